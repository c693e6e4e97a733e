"""The best result of a group so far, kept up to date with every result, by the rule of :mod:`fluid.results.best`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluid.directions import direction_text, known_mode
from fluid.results.best import Merit
from fluid.results.metrics import is_bookkeeping
from fluid.results.submitted import SubmittedTrial
from fluid.trialgroup import Search, Trial, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSoFar:
    """The best value of a group's metric so far.

    Attributes:
        metric, mode: name of the metric, and ``"min"`` or ``"max"``.
        value: the best value.
        trial_id, iteration: the trial and its iteration, as shown to the user.
        config: the trial's hyperparameters, as shown to the user.
        besides: further metrics that the search optimizes, as far as that iteration has them.
        failed: whether the trial has failed, as all others have.
    """

    metric: str
    mode: str
    value: float
    trial_id: str
    iteration: int
    config: Mapping[str, Any] = field(repr=False)
    besides: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False

    @property
    def direction(self) -> str:
        """``"less is better"`` or ``"more is better"``."""
        return direction_text(self.mode)

    @property
    def less_note(self) -> str:
        """``" (less is better)"`` where that is so; else empty, for where there is little room."""
        return f" ({self.direction})" if self.mode == "min" else ""

    @property
    def fate(self) -> str:
        """``", failed"`` where the trial has failed; else empty."""
        return ", failed" if self.failed else ""


class _ShownPart(NamedTuple):
    """A submitted trial, and how reports show it: see :class:`fluid.results.submitted.SubmittedTrial`."""

    trial_id: str
    shown_id: str
    before: int
    config: Mapping[str, Any]

    @classmethod
    def of(cls, trial: Trial | SubmittedTrial) -> _ShownPart:
        if isinstance(trial, SubmittedTrial):
            return cls(trial.trial_id, trial.shown_id, trial.before, trial.config)
        shown = trial.shown
        if shown is None:
            return cls(trial.id, trial.id, 0, trial.config)
        return cls(trial.id, shown.trial_id, shown.iterations, shown.config)


class _BestIteration(NamedTuple):
    """The best iteration of a trial: its number as shown, its value, and those of further metrics."""

    part: _ShownPart
    iteration: int
    value: float
    besides: tuple[tuple[str, float], ...]


@dataclass(slots=True, eq=False)
class _TrackedTrial:
    """How a trial stands, as reports show it: several submitted trials may be shown as one.

    Attributes:
        place: its place in order of submission.
        last: id of the last one submitted of those shown as it, which determines its state.
        parts: how many of those there are, but for forgotten ones.
        ended_failed: whether it has failed.
        said_failed: whether its submitter says that it has; ``None`` if that says nothing.
        entry: its best iteration; ``None`` if it has reported no number.
    """

    place: int
    last: str
    parts: int = 0
    ended_failed: bool = False
    said_failed: bool | None = None
    entry: _BestIteration | None = None

    @property
    def failed(self) -> bool:
        return self.ended_failed if self.said_failed is None else self.said_failed


class BestTracker:
    """Tracks the best result of a group: see :class:`fluid.results.best.Merit` for what that is.

    Without a metric of the search, the first numeric metric that is no bookkeeping counts. Where the search says no
    mode and the metric's name leaves it open, there is no best.

    Args:
        search: names the metric and the mode; may be ``None``.
    """

    __slots__ = ("_besides", "_best", "_entered", "_is_unnamed", "_metric", "_mode", "_of", "_past", "_standings")

    def __init__(self, search: Search | None) -> None:
        self._metric = None if search is None else search.metric
        self._is_unnamed = search is not None and not search.metric
        #: ``None`` as long as it is unknown whether less or more is better.
        self._mode = None if search is None else search.mode
        self._besides = () if search is None else tuple(metric for metric, _ in search.besides)
        self._find_mode()
        #: By the id under which trials are shown.
        self._standings: dict[str, _TrackedTrial] = {}
        #: By the id of a submitted trial, with its own place in order of submission.
        self._of: dict[str, tuple[_TrackedTrial, int]] = {}
        self._entered = 0
        #: Of forgotten trials, the best one that failed, and the best one that did not.
        self._past: dict[bool, _TrackedTrial] = {}
        #: The first of all by merit; ``None`` if it has to be looked for.
        self._best: _TrackedTrial | None = None

    @property
    def metric(self) -> str | None:
        """Name of the metric; ``None`` as long as it is unknown."""
        return self._metric

    def place_of(self, trial_id: str) -> int:
        """The place of a trial in the group's order of submission, from 0; one that never came is behind all."""
        known = self._of.get(trial_id)
        return self._entered if known is None else known[1]

    def enter(self, trial: Trial | SubmittedTrial) -> None:
        """Takes a trial that was submitted, or one that goes on after its end."""
        part = _ShownPart.of(trial)
        if part.trial_id not in self._of:
            standing = self._standings.get(part.shown_id)
            if standing is None:
                standing = self._standings[part.shown_id] = _TrackedTrial(self._entered, part.trial_id)
            self._of[part.trial_id] = standing, self._entered
            self._entered += 1
            standing.last, standing.parts, standing.said_failed = part.trial_id, standing.parts + 1, None
        self.end(part.trial_id, None)

    def hear(self, trial: Trial | SubmittedTrial, iteration: int, numbers: Mapping[str, float]) -> None:
        """Takes a result of a trial.

        Args:
            trial: the trial.
            iteration: the number of its iteration.
            numbers: that it reported: see :class:`fluid.trainables.encoded_metrics.EncodedMetrics`.
        """
        if isinstance(trial, SubmittedTrial):
            trial_id, entry = trial.trial_id, trial.inner
        else:
            trial_id, entry = trial.id, None if trial.shown is None else trial.shown.metrics
        inner = "" if entry is None else f"{entry}/"
        if self._metric is None:
            self._metric = next((name for each in numbers if (name := _metric_name(each, inner, numbers))), None)
            self._find_mode()
        value = None if self._metric is None or self._mode is None else numbers.get(inner + self._metric)
        if value is None or not math.isfinite(value):
            return
        if trial_id not in self._of:
            self.enter(trial)
        standing, _ = self._of[trial_id]
        known = standing.entry
        if known is not None and (known.value <= value if self._less else known.value >= value):
            return
        besides: tuple[tuple[str, float], ...] = ()
        if self._besides:
            further = ((name, numbers.get(inner + name)) for name in self._besides)
            besides = tuple((name, found) for name, found in further if found is not None and math.isfinite(found))
        part = _ShownPart.of(trial) if known is None or known.part.trial_id != trial_id else known.part
        standing.entry = _BestIteration(part, iteration + part.before, value, besides)
        if standing is not self._best:
            self._moved(standing)

    def end(self, trial_id: str, state: TrialState | None) -> None:
        """Takes it how a trial has ended; ``None`` if it goes on."""
        if trial_id in self._of and (standing := self._of[trial_id][0]).last == trial_id:
            standing.ended_failed = state is TrialState.FAILED
            self._moved(standing)

    def say(self, trial_id: str, outcome: str | None) -> None:
        """Takes it how a trial came out, as its submitter says; ``None`` if that says nothing."""
        if outcome is None or trial_id not in self._of:
            return
        standing, _ = self._of[trial_id]
        if standing.last == trial_id:
            standing.said_failed = outcome == TrialState.FAILED
            self._moved(standing)

    def show(self, trial: Trial) -> None:
        """Takes it that a trial is shown with another config from now on."""
        standing = self._of[trial.id][0] if trial.id in self._of else None
        if standing is not None and standing.entry is not None and standing.entry.part.trial_id == trial.id:
            standing.entry = standing.entry._replace(part=_ShownPart.of(trial))

    def forget(self, trial_id: str) -> None:
        """Drops a trial; what it reported counts on."""
        if trial_id not in self._of:
            return
        standing, _ = self._of.pop(trial_id)
        standing.parts -= 1
        if standing.parts or self._standings.get(trial_id) is not standing:
            return  # It has another name, under which a further trial may be shown.
        del self._standings[trial_id]
        known = self._past.get(standing.failed)
        if known is None or self._rank(standing) < self._rank(known):
            self._past[standing.failed] = standing

    def best(self) -> BestSoFar | None:
        """Returns the best so far; ``None`` if no trial that may be the best has a value."""
        if self._best is None:
            self._best = min((*self._standings.values(), *self._past.values()), key=self._rank, default=None)
        standing = self._best
        if standing is None or standing.entry is None or self._metric is None or self._mode is None:
            return None
        part, iteration, value, besides = standing.entry
        return BestSoFar(
            metric=self._metric,
            mode=self._mode,
            value=value,
            trial_id=part.shown_id,
            iteration=iteration,
            config=part.config,
            besides=dict(besides),
            failed=standing.failed,
        )

    def _rank(self, standing: _TrackedTrial) -> tuple[Merit, int]:
        value = None if standing.entry is None else standing.entry.value
        return Merit.of(value, failed=standing.failed, less=self._less), standing.place

    def _moved(self, standing: _TrackedTrial) -> None:
        """Takes it that a trial is better or worse than before."""
        if standing is self._best:
            self._best = None if standing.failed else standing  # It got worse only if it has failed.
        elif self._best is not None and self._rank(standing) < self._rank(self._best):
            self._best = standing

    @property
    def _less(self) -> bool:
        return self._mode == "min"

    @property
    def open_metric(self) -> str | None:
        """The metric of which nothing says whether less or more is better; ``None`` if there is none.

        A search that names no metric says that its trials are not compared by one.
        """
        return self._metric if self._mode is None and not self._is_unnamed else None

    def _find_mode(self) -> None:
        if self._metric is not None:
            self._mode = known_mode(self._metric, self._mode)


def _metric_name(name: str, inner: str, numbers: Mapping[str, float]) -> str | None:
    """The metric that a number stands for; ``None`` if it only counts something, or cannot be compared."""
    metric = name.removeprefix(inner) if name.startswith(inner) else ""
    return metric if metric and not is_bookkeeping(metric) and math.isfinite(numbers[name]) else None
