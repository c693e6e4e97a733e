"""Compares a real run with the rehearsal that predicted it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from fluid.rehearsal.outcome import PlayedTrial, SweepOutcome

#: Times are compared until the best so far is within this share of the worse of the two best values.
_NEAR = 0.05
#: Differences of less than this share are not worth a sentence.
_SMALL = 0.02


@dataclass(frozen=True)
class Compared:
    """A figure of both.

    Attributes:
        name: of the figure.
        predicted, real: ``None`` where there is none.
        unit: ``"s"`` for seconds, ``"h"`` for device-hours, ``"share"``, ``"count"`` or ``"value"``.
    """

    name: str
    predicted: float | None
    real: float | None
    unit: str

    @property
    def error(self) -> float | None:
        """How much too large the prediction was, as a share of the real figure; ``None`` if that cannot be said."""
        if self.predicted is None or self.real is None:
            return None
        if self.real == 0.0:
            return 0.0 if self.predicted == 0.0 else None
        return (self.predicted - self.real) / abs(self.real)


@dataclass(frozen=True)
class Calibration:
    """A real run beside the rehearsal that predicted it.

    Attributes:
        predicted, real: what they came to.
        matched: the trials of both, predicted and real; by id where these are the same, else by config.
    """

    predicted: SweepOutcome
    real: SweepOutcome
    matched: tuple[tuple[PlayedTrial, PlayedTrial], ...]

    @classmethod
    def of(cls, predicted: SweepOutcome, real: SweepOutcome) -> Calibration:
        """Matches the trials of both."""
        ids = {trial.trial_id for trial in real.played}
        same_ids = len(ids) == len(real.played) and ids == {trial.trial_id for trial in predicted.played}
        key: Callable[[PlayedTrial], str] = (lambda trial: trial.trial_id) if same_ids else _config_key
        waiting: dict[str, list[PlayedTrial]] = {}
        for trial in predicted.played:
            waiting.setdefault(key(trial), []).append(trial)
        matched = [(of_key.pop(0), trial) for trial in real.played if (of_key := waiting.get(key(trial)))]
        return cls(predicted, real, tuple(matched))

    @property
    def figures(self) -> list[Compared]:
        """What is compared, in order of weight."""
        predicted, real = self.predicted, self.real
        found = [Compared("makespan", predicted.makespan_s, real.makespan_s, "s")]
        if (target := self.target) is not None:
            found.append(Compared("time to target", predicted.seconds_to(target), real.seconds_to(target), "s"))
            found.append(Compared("best value", predicted.best, real.best, "value"))
        return [
            *found,
            Compared("until the first iteration", predicted.lead_s, real.lead_s, "s"),
            Compared("device-hours", predicted.device_hours, real.device_hours, "h"),
            Compared("busy", predicted.busy_share, real.busy_share, "share"),
            Compared("trials", predicted.trials, real.trials, "count"),
            Compared("iterations", predicted.results, real.results, "count"),
            Compared("seconds per iteration", *self._seconds_per_iteration, "s"),
        ]

    @property
    def target(self) -> float | None:
        """The value that is near what both found; ``None`` if one found none."""
        goal = self.real.goal
        if goal is None or self.real.best is None or self.predicted.best is None:
            return None
        pick = max if goal.less else min
        worse = pick(self.real.best, self.predicted.best)
        return worse + _NEAR * abs(worse) * (1.0 if goal.less else -1.0)

    @property
    def differing(self) -> list[tuple[PlayedTrial, PlayedTrial]]:
        """The trials, predicted and real, that did not reach the same iteration."""
        return [(one, other) for one, other in self.matched if one.iterations != other.iterations]

    @property
    def same_decisions(self) -> float:
        """The share of the real trials that the rehearsal took to the same iteration."""
        if not self.real.played:
            return 1.0
        return (len(self.matched) - len(self.differing)) / len(self.real.played)

    @property
    def order(self) -> float | None:
        """Kendall's tau-b of the ends of trials; ``None`` of fewer than two."""
        return kendall_tau((one.ended_s, other.ended_s) for one, other in self.matched)

    @property
    def value_order(self) -> float | None:
        """Kendall's tau-b of the best values of trials; ``None`` of fewer than two."""
        return kendall_tau((one.value, other.value) for one, other in self.matched)

    @property
    def _seconds_per_iteration(self) -> tuple[float | None, float | None]:
        return _typical_seconds(self.predicted), _typical_seconds(self.real)

    @property
    def iteration_ratio(self) -> float | None:
        """How many times as long the iterations of a matched trial took for real, in the median; ``None`` if unknown.

        By device-seconds, so that trials that held more devices than predicted do not count as faster.
        """
        ratios = [
            (other.device_seconds / other.iterations) / (one.device_seconds / one.iterations)
            for one, other in self.matched
            if one.iterations and other.iterations and one.device_seconds > 0.0
        ]
        return median(ratios) if ratios else None

    def explain(self) -> list[str]:
        """What explains the difference of the makespans, a sentence each; of no difference, one sentence."""
        predicted, real = self.predicted, self.real
        found: list[str] = []
        ratio = self.iteration_ratio
        if ratio is not None and abs(ratio - 1.0) >= _SMALL:
            found.append(f"Iterations took {ratio:.2f}x the device-seconds that were predicted.")
        if real.results != predicted.results:
            share = real.results / predicted.results - 1.0 if predicted.results else math.inf
            found.append(f"The run did {real.results} iterations, the rehearsal {predicted.results} ({share:+.0%}).")
        lead = real.lead_s - predicted.lead_s
        if abs(lead) >= _SMALL * real.makespan_s:
            how = f"{abs(lead):.3g} s {'later' if lead > 0.0 else 'earlier'} than predicted"
            found.append(f"The first iteration began {how}: lanes and trials were set up (--lane-s, --start-s).")
        idle = _idle_s(real) - _idle_s(predicted)
        if abs(idle) >= _SMALL * real.makespan_s:
            what = "more" if idle > 0.0 else "less"
            found.append(
                f"After it, each device was idle for {abs(idle):.3g} s {what} than predicted: hand-overs, moves and "
                "saves that the overheads leave out, or other decisions."
            )
        if real.devices != predicted.devices:
            found.append(f"The run had {real.devices} devices, the rehearsal {predicted.devices}.")
        small = f"{_SMALL:.0%}"
        error = Compared("makespan", predicted.makespan_s, real.makespan_s, "s").error
        if not found and error is not None and abs(error) >= _SMALL:
            return [f"Other decisions: seconds, iterations, starts and idle times differ by less than {small} each."]
        return found or [f"Nothing differs by {small} or more."]


