"""The engine's state machine: events in, commands out, no IO, no clock.

It owns the groups, trials, devices and lanes. All events of one call count as one instant: everything that ended is
processed before anything is started. The transitions are in the modules this one puts together, and every feature is a
policy (:mod:`fluid.engine.policy`); :mod:`fluid.policies.engine` has the engine with all of Fluid's.
"""

from __future__ import annotations

from collections.abc import Iterable

from fluid.engine import tuning
from fluid.engine.commands import Command
from fluid.engine.core import Claims, EngineError, QueueDeadline, SessionState
from fluid.engine.estimates.measuring import notes_of
from fluid.engine.events import (
    Alarm,
    BudgetExtended,
    CallRequested,
    DeviceAdded,
    DeviceLost,
    Event,
    FailRequested,
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
    SavabilityChanged,
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
from fluid.engine.policy import Check, Handler, Policy, Preempt, Proposal
from fluid.engine.records import TrialRecord
from fluid.engine.trials.calls import Calls, Requests
from fluid.engine.trials.failures import Failures
from fluid.engine.trials.lifecycle import Lifecycle, Savability
from fluid.engine.trials.residency import Residency
from fluid.engine.trials.resizing import Resizing
from fluid.engine.trials.submissions import Submissions, UserPauses
from fluid.engine.view import DeviceStatus, device_statuses, places
from fluid.resources import Device
from fluid.trialgroup import TrialState

DEFAULT_MAX_FAILURES = 2
DEFAULT_RESIDENT_LIMIT = 8

__all__ = ["DEFAULT_MAX_FAILURES", "DEFAULT_RESIDENT_LIMIT", "Engine", "EngineError"]


class Engine:
    """Decides what runs where.

    :meth:`handle` says step by step what happens at one instant.

    Args:
        core: the state of a session without devices and trials.
        max_failures: times a trial is queued again after it failed; ``None`` for the default, and for no further try of
            a trial that can only fail again.

    Attributes:
        gives_up_early: whether what can only fail again is not tried so often, as the user has not said how often.
    """

    def __init__(self, core: SessionState, max_failures: int | None) -> None:
        self._core = core
        self.gives_up_early = max_failures is None
        self.profile = core.profile
        self.trials = core.trials
        self.groups = core.groups
        self.queue = core.queue
        self.lanes = core.lanes
        self.occupancy = core.occupancy
        self.memory = core.memory
        self.clearing = core.clearing
        self.estimates = core.estimates
        self.allocations = core.allocations
        self.deadlines = core.deadlines
        self.placing = core.scheduling.placing
        self.limit_of = core.limit_of
        self._calls = Calls(core)
        self._requests = Requests(core)
        self._residency = Residency(core, self._calls)
        self._resizing = Resizing(core, self._calls)
        self._lifecycle = Lifecycle(core, self._calls, self._residency, self._resizing)
        self._failures = Failures(
            core,
            self._calls,
            self._lifecycle,
            self._residency,
            self._resizing,
            DEFAULT_MAX_FAILURES if max_failures is None else max_failures,
            gives_up_early=self.gives_up_early,
        )
        self._savability = Savability(core, self._calls, self._residency, self._resizing)
        self._submissions = Submissions(core, self._lifecycle, self._residency)
        self._user_pauses = UserPauses(core, self._lifecycle, self._residency, self._resizing)
        self._settling = Settling(core, self._lifecycle, self._residency, self._resizing, self._failures)
        self._handlers = self._own_handlers()
        #: What handles a deadline, by the type of its key.
        self._due: dict[type, Handler] = {QueueDeadline: self._queue_due}

    def _register(self, policies: Iterable[Policy]) -> None:
        """Takes all policies, in the order in which they are asked; has to be called once, before any event."""
        self._core.policies.register(policies)
        for policy in self._core.policies.all:
            for event, (check, handler) in policy.events().items():
                checks, handlers = self._handlers.get(event, ((), ()))
                self._handlers[event] = (*checks, *([] if check is None else [check])), (*handlers, handler)
            self._due.update(policy.deadlines())

    def _own_handlers(self) -> dict[type[Event], tuple[tuple[Check, ...], tuple[Handler, ...]]]:
        """What checks and what handles each event; events of the backend are not checked."""
        submissions, failures, lifecycle, user_pauses = (
            self._submissions,
            self._failures,
            self._lifecycle,
            self._user_pauses,
        )
        requests: dict[type[Event], tuple[Check, Handler]] = {
            GroupSubmitted: (submissions.check_group, submissions.group_submitted),
            GroupRecovered: (submissions.check_recovered, submissions.group_recovered),
            TrialsAdded: (submissions.check_added, submissions.trials_added),
            BudgetExtended: (submissions.check_extension, submissions.budget_extended),
            StopRequested: (submissions.check_stop, submissions.stop_requested),
            FailRequested: (submissions.check_failed, submissions.fail_requested),
            PauseRequested: (user_pauses.check_pause, user_pauses.pause_requested),
            TrialSetAside: (user_pauses.check_pause, user_pauses.pause_requested),
            ResumeRequested: (user_pauses.check_resume, user_pauses.resume_requested),
            CallRequested: (self._calls.check, self._calls.requested),
            TrialForgotten: (submissions.check_forgotten, submissions.trial_forgotten),
            DeviceAdded: (failures.check_device, failures.device_added),
        }
        reports: dict[type[Event], Handler] = {
            DeviceLost: failures.device_lost,
            LaneReady: failures.lane_ready,
            LaneMeasured: lifecycle.lane_measured,
            LaneSpent: lifecycle.lane_spent,
            LaneOutdated: lifecycle.lane_outdated,
            StateMeasured: self._residency.measured,
            LaneLost: failures.lane_lost,
            TrialSetBack: lifecycle.set_back,
            SavabilityChanged: self._savability.changed,
            TrialStarted: lifecycle.started,
            IterationDone: lifecycle.iteration_done,
            TrialPaused: self._trial_paused,
            TrialSaved: self._trial_saved,
            TrialNotKept: self._residency.not_kept,
            TrialReleased: lifecycle.released,
            ResizeDone: self._resize_done,
            TrialCalled: self._trial_called,
            TrialAsked: self._requests.asked,
            RequestAnswered: self._requests.answered,
            TrialFailed: failures.trial_failed,
            Tick: self._tick,
            Alarm: self._alarm,
        }
        return {event: ((check,), (handler,)) for event, (check, handler) in requests.items()} | {
            event: ((), (handler,)) for event, handler in reports.items()
        }

    @property
    def alarm_at(self) -> float | None:
        """By when the engine wants an :class:`~fluid.engine.events.Alarm`, seconds; ``None`` for no alarm."""
        return self._core.deadlines.earliest

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All policies, in the order in which they are asked."""
        return self._core.policies.all

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

    @property
    def device_statuses(self) -> tuple[DeviceStatus, ...]:
        """How the devices stand, by index."""
        return device_statuses(self._core)

    @property
    def given_up(self) -> tuple[tuple[int, str], ...]:
        """The devices that are used no more as they do not work, by index, and why."""
        return tuple(sorted(self._core.given_up.items()))

    @property
    def places(self) -> dict[str, int]:
        """Where the trials of groups stand among those of all owners; empty where there is one owner."""
        return places(self._core)

    def awaits_devices(self, trial_id: str) -> bool:
        """Whether a trial waits for devices that there are not."""
        return self._core.awaits_devices(self.trials[trial_id])

    def lacks_devices(self, trial_id: str) -> bool:
        """Whether a trial, wherever it is now, could never start with the devices that there are."""
        trial = self.trials[trial_id]
        return self._core.feasibility.awaits(trial.spec.memory, trial.constraint)

    def awaited(self, group_id: str) -> tuple[str, ...]:
        """The devices that some trials of a group wait for and that there are not, in words, each once."""
        live = self.groups[group_id].live.values()
        waiting = (trial.spec.wanted_devices for trial in live if trial.constraint and self._core.awaits_devices(trial))
        return tuple(dict.fromkeys(waiting))

    def handle(self, *events: Event) -> list[Command]:
        """Handles events that happened at one instant; returns what the backend and the submitter are told.

        What a submitter requests is checked against the state before the call. Requests that build on each other come
        in calls of their own.

        Raises:
            InvalidFieldError: a request is refused (an id that is taken, an unknown one). Nothing has changed.
            EngineError: the engine cannot explain an event. The session cannot go on.
        """
        core, handlers, claims = self._core, self._handlers, Claims()
        # 1. Refuse bad requests, before anything changes.
        for event in events:
            for check in handlers[type(event)][0]:
                check(event, claims)
        del claims  # What follows needs more memory, for very many trials.
        # 2. Let every event change the records: all ends of this instant come before any start.
        core.commands = []
        for event in events:
            if event.at > core.now:
                core.now = core.occupancy.now = event.at
            try:
                for handler in handlers[type(event)][1]:
                    handler(event)
            except EngineError:
                raise
            except Exception as error:
                trial = core.trials.get(getattr(event, "trial_id", ""))
                raise core.error(trial, f"{event!r} cannot be handled: {error!r}") from error
        for after_events in core.policies.after_events:
            after_events()
        core.lanes.end_over(core.commands)
        self._settle()
        # 9. Evict kept states from devices whose known bytes do not fit any more, and start what fits where that ended
        #    lanes.
        core.lanes.end_over(core.commands)
        while self._residency.evict_excess():
            self._settle()
            core.lanes.end_over(core.commands)
        for at_end in core.policies.at_end:
            at_end()
        core.trials.shrink_ended()
        # 10. Return what the backend is to do and what the submitter is told, in order.
        return core.commands

    def _settle(self) -> None:
        policies = self._core.policies
        # 3. If devices or trials came or went, or need less memory, or a tick came: plan, start, preempt and resize.
        if self._settling.is_due:
            self._settling.settle()
            for after_settling in policies.after_settling:
                after_settling()
        for after_starts in policies.after_starts:
            after_starts()
        # 8. Ask for a tick if a policy may have something to propose.
        for policy in policies.wants_tick:
            self._settling.wants_tick |= policy.wants_tick

    # -- transitions that two parts make together ----------------------------------------------------------

    def _trial_paused(self, event: TrialPaused) -> None:
        if event.purpose is PausePurpose.PREEMPT:
            self._lifecycle.paused(event)
            return
        if (finished := self._resizing.paused(event)) is not None:
            self._lifecycle.finish(finished)

    def _trial_saved(self, event: TrialSaved) -> None:
        if not event.copied or event.kept is not None:  # Else the policy that asked for the copy takes it.
            self._lifecycle.saved(event)

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
            for woke_late in self._core.policies.woke_late:
                woke_late()
        for key in deadlines.pop_due(event.at):
            self._due[type(key)](key)

    def _queue_due(self, key: QueueDeadline) -> None:
        self._core.changed = True


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
    ) -> None:
        self.ticked = self.wants_tick = False
        self.changed_at = 0.0
        self._core = core
        self._lifecycle = lifecycle
        self._residency = residency
        self._resizing = resizing
        self._failures = failures

    @property
    def is_due(self) -> bool:
        """Whether devices or trials came or went, or need less memory, or a tick has come."""
        core = self._core
        if core.changed or core.arrivals or self.ticked or core.measuring.ramp_changes or core.memory.has_freed:
            return True
        for policy in core.policies.wants_planning:  # noqa: SIM110  Asked at every event: a generator costs as much again.
            if policy.wants_planning:
                return True
        return False

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
        anew = False
        for policy in core.policies.wants_planning:
            anew |= policy.wants_planning and policy.plan_anew()
        ramped, freed = core.measuring.pop_ramp_changes(), core.memory.pop_freed()
        if core.changed or core.arrivals or ramped or freed or anew:
            # 4. Fail what no device can hold; give what arrived, or is to be planned again, widths in the queue.
            self._failures.end_misfits()
            core.commands += notes_of(ramped, core.now)
            for estimates_changed in core.policies.estimates_changed:
                estimates_changed({estimate.key for estimate in ramped})
            if ramped or freed or anew:
                scheduling.plan_queue_again(anew=anew)
            arrived, core.arrivals = list(core.arrivals.values()), {}
            scheduling.arrive(arrived)
            # 5. Start what fits, calling off widenings and evicting kept states for it; pause others for urgent ones.
            self._dispatch()
            clearing = list(core.clearing.values())
            for trial in clearing:
                self._lifecycle.launch_when_ready(trial)
            if any(map(_has_left, clearing)):
                self._dispatch()
            core.changed, self.wants_tick, self.changed_at = False, True, core.now
        if self.ticked:
            self.ticked = False
            if self.wants_tick:
                self._rebalance()

    def _rebalance(self) -> None:
        core = self._core
        self.wants_tick = False
        # 6. On a tick, change what runs: leave devices that too many share, go to the widths that the planner wants.
        for propose in core.policies.propose:
            self._carry_out(propose())
        if core.queue:
            self._dispatch()
        # 7. Make running trials give way to waiting ones.
        for exchange in core.policies.exchange:
            self._carry_out(exchange())
        core.changed = False

    def _carry_out(self, proposals: Iterable[Proposal]) -> None:
        """Makes the changes that a policy proposes; passes over trials that do not run, or are to pause already."""
        for proposal in proposals:
            trial = proposal.trial
            if trial.state is not TrialState.RUNNING or trial.placement.preemption is not None:
                continue
            if isinstance(proposal, Preempt):
                self._lifecycle.preempt(proposal.trial, proposal.successor, why=proposal.why)
            else:
                self._resizing.begin(*proposal)

    def _dispatch(self) -> None:
        core = self._core
        self._start()
        while self._make_room():
            self._start()
        until: float | None = None
        for policy in core.policies.wait_until:
            at = policy.wait_until
            until = at if until is None or (at is not None and at < until) else until
        if until is None:
            core.deadlines.clear(QueueDeadline())
        else:
            core.deadlines.set(QueueDeadline(), until)

    def _make_room(self) -> bool:
        is_made = False
        for make_room in self._core.policies.make_room:
            is_made |= make_room()
        return is_made

    def _start(self) -> None:
        self._start_what_fits()
        while self._core.queue and self._resizing.give_way():
            self._start_what_fits()
        if self._core.queue:
            for trial in self._residency.make_room():
                if self._core.scheduling.start_where_kept(trial):
                    self._lifecycle.start(trial)
            in_vain = [give_up(self._residency.is_emptying) for give_up in self._core.policies.give_up]
            if self._core.lanes.pop_freed() or any(in_vain):  # empty ones were ended, which made room
                self._start_what_fits()

    def _start_what_fits(self) -> None:
        again = True
        while again:
            started = self._core.scheduling.dispatch()
            for dispatched in self._core.policies.dispatched:
                dispatched()
            for trial in started:
                if trial.state is TrialState.QUEUED:
                    self._lifecycle.start(trial)
            # A start may end a gang's idle lane, which frees memory; a trial restored for a call may leave at once. One
            # that goes on where its state was kept had that counted beside its need until now.
            again = self._core.lanes.pop_freed() or any(map(_has_left, started))
            if self._core.memory.is_bounded and self._core.queue:
                again |= any(trial.state is TrialState.RUNNING for trial in started)


def _has_left(trial: TrialRecord) -> bool:
    """Whether a trial that was to start has left its devices at once: restored for a call, or its state is gone."""
    return trial.state.ended or bool(trial.awaits)
