"""The engine's state machine: events in, commands out, no IO, no clock.

It owns the groups, trials, devices and lanes. All events of one call count as one instant: everything that ended is
processed before anything is started. The transitions are in the modules this one puts together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluid.engine import tuning
from fluid.engine.calls import Calls
from fluid.engine.checkpoint_places import CheckpointPlaced
from fluid.engine.checkpoint_values import CheckpointValues
from fluid.engine.claims import Claims
from fluid.engine.clean_ups import CleanUpLasts, CleanUps
from fluid.engine.commands import Command
from fluid.engine.core import EngineError
from fluid.engine.demand import DeviceDemand
from fluid.engine.drains import DrainEnd, Drains
from fluid.engine.events import (
    Alarm,
    BudgetExtended,
    CallRequested,
    DeviceAdded,
    DeviceDraining,
    DeviceLost,
    Event,
    GroupRecovered,
    GroupSubmitted,
    IterationDone,
    LaneLost,
    LaneReady,
    PausePurpose,
    PauseRequested,
    ResizeDone,
    ResumeRequested,
    SessionDraining,
    StopRequested,
    Tick,
    TrialCalled,
    TrialFailed,
    TrialForgotten,
    TrialPaused,
    TrialReleased,
    TrialsAdded,
    TrialSaved,
    TrialStarted,
)
from fluid.engine.failures import Failures
from fluid.engine.fusion import FusionLimited
from fluid.engine.holds import Holds
from fluid.engine.hung_trials import HungTrials
from fluid.engine.lane_record import LaneMeasured, LaneOutdated, LaneSpent, StateMeasured
from fluid.engine.lane_starts import CapDeadline
from fluid.engine.lifecycle import Lifecycle
from fluid.engine.preemption import Preemptions
from fluid.engine.records import TrialRecord
from fluid.engine.requests import RequestAnswered, Requests, TrialAsked
from fluid.engine.residency import Residency
from fluid.engine.resizing import Resizing
from fluid.engine.retention import TrialNotKept
from fluid.engine.retiring import DeviceRetained, DeviceRetiring, Retirements
from fluid.engine.rounds import Rotation
from fluid.engine.rungs import RungReached
from fluid.engine.savability import Savability, SavabilityChanged
from fluid.engine.session_parts import make_session_state
from fluid.engine.set_aside import TrialSetAside
from fluid.engine.set_back import TrialSetBack
from fluid.engine.settling import Settling
from fluid.engine.spare_lanes import SpareLanes
from fluid.engine.submissions import Submissions
from fluid.engine.transfers import Transfers
from fluid.engine.urgency import Urgency
from fluid.engine.verdicts import FailRequested
from fluid.engine.view import EngineView, seconds_left, view_of
from fluid.engine.waits import WaitDeadline, Waits
from fluid.engine.watching import CleanUpDeadline, DrainDeadline, IterationDeadline
from fluid.errors import require_integer, require_number, require_one_of
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING
from fluid.planners.planner import Planner
from fluid.policies.owners.shares import DEFAULT_GROUP_POLICY, GROUP_POLICIES
from fluid.resources import DEFAULT_MEMORY_WATERMARK, Device

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