def kendall_tau(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Kendall's tau-b: 1 for the same order, -1 for the opposite one; ``None`` if there is no order.

    Example:
        >>> from fluid.rehearsal.calibration import kendall_tau
        >>> kendall_tau([(1, 10), (2, 30), (3, 20)])
        0.3333333333333333

    Args:
        pairs: the two figures of each item; those of which one is missing do not count.
    """
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    one, other = np.array(known, dtype=np.float64).reshape(-1, 2).T
    agreeing = untied_of_one = untied_of_other = 0
    for at in range(len(known) - 1):  # Row by row: sweeps may have thousands of trials.
        first, second = np.sign(one[at] - one[at + 1 :]), np.sign(other[at] - other[at + 1 :])
        agreeing += int(first @ second)
        untied_of_one += int(np.count_nonzero(first))
        untied_of_other += int(np.count_nonzero(second))
    if not untied_of_one or not untied_of_other:
        return None
    return agreeing / math.sqrt(untied_of_one * untied_of_other)


def _typical_seconds(outcome: SweepOutcome) -> float | None:
    """Seconds of an iteration, in the median over trials."""
    every: Sequence[float] = [each.seconds / each.iterations for each in outcome.played if each.iterations]
    return median(every) if every else None


def _idle_s(outcome: SweepOutcome) -> float:
    """Seconds for which a device was idle in the mean, without those before the first iteration."""
    idle = outcome.device_hours * 3600.0 * (1.0 - outcome.busy_share)
    return idle / max(1, outcome.devices) - outcome.lead_s


def _config_key(trial: PlayedTrial) -> str:
    return json.dumps(trial.config, sort_keys=True, default=repr)
