"""The state of a session, which the parts of the state machine share, and the steps that transitions are made of."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fluid.devices.memory import MemoryLedger
from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine import tuning
from fluid.engine.commands import (
    Command,
    KillLane,
    NotePaused,
    NotePlaced,
    NoteQueued,
    NoteResize,
    NoteTrial,
    Persist,
    ReportCall,
    ReportEnd,
    ReportSetBack,
    ReportStart,
    RunIteration,
    Save,
    StopTrial,
)
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.estimates.measuring import IterationTiming, Measuring
from fluid.engine.events import Failure
from fluid.engine.placing.allocations import Allocations
from fluid.engine.placing.feasibility import Feasibility
from fluid.engine.placing.lanes import Lanes
from fluid.engine.placing.scheduling import Scheduling
from fluid.engine.placing.sharing import Sharing
from fluid.engine.policy import Policies
from fluid.engine.records import LEGAL, NO_LANES, NO_REQUESTS, GroupRecord, Killing, Move, Stage, TrialRecord, Trials
from fluid.errors import FluidError, InvalidFieldError
from fluid.measure.profile import Profile
from fluid.trialgroup import TrialState

# -- deadlines -----------------------------------------------------------------------------------
#
# Deadlines: the times at which parts of the engine want to be woken by an Alarm. Without a clock.


#: Removed deadlines stay in the heap until their time, or until there are as many of them as others, and so many more.
_SLACK = 64


class Deadlines:
    """One deadline per key, of whatever part of the engine; the type of the key says whose it is."""

    def __init__(self) -> None:
        self._at: dict[Hashable, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._numbers = itertools.count()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._at

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: Hashable, at: float) -> None:
        """Sets the deadline of a key, in place of an earlier one; ``at`` in seconds on the clock of the events."""
        number = next(self._numbers)
        self._at[key] = at, number
        heapq.heappush(self._heap, (at, number, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(at, number, key) for key, (at, number) in self._at.items()]
            heapq.heapify(self._heap)

    def clear(self, key: Hashable) -> None:
        """Removes the deadline of a key, if it has one."""
        self._at.pop(key, None)

    @property
    def earliest(self) -> float | None:
        """The earliest deadline, seconds; ``None`` if there is none."""
        heap = self._heap
        while heap:
            at, number, key = heap[0]
            if self._at.get(key) == (at, number):
                return at
            heapq.heappop(heap)
        return None

    def pop_due(self, now: float) -> list[Hashable]:
        """Removes and returns the keys whose deadline has come, the earliest first."""
        due: list[Hashable] = []
        while (at := self.earliest) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            due.append(key)
        return due


@dataclass(frozen=True, slots=True)
class QueueDeadline:
    """When the queue is to be looked at again: trials that wait for better devices start on what there is."""


# -- watching ------------------------------------------------------------------------------------
#
# Watching: since when each trial's lanes owe an answer, and when to look at them, as a trial may hang.


class IterationDeadline(NamedTuple):
    """When to look at a trial that runs."""

    row: int


class DrainDeadline(NamedTuple):
    """When to look at a lane that a trial was told to leave."""

    lane_id: int
    trial_id: str


class CleanUpDeadline(NamedTuple):
    """When to look at a lane that a trial which has ended was told to leave, and whether another one waits."""

    lane_id: int
    trial_id: str


def far_longer_than(longest: float) -> float:
    """Seconds without an answer after which a lane is killed whose trial took at most so many before."""
    return max(tuning.LEAST_KILL_S, tuning.KILL_FACTOR * longest)


class Watching:
    """Times what lanes do, and marks those that are killed; :mod:`fluid.policies.hung` looks at them.

    Args:
        deadlines: takes those of trials that run, and of lanes that trials are to leave.
        estimates: have the iterations measured by profile key.
        lanes: all there are.
    """

    def __init__(self, deadlines: Deadlines, estimates: Estimates, lanes: Lanes) -> None:
        self._deadlines = deadlines
        self._estimates = estimates
        self._lanes = lanes

    def launched(self, trial: TrialRecord, now: float, *, iterates: bool) -> None:
        """Records that a trial's lanes set it up from now on, or, if it ``iterates``, run its iterations."""
        trial.placement.iterates = iterates
        self.answered(trial, now)
        timeout = trial.spec.iteration_timeout_s
        if timeout is not None:
            first = tuning.LEAST_DUMP_S if isinstance(timeout, str) else tuning.DUMP_SHARE * timeout
            self._deadlines.set(IterationDeadline(trial.row), now + first)

    def answered(self, trial: TrialRecord, now: float) -> None:
        """Records a sign of progress: the time of what the trial does next begins."""
        trial.placement.since = now
        trial.placement.dumped = False
        if trial.sharing_group is not None:
            for lane_id in trial.placement.hosts:
                if (lane := self._lanes.get(lane_id)) is not None:
                    lane.since = now

    def released(self, trial: TrialRecord) -> None:
        """Records that a trial holds no lanes any more."""
        trial.placement.iterates = False
        self._deadlines.clear(IterationDeadline(trial.row))

    def draining(self, trial: TrialRecord, lane_id: int, now: float) -> None:
        """Records that a trial was told to leave a lane in which it may run."""
        timeout = trial.spec.iteration_timeout_s
        # A trial without a limit has one here: what it still does there is thrown away, and others wait for the lane.
        longest = timeout if isinstance(timeout, float) else self._estimates.of_key(trial).longest
        self._deadlines.set(DrainDeadline(lane_id, trial.trial_id), now + far_longer_than(longest))

    def cleaning_up(self, trial_id: str, lane_id: int, now: float) -> None:
        """Records that a trial at rest was told to leave its lane."""
        self._deadlines.set(CleanUpDeadline(lane_id, trial_id), now + tuning.CLEAN_UP_S)

    def saving_last(self, trial_id: str, lane_id: int, now: float) -> None:
        """Records that a trial that has ended was told to save its state and leave its lane."""
        self._deadlines.set(CleanUpDeadline(lane_id, trial_id), now + tuning.LEAST_KILL_S)

    def left(self, trial_id: str, lane_id: int) -> None:
        """Records that a trial has left a lane."""
        self._deadlines.clear(CleanUpDeadline(lane_id, trial_id))

    def kill(
        self, trial_id: str, lane_ids: tuple[int, ...], reason: str, now: float, failure: Failure | None = None
    ) -> list[Command]:
        """Has lanes killed because of a trial; what becomes of the trials there follows when the lanes are lost.

        Args:
            trial_id: the trial.
            lane_ids: the lanes; those that are being killed already are left out.
            reason: why, to be read after "lane 3".
            now: the time, seconds.
            failure: what the trial is to blame for; ``None`` if it is stopped.
        """
        commands: list[Command] = []
        for lane_id in lane_ids:
            if lane_id in self._lanes and self._lanes[lane_id].killing is None:
                self._lanes[lane_id].killing = Killing(trial_id, failure)
                commands.append(KillLane(lane_id, reason, at=now))
        return commands


