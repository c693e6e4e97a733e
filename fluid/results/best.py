"""The best trial, and how it is chosen."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fluid.directions import direction_text, known_mode
from fluid.errors import FluidError
from fluid.few_items import FewItems
from fluid.random_state import Seeds
from fluid.results.metrics import Goal, is_bookkeeping
from fluid.results.records import Result, TrialResult, short_text
from fluid.results.submitted import SubmittedTrial
from fluid.trialgroup import Search, Trial, TrialState
from fluid.user_calls import PeersNames


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BestTrial(PeersNames):
    """A trial and its best iteration.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup, load
        >>> def train(config):
        ...     for step in range(3):
        ...         yield {"loss": (step - 1) ** 2 + config["lr"]}
        >>> with FluidExecutor(backend="local", devices=1, run_dir="run", verbose=0) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.5}, budget=3, trial_id="a")])
        ...     done = executor.submit_trialgroup(group).wait()
        >>> best = load("run", metric="loss", mode="min").best
        >>> best.trial_id, best.value, best.iteration, best.metrics, best.config, best.trial.metrics
        ('a', 0.5, 2, {'loss': 0.5}, {'lr': 0.5}, {'loss': 1.5})

    Attributes:
        trial: the trial.
        metric: what it is best at; several for an element of :attr:`SweepResult.pareto`.
        mode: ``"min"`` if less of the metric is better, or ``"max"``; several for several metrics.
        value: the value of the metric; several for several metrics.
        iteration: the iteration with this value.
        metrics: what that iteration reported.
    """

    trial: TrialResult
    metric: str | tuple[str, ...]
    mode: str | tuple[str, ...]
    value: float | tuple[float, ...]
    iteration: int
    metrics: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"BestTrial({self.text})"

    @property
    def text(self) -> str:
        """Value, iteration, trial and config in one line."""
        names = self.metric if isinstance(self.metric, tuple) else (self.metric,)
        modes = self.mode if isinstance(self.mode, tuple) else (self.mode,)
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        each = zip(names, values, modes, strict=True)
        shown = ", ".join(f"{name}={value:.6g} ({direction_text(mode)})" for name, value, mode in each)
        failed = ", which failed" if self.trial.state == TrialState.FAILED else ""
        where = f"at iteration {self.iteration} of trial {self.trial_id!r}{failed}"
        return f"{shown} {where}, config={short_text(self.config)}"

    @property
    def trial_id(self) -> str:
        """The trial's id."""
        return self.trial.trial_id

    @property
    def config(self) -> Mapping[str, Any]:
        """The trial's hyperparameters."""
        return self.trial.config

    @property
    def checkpoint(self) -> Path | None:
        """The folder that ``save_checkpoint`` filled after the best iteration; ``None`` if that one is not kept.

        :attr:`TrialResult.checkpoints` has those of other iterations.
        """
        exact = [found.path for found in self.trial.checkpoints if found.iteration == self.iteration]
        return exact[-1] if exact else None

    @property
    def checkpoint_iteration(self) -> int | None:
        """:attr:`iteration`, if its checkpoint is kept; else ``None``."""
        return None if self.checkpoint is None else self.iteration

    def load_checkpoint(self) -> Any:
        """Loads the checkpoint of the best iteration, as :meth:`TrialResult.load_checkpoint` does.

        Raises:
            FluidError: it is not kept, or it is damaged; the error says of which iterations there are checkpoints.
        """
        path, kept = self.checkpoint, self.trial.checkpoints
        if path is None and kept:
            others = ", ".join(str(found.iteration) for found in kept)
            raise FluidError(
                f"the checkpoint of iteration {self.iteration}, the best of trial {self.trial_id!r}, is not kept; "
                f"there are those of iterations {others}: best.trial.load_checkpoint() loads the newest"
            )
        return self.trial.load_checkpoint(path)


#: States of trials that come after all others.
NOT_BEST = (TrialState.FAILED, TrialState.INFEASIBLE)


