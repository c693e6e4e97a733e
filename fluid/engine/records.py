"""Records of trials: plain data that the state machine changes."""

from __future__ import annotations

import functools
import math
from collections import Counter, OrderedDict
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from fluid.devices.constraints import Constraint
from fluid.devices.memory import TURNS
from fluid.engine import tuning
from fluid.engine.events import (
    PLAIN_TERMS,
    Checkpoint,
    Failure,
    GroupTerms,
    TrialSpec,
)
from fluid.few_items import FewItems
from fluid.resources import MemoryNeed
from fluid.trialgroup import TrialState

# -- pace ----------------------------------------------------------------------------------------
#
# How fast a trial is, as far as it was observed, and what was predicted of it before.


@dataclass(slots=True)
class Pace:
    """How fast a trial is.

    Attributes:
        seconds: per iteration at width 1 and speed 1, as last observed; ``None`` before the first.
        solo: seconds per iteration alone on one device of speed 1, as last observed; ``None`` if it never was alone.
        own: seconds per iteration at width 1 and speed 1, as its iterations at packings and widths tell that had been
            measured before; ``None`` if there were none.
        observed: number of iterations that ``seconds`` follows from.
        need: the most device memory that the trial was seen to need; ``None`` if none was measured.
        predicted: seconds per iteration at width 1 and speed 1, as other trials' configs tell it
            (:mod:`fluid.measure.cohorts.tree`); ``None`` if nothing is known.
        predicted_sigma: standard deviation of the logarithm of the true seconds over these.
        predicted_need: memory to reserve, in the same way; ``None`` if nothing is known.
        model: the device model on which they were observed.
    """

    seconds: float | None = None
    solo: float | None = None
    own: float | None = None
    observed: int = 0
    need: MemoryNeed | None = None
    predicted: float | None = None
    predicted_sigma: float = 0.0
    predicted_need: MemoryNeed | None = None
    model: str | None = None

    def observe(self, seconds: float, model: str | None, count: int = 1) -> None:
        """Adds an iteration, or so many, in seconds at width 1 and speed 1, on a device of that model."""
        self.seconds, self.model = smooth(self.seconds, seconds, count), model
        self.observed += count

    @property
    def expected(self) -> float | None:
        """Seconds per iteration at width 1 and speed 1: as observed, else as predicted; ``None`` for neither."""
        return self.seconds if self.seconds is not None else self.predicted

    @property
    def expected_need(self) -> MemoryNeed | None:
        """The memory to reserve: as predicted, or more where it was seen to need more; ``None`` if not predicted."""
        predicted, seen = self.predicted_need, self.need
        return predicted if predicted is None or seen is None else MemoryNeed.most(predicted, seen)

    def grow_need(self, seen: MemoryNeed) -> bool:
        """Raises each part of the need to what was seen; returns whether that is more than before."""
        if self.need is not None and self.need.covers(seen):
            return False
        self.need = MemoryNeed.most(*filter(None, (self.need, seen)))
        return True

    def predict(self, seconds: float | None, sigma: float, need: MemoryNeed | None) -> None:
        """Sets what is predicted of the trial."""
        self.predicted, self.predicted_sigma, self.predicted_need = seconds, sigma, need

    def rescale(self, factor: float) -> None:
        """Changes the paces as the measured speed of the device model has changed, by that factor."""
        self.seconds = None if self.seconds is None else self.seconds * factor
        self.solo = None if self.solo is None else self.solo * factor
        self.own = None if self.own is None else self.own * factor


def smooth(before: float | None, latest: float, count: int = 1) -> float:
    """The exponentially weighted mean of what was observed before and the latest observation, or so many alike."""
    if before is None:
        return latest
    kept: float = (1.0 - tuning.PACE_SMOOTHING) ** count
    return kept * before + (1.0 - kept) * latest


# -- records -------------------------------------------------------------------------------------


#: Transitions of a trial that are kept for error messages.
STORY_LENGTH = 20
NO_LANES: frozenset[int] = frozenset()
NO_REQUESTS: frozenset[tuple[int, int]] = frozenset()


class Stage(Enum):
    """How far a resize has come."""

    #: The new lanes are not ready yet; the trial runs on where it is.
    WARMING = "WARMING"
    #: The trial's lanes were told to pause it and have not answered.
    PAUSING = "PAUSING"
    #: The trial was told to move and has not arrived.
    MOVING = "MOVING"