# -- retention -----------------------------------------------------------------------------------
#
# Retention: the last checkpoint of a trial outlives the run, if its submitter wants that (``TrialSpec.keep_last``).
#
# A trial that is done is saved in its lane; one that is stopped, before it leaves its lane. If a trial failed or lost
# its lane, its host copies its newest checkpoint.


def is_to_be_kept(trial: TrialRecord) -> bool:
    """Whether a trial's present state is to be saved for good, and no lane was told to."""
    spec, residence, done = trial.spec, trial.residence, trial.progress.done
    return spec.keep_last and spec.can_save and max(residence.kept_at, residence.keeping) < done


def last_to_keep(trial: TrialRecord, lane_id: int) -> list[Save]:
    """Returns the command by which the lane of a trial that is done saves it for good, if that is wanted."""
    if not is_to_be_kept(trial):
        return []
    trial.residence = replace(trial.residence, keeping=trial.progress.done)
    return [Save(trial.trial_id, (lane_id,), durable=True, keep=True)]


def newest_to_keep(trial: TrialRecord) -> list[Persist]:
    """Returns the command by which the newest checkpoint of a trial is copied for good, if that is wanted.

    Args:
        trial: a trial that was stopped or failed, or is done and has lost its lane.
    """
    residence = trial.residence
    checkpoint, kept = residence.checkpoint, max(residence.kept_at, residence.keeping)
    if not trial.spec.keep_last or checkpoint is None or checkpoint.iteration <= kept:
        return []
    return [Persist(trial.trial_id, checkpoint, keep=True)]


