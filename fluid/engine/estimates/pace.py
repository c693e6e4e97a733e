"""Beliefs of paces: how far the seconds predicted of a trial may be off, from its key's trials and its own iterations.

Trials of a key differ, and so do the iterations of a trial. Both spreads are those of logarithms, and robust: a few
stragglers do not widen them. A trial that has not iterated may be as far off as the key's trials are from one another,
one that has as far as its iterations leave open (docs/theory.md, section 12).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from fluid.engine import tuning
from fluid.engine.records import TrialRecord, smooth
from fluid.measure.measurements import log_spread
from fluid.measure.profile import Profile

#: Newest trials of a key of which the paces are kept, and newest iterations of which the deviation is.
_MOST_TRIALS, _MOST_ITERATIONS = 64, 64
#: Deviations of a key's iterations from which their spread is taken; fewer say little.
_LEAST_ITERATIONS = 3
#: Median absolute deviation of a normal distribution, to its standard deviation.
_OF_MEDIAN = 1.4826


@dataclass(slots=True)
class _KeyBelief:
    """What a key's trials have shown.

    Attributes:
        paces: logarithm of the seconds per iteration at width 1 and speed 1, by row, the newest trials last.
        deviations: of iterations from the pace of their trial before, logarithms, as many times what is expected of a
            trial whose pace is known.
        spread, noise: of trials and of iterations; ``None`` until asked for.
    """

    paces: dict[int, float] = field(default_factory=dict)
    deviations: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_ITERATIONS))
    spread: float | None = None
    noise: float | None = None


class PaceBeliefs:
    """Says how far predicted paces may be off.

    Args:
        profile: has the spread of earlier measurements, until trials of this session have shown theirs.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._by_key: dict[str, _KeyBelief] = {}

    def observe(self, trial: TrialRecord, seconds: float, count: int = 1, one: float | None = None) -> None:
        """Learns from an iteration, or so many, in seconds at width 1 and speed 1, before the trial's pace does.

        Args:
            trial: the trial.
            seconds: of the iteration, or typical ones of several.
            count: how many.
            one: of a single one of several, as the noise is that of single iterations.
        """
        belief = self._by_key.setdefault(trial.spec.profile_key, _KeyBelief())
        before, latest = trial.pace.seconds, math.log(seconds)
        if before is not None and before > 0.0:
            off, known = _variance_of_pace(trial.pace.observed), math.log(before)
            single = latest if one is None else math.log(one)
            belief.deviations.append((single - known) / math.sqrt(1.0 + off))
            belief.noise = None
            # As fluid.engine.records smooths it, nearly: the mean of logarithms in place of that of seconds.
            latest = smooth(known, latest, count)
        paces = belief.paces
        if trial.row not in paces and len(paces) >= _MOST_TRIALS:
            del paces[next(iter(paces))]
        paces[trial.row] = latest
        belief.spread = None

    def sigma(self, trial: TrialRecord, model: str | None, iterations: int | None = None) -> float:
        """Standard deviation of the logarithm of the true seconds of work over those predicted; 0 if unknown.

        Args:
            trial: the trial.
            model: device model of its key's estimate.
            iterations: of the work; ``None`` for all that are left.
        """
        noise = self._noise(trial.spec.profile_key)
        over_the_rest = noise * noise / max(1, trial.progress.left if iterations is None else iterations)
        if trial.pace.seconds is not None:
            return math.sqrt(noise * noise * _variance_of_pace(trial.pace.observed) + over_the_rest)
        if trial.pace.predicted is not None:
            prior = trial.pace.predicted_sigma
        else:
            prior = self._spread(trial.spec.profile_key, model)
        return math.sqrt(prior * prior + over_the_rest)

    def paces(self, key: str) -> Sequence[float]:
        """Logarithms of the seconds per iteration of a key's trials, of the newest, also of forgotten ones."""
        belief = self._by_key.get(key)
        return [] if belief is None else list(belief.paces.values())

    def _spread(self, key: str, model: str | None) -> float:
        """Standard deviation of the logarithm of a trial's pace over its key's."""
        belief = self._by_key.get(key)
        if belief is None or len(belief.paces) < 2:
            return self._profile.spread(key, model)
        if belief.spread is None:
            belief.spread = _of_few(list(belief.paces.values()))
        return belief.spread

    def _noise(self, key: str) -> float:
        """Standard deviation of the logarithm of an iteration's seconds over its trial's pace."""
        belief = self._by_key.get(key)
        if belief is None or len(belief.deviations) < _LEAST_ITERATIONS:
            return 0.0
        if belief.noise is None:
            belief.noise = _OF_MEDIAN * median(map(abs, belief.deviations))
        return belief.noise


def _variance_of_pace(observed: int) -> float:
    """Variance of a pace smoothed over so many iterations, over that of an iteration."""
    weight = tuning.PACE_SMOOTHING
    steady = weight / (2.0 - weight)
    return float(steady + (1.0 - steady) * (1.0 - weight) ** (2 * (max(1, observed) - 1)))


def _of_few(logs: Sequence[float]) -> float:
    """The spread of a further trial about the few seen: wider than theirs, about as a t distribution is."""
    further: float = 1.0 + 1.4 / (len(logs) - 1) ** 1.5
    return log_spread(logs) * further
