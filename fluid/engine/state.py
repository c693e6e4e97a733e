"""The engine's state machine: events in, commands out, no IO, no clock.

It owns the groups, trials, devices and lanes. All events of one call count as one instant: everything that ended is
processed before anything is started. The transitions are in the modules this one puts together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluid.engine.allocations import Allocations
from fluid.engine.calls import Calls
from fluid.engine.commands import Command
from fluid.engine.core import EngineError, SessionState
from fluid.engine.estimates import Estimates
from fluid.engine.events import (
    BudgetExtended,
    CallRequested,
    DeviceAdded,
    DeviceLost,
    Event,
    GroupRecovered,
    GroupSubmitted,
    IterationDone,
    LaneLost,
    LaneReady,
    ResizeDone,
    StopRequested,
    Tick,
    TrialAdded,
    TrialCalled,
    TrialFailed,
    TrialForgotten,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialStarted,
)
from fluid.engine.failures import Failures
from fluid.engine.lanes import Lanes
from fluid.engine.lifecycle import Lifecycle
from fluid.engine.measuring import Measuring
from fluid.engine.preemption import Preemptions
from fluid.engine.rebalancing import Rebalancing
from fluid.engine.records import GroupRecord, TrialRecord
from fluid.engine.residency import Residency
from fluid.engine.resizing import Resizing
from fluid.engine.running_table import RunningTable
from fluid.engine.scheduling import Scheduling
from fluid.engine.submissions import Submissions
from fluid.engine.trials import Trials
from fluid.engine.view import EngineView, seconds_left, view_of
from fluid.errors import FluidError, require_integer
from fluid.planning.memory_ledger import MemoryLedger
from fluid.planning.occupancy import Occupancy
from fluid.planning.planner import Planner
from fluid.planning.profile import Profile
from fluid.planning.runtime_model import DEFAULT_MAX_PACKING
from fluid.planning.start_queue import StartQueue
from fluid.resources import DEFAULT_MEMORY_WATERMARK, Device
from fluid.trialgroup import TrialState

DEFAULT_MAX_FAILURES = 2
DEFAULT_RESIDENT_LIMIT = 8

__all__ = ["DEFAULT_MAX_FAILURES", "DEFAULT_RESIDENT_LIMIT", "EngineError", "EngineState"]

#: Events that a submitter, or whoever adds devices, may get wrong.
_REFUSABLE = (
    *(GroupSubmitted, GroupRecovered, TrialAdded, BudgetExtended, StopRequested, CallRequested, TrialForgotten),
    DeviceAdded,
)


class EngineState:
    """Decides what runs where.

    Args:
        planner: who plans.
        profile: what is known about trials; it learns from what is reported.
        max_packing: most trials on one device; 1 switches packing off.
        max_width: most devices for one trial; ``None`` for the planner's ``d``.
        max_failures: times a trial is queued again after it failed.
        resident_limit: trials whose state a device keeps though they do not run, where nobody knows how many bytes
            they take, or that does not bound packing; where it is known, they stay while they fit.
        watermark: share of a device's memory that trials may fill.
    """

    def __init__(
        self,
        planner: Planner,
        profile: Profile | None = None,
        *,
        max_packing: int = DEFAULT_MAX_PACKING,
        max_width: int | None = None,
        max_failures: int = DEFAULT_MAX_FAILURES,
        resident_limit: int = DEFAULT_RESIDENT_LIMIT,
        watermark: float = DEFAULT_MEMORY_WATERMARK,
    ) -> None:
        self.planner = planner
        self.profile = profile if profile is not None else Profile()
        self.trials = Trials()
        self.occupancy = Occupancy(watermark=watermark)
        self.lanes = Lanes(require_integer("resident_limit", resident_limit, at_least=0), self.occupancy.memory)
        table, queue = RunningTable(), StartQueue()
        self.estimates = Estimates(
            self.profile,
            self.occupancy,
            table,
            max_packing=require_integer("max_packing", max_packing, at_least=1),
            max_width=planner.d if max_width is None else require_integer("max_width", max_width, at_least=1),
        )
        self.allocations = Allocations(self.trials, self.occupancy, self.estimates, table)
        self.scheduling = Scheduling(
            planner,
            trials=self.trials,
            queue=queue,
            occupancy=self.occupancy,
            lanes=self.lanes,
            estimates=self.estimates,
            table=table,
            allocations=self.allocations,
        )
        self._rebalancing = Rebalancing(
            trials=self.trials,
            queue=queue,
            occupancy=self.occupancy,
            estimates=self.estimates,
            table=table,
            allocations=self.allocations,
        )
        self._measuring = Measuring(self.profile, self.occupancy, self.estimates, self.allocations, self._rebalancing)
        #: Whether a Tick is due, once the submitter has had its say.
        self.wants_tick = False
        #: When what ticks are for changed last, seconds.
        self.changed_at = 0.0
        self._core = SessionState(
            trials=self.trials,
            lanes=self.lanes,
            occupancy=self.occupancy,
            memory=self.memory,
            estimates=self.estimates,
            allocations=self.allocations,
            measuring=self._measuring,
            scheduling=self.scheduling,
        )
        self._calls = Calls(self._core)
        self._residency = Residency(self._core, self._calls)
        self._resizing = Resizing(self._core, self._calls)
        self._lifecycle = Lifecycle(self._core, self._calls, self._residency, self._resizing)
        most = require_integer("max_failures", max_failures, at_least=0)
        self._failures = Failures(self._core, self._calls, self._lifecycle, self._residency, self._resizing, most)
        self._submissions = Submissions(self._core, self._lifecycle)
        self._preemptions = Preemptions(self._core, planner.preempts)
        self._ticked = False
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            GroupSubmitted: self._submissions.group_submitted,
            GroupRecovered: self._submissions.group_recovered,
            TrialAdded: self._submissions.trial_added,
            BudgetExtended: self._submissions.budget_extended,
            StopRequested: self._submissions.stop_requested,
            CallRequested: self._calls.requested,
            TrialForgotten: self._submissions.trial_forgotten,
            DeviceAdded: self._failures.device_added,
            DeviceLost: self._failures.device_lost,
            LaneReady: self._failures.lane_ready,
            LaneLost: self._failures.lane_lost,
            TrialStarted: self._lifecycle.started,
            IterationDone: self._lifecycle.iteration_done,
            TrialPaused: self._trial_paused,
            TrialSaved: self._lifecycle.saved,
            TrialReleased: self._lifecycle.released,
            ResizeDone: self._resize_done,
            TrialCalled: self._trial_called,
            TrialFailed: self._failures.trial_failed,
            Tick: self._tick,
        }

    @property
    def memory(self) -> MemoryLedger:
        """What trials, kept states and lanes take of the devices' memory."""
        return self.occupancy.memory

    @property
    def groups(self) -> dict[str, GroupRecord]:
        """The groups of the session by id."""
        return self._core.groups

    @property
    def arrivals(self) -> list[TrialRecord]:
        """Queued trials that have no width yet: there is no device."""
        return list(self._core.arrivals.values())

    @property
    def clearing(self) -> dict[int, TrialRecord]:
        """Trials that wait to start until states that were kept on their devices have left, by row."""
        return self._core.clearing

    @property
    def only_spreads(self) -> bool:
        """Whether all that a tick could do is to spread trials over idle devices: nobody waits or is in the way."""
        return not self.scheduling.queue and not self._rebalancing.has_overpacking

    @property
    def devices(self) -> list[Device]:
        """The devices in use, in order of their index."""
        return list(self.occupancy.devices)

    def view(self) -> EngineView:
        """Returns how groups and devices stand, for displays."""
        return view_of(self.groups.values(), self.trials, self.occupancy, self.lanes)

    def seconds_left(self, group_id: str) -> float | None:
        """Predicted seconds until a group has ended; ``None`` where no trial of it was measured."""
        trials = map(self.trials.__getitem__, self.groups[group_id].trial_ids)
        return seconds_left(trials, self.occupancy, self.estimates)

    def is_taken(self, trial_id: str) -> bool:
        """Whether a trial has, or had, that id."""
        return trial_id in self._core.trials or trial_id in self._core.forgotten

    def handle(self, *events: Event) -> list[Command]:
        """Takes what happened, as one instant, and returns what to do.

        Raises:
            InvalidFieldError: an event of the submitter's cannot be (an id that is there already, an unknown one).
                None of the events changed anything.
            EngineError: any other event that cannot be. The session cannot go on.
        """
        core = self._core
        if any(isinstance(event, _REFUSABLE) for event in events):
            self._submissions.check(events)
        core.commands = []
        for event in events:
            if event.at > core.now:
                core.now = event.at
            try:
                self._handlers[type(event)](event)
            except FluidError:
                raise
            except Exception as error:
                trial = core.trials.get(getattr(event, "trial_id", ""))
                raise core.error(trial, f"{event!r} cannot be: {error!r}") from error
        if core.changed or core.arrivals or self._ticked or self._measuring.has_ramp_changes:
            self._settle()
        self.wants_tick |= self._preemptions.is_due()
        self._residency.evict_excess()
        return core.commands

    # -- transitions that two parts make together ----------------------------------------------------------

    def _trial_paused(self, event: TrialPaused) -> None:
        if self._lifecycle.paused(event):
            return
        finished = self._resizing.paused(event)
        if finished is not None:
            self._lifecycle.finish(finished)

    def _resize_done(self, event: ResizeDone) -> None:
        finished = self._resizing.done(event)
        if finished is not None:
            self._lifecycle.finish(finished)

    def _trial_called(self, event: TrialCalled) -> None:
        trial = self._calls.answered(event)
        if trial is not None and not trial.calls:
            self._residency.answered(trial)

    def _tick(self, event: Tick) -> None:
        self._ticked = True

    # -- after each instant --------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Plans what arrived and starts what fits; on a tick, resizes where that pays.

        Resizes wait for a tick so that whoever submits can first answer what ended: a device that falls idle
        should go to its next trial before it widens another.
        """
        core, scheduling = self._core, self.scheduling
        if not self.occupancy:
            self._failures.fail_what_waits()
            self._ticked = self.wants_tick = False
            return
        ramped = self._measuring.pop_ramp_changes()
        if core.changed or core.arrivals or ramped:
            self._failures.end_misfits()
            if ramped:
                scheduling.plan_queue_again()
            arrived, core.arrivals = list(core.arrivals.values()), {}
            scheduling.arrive(arrived)
            self._dispatch()
            for trial in list(core.clearing.values()):
                self._lifecycle.launch_when_ready(trial)
            core.changed, self.wants_tick, self.changed_at = False, True, core.now
        if self._ticked:
            self._ticked = False
            if self.wants_tick:
                self._rebalance()

    def _rebalance(self) -> None:
        self.wants_tick = False
        for trial in self._rebalancing.overpacked():
            self._lifecycle.preempt(trial)
        for trial, width in self._rebalancing.rebalance(self.scheduling.replanner):
            self._resizing.begin(trial, width)
        if self.scheduling.queue:
            self._dispatch()
        for leaving, coming in self._preemptions.choose():
            self._lifecycle.preempt(leaving, coming)
        self._core.changed = False

    def _dispatch(self) -> None:
        self._start_what_fits()
        while self.scheduling.queue and self._resizing.give_way():
            self._start_what_fits()
        if self.scheduling.queue:
            lanes = len(self.lanes)
            for trial in self._residency.make_room():
                if self.scheduling.start_where_kept(trial):
                    self._lifecycle.start(trial)
            if len(self.lanes) < lanes:  # some were ended to make room, and there is room now
                self._start_what_fits()

    def _start_what_fits(self) -> None:
        for trial in self.scheduling.dispatch():
            if trial.state is TrialState.QUEUED:
                self._lifecycle.start(trial)