class Merit(NamedTuple):
    """How good a trial is among those it is compared with: less is better. This is the one rule of what is best.

    * A trial that has failed comes after all others, whether they have ended or not. So it is the best only if all have
      failed. One that is infeasible comes after these, and is never the best: what it has reported does not count.
    * A trial that has reported no finite number of the metric comes after those that have, and is never the best.
    * The best value of any iteration decides, and of equal values that of the trial that was submitted first. Within a
      trial it is the first iteration with that value.

    Attributes:
        failed: whether the trial has failed, or is infeasible.
        valueless: whether it has no value.
        loss: its best value, with the sign that makes less better; 0 if it has none.
    """

    failed: bool
    valueless: bool
    loss: float

    @classmethod
    def of(cls, value: float | None, state: str, *, less: bool) -> Merit:
        """The merit of a trial.

        Args:
            value: its best value; ``None`` if it has none.
            state: how it stands.
            less: whether less is better.
        """
        if state == TrialState.INFEASIBLE:
            value = None
        return cls(state in NOT_BEST, value is None, 0.0 if value is None else value if less else -value)


T = TypeVar("T")


def ranked(trials: Iterable[T], merit: Callable[[T], Merit]) -> list[T]:
    """Trials in order of merit, the best first; equal ones in the order given, which is that of submission."""
    return sorted(trials, key=merit)


def best_among(trials: Iterable[T], merit: Callable[[T], Merit]) -> T | None:
    """The best of some trials, given in order of submission; ``None`` if no trial that may be the best has a value."""
    best = min(trials, key=merit, default=None)
    return None if best is None or merit(best).valueless else best


def eligible(trials: Iterable[T], state: Callable[[T], str]) -> list[T]:
    """The trials that may be best: those that have not failed, or all if all have; not those that are infeasible."""
    listed = [trial for trial in trials if state(trial) != TrialState.INFEASIBLE]
    return [trial for trial in listed if state(trial) != TrialState.FAILED] or listed


def best_of(trials: Iterable[TrialResult], goal: Goal) -> BestTrial | None:
    """The best trial, by :class:`Merit`; ``None`` if no trial that may be the best has reported a finite number."""
    found = [(trial, best_result(trial, goal)) for trial in trials]
    best = best_among(found, lambda one: _merit(*one, goal))
    if best is None or best[1] is None:
        return None
    trial, (value, result) = best[0], best[1]
    return BestTrial(
        trial=trial,
        metric=goal.metric,
        mode=goal.mode,
        value=value,
        iteration=result.iteration,
        metrics=result.metrics,
    )


def merit_of(trial: TrialResult, goal: Goal) -> Merit:
    """How good a trial is."""
    return _merit(trial, best_result(trial, goal), goal)


def _merit(trial: TrialResult, best: tuple[float, Result] | None, goal: Goal) -> Merit:
    return Merit.of(None if best is None else best[0], trial.state, less=goal.less)


def best_result(trial: TrialResult, goal: Goal) -> tuple[float, Result] | None:
    """A trial's best value and its iteration, the first of equals; ``None`` if it has reported no finite number."""
    best: tuple[float, Result] | None = None
    for result in trial.results:
        value = goal.value_of(result)
        if value is not None and (best is None or goal.is_better(value, best[0])):
            best = value, result
    return best


# -- best so far ---------------------------------------------------------------------------------
#
# How the trials of a group stand: how each ended, and the best result so far, by :mod:`fluid.results.best`.


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


def _shown(trial: Trial | SubmittedTrial) -> tuple[str, int, Mapping[str, Any]]:
    """How reports show a submitted trial: its id, the iterations before it, and its config."""
    if isinstance(trial, SubmittedTrial):
        return trial.shown_id, trial.before, trial.config
    shown = trial.shown
    return (trial.id, 0, trial.config) if shown is None else (shown.trial_id, shown.iterations, shown.config)


def _id_of(trial: Trial | SubmittedTrial) -> str:
    return trial.trial_id if isinstance(trial, SubmittedTrial) else trial.id


@dataclass(slots=True, eq=False)
class _Submitted:
    """A submitted trial.

    Attributes:
        place: its place in order of submission.
        state: how it has ended; ``None`` if it has not.
        seeds: of its random number generators, packed; ``None`` if they are unknown.
    """

    place: int
    state: TrialState | None = None
    seeds: bytes | None = None