@dataclass(slots=True)
class Move:
    """A resize under way.

    Attributes:
        old_lanes, old_devices: the lanes that the trial comes from, rank 0 first, and their devices.
        old_width: the width it had there.
        old_devices_row: row under which occupancy holds the devices that the trial leaves until it has arrived.
        old_need: the device memory with which it was placed there.
        stage: how far the resize has come.
        called_off: whether the trial stays where it is once its lanes have answered the Pause in flight.
        after_loss: whether the trial lost a lane and goes on in the ones that are left.
        begun_at: when the engine decided on it, seconds.
        gain: predicted seconds by which the trial ends earlier; ``None`` after a loss.
        stall_s: predicted seconds that this trial and those beside it stand still for it; ``None`` after a loss.
        left: iterations left to run after the one in flight when it was decided on; ``None`` after a loss.
    """

    old_lanes: tuple[int, ...]
    old_devices: tuple[int, ...]
    old_width: float
    old_devices_row: int
    old_need: MemoryNeed | None = None
    stage: Stage = Stage.WARMING
    called_off: bool = False
    after_loss: bool = False
    begun_at: float = 0.0
    gain: float | None = None
    stall_s: float | None = None
    left: int | None = None


@dataclass(slots=True)
class PendingPreemption:
    """A running trial was told to pause for others, and has not answered.

    Attributes:
        successor: row of the trial that takes its device over; ``None`` if the trials beside it keep the device.
        urgent_group: group of that trial, if it is urgent: several trials may be paused for it.
    """

    successor: int | None = None
    urgent_group: str | None = None

    @property
    def why(self) -> str:
        """Why the trial waits again then, for people."""
        return "waits to go on" if self.urgent_group is None else f"made room for urgent group {self.urgent_group!r}"


@dataclass(slots=True)
class PendingCall:
    """A call of a trial's method that has not been answered.

    Attributes:
        after: iterations that had been reported when the call was requested; they must be done before it is made.
        before: the trial's budget at that time; iterations added later run after the call.
        lane_id: lane that was told to make the call; ``None`` while the call waits.
        losses: lanes that died and may have died of this call.
    """

    call_id: int
    method: str
    payload: bytes
    after: int
    before: int
    lane_id: int | None = None
    losses: int = 0


@dataclass(slots=True)
class Progress:
    """How far a trial has come, in iterations.

    Attributes:
        budget: iterations that the trial may run in all.
        follow_up_iterations: iterations that later rungs may add after the budget, to this trial or to others.
        done: iterations done, by the state that the trial would go on from.
        reported: greatest iteration reported; a trial that is set back repeats some without a report.
        granted: iteration up to which the trial's lanes were told to run.
        finished_early: whether the trial said that it has no more to do.
        starts_at: iterations done by the state of another trial from which it starts; 0 if it begins afresh, or that is
            not known yet.
    """

    budget: int
    follow_up_iterations: int = 0
    done: int = 0
    reported: int = 0
    granted: int = 0
    finished_early: bool = False
    starts_at: int = 0

    @property
    def left(self) -> int:
        """Iterations of the budget that are to be done, and not by a trial from whose state this one starts."""
        return max(0, self.budget - max(self.done, self.starts_at))

    def count(self, iteration: int) -> None:
        """Counts an iteration that a lane reports as done."""
        self.done = iteration
        if iteration > self.granted:
            self.granted = iteration  # a lane that is gone may have been told to run further

    def go_back_to(self, iteration: int) -> None:
        """Sets the trial back to a state it was in."""
        self.done = iteration

    def restart(self, iteration: int) -> None:
        """Sets the trial back to the state that a lane restored, from which it runs as many iterations as granted."""
        self.granted -= self.done - iteration
        self.done = iteration

    def grant(self, limit: int) -> int:
        """Records that lanes are told to run the trial up to an iteration; returns how many iterations those are."""
        self.granted = limit
        return limit - self.done

    def finish_early(self) -> None:
        """Ends the budget with the last iteration done, as the trial has no more to do."""
        self.finished_early, self.budget = True, self.done


