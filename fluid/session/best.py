"""The best result of a group so far, kept up to date with every result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fluid.results.metrics import is_bookkeeping, less_is_better
from fluid.trialgroup import Search, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSoFar:
    """The best value of a group's metric so far.

    Attributes:
        metric, mode: name of the metric, and ``"min"`` or ``"max"``.
        value: the best value.
        trial_id, iteration: the trial and its iteration, as shown to the user.
        config: the trial's hyperparameters, as shown to the user.
        besides: further metrics that the search optimizes, as far as that iteration has them.
    """

    metric: str
    mode: str
    value: float
    trial_id: str
    iteration: int
    config: Mapping[str, Any] = field(repr=False)
    besides: Mapping[str, float] = field(default_factory=dict)


#: The best value times the sign, its iteration, the trial, and the iteration's values of further metrics.
_Entry = tuple[float, int, Trial, tuple[tuple[str, float], ...]]


class BestTracker:
    """Tracks the best result of a group. A failed trial is the best only while all others have no value.

    Without a metric of the search, the first numeric metric that is no bookkeeping counts, and its name says whether
    less is better.

    Args:
        search: names the metric and the mode; may be ``None``.
    """

    __slots__ = ("_besides", "_best", "_best_of", "_failed", "_metric", "_mode", "_past", "_sign")

    def __init__(self, search: Search | None) -> None:
        self._metric = None if search is None else search.metric
        self._mode = None if search is None else search.mode
        self._besides = () if search is None else tuple(metric for metric, _ in search.besides)
        #: 1 where less is better, else -1; ``None`` until the metric is known.
        self._sign: float | None = None
        #: The best of each trial.
        self._best_of: dict[str, _Entry] = {}
        #: Ids of trials that failed, and the best of forgotten trials that did not.
        self._failed: set[str] = set()
        self._past: _Entry | None = None
        #: The best entry of all; ``None`` if it has to be looked for.
        self._best: _Entry | None = None

    @property
    def metric(self) -> str | None:
        """Name of the metric; ``None`` as long as it is unknown."""
        return self._metric

    def hear(self, trial: Trial, iteration: int, numbers: Mapping[str, float]) -> None:
        """Takes a result of a trial.

        Args:
            trial: the trial.
            iteration: the number of its iteration.
            numbers: that it reported: see :class:`fluid.trainables.encoded_metrics.EncodedMetrics`.
        """
        shown = trial.shown
        inner = "" if shown is None or shown.metrics is None else f"{shown.metrics}/"
        if self._metric is None:
            self._metric = next((name for each in numbers if (name := _metric_name(each, inner, numbers))), None)
        value = None if self._metric is None else numbers.get(inner + self._metric)
        if value is None or not math.isfinite(value):
            return
        value *= self._sign or self._find_sign()
        known = self._best_of.get(trial.id)
        if known is not None and known[0] <= value:
            return
        further = ((name, numbers.get(inner + name)) for name in self._besides)
        besides = tuple((name, found) for name, found in further if found is not None and math.isfinite(found))
        entry = self._best_of[trial.id] = value, iteration, trial, besides
        if self._best is not None and value < self._best[0] and trial.id not in self._failed:
            self._best = entry

    def fail(self, trial_id: str) -> None:
        """Takes it that a trial has failed for good."""
        if trial_id in self._best_of:
            self._failed.add(trial_id)
            self._best = None

    def show(self, trial: Trial) -> None:
        """Takes it that a trial is shown otherwise from now on."""
        if trial.id in self._best_of:
            value, iteration, _, besides = self._best_of[trial.id]
            self._best_of[trial.id] = value, iteration, trial, besides
            self._best = None

    def forget(self, trial_id: str) -> None:
        """Drops a trial; its value counts on unless the trial failed."""
        entry = self._best_of.pop(trial_id, None)
        if trial_id in self._failed:
            self._failed.discard(trial_id)
        elif entry is not None and (self._past is None or entry[0] < self._past[0]):
            self._past = entry

    def best(self) -> BestSoFar | None:
        """Returns the best so far; ``None`` before the first value."""
        if not self._best_of and self._past is None:
            return None
        if self._best is None:
            entries = [entry for trial_id, entry in self._best_of.items() if trial_id not in self._failed]
            entries += [] if self._past is None else [self._past]
            self._best = min(entries, key=_value_of, default=None)
        best = self._best or min(self._best_of.values(), key=_value_of, default=None)
        if best is None or self._metric is None or self._sign is None:
            return None
        value, iteration, trial, besides = best
        shown = trial.shown
        return BestSoFar(
            metric=self._metric,
            mode="min" if self._sign > 0.0 else "max",
            value=value * self._sign,
            trial_id=trial.id if shown is None else shown.trial_id,
            iteration=iteration if shown is None else iteration + shown.iterations,
            config=trial.config if shown is None else shown.config,
            besides=dict(besides),
        )

    def _find_sign(self) -> float:
        assert self._metric is not None
        less = less_is_better(self._metric) if self._mode is None else self._mode == "min"
        self._sign = 1.0 if less else -1.0
        return self._sign


def _value_of(entry: _Entry) -> float:
    return entry[0]


def _metric_name(name: str, inner: str, numbers: Mapping[str, float]) -> str | None:
    """The metric that a number stands for; ``None`` if it only counts something, or cannot be compared."""
    metric = name.removeprefix(inner) if name.startswith(inner) else ""
    return metric if metric and not is_bookkeeping(metric) and math.isfinite(numbers[name]) else None
