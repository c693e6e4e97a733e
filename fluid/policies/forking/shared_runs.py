"""Runs that several trials share: those whose configs agree until an iteration are one run until then (docs/sweeps.md).

The session adds such a run as a trial of its own. What it reports is reported for each of its trials, which start from
its state where they part. A trial may come to its budget before that: it is done then, and has had no process at all.
The run goes as far as one of its trials needs it, and ends once none does. Where it cannot serve them, as its state
cannot be saved, or its code asks for values of a config by which they differ, each of them runs alone from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from msgspec import structs

from fluid.engine.commands import Report
from fluid.engine.core import SessionState
from fluid.engine.events import (
    BudgetExtended,
    Event,
    GroupRecovered,
    TrialEvent,
    TrialForgotten,
    TrialForked,
)
from fluid.engine.policy import Check, Handler, Policy
from fluid.engine.records import TrialRecord
from fluid.engine.trials.lifecycle import Lifecycle
from fluid.engine.trials.residency import Residency
from fluid.engine.trials.submissions import Submissions
from fluid.trialgroup import TrialState

#: The kind of failure of a shared run whose code has asked for what its trials do not agree on.
PARTED = "parted"


class IterationsKnown(TrialEvent, frozen=True):
    """An earlier run has done iterations of a trial that starts from its state.

    Attributes:
        reports: of all iterations until then, in order, with their source.
    """

    reports: tuple[Report, ...]


class SharedRuns(Policy):
    """Reports shared iterations for each trial, and has shared runs go as far as they are needed.

    Args:
        core: the session.
        submissions: extend runs.
        lifecycle, residency: end them.
    """

    def __init__(
        self, core: SessionState, submissions: Submissions, lifecycle: Lifecycle, residency: Residency
    ) -> None:
        self._core = core
        self._submissions = submissions
        self._lifecycle = lifecycle
        self._residency = residency
        #: By run, the ids of the trials that have not parted from it, in order of submission; also runs within it.
        self._followers: dict[str, dict[str, None]] = {}
        #: Reports of runs that are ahead of one of their trials, which may be extended.
        self._reports: dict[str, deque[Report]] = {}
        #: Whether a run may be needed no more, or may have ended.
        self._is_due = False

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """Whatever changes who needs a run, or ends it."""
        return {
            TrialForked: (None, self._look),
            TrialForgotten: (None, self._look),
            GroupRecovered: (None, self._recovered),
            BudgetExtended: (None, self._extended),
            IterationsKnown: (None, self._known),
        }

    def _look(self, event: Event) -> None:
        self._is_due = bool(self._followers)

    # -- who follows which run -----------------------------------------------------------------------------

    def submitted(self, trial: TrialRecord) -> None:
        """Follows its run, if it has one."""
        start = trial.spec.start
        if start is not None and start.is_shared and start.checkpoint is None:
            self._followers.setdefault(start.parent, {})[trial.trial_id] = None

    def forgotten(self, trial: TrialRecord) -> None:
        """Follows nothing any more."""
        self._part(trial)
        self._followers.pop(trial.trial_id, None)
        self._reports.pop(trial.trial_id, None)

    def _part(self, trial: TrialRecord) -> None:
        start = trial.spec.start
        if start is not None and start.is_shared and start.checkpoint is None:
            self._followers.get(start.parent, {}).pop(trial.trial_id, None)
            self._is_due = True

    def _following(self, run: str) -> Iterator[TrialRecord]:
        """The trials that have not parted from a run, and are not over."""
        for trial_id in list(self._followers.get(run, ())):
            trial = self._core.trials.get(trial_id)
            if trial is not None and trial.awaits and not trial.state.is_over:
                yield trial

    def _recovered(self, event: GroupRecovered) -> None:
        """Trials of an earlier session go on with their runs; one that has missed reports of its run runs alone."""
        for history in event.trials:
            trial = self._core.trials[history.trial.trial_id]
            start = trial.spec.start
            if start is None or not start.is_shared:
                continue
            has_parted = trial.state.ended and trial.progress.reported > self._end(trial)
            if trial.residence.checkpoint is not None or trial.state.is_over or has_parted:
                self._part(trial)
                continue
            trial.awaits = trial.awaits or "is done before it parts from its shared run"
            self._require_all(trial)
        for name in list(self._followers):
            self._extend(self._core.trials.get(name))

    # -- reports -------------------------------------------------------------------------------------------

    def reported(self, trial: TrialRecord, report: Report) -> None:
        """Reports iterations of a run for each of its trials; those done before they part are done."""
        if trial.trial_id not in self._followers:
            return
        followers = list(self._following(trial.trial_id))
        if any(each.progress.budget < self._end(each) for each in followers):
            self._reports.setdefault(trial.trial_id, deque()).append(report)
        for each in followers:
            self._pass_on(each, report)

    def _known(self, event: IterationsKnown) -> None:
        """Reports to a trial, and to those that share it, what an earlier run has done."""
        trial = self._core.trials.get(event.trial_id)
        if trial is None or trial.state.is_over or trial.spec.start is None:
            return
        self._reports[event.trial_id] = deque(event.reports)
        for report in event.reports:
            self._pass_on(trial, report)

    def _pass_on(self, trial: TrialRecord, report: Report) -> None:
        """Reports what is news of a report to a trial, up to its budget, and up to where it parts from the run."""
        progress = trial.progress
        last = min(report.iteration, progress.budget, self._end(trial))  # The user may have extended the run.
        first = max(progress.reported, report.iteration - report.count) + 1
        if first > last:
            return
        made = structs.replace(report, trial_id=trial.trial_id, group_id=trial.group_id, source=self._source(report))
        if report.run is not None:
            before = report.iteration - report.count
            run = report.run._replace(
                **{
                    name: tuple(islice(each, first - before - 1, last - before))
                    for name, each in report.run._asdict().items()
                }
            )
            at, seconds, metrics = run.at[-1], run.seconds[-1], run.metrics[-1]
            made = structs.replace(
                made, iteration=last, at=at, seconds=seconds, metrics=metrics, run=run if last > first else None
            )
        progress.reported = progress.done = last
        self._core.commands.append(made)
        for reported in self._core.policies.reported:
            reported(trial, made)
        if last >= progress.budget and trial.state is TrialState.PAUSED and not trial.calls:
            self._core.end(trial, TrialState.DONE, f"done after {last} iterations, all of them shared")

    @staticmethod
    def _source(report: Report) -> str:
        """The trial that ran it: of a run within a run, the outer one."""
        return report.source or report.trial_id

    # -- how far runs go -----------------------------------------------------------------------------------

    def _extended(self, event: BudgetExtended) -> None:
        """A trial that was extended before it has parted gets what its run has done meanwhile, and the run goes on."""
        trial = self._core.trials.get(event.trial_id)
        start = None if trial is None else trial.spec.start
        if trial is None or start is None or not start.is_shared or not trial.awaits:
            return
        self._extend(self._run_of(trial))
        self._catch_up(trial)
        self._require_all(trial)

    def _require_all(self, trial: TrialRecord) -> None:
        """Has a trial run alone that has missed reports of its run: those of an earlier session are not at hand."""
        start, run = trial.spec.start, self._run_of(trial)
        assert start is not None
        is_gone = run is None and start.checkpoint is None
        ahead = self._end(trial) if run is None else min(run.progress.reported, self._end(trial))
        if is_gone or trial.progress.reported < min(ahead, trial.progress.budget):
            self.stateless(trial, f"{start.parent!r}, which it shared, has gone on without it")

    def _run_of(self, trial: TrialRecord) -> TrialRecord | None:
        """The run of this session that a trial shares; ``None`` if it shares none, or one of another session."""
        start = trial.spec.start
        is_here = start is not None and start.is_shared and start.checkpoint is None
        return self._core.trials.get(start.parent) if start is not None and is_here else None

    def _catch_up(self, trial: TrialRecord) -> None:
        """Reports to a trial what its run, and those that this is within, have done while it was not to go on."""
        start = trial.spec.start
        if start is None or not start.is_shared or not trial.awaits:
            return
        own = start.parent if start.checkpoint is None else trial.trial_id
        for report in list(self._reports.get(own, ())):
            if report.iteration > trial.progress.reported:
                self._pass_on(trial, report)
        if (run := self._run_of(trial)) is not None:
            self._catch_up(run)  # What is news to the run is passed on to all that share it.

    def _end(self, trial: TrialRecord) -> int:
        """The iteration at which a trial parts from its run."""
        assert trial.spec.start is not None and trial.spec.start.at is not None
        return trial.spec.start.at

    def _needed(self, run: str) -> int:
        """The iteration up to which trials need a run."""
        return max((min(self._end(each), self._demand(each)) for each in self._following(run)), default=0)

    def _demand(self, trial: TrialRecord) -> int:
        """How far a trial is to come; a run, as far as its own trials need it, or beyond where it is ahead of them."""
        if trial.trial_id not in self._followers:
            return trial.progress.budget
        return max(trial.progress.budget, self._needed(trial.trial_id))

    def _extend(self, trial: TrialRecord | None) -> None:
        """Has a run, and those that it is within, go as far as their trials need them."""
        while trial is not None and not trial.state.is_over and trial.state is not TrialState.STOPPING:
            further = self._needed(trial.trial_id) - trial.progress.budget
            if further > 0 and not trial.progress.finished_early:
                self._submissions.budget_extended(BudgetExtended(self._core.now, trial.trial_id, further))
            trial = self._run_of(trial)

    # -- ends ----------------------------------------------------------------------------------------------

    def after_events(self) -> None:
        """Ends runs that no trial needs any more, and passes on what has become of one that could not serve."""
        if self._followers:
            self._is_due |= any(map(self._concerns, self._core.trials.touched))
        while self._is_due:
            self._is_due = False
            for run in list(self._followers):
                self._settle(run)

    def after_starts(self) -> None:
        """The same is due where a run could not be started."""
        if self._followers:
            over = (trial_id for trial_id in self._core.trials.touched if trial_id in self._followers)
            self._is_due |= any(self._core.trials[trial_id].state.is_over for trial_id in over)

    @property
    def wants_tick(self) -> bool:
        """Soon, if a run has ended as trials were started, of which its trials are to hear."""
        return self._is_due

    def _concerns(self, trial_id: str) -> bool:
        """Whether a trial is a run, or shares one."""
        trial = self._core.trials.get(trial_id)
        start = None if trial is None else trial.spec.start
        return trial_id in self._followers or (start is not None and start.is_shared)

    def _settle(self, run: str) -> None:
        trial = self._core.trials.get(run)
        followers = list(self._following(run))
        if trial is None or not followers:
            del self._followers[run]
            self._reports.pop(run, None)
            if trial is not None:
                self._let_go(trial)
        elif trial.state.is_over:
            for each in followers:
                self._pass_end_on(trial, each)
        elif trial.state is TrialState.DONE and trial.progress.finished_early:
            for each in followers:
                if self._end(each) > trial.progress.done:
                    self._end_early(each)

    def _let_go(self, run: TrialRecord) -> None:
        """Ends a run of which no trial has anything to come; its state is needed no more."""
        self._is_due = True  # It may be one of another run's.
        if run.state is TrialState.DONE and not run.calls:
            self._residency.drop(run)
        elif not run.state.ended and not run.restored_for_call:
            self._lifecycle.stop(run)

    def _end_early(self, trial: TrialRecord) -> None:
        """A run has no more to do, and so has a trial that shared all that it did."""
        if trial.calls:
            self.stateless(trial, "a method of it was called")
            return
        self._part(trial)
        trial.awaits = ""
        trial.progress.finish_early()
        if trial.state is not TrialState.DONE:
            self._core.end(trial, TrialState.DONE, f"has ended by itself after {trial.progress.done} iterations")

    def _pass_end_on(self, run: TrialRecord, trial: TrialRecord) -> None:
        """A run is over: a trial fails as it did, which it would have done alone, or runs alone after all."""
        failure = run.limits.failure
        self._part(trial)
        if run.state is TrialState.STOPPED or failure is None or failure.kind in (PARTED, "not_saved"):
            why = f"{run.trial_id!r}, which it shared, was stopped" if failure is None else failure.message
            self.stateless(trial, why)
            return
        trial.awaits = ""
        trial.limits = replace(trial.limits, failure=failure)
        if trial.state is not TrialState.DONE:  # One that had done its iterations before has done them.
            self._core.end(trial, run.state, failure.message)

    def stateless(self, trial: TrialRecord, why: str) -> bool:
        """A trial of a shared run runs alone from its start if it cannot have the run's state."""
        core, start = self._core, trial.spec.start
        if start is None or not start.is_shared:
            return False
        self._part(trial)
        trial.spec = structs.replace(trial.spec, start=None)
        trial.progress.starts_at = 0
        trial.awaits = ""
        core.note(trial, f"runs alone from its start: {why}")
        if trial.state is TrialState.PAUSED:
            core.enqueue(trial, "runs alone from its start")
        return True