@dataclass(frozen=True, slots=True)
class Residence:
    """Where a trial's state is while the trial does not run, and where it was saved.

    It is replaced, never changed: trials whose state is nowhere have one between them.

    Attributes:
        lane, device: lane that keeps the state, and its device; ``None`` if none does.
        held_bytes: device memory that its lane last measured it to take; ``None`` if that has measured nothing.
        saving: whether that lane was told to save the state and drop it, and has not answered.
        checkpoint: the newest one.
        durable: the newest one that outlives its host's memory.
        checkpoint_is_current: whether the newest one holds the trial's present state: no iteration was done, and no
            call answered, since.
        kept_at: iteration of the newest one that outlives the run; 0 for none.
        keeping: iteration of the one that a lane was told to save so, and has not; 0 for none.
    """

    lane: int | None = None
    device: int | None = None
    held_bytes: float | None = None
    saving: bool = False
    checkpoint: Checkpoint | None = None
    durable: Checkpoint | None = None
    checkpoint_is_current: bool = False
    kept_at: int = 0
    keeping: int = 0

    @property
    def restart_at(self) -> int:
        """Iterations done by the state that a trial would go on from if its lanes were gone."""
        return self.checkpoint.iteration if self.checkpoint is not None else 0

    def without_lane(self) -> Residence:
        """The same, with no lane that keeps the state."""
        return replace(self, lane=None, device=None, saving=False)

    def without_newest(self) -> Residence:
        """The same, with the newest durable checkpoint as the newest one."""
        return replace(self, checkpoint=self.durable, checkpoint_is_current=False)


@dataclass(slots=True)
class TrialPlacement:
    """Where a trial runs.

    Attributes:
        lanes, launched: lanes that the trial runs on or is to run on, rank 0 first, empty unless it holds devices; and
            whether they were told to.
        move: the resize under way; ``None`` unless there is one.
        preemption: set while the trial's lane was told to pause it for others; ``None`` otherwise.
        stopping_lanes: lanes that were told to stop the trial and have not answered; empty unless it is STOPPING.
        lost_lanes: lanes that the trial lost and went on without; what they had reported may still arrive.
        since: when its lanes were told what they do now, or gave their latest sign of progress, seconds.
        iterates, dumped: whether that is an iteration, no set-up or resize; whether its stacks were dumped since.
        asking: (lane, number) of its requests to the submitter that were not answered.
        disturbed: whether co-residency changed since the iteration in flight began, so that its seconds say nothing.
        settled: whether the trial has finished an iteration on its devices; before, it starts, loads data or compiles.
        placed_at: when the trial was placed in a lane that no trial had used, or that lane was launched, seconds;
            ``None`` otherwise, and once it has settled there.
        is_first: whether no trial of its key had started when it was placed: what they import is loaded for later ones.
        settled_after: seconds from then to the end of its first iteration; ``None`` otherwise, and from the second on.
    """

    lanes: tuple[int, ...] = ()
    launched: bool = False
    move: Move | None = None
    preemption: PendingPreemption | None = None
    stopping_lanes: frozenset[int] = NO_LANES
    lost_lanes: frozenset[int] = NO_LANES
    since: float = 0.0
    iterates: bool = False
    dumped: bool = False
    asking: frozenset[tuple[int, int]] = NO_REQUESTS
    disturbed: bool = True
    settled: bool = False
    placed_at: float | None = None
    is_first: bool = False
    settled_after: float | None = None

    @property
    def hosts(self) -> tuple[int, ...]:
        """The lanes that were told about the trial and may run it now."""
        if not self.launched:
            return ()
        if self.move is None:
            return self.lanes
        if self.move.stage is Stage.MOVING:
            return tuple(dict.fromkeys((*self.lanes, *self.move.old_lanes)))
        return self.move.old_lanes

    @property
    def stays_in(self) -> tuple[int, ...]:
        """The hosts that the trial does not leave as part of its move."""
        return self.lanes if self.move is not None and self.move.stage is Stage.MOVING else self.hosts


@dataclass(frozen=True, slots=True)
class Limits:
    """What went wrong with a trial, and what it is given no more of since.

    They are replaced, never changed: trials with which nothing went wrong have one between them.

    Attributes:
        failures, timeouts: times it failed and was queued again; times its lanes were killed as it gave no result.
        failure, verdict: the last failure; the one that the submitter stops it for, ``None`` if there is none.
        width_cap: most devices, since the trial could not be set up on further ones; ``None`` for no cap.
        packing_cap: most trials on its device, itself included, since it ran out of memory or killed its lane, if any.
        cannot_load: whether the trial's own code could load none of its checkpoints, so that it is moved no more.
        avoids: a device that it is not placed on, unless it fits nowhere else; ``None`` for none.
    """

    failures: int = 0
    timeouts: int = 0
    failure: Failure | None = None
    verdict: Failure | None = None
    width_cap: int | None = None
    packing_cap: int | None = None
    cannot_load: bool = False
    avoids: int | None = None