# -- core ----------------------------------------------------------------------------------------


class EngineError(FluidError):
    """An event that the engine cannot explain: a fault of Fluid or of a backend. Carries the trial's story."""


@dataclass
class SessionState:
    """The state of a session, and the steps that all transitions are made of.

    Attributes:
        commands: what the backend and the submitter are told in answer to the events at hand, in order.
        arrivals: queued trials that have no width yet, by row.
        resizing: trials that are being resized, by row, in the order in which that began.
        clearing: trials that wait to start until other trials' states have left their devices, by row.
        forgotten: ids of forgotten trials, which stay taken.
        deadlines: when parts of the engine want an Alarm.
        given_up: the devices that are used no more as they do not work, with the reason.
        sharing: whose trials get devices first.
        policies: the features beside the core.
        drained: whether the session was told to drain, so that no trial starts any more.
        stepwise: whether lanes are told to run one iteration at a time, as others wait for their turn.
        stepping: rows of trials on devices of which this holds alone, whatever others do.
        changed: whether devices or trials came or went, so that queued trials may fit now.
        now: time of the latest event, seconds.
    """

    profile: Profile
    trials: Trials
    queue: StartQueue
    lanes: Lanes
    occupancy: Occupancy
    memory: MemoryLedger
    estimates: Estimates
    allocations: Allocations
    measuring: Measuring
    timing: IterationTiming
    scheduling: Scheduling
    deadlines: Deadlines
    watching: Watching
    feasibility: Feasibility
    sharing: Sharing
    policies: Policies
    groups: dict[str, GroupRecord] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    arrivals: dict[int, TrialRecord] = field(default_factory=dict)
    resizing: dict[int, TrialRecord] = field(default_factory=dict)
    clearing: dict[int, TrialRecord] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    given_up: dict[int, str] = field(default_factory=dict)
    drained: bool = False
    stepwise: bool = False
    stepping: set[int] = field(default_factory=set)
    changed: bool = False
    now: float = 0.0

    def holder(self, trial_id: str, lane_id: int | None) -> TrialRecord | None:
        """The trial, if that lane was told to run it; ``None`` if it has left the lane, whose event is out of date."""
        trial = self.trials.get(trial_id)
        if trial is None or not trial.placement.launched:
            return None
        place = trial.placement
        return trial if lane_id in (place.lanes if place.move is None else place.hosts) else None

    def require_known(self, trial_id: str) -> TrialRecord:
        """The trial of that id.

        Raises:
            InvalidFieldError: there is none.
        """
        trial = self.trials.get(trial_id)
        if trial is None:
            raise InvalidFieldError("trial_id", trial_id, "is unknown")
        return trial

    def require_alive(self, trial_id: str, action: str) -> TrialRecord:
        """The trial of that id, if it can run.

        Args:
            trial_id: the trial.
            action: what it is to be, for the error: ``"extended"``.

        Raises:
            InvalidFieldError: there is none, or it has ended for good.
        """
        trial = self.require_known(trial_id)
        if trial.state is TrialState.STOPPING or trial.state.is_over:
            raise InvalidFieldError("trial_id", trial_id, f"is {trial.state.value} and cannot be {action}")
        return trial

    def awaits_devices(self, trial: TrialRecord) -> bool:
        """Whether a trial waits for devices that there are not: with those that there are it can never start."""
        constraint = trial.constraint
        if constraint is None or trial.state is not TrialState.QUEUED:
            return False
        return self.feasibility.awaits(trial.spec.memory, constraint)

    # -- states and stories --------------------------------------------------------------------------------

    def set_state(self, trial: TrialRecord, state: TrialState, why: str) -> None:
        """Changes a trial's state: the only place that does.

        Raises:
            EngineError: the trial may not go there from its state (:mod:`fluid.engine.records`).
        """
        if (trial.state, state) not in LEGAL:
            raise self.error(trial, f"cannot go from {trial.state.value} to {state.value}: {why}")
        trial.state = state
        self.groups[trial.group_id].count(trial)
        self.trials.touched.add(trial.trial_id)
        trial.add_to_story(self.now, f"{state.value}: {why}")

    def log(self, trial: TrialRecord, text: str) -> None:
        """Adds a line to a trial's story."""
        trial.add_to_story(self.now, text)

    def distrust(self, trial: TrialRecord, lane_id: int, problem: str) -> None:
        """Has a lane killed that has reported what cannot be of a trial; the report is passed over.

        Args:
            trial: the trial.
            lane_id: the lane.
            problem: what it reported, to be read after "the trial 'a'".
        """
        reason = f"has reported what cannot be: the trial {trial.trial_id!r} {problem}"
        self.commands += self.watching.kill(trial.trial_id, (lane_id,), reason, self.now)

    def error(self, trial: TrialRecord | None, message: str) -> EngineError:
        """Makes an error that tells the trial's story."""
        if trial is None:
            return EngineError(message)
        story = "\n".join(f"  {at:.3f} s  {text}" for at, text in trial.story)
        return EngineError(f"trial {trial.trial_id!r}, {trial.state.value}: {message}\nits story:\n{story}")

    # -- steps ---------------------------------------------------------------------------------------------

    def release(self, trial: TrialRecord) -> None:
        """Takes a trial off its devices and lanes."""
        self.timing.invalidate(trial)
        place = trial.placement
        self.lanes.release(trial.trial_id, place.lanes)
        if place.move is not None:
            self.lanes.release(trial.trial_id, place.move.old_lanes)
        self.allocations.release(trial)
        for left in self.policies.left:
            left(trial)
        self.watching.released(trial)
        self.resizing.pop(trial.row, None)
        self.stepping.discard(trial.row)
        self.clearing.pop(trial.row, None)  # Its deadline, if it has one, finds it gone.
        place.lanes, place.launched = (), False
        place.move = place.preemption = None
        place.stopping_lanes = place.lost_lanes = NO_LANES
        place.asking = NO_REQUESTS
        self.changed = True

    def drain(self, trial: TrialRecord, lane_ids: tuple[int, ...], *, told: bool = False) -> None:
        """Makes a trial leave lanes in which it may run; no other trial runs there until it has left.

        Args:
            trial: a trial that goes on elsewhere, or not at all.
            lane_ids: the lanes.
            told: whether these lanes were told to stop it before.
        """
        if not lane_ids:
            return
        need = self.estimates.need(trial)
        for lane_id in lane_ids:
            self.lanes.drain(lane_id, trial.trial_id, need.peak_bytes if need is not None else 0.0)
            self.watching.draining(trial, lane_id, self.now)
        if not told:
            self.commands.append(StopTrial(trial.trial_id, lane_ids))

    def enqueue(self, trial: TrialRecord, why: str, *, kind: str | None = None) -> None:
        """Queues a trial, which will go on from the state that is left of it; its width is planned at this instant.

        One that is held rests instead.

        Args:
            trial: the trial.
            why: for people.
            kind: the kind of failure that sends it back; ``None`` if none does.
        """
        if trial.residence.lane is None:
            trial.progress.go_back_to(trial.residence.restart_at)
        trial.awaits = next((text for waits_for in self.policies.waits_for if (text := waits_for(trial))), "")
        if trial.held or trial.awaits:
            self.rest(trial, trial.awaits if not trial.held else why, kind=kind)
            return
        self._set_queued(trial, why, kind)
        self.arrivals[trial.row] = trial

    def plan_again(self, trial: TrialRecord) -> None:
        """Gives a queued trial another width and place at this instant, as it is not what it was taken for."""
        if trial.row in self.queue:
            self.unqueue(trial)
            self.arrivals[trial.row] = trial

    def queue_again(self, trial: TrialRecord, why: str) -> None:
        """Queues a preempted trial at the width it has, before trials like it."""
        self._set_queued(trial, why)
        self.scheduling.enqueue(trial, trial.width, again=True)
        self.changed = True

    def rest(self, trial: TrialRecord, why: str, *, kind: str | None = None) -> None:
        """Lets a trial that is held, or has no state to start from yet, wait; it holds nothing any more."""
        if trial.state is not TrialState.PAUSED:
            self.set_state(trial, TrialState.PAUSED, why)
        done, failures = trial.progress.done, trial.limits.failures
        note = NotePaused if trial.held else NoteQueued
        self.commands.append(note(trial.trial_id, at=self.now, iteration=done, why=why, kind=kind, failures=failures))
        self.lanes.check_memory(trial.residence.lane)  # its state may leave now

    def _set_queued(self, trial: TrialRecord, why: str, kind: str | None = None) -> None:
        if trial.state is TrialState.QUEUED:  # a new trial, or one that is sorted in again
            self.log(trial, f"QUEUED: {why}")
        else:
            self.set_state(trial, TrialState.QUEUED, why)
            done, failures = trial.progress.done, trial.limits.failures
            self.commands.append(
                NoteQueued(trial.trial_id, at=self.now, iteration=done, why=why, kind=kind, failures=failures)
            )
        self.lanes.check_memory(trial.residence.lane)  # its state may leave now

    def unqueue(self, trial: TrialRecord) -> None:
        """Takes a queued trial out of the queue; devices that were kept for waiting trials may be free for others."""
        self.arrivals.pop(trial.row, None)
        self.scheduling.withdraw(trial)
        self.changed |= bool(self.scheduling.placing.reserved_devices)

    def limit_of(self, trial: TrialRecord) -> int:
        """Iteration up to which a trial's lanes may be told to run now."""
        steps = self.stepwise or trial.row in self.stepping
        return min(trial.limit, trial.progress.done + 1) if steps else trial.limit

    def top_up(self, trial: TrialRecord) -> None:
        """Tells the lanes of a running trial about iterations that they were not told about yet."""
        progress, limit = trial.progress, self.limit_of(trial)
        if progress.granted >= limit or trial.placement.preemption is not None:
            return
        move = trial.placement.move
        warming = trial.state is TrialState.RESIZING and move is not None and move.stage is Stage.WARMING
        if trial.state is TrialState.RUNNING or warming:
            more = limit - progress.granted
            progress.grant(limit)
            self.commands.append(RunIteration(trial.trial_id, trial.placement.hosts, more))

    def end(self, trial: TrialRecord, state: TrialState, why: str, *, tells: bool = True) -> None:
        """Ends a trial that holds no device any more; its submitter is told, unless only a call had restored it.

        One that is stopped because its submitter found that it has failed is FAILED.

        Args:
            trial: the trial.
            state: how it ends.
            why: for people.
            tells: whether its submitter is told.
        """
        verdict = trial.limits.verdict
        if state is TrialState.STOPPED and verdict is not None:
            state, why, trial.limits = TrialState.FAILED, verdict.message, replace(trial.limits, failure=verdict)
        if trial.state is not TrialState.DONE:
            self.groups[trial.group_id].open -= 1
        self.set_state(trial, state, why)
        known, trial.restored_for_call = trial.restored_for_call, False
        trial.held = ""
        if state is not TrialState.DONE:
            trial.awaits = ""
            self.refuse_calls(trial)
            self.commands += newest_to_keep(trial)
        if tells and (state is not TrialState.DONE or not known):
            self.report_end(trial)

    # -- what submitters are told --------------------------------------------------------------------------

    def report_start(self, trial: TrialRecord) -> None:
        """Tells the submitter that a trial begins to run, unless it was restored only to be called."""
        if not trial.restored_for_call:
            devices = self._devices_of(trial)
            width = self.lanes.width_of(trial, trial.width, fused=not trial.takes_turns)
            self.commands.append(
                ReportStart(trial.trial_id, trial.group_id, at=self.now, width=width, device_ids=devices)
            )

    def note_resize(self, trial: TrialRecord, move: Move, seconds: float) -> None:
        """Tells the journal that a trial runs at another width."""
        self.commands.append(
            NoteResize(
                trial.trial_id,
                at=self.now,
                width=trial.width,
                device_ids=self._devices_of(trial),
                seconds=seconds,
                old_width=move.old_width,
                begun_at=move.begun_at,
                gain=move.gain,
                stall_s=move.stall_s,
                left=move.left,
            )
        )

    def note_placed(self, trial: TrialRecord, devices: tuple[int, ...]) -> None:
        """Tells the journal where a trial is about to run."""
        place = trial.placement
        self.commands.append(
            NotePlaced(
                trial.trial_id,
                at=self.now,
                width=self.lanes.width_of(trial, trial.width, fused=not trial.takes_turns),
                device_ids=devices,
                lane_ids=place.lanes,
                iteration=trial.progress.done,
                resident=trial.residence.lane in place.lanes,
                alpha=self.estimates.of_key(trial).alpha if trial.width < 1.0 else None,
                predicted_s=trial.pace.predicted if trial.pace.seconds is None else None,
                cohort=trial.spec.profile_key if self.estimates.is_cohort(trial.spec.profile_key) else None,
                takes_turns=trial.takes_turns,
            )
        )

    def note(self, trial: TrialRecord, text: str) -> None:
        """Adds a line to a trial's story, and tells it the journal."""
        self.log(trial, text)
        self.tell(trial, text)

    def tell(self, trial: TrialRecord, text: str) -> None:
        """Tells the journal something rare of a trial."""
        self.commands.append(NoteTrial(trial.trial_id, at=self.now, text=text))

    def _devices_of(self, trial: TrialRecord) -> tuple[int, ...]:
        return tuple([device for lane_id in trial.placement.lanes for device in self.lanes[lane_id].device_ids])

    def report_end(self, trial: TrialRecord) -> None:
        """Tells the submitter how a trial ended."""
        state, iteration = trial.state, trial.progress.done
        failure = trial.limits.failure if state in (TrialState.FAILED, TrialState.INFEASIBLE) else None
        self.commands.append(
            ReportEnd(trial.trial_id, trial.group_id, state=state, iteration=iteration, at=self.now, failure=failure)
        )

    def tell_if_set_back(self, trial: TrialRecord, why: str) -> None:
        """Says so if a trial that is done goes on from an earlier state, as its last one was not kept.

        Args:
            trial: the trial.
            why: it goes on.
        """
        residence = trial.residence
        if residence.lane is not None or residence.restart_at >= trial.progress.reported or trial.awaits:
            return  # One that awaits a state has had none: what it has done was another trial's work.
        cannot = ", and it cannot be saved: follow_up_iterations= keeps it in its process"
        report = ReportSetBack(
            trial.trial_id,
            trial.group_id,
            at=self.now,
            lost=trial.progress.reported,
            checkpoint=residence.checkpoint,
            reason=f"{why} after its state was gone{'' if trial.spec.can_save else cannot}",
            cannot_load=False,
        )
        self.commands.append(report)

    def report_call(
        self, trial: TrialRecord, call_id: int, result: bytes | None = None, failure: Failure | None = None
    ) -> None:
        """Tells the submitter the result of a call."""
        self.commands.append(
            ReportCall(trial.trial_id, trial.group_id, call_id=call_id, result=result, failure=failure, at=self.now)
        )

    def refuse_calls(self, trial: TrialRecord) -> None:
        """Answers all calls of a trial that will not run again."""
        if not trial.calls:
            return
        failure, failed = Failure("stopped", "the trial was stopped"), trial.limits.failure
        if trial.state in (TrialState.FAILED, TrialState.INFEASIBLE) and failed is not None:
            how = "failed" if trial.state is TrialState.FAILED else "is infeasible"
            failure = Failure(failed.kind, f"the trial {how}: {failed.message}", failed.traceback)
        for call in trial.calls:
            self.report_call(trial, call.call_id, failure=failure)
        trial.calls = ()


# -- claims --------------------------------------------------------------------------------------
#
# Claims: the ids that requests of one call of the engine claim.


class Claims:
    """The ids that requests of one call of the engine claim, so that no two of them claim the same.

    Attributes:
        fitting: memory needs and constraints that were found to fit on the devices, which the call has not changed yet.
    """

    def __init__(self) -> None:
        self.fitting: set[Hashable] = set()
        #: By the name of the field: trials may be very many.
        self._claimed: dict[str, set[Hashable]] = {}

    def claim(self, field_name: str, value: Hashable, *taken: Container[Hashable]) -> None:
        """Claims an id.

        Raises:
            InvalidFieldError: it is taken, or was claimed before.
        """
        claimed = self._claimed.setdefault(field_name, set())
        if value in claimed or any(value in ids for ids in taken):
            raise InvalidFieldError(field_name, value, "is taken in this session")
        claimed.add(value)