@dataclass(slots=True, eq=False)
class _TrackedTrial(_Submitted):
    """How a trial stands, as reports show it: several submitted trials may be shown as one.

    It is also the first one of those, as most are shown by themselves.

    Attributes:
        first: id of the first one submitted of those shown as it, as long as that is the id as which it is shown, and
            was not forgotten; else empty.
        last: id of the last one submitted of those shown as it, which determines its state.
        parts: how many of those there are, but for forgotten ones.
        ended_failed: whether it has failed, or is infeasible.
        said_failed: whether its submitter says that it has; ``None`` if that says nothing.
        best_of: the submitted trial of its best iteration; ``None`` if it has reported no number.
        iteration: the number of that, as shown.
        value, besides: the value of the metric then, and those of further ones.
    """

    first: str = ""
    last: str = ""
    parts: int = 0
    ended_failed: bool = False
    said_failed: bool | None = None
    best_of: Trial | SubmittedTrial | None = None
    iteration: int = 0
    value: float = math.nan
    besides: tuple[tuple[str, float], ...] = ()

    @property
    def failed(self) -> bool:
        return self.ended_failed if self.said_failed is None else self.said_failed


#: Most trackers have nothing of what this stands for; it is never changed.
_NOTHING: dict[Any, Any] = {}


class BestTracker:
    """Tracks how the trials of a group end, and its best result: see :class:`fluid.results.best.Merit`.

    Shared runs, which Fluid has added, are no trials here. Without a metric of the search, the first numeric metric
    that is no bookkeeping counts. Where the search says no mode and the metric's name leaves it open, there is no best.

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
        self._standings = FewItems[str, _TrackedTrial]()
        #: By the id of a submitted trial that is not the first one of its id to be shown, with what it is
        #: by itself. The others, most of all, are those of ``_standings`` that ``first`` names.
        self._of: dict[str, tuple[_TrackedTrial, _Submitted]] = _NOTHING
        self._entered = 0
        #: Of forgotten trials, the best one that failed, and the best one that did not.
        self._past: dict[bool, _TrackedTrial] = _NOTHING
        #: The first of all by merit; ``None`` if it has to be looked for.
        self._best: _TrackedTrial | None = None

    @property
    def metric(self) -> str | None:
        """Name of the metric; ``None`` as long as it is unknown."""
        return self._metric

    def place_of(self, trial_id: str) -> int:
        """The place of a trial in the group's order of submission, from 0; one that never came is behind all."""
        known = self._find(trial_id)
        return self._entered if known is None else known[1].place

    @property
    def states(self) -> dict[str, TrialState]:
        """How trials have ended, by id, for those that have."""
        return {trial_id: each.state for trial_id, each in self._submitted() if each.state is not None}

    @property
    def seeds(self) -> dict[str, Seeds]:
        """The seeds of trials, by id, as far as they are known."""
        return {trial_id: Seeds.unpack(each.seeds) for trial_id, each in self._submitted() if each.seeds is not None}

    def facts(self, trial_id: str) -> tuple[TrialState | None, Seeds | None]:
        """How a trial has ended, and its seeds; ``None`` for what is unknown."""
        known = self._find(trial_id)
        if known is None:
            return None, None
        _, submitted = known
        return submitted.state, None if submitted.seeds is None else Seeds.unpack(submitted.seeds)

    def _submitted(self) -> Iterator[tuple[str, _Submitted]]:
        """The trials by id, for any thread."""
        for standing in self._standings.copy().values():
            if first := standing.first:
                yield first, standing
        for trial_id, (_, each) in self._of.copy().items():
            yield trial_id, each

    def _find(self, trial_id: str) -> tuple[_TrackedTrial, _Submitted] | None:
        """How a submitted trial stands, and what it is by itself; ``None`` if it is unknown."""
        found = self._of.get(trial_id)
        if found is None:
            standing = self._standings.get(trial_id)
            if standing is not None and standing.first == trial_id:
                return standing, standing
        return found

    def enter(self, trial: Trial | SubmittedTrial) -> None:
        """Takes a trial that was submitted, or one that goes on after its end."""
        if trial.is_shared_run:
            return
        trial_id, shown_id = _id_of(trial), _shown(trial)[0]
        if self._find(trial_id) is None:
            standing = self._standings.get(shown_id)
            if standing is None and trial_id == shown_id:
                standing = self._standings[shown_id] = _TrackedTrial(self._entered, first=trial_id)
            else:
                if standing is None:
                    standing = self._standings[shown_id] = _TrackedTrial(self._entered)
                self._of = self._of or {}
                self._of[trial_id] = standing, _Submitted(self._entered)
            self._entered += 1
            standing.last, standing.parts, standing.said_failed = trial_id, standing.parts + 1, None
        self.end(trial_id, None)

    def take_seeds(self, trial: Trial, seeds: Seeds) -> None:
        """Takes the seeds of a trial, which may be entered with them."""
        if self._find(trial.id) is None:
            self.enter(trial)
        if (found := self._find(trial.id)) is not None:
            found[1].seeds = seeds.packed()

    def hear(self, trial: Trial | SubmittedTrial, iteration: int, numbers: Mapping[str, float]) -> None:
        """Takes a result of a trial.

        Args:
            trial: the trial.
            iteration: the number of its iteration.
            numbers: that it reported: see :class:`fluid.trainables.encoded_metrics.EncodedMetrics`.
        """
        if trial.is_shared_run:
            return
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
        found = self._find(trial_id)
        if found is None:
            self.enter(trial)
            found = self._find(trial_id)
            assert found is not None
        standing, _ = found
        shown_at = iteration + _shown(trial)[1]
        if standing.best_of is not None:
            was_better = standing.value < value if self._less else standing.value > value
            # Of equal ones the first counts. Parts of a trial may be heard in another order.
            if was_better or (standing.value == value and standing.iteration <= shown_at):
                return
        besides: tuple[tuple[str, float], ...] = ()
        if self._besides:
            further = ((name, numbers.get(inner + name)) for name in self._besides)
            besides = tuple((name, found) for name, found in further if found is not None and math.isfinite(found))
        standing.best_of, standing.iteration = trial, shown_at
        standing.value, standing.besides = value, besides
        if standing is not self._best:
            self._moved(standing)

    def end(self, trial_id: str, state: TrialState | None) -> None:
        """Takes it how a trial has ended; ``None`` if it goes on."""
        found = self._find(trial_id)
        if found is None:
            return
        standing, found[1].state = found[0], state
        if standing.last == trial_id:
            standing.ended_failed = state in NOT_BEST
            if state is TrialState.INFEASIBLE:
                standing.best_of = None  # What it has reported does not count.
            self._moved(standing)

    def say(self, trial_id: str, outcome: str | None) -> None:
        """Takes it how a trial came out, as its submitter says; ``None`` if that says nothing."""
        found = None if outcome is None else self._find(trial_id)
        if found is not None and (standing := found[0]).last == trial_id:
            standing.said_failed = outcome == TrialState.FAILED
            self._moved(standing)

    def show(self, trial: Trial) -> None:
        """Takes it that a trial is shown with another config from now on."""
        found = self._find(trial.id)
        if found is not None and (known := found[0].best_of) is not None and _id_of(known) == trial.id:
            found[0].best_of = trial

    def forget(self, trial_id: str) -> None:
        """Drops a trial; what it reported counts on."""
        found = self._find(trial_id)
        if found is None:
            return
        standing, _ = found
        if self._of.pop(trial_id, None) is None:
            standing.first, standing.state, standing.seeds = "", None, None
        standing.parts -= 1
        if standing.parts or self._standings.get(trial_id) is not standing:
            return  # It has another name, under which a further trial may be shown.
        del self._standings[trial_id]
        known = self._past.get(standing.failed)
        if known is None or self._rank(standing) < self._rank(known):
            self._past = self._past or {}
            self._past[standing.failed] = standing

    def best(self) -> BestSoFar | None:
        """Returns the best so far; ``None`` if no trial that may be the best has a value."""
        if self._best is None:
            self._best = min((*self._standings.copy().values(), *self._past.values()), key=self._rank, default=None)
        standing = self._best
        if standing is None or standing.best_of is None or self._metric is None or self._mode is None:
            return None
        shown_id, _, config = _shown(standing.best_of)
        return BestSoFar(
            metric=self._metric,
            mode=self._mode,
            value=standing.value,
            trial_id=shown_id,
            iteration=standing.iteration,
            config=config,
            besides=dict(standing.besides),
            failed=standing.failed,
        )

    def _rank(self, standing: _TrackedTrial) -> tuple[Merit, int]:
        value = None if standing.best_of is None else standing.value
        return Merit.of(value, TrialState.FAILED if standing.failed else "", less=self._less), standing.place

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
    if not metric or is_bookkeeping(metric) or not math.isfinite(numbers[name]):
        return None
    return sys.intern(metric)  # one string for all groups