#: Those of most trials.
NOWHERE, NO_LIMITS = Residence(), Limits()


class EndedTrial(NamedTuple):
    """What displays and forecasts know of a trial that has ended: those of which it is equal are alike to them.

    Attributes:
        state: how it ended.
        outcome: what the submitter says came of it; ``None`` if it did not say.
        done, budget: iterations done, and allowed in all.
        submitted: the budget with which it was submitted.
        follow_up_iterations: iterations that later rungs may add after the budget.
    """

    state: TrialState
    outcome: TrialState | None
    done: int
    budget: int
    submitted: int
    follow_up_iterations: int

    @classmethod
    def of(cls, trial: TrialRecord) -> EndedTrial:
        """What is known of a trial."""
        progress = trial.progress
        left = progress.follow_up_iterations
        return cls(trial.state, trial.outcome, progress.done, progress.budget, trial.spec.budget, left)

    @property
    def comes_back(self) -> bool:
        """Whether it goes on as another trial."""
        return self.outcome is TrialState.PAUSED


@dataclass(slots=True, eq=False)
class TrialRecord:
    """One trial.

    Attributes:
        row: the number by which placement and planners know the trial.
        progress: iterations; ``done`` and ``granted`` are written by its methods alone.
        width: width given or to be given, written by :mod:`fluid.engine.placing.allocations` and as it is planned.
        line: number of the line of queued trials in which the journal last said that it waits.
        placement: its lanes; made when first asked for, as most trials wait, or have ended.
        residence: the trial's state while it does not run, written by :mod:`fluid.engine.trials.residency`; an
            iteration or an answered call makes its checkpoint outdated.
        limits: written when something fails.
        pace: written when iterations are observed; ``state`` by :meth:`SessionState.set_state` alone.
        calls: calls of its methods, in the order requested; those that a lane was told to make come first.
        restored_for_call: whether the trial was done, and goes on only because a call needs its state.
        held: why it does not run until it is resumed: the user paused it, or it is set aside; empty if it may run.
        awaits: why it does not run until the state from which it starts is there; empty if it waits for none.
        outcome: the outcome that the submitter gave the trial when it stopped it; ``None`` if none.
        counted: as what its group counts it; ``None`` while it has not ended.
        story: the latest transitions, for error messages; of a trial that has ended the last one,
            as long as its state is kept.
        constraint: what the trial asks of its devices; ``None`` if nothing.
        sharing_group: the trials with which it shares a lane and devices; ``None`` if it has a lane of its own.
        owner: number of its group's owner.
        group_priority: its group's priority.
        job: number of its job (:class:`fluid.policies.owners.owners.JobTerms`).
    """

    spec: TrialSpec
    row: int
    group_id: str
    progress: Progress
    state: TrialState = TrialState.QUEUED
    width: float = 1.0
    line: int | None = None
    placement: TrialPlacement = field(init=False)
    residence: Residence = NOWHERE
    limits: Limits = NO_LIMITS
    pace: Pace = field(default_factory=Pace)
    calls: tuple[PendingCall, ...] = ()
    restored_for_call: bool = False
    held: str = ""
    awaits: str = ""
    outcome: TrialState | None = None
    counted: EndedTrial | None = None
    story: tuple[tuple[float, str], ...] = ()
    constraint: Constraint | None = field(init=False)
    sharing_group: str | None = None
    owner: int = 0
    group_priority: float = 1.0
    job: int = 0

    def __post_init__(self) -> None:
        self.constraint = self.spec.constraint()

    @property
    def trial_id(self) -> str:
        """The trial's id."""
        return self.spec.trial_id

    @property
    def starts_cold(self) -> bool:
        """Whether it has not settled in a lane that loads everything for it, as later trials' lanes need not.

        Where each trial has a lane of its own, all but the first ones of their key start alike.
        """
        return self.placement.placed_at is not None and (self.placement.is_first or not self.spec.isolated)

    @property
    def takes_turns(self) -> bool:
        """Whether it takes turns with others of its lane."""
        return self.sharing_group == TURNS

    @property
    def is_fused(self) -> bool:
        """Whether it shares its lane with trials that are fused with it."""
        return self.sharing_group is not None and not self.takes_turns

    def add_to_story(self, at: float, text: str) -> None:
        """Adds what happened at a time, seconds; the oldest of many entries are dropped."""
        self.story = (*self.story[1 - STORY_LENGTH :], (at, text)) if self.story else _begun(at, text)

    def add_failure(self, failure: Failure) -> None:
        """Counts a failure after which the trial may be tried again."""
        self.limits = replace(self.limits, failures=self.limits.failures + 1, failure=failure)

    def outdate_checkpoint(self) -> None:
        """Takes it that the newest checkpoint does not hold the trial's present state any more."""
        if self.residence.checkpoint_is_current:
            self.residence = replace(self.residence, checkpoint_is_current=False)

    def shrink(self) -> None:
        """Drops what is not needed of a trial that has ended. A session has many of those."""
        self.line, self.story = None, self.story[-1:]
        if self.residence == NOWHERE:
            self.residence, self.story, self.width = NOWHERE, (), 1.0  # Its width is planned anew if it goes on.
        place = self.placement
        goes_on_warm = place.settled_after is not None and self.residence is not NOWHERE
        if not place.lanes and not place.lost_lanes and not place.asking and not goes_on_warm:
            del self.placement

    def __getattr__(self, name: str) -> Any:
        """Makes the placement, where there is none; not called for what there is."""
        if name != "placement":
            raise AttributeError(name)
        self.placement = TrialPlacement()
        return self.placement

    @property
    def priority(self) -> tuple[float, float]:
        """Its group's priority, then its own: a greater one starts first."""
        return self.group_priority, self.spec.priority

    @property
    def limit(self) -> int:
        """Iteration up to which the trial's lanes may be told to run: a call that waits comes first."""
        progress = self.progress
        for call in self.calls:
            if call.lane_id is None:
                return max(progress.done, min(progress.budget, call.before))
        return max(progress.done, progress.budget)  # A fork may start from a state that is beyond its budget.

    @property
    def is_held(self) -> bool:
        """Whether it waits for no device, and for no other trial either: until the user resumes it, or a session."""
        return self.state is TrialState.PAUSED and not (self.awaits and not self.held)

    @property
    def max_width(self) -> int:
        """Most devices that the trial can use."""
        cap = self.limits.width_cap
        return self.spec.max_width if cap is None else min(self.spec.max_width, cap)

    @property
    def fixed_width(self) -> int | None:
        """The number of devices that the trial asks for; ``None`` where the planner decides."""
        return None if self.constraint is None else self.constraint.width

    @property
    def packing_cap(self) -> int | None:
        """Most trials on the trial's device, itself included; ``None`` for no cap of its own."""
        cap = self.limits.packing_cap
        asked = None if self.constraint is None else self.constraint.most_residents
        return cap if asked is None else asked if cap is None else min(cap, asked)

    @property
    def rests(self) -> bool:
        """Whether the trial does not go on by itself: it is done, or the user paused it."""
        return self.state is TrialState.DONE or self.state is TrialState.PAUSED

    @property
    def pinned(self) -> bool:
        """Whether the trial can go on only in the lane that keeps its state."""
        return self.residence.lane is not None and not self.spec.can_save


