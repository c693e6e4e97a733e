"""What chance decides in one play of a search: paces, scores, lengths and early ends."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass

import numpy as np

from fluid.errors import require_integer
from fluid.measure.runtime_model import FloatArray
from fluid.simulation.search_now import SearchNow

#: How often a pace is drawn anew that would have ended the iteration in flight before now.
_TRIES = 20
#: Most by which the spread of a draw exceeds the one that was observed: few observations say little.
_WIDEST = 2.5


@dataclass(frozen=True, slots=True)
class Draw:
    """What chance decides in one play; trials are numbered, live ones first.

    Attributes:
        pace: seconds per iteration of each trial, alone on a device.
        chance: for each trial, a number in (0, 1) for each rung.
        stops: for each trial, the share of its way to each rung after which it ends early, if below 1; ``None`` if none
            does.
        length: iterations of each trial in all, of a search whose shape is unknown; else none.
    """

    pace: list[float]
    chance: list[list[float]]
    stops: list[list[float]] | None
    length: list[float]


class SearchDraws:
    """Draws from what is known of a search, the same for a number each time.

    The medians of new trials' paces are drawn too, as they follow from few observations: the variance of their
    logarithms from its scaled inverse chi-squared distribution, the mean given that variance.

    Args:
        search: as it stands.
        seed: of chance.
    """

    def __init__(self, search: SearchNow, seed: int) -> None:
        self._search = search
        self._seed = require_integer("seed", seed, at_least=0)
        live = search.live
        unknown = [trial.seconds is None for trial in live]
        self._count = len(live) + search.coming
        self._is_new = np.array([*unknown, *[True] * search.coming], dtype=bool)
        self._median = np.full(self._count, 1.0)
        self._median[: len(live)] = [1.0 if trial.seconds is None else trial.seconds for trial in live]
        self._sigma = np.zeros(self._count)
        self._sigma[: len(live)] = [0.0 if trial.seconds is None else trial.sigma for trial in live]
        self._elapsed = np.zeros(self._count)
        self._elapsed[: len(live)] = [trial.elapsed for trial in live]
        self._rungs = 1 if search.shape is None else len(search.shape.rungs)
        self._exposure = _exposure(search) if search.stops else 0.0
        self._lengths = _LengthDraws(search) if search.shape is None else None

    def of(self, draw: int) -> Draw:
        """Returns the draw of that number."""
        rng = np.random.default_rng([self._seed, draw])
        pace = self._paces(rng)
        chance = rng.random((self._count, self._rungs)).tolist()
        stops = None
        if self._search.stops:
            hazard = rng.gamma(self._search.stops + 0.5) / (self._exposure + 0.5)
            stops = (rng.standard_exponential((self._count, self._rungs)) / hazard).tolist()
        length = [] if self._lengths is None else self._lengths.draw(rng)
        return Draw(pace.tolist(), chance, stops, length)

    def _paces(self, rng: np.random.Generator) -> FloatArray:
        search, observed = self._search, self._search.observed
        median, sigma = search.seconds, search.sigma
        if observed and sigma:
            sigma *= min(_WIDEST, math.sqrt((observed + 1) / rng.chisquare(observed + 1)))
            median *= math.exp(sigma / math.sqrt(observed) * rng.standard_normal())
        medians = np.where(self._is_new, median, self._median)
        sigmas = np.where(self._is_new, sigma, self._sigma)
        pace = medians * np.exp(sigmas * rng.standard_normal(self._count))
        for _ in range(_TRIES):
            late = np.flatnonzero((pace < self._elapsed) & (sigmas > 0.0))
            if not len(late):
                break
            pace[late] = medians[late] * np.exp(sigmas[late] * rng.standard_normal(len(late)))
        bounded: FloatArray = np.maximum(pace, np.where(sigmas > 0.0, self._elapsed, 0.0))
        return bounded


def _exposure(search: SearchNow) -> float:
    """Number of ways to a rung, whole and in parts, that trials have gone."""
    assert search.shape is not None
    rungs = (0, *search.shape.rungs)
    numbers = Counter(search.ended)
    numbers.update(trial.done for trial in search.live)
    result = 0.0
    for done, number in numbers.items():
        passed = bisect_right(rungs, done) - 1
        part = (done - rungs[passed]) / (rungs[passed + 1] - rungs[passed]) if passed + 1 < len(rungs) else 0.0
        result += number * (passed + part)
    return result


class _LengthDraws:
    """Draws how far trials of an unknown algorithm run, as others did.

    With probability 1 - e(t)/n(t), a trial that has come to t iterations goes on: e of the n that came so far ended
    there (Kaplan and Meier, 1958); that probability is drawn from its beta distribution. Beyond the furthest trial, a
    trial survives t iterations with a probability that falls as 1/t.
    """

    def __init__(self, search: SearchNow) -> None:
        self._search = search
        reach = [trial.done for trial in search.live]
        at_risk = sum(search.ended.values()) + len(reach)
        lengths = sorted({*search.ended, *reach})
        self._most = max([search.most, *search.ended, *(max(trial.done, trial.granted) for trial in search.live)])
        running = Counter(reach)
        at, ends, stays = [], [], []
        for length in lengths:
            if length and (ended := search.ended.get(length, 0)):
                at.append(length)
                ends.append(ended)
                stays.append(at_risk - ended)
            at_risk -= search.ended.get(length, 0) + running[length]
        self._at = np.array(at, dtype=np.float64)
        self._ends = np.array(ends, dtype=np.float64)
        self._stays = np.array(stays, dtype=np.float64)
        # A trial that waits for a decision has survived less than what it has run.
        survived = [trial.done if trial.granted > trial.done else trial.done - 1 for trial in search.live]
        self._done = np.array([*(trial.done for trial in search.live), *[0] * search.coming], dtype=np.float64)
        self._survived = np.array([*survived, *[-1] * search.coming], dtype=np.float64)
        self._furthest = float(max([1, *lengths, *(trial.granted for trial in search.live)]))

    def draw(self, rng: np.random.Generator) -> list[float]:
        """Draws the length of each trial."""
        most = float(self._most)
        count = len(self._done)
        # Of those that have ended by themselves at the most, none goes on.
        stay = (
            np.where(self._at >= most, 0.0, rng.beta(np.maximum(self._stays, 1e-9) + 0.5, self._ends + 0.5))
            if len(self._at)
            else np.empty(0)
        )
        survival = np.concatenate([[1.0], np.cumprod(stay)])
        level = survival[np.searchsorted(self._at, self._survived, side="right")] * rng.random(count)
        # The first length at which the survival falls to the level or below.
        position = np.searchsorted(-survival[1:], -level, side="left")
        inside = position < len(self._at)
        lengths = np.where(inside, self._at[np.minimum(position, len(self._at) - 1)], most) if len(self._at) else None
        if lengths is None:
            lengths = np.full(count, most)
        tail = survival[-1]
        known = max(self._furthest, 1.0)
        if tail > 0.0 and most > known:
            # S(t) = tail * known / t.
            with np.errstate(divide="ignore"):
                beyond = np.minimum(most, np.maximum(known, tail * known / np.maximum(level, 1e-12)))
            lengths = np.where(inside, lengths, beyond)
        rounded: list[float] = np.maximum(np.round(lengths), self._done).tolist()
        return rounded
