"""The engine's state machine: events in, commands out, no IO, no clock.

It owns the groups, trials, devices and lanes. All events of one call count as one instant: everything that ended is
processed before anything is started. The transitions are in the modules this one puts together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine import tuning
from fluid.engine.commands import Command, NoteKeptWidth
from fluid.engine.core import (
    Claims,
    CleanUpDeadline,
    Deadlines,
    DrainDeadline,
    EngineError,
    IterationDeadline,
    SessionState,
    Watching,
)
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.estimates.measuring import IterationTiming, Measuring, notes_of
from fluid.engine.estimates.running import RunningTable
from fluid.engine.events import (
    Alarm,
    BudgetExtended,
    CallRequested,
    CheckpointPlaced,
    CleanUpLasts,
    DeviceAdded,
    DeviceDraining,
    DeviceLost,
    DeviceRetained,
    DeviceRetiring,
    Event,
    FailRequested,
    FusionLimited,
    GroupRecovered,
    GroupSubmitted,
    IterationDone,
    LaneLost,
    LaneMeasured,
    LaneOutdated,
    LaneReady,
    LaneSpent,
    PausePurpose,
    PauseRequested,
    RequestAnswered,
    ResizeDone,
    ResumeRequested,
    RungReached,
    SavabilityChanged,
    SessionDraining,
    StateMeasured,
    StopRequested,
    Tick,
    TrialAsked,
    TrialCalled,
    TrialFailed,
    TrialForgotten,
    TrialNotKept,
    TrialPaused,
    TrialReleased,
    TrialsAdded,
    TrialSaved,
    TrialSetAside,
    TrialSetBack,
    TrialStarted,
)
from fluid.engine.placing.allocations import Allocations
from fluid.engine.placing.feasibility import Feasibility
from fluid.engine.placing.lanes import Lanes
from fluid.engine.placing.scheduling import Scheduling
from fluid.engine.records import TrialRecord, Trials
from fluid.engine.trials.calls import Calls, Requests
from fluid.engine.trials.failures import CapDeadline, Failures
from fluid.engine.trials.lifecycle import Lifecycle, Savability
from fluid.engine.trials.residency import Residency
from fluid.engine.trials.resizing import Resizing
from fluid.engine.trials.submissions import Holds, Submissions
from fluid.engine.view import EngineView, seconds_left, view_of
from fluid.errors import require_integer, require_number, require_one_of
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING
from fluid.planners.arrangement import KeepWidths
from fluid.planners.planner import Planner
from fluid.policies.checkpoints import CheckpointValues
from fluid.policies.cohorts import Cohorts
from fluid.policies.drains import DeviceDemand, DrainEnd, Drains, Retirements
from fluid.policies.fusing.fusing import Fusing
from fluid.policies.hung import HungTrials
from fluid.policies.isolation import CleanUps
from fluid.policies.owners.owners import Owners
from fluid.policies.owners.shares import DEFAULT_GROUP_POLICY, GROUP_POLICIES, GroupShares
from fluid.policies.owners.transfers import Transfers
from fluid.policies.preemption import Preemptions
from fluid.policies.rebalancing import Rebalancing
from fluid.policies.rounds import Rotation
from fluid.policies.spare_lanes import SpareLanes
from fluid.policies.turns import Turns
from fluid.policies.urgent.urgency import Urgency
from fluid.policies.waits import WaitDeadline, Waits
from fluid.resources import DEFAULT_MEMORY_WATERMARK, Device
from fluid.trialgroup import TrialState

# -- settling ------------------------------------------------------------------------------------
#
# After each instant: what arrived is planned, what fits is started, and what runs is resized where that pays.


class Settling:
    """Plans, starts, preempts and resizes once all events of an instant have changed the records.

    Attributes:
        ticked: whether a Tick has come that was not handled yet.
        wants_tick: whether a Tick is due, once the submitter has had time to answer what ended.
        changed_at: when that was last found, seconds.
    """

    def __init__(
        self,
        core: SessionState,
        lifecycle: Lifecycle,
        residency: Residency,
        resizing: Resizing,
        failures: Failures,
        preemptions: Preemptions,
        transfers: Transfers,
        urgency: Urgency,
    ) -> None:
        self.ticked = self.wants_tick = False
        self.changed_at = 0.0
        self._core = core
        self._lifecycle = lifecycle
        self._residency = residency
        self._resizing = resizing
        self._failures = failures
        self._preemptions = preemptions
        self._transfers = transfers
        self._urgency = urgency

    @property
    def is_due(self) -> bool:
        """Whether devices or trials came or went, or need less memory, or a tick has come."""
        core = self._core
        return bool(
            core.changed
            or core.arrivals
            or self.ticked
            or core.measuring.ramp_changes
            or core.memory.has_freed
            or core.cohorts.is_due
        )

    def settle(self) -> None:
        """Plans what arrived and starts what fits; on a tick, preempts and resizes where that pays.

        Resizes wait for a tick so that the submitter can first answer what ended: a device that falls idle should go
        to the submitter's next trial before it widens another.
        """
        core, scheduling = self._core, self._core.scheduling
        if not core.occupancy:
            self._failures.fail_what_waits()
            self.ticked = self.wants_tick = False
            return
        anew = core.cohorts.is_due and core.cohorts.update()
        ramped, freed = core.measuring.pop_ramp_changes(), core.memory.pop_freed()
        if core.changed or core.arrivals or ramped or freed or anew:
            # 4. Fail what no device can hold; give what arrived, or is to be planned again, widths in the queue.
            self._failures.end_misfits()
            core.commands += notes_of(ramped, core.now)
            core.fusing.update({estimate.key for estimate in ramped})
            if ramped or freed or anew:
                scheduling.plan_queue_again(anew=anew)
            arrived, core.arrivals = list(core.arrivals.values()), {}
            scheduling.arrive(arrived)
            # 5. Start what fits, calling off widenings and evicting kept states for it; pause others for urgent ones.
            self._dispatch()
            clearing = list(core.clearing.values())
            for trial in clearing:
                self._lifecycle.launch_when_ready(trial)
            if any(trial.state.ended for trial in clearing):  # One that was restored for a call left at once.
                self._dispatch()
            core.changed, self.wants_tick, self.changed_at = False, True, core.now
        if self.ticked:
            self.ticked = False
            if self.wants_tick:
                self._rebalance()

    def _rebalance(self) -> None:
        core = self._core
        self.wants_tick = False
        # 6. On a tick, leave devices that too many share, and go to the widths that the planner wants now.
        for trial in core.rebalancing.overpacked():
            self._lifecycle.preempt(trial)
        for trial in core.fusing.uneven():
            self._lifecycle.preempt(trial, why="leaves its lane for another one of its device, which is idle")
        for resize in core.rebalancing.rebalance(core.scheduling.replanner):
            self._resizing.begin(*resize)
        for trial, (change, gain, stall, *_) in core.rebalancing.pop_rejected():
            core.commands.append(
                NoteKeptWidth(
                    trial.trial_id,
                    at=core.now,
                    width=change.width,
                    old_width=trial.width,
                    gain=gain,
                    stall_s=stall,
                )
            )
        if self._core.queue:
            self._dispatch()
        for transfer in self._transfers.choose():
            if transfer.device is None:
                self._lifecycle.preempt(transfer.leaving, transfer.coming)
            else:
                self._resizing.begin(transfer.leaving, transfer.leaving.width, transfer.device)
        # 7. Preempt running trials for waiting ones, if all end earlier that way.
        for leaving, coming in self._preemptions.choose():
            self._lifecycle.preempt(leaving, coming)
        core.changed = False

    def _dispatch(self) -> None:
        self._start()
        while self._urgency.make_room():
            self._start()
        until = self._core.scheduling.placing.reservations.wait_until
        if until is None:
            self._core.deadlines.clear(WaitDeadline())
        else:
            self._core.deadlines.set(WaitDeadline(), until)

    def _start(self) -> None:
        self._start_what_fits()
        while self._core.queue and self._resizing.give_way():
            self._start_what_fits()
        if self._core.queue:
            for trial in self._residency.make_room():
                if self._core.scheduling.start_where_kept(trial):
                    self._lifecycle.start(trial)
            in_vain = self._core.scheduling.placing.admitting.lift(self._residency.is_emptying)
            if self._core.lanes.pop_freed() or in_vain:  # empty ones were ended, which made room
                self._start_what_fits()

    def _start_what_fits(self) -> None:
        again = True
        while again:
            started = self._core.scheduling.dispatch()
            self._core.stepwise |= self._core.in_rounds and bool(self._core.queue)
            for trial in started:
                if trial.state is TrialState.QUEUED:
                    self._lifecycle.start(trial)
            # A start may end a gang's idle lane, which frees memory; a trial restored for a call may leave at once.
            again = self._core.lanes.pop_freed() or any(trial.state.ended for trial in started)


# -- session parts -------------------------------------------------------------------------------
#
# Puts the parts of a session's state together.


def make_session_state(
    planner: Planner,
    profile: Profile,
    *,
    max_packing: int,
    max_fused: int,
    insists_on_fusing: bool,
    turns: int,
    in_rounds: bool,
    max_width: int,
    resident_limit: int,
    watermark: float,
    group_policy: str,
    fairness: float,
) -> SessionState:
    """The state of a session without devices and trials (arguments: see :class:`fluid.engine.engine.EngineState`)."""
    deadlines, owners = Deadlines(), Owners()
    trials, queue, table, occupancy = Trials(), StartQueue(), RunningTable(), Occupancy(watermark=watermark)
    lanes = Lanes(resident_limit, occupancy.memory)
    estimates = Estimates(
        profile,
        occupancy,
        table,
        max_packing=max_packing,
        max_width=max_width,
        max_fused=max_fused,
        insists_on_fusing=insists_on_fusing,
        turns=turns,
    )
    allocations = Allocations(trials, occupancy, estimates, table)
    moves = not isinstance(planner.replanner(), KeepWidths)
    rebalancing = Rebalancing(trials, queue, occupancy, estimates, table, allocations, moves=moves)
    measuring = Measuring(trials, profile, occupancy, estimates, allocations, rebalancing)
    shares = GroupShares(group_policy, fairness, owners, trials, queue, occupancy, estimates, allocations.work)
    return SessionState(
        profile=profile,
        trials=trials,
        queue=queue,
        lanes=lanes,
        occupancy=occupancy,
        memory=occupancy.memory,
        estimates=estimates,
        allocations=allocations,
        rebalancing=rebalancing,
        measuring=measuring,
        timing=IterationTiming(trials, occupancy),
        scheduling=Scheduling(
            planner, trials, queue, occupancy, lanes, estimates, table, allocations, shares, in_rounds=in_rounds
        ),
        in_rounds=in_rounds,
        deadlines=deadlines,
        watching=Watching(deadlines, estimates, lanes),
        feasibility=Feasibility(occupancy),
        cohorts=Cohorts(profile, estimates, allocations, measuring),
        owners=owners,
        shares=shares,
        fusing=Fusing(
            trials, lanes, estimates, allocations, measuring, Turns(trials, lanes, occupancy, estimates, measuring)
        ),
    )


# -- state ---------------------------------------------------------------------------------------


DEFAULT_MAX_FAILURES = 2
DEFAULT_RESIDENT_LIMIT = 8

__all__ = ["DEFAULT_MAX_FAILURES", "DEFAULT_RESIDENT_LIMIT", "EngineError", "EngineState"]

_Check = Callable[[Any, Claims], None]
_Handler = Callable[[Any], None]


class EngineState:
    """Decides what runs where.

    :meth:`handle` says step by step what happens at one instant.

    Args:
        planner: plans widths, placements and resizes.
        profile: measurements of trials; it learns from what lanes report.
        max_packing: most processes on one device; 1 switches packing them off.
        max_fused: most trials that one process trains in one step; 1 switches fusing off.
        insists_on_fusing: whether trials that can be fused are, though it was not measured to pay.
        turns: most trials on one device that take turns in its lanes; 1 if each is to have a lane of its own.
        in_rounds: whether all trials advance together, an iteration each in turn, those that wait for room too.
        max_width: most devices for one trial; ``None`` for the planner's ``d``.
        max_failures: times a trial is queued again after it failed.
        resident_limit: states of trials at rest that a device keeps, of those whose bytes do not bound packing.
        watermark: share of a device's memory that trials may fill.
        group_policy: which owner's trials start first: see :mod:`fluid.policies.owners.shares`.
        fairness: how much owners that got less than their share are preferred; 0 for not at all.
        spare_lanes: unused lanes that are at hand on each device; 0 for none.
    """

    def __init__(
        self,
        planner: Planner,
        profile: Profile | None = None,
        *,
        max_packing: int = DEFAULT_MAX_PACKING,
        max_fused: int = 1,
        insists_on_fusing: bool = False,
        turns: int = 1,
        in_rounds: bool = False,
        max_width: int | None = None,
        max_failures: int = DEFAULT_MAX_FAILURES,
        resident_limit: int = DEFAULT_RESIDENT_LIMIT,
        watermark: float = DEFAULT_MEMORY_WATERMARK,
        group_policy: str = DEFAULT_GROUP_POLICY,
        fairness: float = 0.0,
        spare_lanes: int = 0,
    ) -> None:
        self._core = core = make_session_state(
            planner,
            profile if profile is not None else Profile(),
            max_packing=require_integer("max_packing", max_packing, at_least=1),
            max_fused=require_integer("max_fused", max_fused, at_least=1),
            insists_on_fusing=insists_on_fusing,
            turns=require_integer("turns", turns, at_least=1),
            in_rounds=in_rounds,
            max_width=planner.d if max_width is None else require_integer("max_width", max_width, at_least=1),
            resident_limit=require_integer("resident_limit", resident_limit, at_least=0),
            watermark=watermark,
            group_policy=require_one_of("group_policy", group_policy, GROUP_POLICIES),
            fairness=require_number("fairness", fairness, at_least=0.0),
        )
        self.planner = planner
        self.profile, self.trials, self.groups, self.queue = core.profile, core.trials, core.groups, core.queue
        self.lanes, self.occupancy, self.memory, self.clearing = core.lanes, core.occupancy, core.memory, core.clearing
        self.estimates, self.allocations, self.deadlines = core.estimates, core.allocations, core.deadlines
        self.demand, self.shares, self.placing = DeviceDemand(core), core.shares, core.scheduling.placing
        self.limit_of = core.limit_of
        self._calls = Calls(self._core)
        self._requests = Requests(self._core)
        self.checkpoints = CheckpointValues(core)
        self._residency = Residency(self._core, self._calls, self.checkpoints)
        self._resizing = Resizing(self._core, self._calls)
        self._lifecycle = Lifecycle(self._core, self._calls, self._residency, self._resizing)
        most = require_integer("max_failures", max_failures, at_least=0)
        self.spares = SpareLanes(core, require_integer("spare_lanes", spare_lanes, at_least=0))
        self._failures = Failures(
            core, self._calls, self._lifecycle, self._residency, self._resizing, self.spares, most
        )
        self._savability = Savability(self._core, self._calls, self._residency, self._resizing)
        self._submissions = Submissions(self._core, self._lifecycle, self._residency)
        self._drains = Drains(core, self._lifecycle, self._residency, self._resizing, self._failures.device_lost)
        self.retirements = Retirements(core, self._drains, self.demand)
        self._holds = Holds(core, self._lifecycle, self._residency, self._resizing)
        self._preemptions = Preemptions(self._core, planner.preempts)
        self.urgency = Urgency(core, self._lifecycle)
        self._hung, self._waits, self._clean_ups = HungTrials(core), Waits(core), CleanUps(core)
        self._rounds = Rotation(core, self._lifecycle, self._residency)
        self._settling = Settling(
            core,
            self._lifecycle,
            self._residency,
            self._resizing,
            self._failures,
            self._preemptions,
            Transfers(core, planner.preempts),
            self.urgency,
        )
        self._table = self._event_table()
        self._due: dict[type, _Handler] = {  # What handles a deadline, by the type of its key.
            WaitDeadline: self._waits.due,
            IterationDeadline: self._hung.look,
            DrainDeadline: self._hung.look_at_drain,
            DrainEnd: self._drains.due,
            CapDeadline: self._failures.starts.due,
            CleanUpDeadline: self._clean_ups.look,
        }

    def _event_table(self) -> dict[type[Event], tuple[_Check | None, _Handler]]:
        """What checks and what handles each event; events of the backend are not checked."""
        submissions, failures, lifecycle, drains = self._submissions, self._failures, self._lifecycle, self._drains
        return {
            GroupSubmitted: (submissions.check_group, submissions.group_submitted),
            GroupRecovered: (submissions.check_recovered, submissions.group_recovered),
            TrialsAdded: (submissions.check_added, submissions.trials_added),
            BudgetExtended: (submissions.check_extension, submissions.budget_extended),
            StopRequested: (submissions.check_stop, submissions.stop_requested),
            FailRequested: (submissions.check_failed, submissions.fail_requested),
            PauseRequested: (self._holds.check_pause, self._holds.pause_requested),
            TrialSetAside: (self._holds.check_pause, self._holds.pause_requested),
            ResumeRequested: (self._holds.check_resume, self._holds.resume_requested),
            CallRequested: (self._calls.check, self._calls.requested),
            TrialForgotten: (submissions.check_forgotten, self._trial_forgotten),
            RungReached: (self.checkpoints.check_reached, self.checkpoints.reached),
            CheckpointPlaced: (None, self.checkpoints.placed),
            DeviceAdded: (failures.check_device, failures.device_added),
            DeviceLost: (None, failures.device_lost),
            DeviceDraining: (drains.check_device, drains.device_draining),
            DeviceRetiring: (self.retirements.check_retiring, self.retirements.device_retiring),
            DeviceRetained: (self.retirements.check_retained, self.retirements.device_retained),
            SessionDraining: (drains.check_session, drains.session_draining),
            LaneReady: (None, failures.lane_ready),
            LaneMeasured: (None, lifecycle.lane_measured),
            LaneSpent: (None, lifecycle.lane_spent),
            LaneOutdated: (None, lifecycle.lane_outdated),
            CleanUpLasts: (None, self._clean_ups.lasts),
            StateMeasured: (None, self._residency.measured),
            LaneLost: (None, failures.lane_lost),
            TrialSetBack: (None, lifecycle.set_back),
            SavabilityChanged: (None, self._savability.changed),
            TrialStarted: (None, lifecycle.started),
            FusionLimited: (None, lifecycle.fusion_limited),
            IterationDone: (None, lifecycle.iteration_done),
            TrialPaused: (None, self._trial_paused),
            TrialSaved: (None, self._trial_saved),
            TrialNotKept: (None, self._residency.not_kept),
            TrialReleased: (None, lifecycle.released),
            ResizeDone: (None, self._resize_done),
            TrialCalled: (None, self._trial_called),
            TrialAsked: (None, self._requests.asked),
            RequestAnswered: (None, self._requests.answered),
            TrialFailed: (None, failures.trial_failed),
            Tick: (None, self._tick),
            Alarm: (None, self._alarm),
        }

    @property
    def alarm_at(self) -> float | None:
        """By when the engine wants an :class:`~fluid.engine.events.Alarm`, seconds; ``None`` for no alarm."""
        return self._core.deadlines.earliest

    @property
    def wants_tick(self) -> bool:
        """Whether a Tick is due, once the submitter has had time to answer what ended."""
        return self._settling.wants_tick

    @property
    def changed_at(self) -> float:
        """When that was last found, seconds."""
        return self._settling.changed_at

    @property
    def arrivals(self) -> list[TrialRecord]:
        """Queued trials that have no width yet: there is no device."""
        return list(self._core.arrivals.values())

    @property
    def only_spreads(self) -> bool:
        """Whether a tick could only widen trials onto idle devices: none waits, and none hinders another."""
        return not self.queue and not self._core.rebalancing.has_overpacking

    @property
    def drained(self) -> bool:
        """Whether the session was told to drain, so that no trial starts any more."""
        return self._core.drained

    @property
    def most_devices(self) -> int:
        """Most devices that the session may come to hold; 0 if none come by themselves."""
        return self._core.feasibility.most_devices

    def set_most_devices(self, most: int) -> None:
        """Sets :attr:`most_devices`."""
        self._core.feasibility.most_devices = most

    @property
    def devices(self) -> list[Device]:
        """The devices in use, in order of their index."""
        return self.occupancy.devices

    def view(self) -> EngineView:
        """Returns how devices stand, and the order of groups, for displays."""
        return view_of(self._core)

    def seconds_left(self, group_id: str, now: float | None = None) -> float | None:
        """Predicted seconds until a group has ended, from ``now``, or from the latest event where that is ``None``.

        ``None`` where no trial was measured, one hangs, or one waits for devices that there are not.
        """
        if self.hangs(group_id, self._core.now if now is None else now) or self.awaited(group_id):
            return None
        return seconds_left(self.groups[group_id].live.values(), self.occupancy, self.estimates)

    def awaits_devices(self, trial_id: str) -> bool:
        """Whether a trial waits for devices that there are not."""
        return self._core.awaits_devices(self.trials[trial_id])

    def awaited(self, group_id: str) -> tuple[str, ...]:
        """The devices that some trials of a group wait for and that there are not, in words, each once."""
        live = self.groups[group_id].live.values()
        waiting = (trial.spec.wanted_devices for trial in live if trial.constraint and self._core.awaits_devices(trial))
        return tuple(dict.fromkeys(waiting))

    def hangs(self, group_id: str, now: float) -> bool:
        """Whether a trial of a group has given no result for far longer than usual."""
        return any(self._hung.silence(trial, now) is not None for trial in self.groups[group_id].live.values())

    def silent(self, now: float) -> list[tuple[str, float]]:
        """Returns the trials that have given no result for far longer than usual, and for how many seconds."""
        held = (self.trials.by_row.get(row) for row in sorted(self.occupancy.held))  # No others run.
        silences = ((trial.trial_id, self._hung.silence(trial, now)) for trial in held if trial is not None)
        return [(trial_id, seconds) for trial_id, seconds in silences if seconds is not None]

    def handle(self, *events: Event) -> list[Command]:
        """Handles events that happened at one instant; returns what the backend and the submitter are told.

        What a submitter requests is checked against the state before the call. Requests that build on each other come
        in calls of their own.

        Raises:
            InvalidFieldError: a request is refused (an id that is taken, an unknown one). Nothing has changed.
            EngineError: the engine cannot explain an event. The session cannot go on.
        """
        core, table, claims = self._core, self._table, Claims()
        # 1. Refuse bad requests, before anything changes.
        for event in events:
            check = table[type(event)][0]
            if check is not None:
                check(event, claims)
        del claims  # What follows needs more memory, for very many trials.
        # 2. Let every event change the records: all ends of this instant come before any start.
        core.commands = []
        for event in events:
            if event.at > core.now:
                core.now = core.occupancy.now = event.at
            try:
                table[type(event)][1](event)
            except EngineError:
                raise
            except Exception as error:
                trial = core.trials.get(getattr(event, "trial_id", ""))
                raise core.error(trial, f"{event!r} cannot be handled: {error!r}") from error
        for part in (self._holds, self.retirements, self._drains):  # Held trials leave devices that retire, then drain.
            if part.under_way:
                part.advance()
        self._rounds.update()
        core.lanes.end_over(core.commands)
        self._settle()
        # 9. Evict kept states from devices whose known bytes do not fit any more, and start what fits where that ended
        #    lanes; see whether capped devices have room.
        core.lanes.end_over(core.commands)
        while self._residency.evict_excess():
            self._settle()
            core.lanes.end_over(core.commands)
        self.spares.fill()
        self._failures.starts.ease()
        core.fusing.tell_rows(core.commands)
        self.checkpoints.tell()
        core.trials.shrink_ended()
        # 10. Return what the backend is to do and what the submitter is told, in order.
        return core.commands

    def _settle(self) -> None:
        # 3. If devices or trials came or went, or need less memory, or a tick came: plan, start, preempt and resize.
        if self._settling.is_due:
            self._settling.settle()
            self._waits.note()
        self._rounds.advance()
        # 8. Ask for a tick if a waiting trial may have become urgent.
        self._settling.wants_tick |= self._preemptions.is_due()

    # -- transitions that two parts make together ----------------------------------------------------------

    def _trial_paused(self, event: TrialPaused) -> None:
        if event.purpose is PausePurpose.PREEMPT:
            self._lifecycle.paused(event)
            self._rounds.make_room(self._core.trials.get(event.trial_id))
            return
        if (finished := self._resizing.paused(event)) is not None:
            self._lifecycle.finish(finished)

    def _trial_saved(self, event: TrialSaved) -> None:
        is_of_drain = event.copied and event.kept is None
        (self._drains.copied if is_of_drain else self._lifecycle.saved)(event)
        self.checkpoints.saved(event)

    def _trial_forgotten(self, event: TrialForgotten) -> None:
        self._submissions.trial_forgotten(event)
        self.checkpoints.forgotten(event)

    def _resize_done(self, event: ResizeDone) -> None:
        if (finished := self._resizing.done(event)) is not None:
            self._lifecycle.finish(finished)

    def _trial_called(self, event: TrialCalled) -> None:
        if (trial := self._calls.answered(event)) is None:
            return
        self._core.watching.answered(trial, self._core.now)
        if not trial.calls:
            self._residency.answered(trial)

    def _tick(self, event: Tick) -> None:
        self._settling.ticked = True

    def _alarm(self, event: Alarm) -> None:
        """Hands each deadline that has come to the part whose it is; unlike a tick, it rebalances nothing."""
        deadlines = self._core.deadlines
        if deadlines.earliest is not None and event.at > deadlines.earliest + tuning.LATE_S:
            self._hung.begin_anew()
        for key in deadlines.pop_due(event.at):
            self._due[type(key)](key)