@lru_cache(1)
def _begun(at: float, text: str) -> tuple[tuple[float, str], ...]:
    """The story of a trial of which this is known; one for all that are submitted together."""
    return ((at, text),)


# -- lane record ---------------------------------------------------------------------------------
#
# The record of a lane: plain data that the state machine changes, and what a lane reports of itself.


@dataclass(frozen=True, slots=True)
class Killing:
    """A lane ends soon: the engine has told the backend to kill it, or a trial has left its device unusable to it.

    Attributes:
        trial_id: the trial because of which.
        failure: what that trial is to blame for; ``None`` if it is stopped.
    """

    trial_id: str
    failure: Failure | None = None


@dataclass(slots=True)
class LaneRecord:
    """One lane.

    Attributes:
        device_id: its device; the first one of a gang's lane.
        others: further devices of a gang's lane, of the same host.
        ready: whether the lane has reported that it is warm.
        used: whether a trial's code may have run in it.
        shared: whether trials that may share a process are to run in it; ``False`` for one that is used by a trial that
            is to have a process of its own.
        spent: whether a trial has changed its process for good, so that no other one is to run there.
        holders: the trials that hold the lane, in order of arrival: one, or several that are fused or take turns; empty
            while it is idle.
        sharing_group: the group of trials that others may join here; ``None`` where it has at most one holder.
        rows: how many of its trials it was told to train in one step; ``None`` if nothing.
        step_at: when fused trials last reported a step, seconds.
        since: when a trial that may share it gave its latest sign of progress there, seconds: maybe one that has left.
        failed: trials that have raised there, one after another, since one last reported an iteration.
        trained_key: the profile key of the trial that last reported an iteration; ``None`` before the first.
        draining: trials that were told to leave and may still run here; no other trial is set up here until they have.
        dismissed: trials whose state the lane was told to drop, and has not reported to have dropped.
        residents: trials whose state the lane keeps though they do not run, least recently used first.
        reserved: bytes of device memory by trial, for residents and for trials about to leave.
        own_bytes: device memory that the lane takes for itself, such as for a CUDA context; what other lanes take where
            it was not measured.
        is_measured: whether that was measured.
        killing: set once the lane is known to end soon; ``None`` otherwise.
    """

    lane_id: int
    device_id: int
    others: tuple[int, ...] = ()
    ready: bool = False
    used: bool = False
    shared: bool = False
    spent: bool = False
    holders: dict[str, None] = field(default_factory=dict)
    sharing_group: str | None = None
    rows: int | None = None
    step_at: float = -math.inf
    since: float = -math.inf
    failed: int = 0
    trained_key: str | None = None
    draining: set[str] = field(default_factory=set)
    dismissed: set[str] = field(default_factory=set)
    residents: OrderedDict[str, None] = field(default_factory=OrderedDict)
    reserved: dict[str, float] = field(default_factory=dict)
    own_bytes: float = 0.0
    is_measured: bool = False
    killing: Killing | None = None

    @property
    def device_ids(self) -> tuple[int, ...]:
        """All its devices."""
        return (self.device_id, *self.others)

    @property
    def usable(self) -> bool:
        """Whether the trials that hold the lane can be told to run."""
        return self.ready and not self.draining and self.killing is None

    @property
    def is_unused(self) -> bool:
        """Whether any trial can have it: none has run there, and none holds it."""
        return not (self.used or self.holders or self.others or self.spent or self.killing is not None)

    @property
    def is_over(self) -> bool:
        """Whether no trial is to run in it any more, and it holds nothing."""
        return (self.spent or (self.used and not self.shared)) and self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether the lane holds nothing that would be lost with it, and cleans up after no trial."""
        return not (self.holders or self.draining or self.dismissed or self.residents or self.reserved)


# -- group record --------------------------------------------------------------------------------
#
# The record of a TrialGroup: its trials, those that go on one by one, and those that have ended in numbers.
#
# Looks at a session, of which there are several a second, cost what goes on, and not what has ended.


#: Of most groups no trial is ever forgotten, and none goes on; these are never changed.
_NO_PAST: Counter[Any] = Counter()
_NOTHING: dict[Any, Any] = {}


@functools.lru_cache(1024)
def _one_of(alike: EndedTrial) -> EndedTrial:
    """One object for all that are alike."""
    return alike


@functools.lru_cache(1024)
def _once(alike: EndedTrial) -> dict[EndedTrial, int]:
    """The numbers of the ended trials of a group that has one such trial; one dict for all, which is never changed."""
    return {alike: 1}


@dataclass(slots=True)
class GroupRecord:
    """One TrialGroup.

    Attributes:
        terms: what is known of it beyond its trials.
        owner: number of its owner.
        trial_ids, open: its trials in order of arrival, as keys, and how many have not ended.
        live: those whose state is none that ends a trial, by id: one that has ended may be restored to be called.
        ended: the number of the others by what is known of them; shared with other groups where that is one at most.
        changes: counts how often a trial has come to be live, to have ended, or to be forgotten.
        past: number of trials that were forgotten, by outcome.
        past_iterations: iterations done by those; ``past_lengths`` counts them by these, but for paused ones.
    """

    group_id: str
    terms: GroupTerms = PLAIN_TERMS
    owner: int = 0
    trial_ids: FewItems[str, None] = field(default_factory=FewItems)
    open: int = 0
    live: dict[str, TrialRecord] = field(default_factory=lambda: _NOTHING, repr=False)
    ended: dict[EndedTrial, int] = field(default_factory=lambda: _NOTHING)
    changes: int = 0
    past: Counter[str] = field(default_factory=lambda: _NO_PAST)
    past_iterations: int = 0
    past_lengths: Counter[int] = field(default_factory=lambda: _NO_PAST)

    @property
    def known(self) -> int:
        """The number of its trials so far; one that goes on as another counts once."""
        return len(self.live) + sum(n for each, n in self.ended.items() if not each.comes_back) + self.past.total()

    def count(self, trial: TrialRecord) -> None:
        """Counts one of its trials as it stands now: live, or as what it has ended."""
        self._discount(trial)
        if trial.state.ended:
            trial.counted = _one_of(EndedTrial.of(trial))
            self._count_ended(trial.counted, 1)
        else:
            self.live = self.live or {}
            self.live[trial.trial_id] = trial

    def drop(self, trial: TrialRecord) -> None:
        """Drops one of its trials, as another record takes its place."""
        self._discount(trial)
        del self.trial_ids[trial.trial_id]
        self.open -= not trial.state.ended

    def forget(self, trial: TrialRecord) -> None:
        """Drops one of its trials; what it did still counts."""
        self._discount(trial)
        del self.trial_ids[trial.trial_id]
        found = EndedTrial.of(trial)
        self.past_iterations += found.done
        if not found.comes_back:  # Else it is counted when it has.
            if self.past is _NO_PAST:
                self.past, self.past_lengths = Counter(), Counter()
            self.past[(found.outcome or found.state).value] += 1
            self.past_lengths[found.done] += 1

    def _discount(self, trial: TrialRecord) -> None:
        self.changes += 1
        if self.live.pop(trial.trial_id, None) is not None and not self.live:
            self.live = _NOTHING  # An empty dict keeps the room that its members took.
        before, trial.counted = trial.counted, None
        if before is not None:
            self._count_ended(before, -1)

    def _count_ended(self, alike: EndedTrial, number: int) -> None:
        ended = self.ended.copy() if self._has_one_end else self.ended
        ended[alike] = ended.get(alike, 0) + number
        if not ended[alike]:
            del ended[alike]
        self.ended = ended
        if self._has_one_end:
            self.ended = _once(*ended) if ended else _NOTHING

    @property
    def _has_one_end(self) -> bool:
        return not self.ended or (len(self.ended) == 1 and 1 in self.ended.values())


# -- trials --------------------------------------------------------------------------------------
#
# The trials of a session: one record each, found by id, or by row, the number that placement and planners use.


class Trials:
    """The records of a session's trials by id, in order of arrival. Reads like a mapping.

    Attributes:
        by_row: the same records by row; :meth:`add` and :meth:`remove` keep both.
        constrained: whether any trial so far asked for certain devices.
        touched: ids of those whose state has changed in this call of the engine.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, TrialRecord] = {}
        self.by_row: dict[int, TrialRecord] = {}
        self.constrained = False
        self.touched: set[str] = set()
        self._rows = 0

    def __getitem__(self, trial_id: str) -> TrialRecord:
        return self._by_id[trial_id]

    def get(self, trial_id: str) -> TrialRecord | None:
        """The record of a trial; ``None`` if there is none."""
        return self._by_id.get(trial_id)

    def __contains__(self, trial_id: object) -> bool:
        return trial_id in self._by_id

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def keys(self) -> KeysView[str]:
        """The ids."""
        return self._by_id.keys()

    def items(self) -> ItemsView[str, TrialRecord]:
        """The ids and records."""
        return self._by_id.items()

    def values(self) -> ValuesView[TrialRecord]:
        """The records."""
        return self._by_id.values()

    def shrink_ended(self) -> None:
        """Drops, as a call of the engine ends, what is not needed of the trials that have ended in it."""
        for trial_id in self.touched:
            trial = self._by_id.get(trial_id)
            if trial is not None and trial.state.ended:
                trial.shrink()
        self.touched.clear()

    def new_row(self) -> int:
        """A row that was never used."""
        self._rows += 1
        return self._rows

    def add(self, trial: TrialRecord) -> None:
        """Adds a trial whose id and row are new."""
        self._by_id[trial.trial_id] = self.by_row[trial.row] = trial
        if trial.constraint is not None:
            self.constrained = True

    def remove(self, trial: TrialRecord) -> None:
        """Removes a trial; its row is not used again."""
        del self._by_id[trial.trial_id], self.by_row[trial.row]


# -- transitions ---------------------------------------------------------------------------------
#
# A trial's states: which may follow which, and the state diagram drawn from that table.
#
# :meth:`fluid.engine.core.SessionState.set_state` is the one place where a trial changes its state, and it checks this
# table. docs/architecture.md shows the diagram that :func:`state_diagram` draws.


class Transition(NamedTuple):
    """One legal change of state, and when it happens."""

    before: TrialState
    after: TrialState
    reason: str


TRANSITIONS = (
    Transition(TrialState.QUEUED, TrialState.STARTING, "placed on devices"),
    Transition(TrialState.QUEUED, TrialState.PAUSED, "paused while it waited, or waits for its start state"),
    Transition(TrialState.QUEUED, TrialState.STOPPED, "stopped while it waited"),
    Transition(TrialState.QUEUED, TrialState.FAILED, "fits on no device, or no lane can be started"),
    Transition(TrialState.STARTING, TrialState.RUNNING, "set up, restored or resumed"),
    Transition(TrialState.STARTING, TrialState.PAUSED, "paused before it ran"),
    Transition(TrialState.STARTING, TrialState.QUEUED, "failed, or lost a lane or its state, tried again"),
    Transition(TrialState.STARTING, TrialState.STOPPING, "stopped after its lanes were told to start it"),
    Transition(TrialState.STARTING, TrialState.STOPPED, "stopped before its lanes were told to start it"),
    Transition(TrialState.STARTING, TrialState.FAILED, "failed too often"),
    Transition(TrialState.STARTING, TrialState.INFEASIBLE, "raised Infeasible as it was set up"),
    Transition(TrialState.RUNNING, TrialState.RESIZING, "new width planned, or a lane lost"),
    Transition(TrialState.RUNNING, TrialState.PAUSED, "preempted, or paused"),
    Transition(TrialState.RUNNING, TrialState.QUEUED, "failed or lost its lane, goes on from its checkpoint"),
    Transition(TrialState.RUNNING, TrialState.STOPPING, "stop requested"),
    Transition(TrialState.RUNNING, TrialState.DONE, "budget used up"),
    Transition(TrialState.RUNNING, TrialState.FAILED, "failed too often"),
    Transition(TrialState.RUNNING, TrialState.INFEASIBLE, "raised Infeasible"),
    Transition(TrialState.RESIZING, TrialState.RUNNING, "resized, or the resize was called off"),
    Transition(TrialState.RESIZING, TrialState.PAUSED, "failed or lost its lanes after the user had paused it"),
    Transition(TrialState.RESIZING, TrialState.QUEUED, "failed or lost its lanes, goes on from its checkpoint"),
    Transition(TrialState.RESIZING, TrialState.STOPPING, "stop requested"),
    Transition(TrialState.RESIZING, TrialState.FAILED, "failed too often"),
    Transition(TrialState.RESIZING, TrialState.INFEASIBLE, "raised Infeasible"),
    Transition(TrialState.PAUSED, TrialState.QUEUED, "goes on from the state it kept, resumed, or has its start state"),
    Transition(TrialState.PAUSED, TrialState.STOPPED, "stopped while the user had it paused"),
    Transition(
        TrialState.PAUSED, TrialState.FAILED, "its state could not be saved, or is gone, or it failed elsewhere"
    ),
    Transition(TrialState.PAUSED, TrialState.INFEASIBLE, "raised Infeasible elsewhere"),
    Transition(TrialState.PAUSED, TrialState.DONE, "another driver, or a shared run, has used its budget up"),
    Transition(TrialState.STOPPING, TrialState.STOPPED, "left its last lane"),
    Transition(TrialState.STOPPING, TrialState.FAILED, "left its last lane, and has failed as its submitter judges"),
    Transition(TrialState.DONE, TrialState.QUEUED, "extended, or a call needs its state"),
    Transition(TrialState.DONE, TrialState.PAUSED, "extended, for another driver or a shared run to run"),
    Transition(TrialState.DONE, TrialState.STOPPED, "stopped after it was done"),
    Transition(TrialState.DONE, TrialState.FAILED, "has failed as its submitter judges"),
)

#: (before, after) of every legal change of state.
LEGAL = frozenset((transition.before, transition.after) for transition in TRANSITIONS)


def state_diagram() -> str:
    """Draws the table as a Mermaid state diagram.

    Example:
        >>> print(state_diagram().splitlines()[1].strip())
        [*] --> QUEUED: submitted
    """
    lines = ["stateDiagram-v2", f"    [*] --> {TrialState.QUEUED.value}: submitted"]
    lines += [f"    {before.value} --> {after.value}: {reason}" for before, after, reason in TRANSITIONS]
    lines += [f"    {state.value} --> [*]" for state in TrialState if state.ended]
    return "\n".join(lines) + "\n"
