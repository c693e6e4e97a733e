"""Which trials a session in a shared folder runs: what it asks the log for, and what it gives up for others.

A member asks for a trial once it has a device for it, and a little ahead of that. It asks first for those after which
most follows, as an engine does that has all devices: they end last. What waits for its devices for long, it gives up;
and for a trial that would end later than one of its own, it gives up that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

from fluid.engine.events import (
    OFFERED,
    ResumeRequested,
    TrialOffered,
    TrialSetAside,
)
from fluid.engine.records import TrialRecord
from fluid.engine.tuning import OVERTAKES
from fluid.joint.entries import Begun, Claimed, Founded, Item, Released, Wants
from fluid.joint.state import Fact, JointState, JointTrial
from fluid.policies.engine import EngineState
from fluid.trainables.trainable_code import TrainableCode
from fluid.trialgroup import TrialState

#: Seconds in which a device may be free soon; and how many times what a trial's move takes it waits here before others
#: may run it.
_SOON_S, _PATIENT = 0.5, 4.0
#: States of trials that are about to be over for all members.
_ENDING = (TrialState.STOPPING, *(state for state in TrialState if state.is_over))
#: Seconds for which no trials are taken to be packed after some had waited for that.
_UNPACKED_S = 10.0


class JointSweep(Protocol):
    """A sweep that begins its trials as the log says, in every member alike."""

    def begin(self, config: Any, *, is_own: bool) -> None:
        """Begins the next trial, if there is one: the engine knows it then.

        Args:
            config: its hyperparameters, as the member said that begins it; ``None`` if they follow from the sweep.
            is_own: whether that is this member.
        """
        ...

    def ready(self, most: int) -> int:
        """How many trials can begin now, so many at most; a searcher is asked for what it has not suggested yet."""
        ...

    def begins(self, number: int) -> list[Begun]:
        """What to tell the log of so many trials that are ready and are to begin here."""
        ...

    def founded(self, founded: Founded, *, is_own: bool) -> bool:
        """Takes what all members agree on; returns whether this one does.

        Args:
            founded: what that is.
            is_own: whether this member has said it.
        """
        ...

    def rejoined(self) -> None:
        """This member was taken for dead: what it was about to begin has not begun."""
        ...


class Early(NamedTuple):
    """What the log told of a trial before the program came to it.

    Attributes:
        fact: what it told.
        trial: the trial as it stood then.
    """

    fact: Fact
    trial: JointTrial


@dataclass
class JointGroup:
    """A group of which this member's program has told the session.

    Attributes:
        sweep: begins its trials; ``None`` if the program itself submits them.
        codes: of what its trials run, by what they are for.
        submitted: texts of what trials are that the program has submitted by itself, by id.
        early: what the log told of trials before the program submitted them, by id.
        unfit: a trial of the sweep for which this member has no devices; empty if it has them.
    """

    sweep: JointSweep | None = None
    codes: Mapping[str, TrainableCode] = field(default_factory=dict)
    submitted: dict[str, str] = field(default_factory=dict)
    early: dict[str, list[Early]] = field(default_factory=dict)
    unfit: str = ""


@dataclass
class Standing:
    """How a session stands in a shared folder: what its parts have in common.

    Attributes:
        state: the engine.
        log: what the log tells.
        me: this member's name of now; empty while it has none.
        groups: those of which this member's program has told the session, by name.
        here: the trials that run here: id -> lease.
        coming: those that are to, once their checkpoint is found.
    """

    state: EngineState
    log: JointState = field(default_factory=JointState)
    me: str = ""
    groups: dict[str, JointGroup] = field(default_factory=dict)
    here: dict[str, int] = field(default_factory=dict)
    coming: dict[str, int] = field(default_factory=dict)


class Claims:
    """Asks for trials, and gives trials up. For the session's thread.

    Args:
        at: how the session stands.
        post: has items appended to the log.
        now: tells the time, on the clock of the events.
        handle: gives the engine events, at one instant.
        name_of: the name of a group, by its id.
    """

    def __init__(
        self,
        at: Standing,
        post: Callable[..., None],
        now: Callable[[], float],
        handle: Callable[..., None],
        name_of: Callable[[str], str],
    ) -> None:
        self._at = at
        self._post = post
        self._now = now
        self._handle = handle
        self._name_of = name_of
        #: Known trials that no member has, as keys; and these in the order in which they are asked for, the last first,
        #: ``None`` if that is not known.
        self._free: dict[str, None] = {}
        self._order: list[str] | None = None
        #: Seconds of the longest of them after which further rungs come.
        self._longest_s = math.inf
        #: What was asked for and has not come back: trials by id, and how many are to begin.
        self._claims: set[str] = set()
        self._begins = 0
        #: Trials that are given up for others, as keys; and those of them of which the log knows.
        self._offered: dict[str, bool] = {}
        #: How far trials had come when they were given up last, by id: one that no member has taken stays here.
        self._gave: dict[str, int] = {}
        self._wanted = 0
        #: Since when trials wait here, by id; and when trials are taken for packing again.
        self._queued_at: dict[str, float] = {}
        self._packs_at = -math.inf
        self._is_leaving = False

    def set_free(self, trial_id: str) -> None:
        """No member has a trial."""
        self._free[trial_id], self._order = None, None

    def taken(self, trial_id: str) -> None:
        """A member has a trial."""
        self._free.pop(trial_id, None)

    def extended(self) -> None:
        """A trial is to run further, so that another one may be the first to ask for."""
        self._order = None

    def forget(self, trial_id: str) -> None:
        """A trial is over, or the engine knows it no more."""
        for names in (self._free, self._offered, self._gave, self._queued_at):
            names.pop(trial_id, None)

    def came_back(self, item: Item) -> None:
        """An item that this member has told is in the log."""
        if isinstance(item, Claimed):
            self._claims.discard(item.trial_id)
        elif isinstance(item, Begun) and not item.is_free:
            self._begins -= 1

    def joined(self) -> None:
        """The member takes part by another name: what it had asked for does not come back."""
        self._claims.clear()
        self._begins = self._wanted = 0

    def lost(self) -> None:
        """The member was taken for dead: it has no trial any more."""
        self._offered.clear()

    def leave(self, name: str | None = None) -> None:
        """Asks for nothing any more, or gives up the trials of a sweep, by its name, that is over here."""
        if name is None:
            self._is_leaving = True
            return
        of_group = [one for one in self._free if self._name_of(self._at.state.trials[one].group_id) == name]
        for trial_id in of_group:
            del self._free[trial_id]
        for trial_id in list(self._at.here):
            record = self._at.state.trials[trial_id]
            if self._name_of(record.group_id) == name and record.state not in _ENDING:
                self._set_aside(trial_id)

    def look(self) -> None:
        """Asks for trials if there are devices for them, and gives up such as wait for others' idle devices."""
        if not self._at.me or self._is_leaving or self._at.state.drained:
            return
        idle = sum(not self._at.state.occupancy.is_closed(device) for device in self._at.state.occupancy.idle_since)
        waiting = len(self._at.state.queue) + len(self._at.state.arrivals) + len(self._at.coming)
        waiting += len(self._claims) + self._begins
        free = len(self._free) - len(self._claims)
        present = [member for member in self._at.log.present if member.name != self._at.me]
        others = sum(len(member.joined.devices) for member in present)
        wanted = idle - waiting
        if not any(member.wants for member in present):
            # Trials that wait here start at once, or are packed; the last ones are for who is idle first.
            ahead = self._soon - waiting
            fresh = sum(self._ready(ahead + others - free).values()) if ahead > 0 else 0
            wanted = max(wanted, min(ahead, free + fresh - others))
        if wanted <= 0 and not waiting and free > 0 and present:
            wanted = self._preempt()
        asked = self._ask(wanted) if wanted > 0 else 0
        is_fit = any(not group.unfit for group in self._at.groups.values())
        self._want(idle if waiting + asked == 0 and is_fit else 0)
        self._offer()

    @property
    def _soon(self) -> int:
        """How many trials may start here soon: beside those that run, or as they end."""
        devices, packed = len(self._at.state.devices), self._at.state.estimates.max_packing
        if packed > 1 and self._now() >= self._packs_at:
            return devices * packed
        return sum(self._left_s(record) <= _SOON_S for record in self._running)

    @property
    def _running(self) -> list[TrialRecord]:
        found = (self._at.state.trials.by_row.get(row) for row in self._at.state.occupancy.held)
        return [record for record in found if record is not None]

    def _left_s(self, record: TrialRecord) -> float:
        """Seconds until a trial that runs here has come to its budget, as far as is known."""
        pace_s = record.pace.seconds or self._at.log.pace_s
        return record.progress.left * pace_s if pace_s else math.inf

    def _may_run(self, trial_id: str) -> bool:
        record = self._at.state.trials.get(trial_id)
        if record is None or record.state.ended or self._name_of(record.group_id) not in self._at.groups:
            return False
        return not self._at.state.lacks_devices(trial_id)

    def _ready(self, most: int) -> dict[str, int]:
        """How many trials of each sweep can begin, so many at most."""
        found: dict[str, int] = {}
        for name, group in self._at.groups.items():
            if group.unfit and not self._at.state.lacks_devices(group.unfit):
                group.unfit = ""
            may_begin = name in self._at.log.founded and not group.unfit
            if group.sweep is not None and may_begin and sum(found.values()) < most:
                found[name] = group.sweep.ready(most - sum(found.values()))
        return found

    def _ask(self, wanted: int) -> int:
        """Asks the log for so many trials; returns for how many there are."""
        items: list[Item] = [
            Claimed(self._name_of(self._at.state.trials[trial_id].group_id), trial_id)
            for trial_id in self._chosen(wanted)
        ]
        self._claims.update(item.trial_id for item in items if isinstance(item, Claimed))
        for name, number in self._ready(wanted - len(items)).items():
            sweep = self._at.groups[name].sweep
            begun = [] if sweep is None else sweep.begins(number)
            self._begins += len(begun)
            items += begun
        if items:
            self._post(*items)
        return len(items)

    def _chosen(self, wanted: int) -> list[str]:
        """The trials to ask for; members that ask at once ask for different ones."""
        if self._order is None:
            records = (self._at.state.trials.get(trial_id) for trial_id in self._free)
            led = [record for record in records if record is not None and record.progress.follow_up_iterations]
            self._longest_s = max(map(self._path_s, led), default=math.inf)
            self._order = sorted(self._free, key=self._urgency)
        among = len(self._at.log.present)
        first: list[str] = []
        for trial_id in reversed(self._order):
            if len(first) == wanted * among:
                break
            if trial_id in self._free and trial_id not in self._claims and self._may_run(trial_id):
                first.append(trial_id)
        place = sum(member.number < self._at.log.members[self._at.me].number for member in self._at.log.present)
        mine = first[place::among]
        return [*mine, *(trial_id for trial_id in first if trial_id not in mine)][:wanted]

    def _urgency(self, trial_id: str) -> tuple[bool, float, int]:
        """Those start first after which most follows, later rungs included, and of equal ones the first to begin.

        A rung waits for the last of its trials: they go before those after which none comes, unless these are longer.
        """
        record = self._at.state.trials.get(trial_id)
        if record is None:
            return False, 0.0, 0
        path_s = self._path_s(record)
        leads = record.progress.follow_up_iterations > 0 or path_s > OVERTAKES * self._longest_s
        return leads, path_s, -record.row

    def _path_s(self, record: TrialRecord) -> float:
        """Seconds of what begins with a trial; the pace of what follows in later rungs, of other trials, is a guess."""
        known, progress = self._at.log.trials.get(record.trial_id), record.progress
        done = max(progress.done, 0 if known is None else known.reported)
        mean_s = self._at.log.pace_s or 1.0
        pace_s = record.pace.seconds or (0.0 if known is None else known.pace_s) or mean_s
        return max(0, progress.budget - done) * pace_s + progress.follow_up_iterations * mean_s

    def _preempt(self) -> int:
        """Gives up a trial that runs for one that no member runs, and that ends later; returns how many.

        So no device is left with a long trial at the end, while the others have nothing to run.
        """
        chosen = self._chosen(1)
        running = [record for record in self._running if record.state is TrialState.RUNNING and record.spec.can_save]
        if not chosen or not running or any(not told for told in self._offered.values()):
            return 0
        first = self._at.state.trials[chosen[0]]
        last = min(running, key=lambda record: self._urgency(record.trial_id))
        are_few = len(self._free) <= sum(len(member.joined.devices) for member in self._at.log.present)
        leads = first.progress.follow_up_iterations > 0 and not last.progress.follow_up_iterations
        gain_s = self._path_s(first) - OVERTAKES * self._path_s(last)
        if not (are_few or leads) or gain_s < 2.0 * self._patience_s(last.trial_id):
            return 0
        if not self._may_give(last):
            return 0
        self._set_aside(last.trial_id)
        return 1

    def _want(self, devices: int) -> None:
        if devices != self._wanted:
            self._wanted = devices
            self._post(Wants(devices))

    def _offer(self) -> None:
        """Gives up trials that wait here, or run beside others, where other members have idle devices."""
        wanted = sum(member.wants for member in self._at.log.present if member.name != self._at.me)
        for trial_id, is_told in list(self._offered.items()):
            record = self._at.state.trials.get(trial_id)
            if record is None or trial_id not in self._at.here:
                del self._offered[trial_id]
            elif is_told:
                continue
            elif record.state in (TrialState.PAUSED, TrialState.DONE) and (
                _is_on_disk(record) or not (record.spec.can_save or self._may_run(trial_id))
            ):
                self._offered[trial_id] = True
                self._gave[trial_id] = record.progress.reported
                self._post(Released(trial_id, self._at.here[trial_id]))
            elif (
                not (wanted and record.spec.can_save) and self._may_run(trial_id) and self._is_idle
            ):  # It goes on here.
                del self._offered[trial_id]
                self._handle(ResumeRequested(self._now(), trial_id))
        waiting = self._waiting()
        overdue = sum(waits_s > self._patience_s(trial_id) for trial_id, waits_s in waiting.items())
        if overdue:
            self._packs_at = self._now() + _UNPACKED_S
        wanted -= len(self._offered)
        leaving = sorted(waiting, key=self._urgency)[: max(wanted, overdue)]
        if wanted > len(leaving):
            # Of those that share a device, each is faster by itself.
            running = [record for record in self._running if record.state is TrialState.RUNNING]
            beside = sorted(running, key=self._path_s)[len(self._at.state.devices) :]
            worth = [one for one in beside if self._path_s(one) > 2.0 * self._patience_s(one.trial_id)]
            leaving += [record.trial_id for record in worth[: wanted - len(leaving)]]
        for trial_id in leaving:
            if self._may_give(self._at.state.trials[trial_id]):
                self._set_aside(trial_id)

    def _may_give(self, record: TrialRecord) -> bool:
        """Whether a trial that this member has can be given up: not twice without an iteration in between."""
        is_new = self._gave.get(record.trial_id) != record.progress.reported
        can_move = record.spec.can_save or not (record.progress.reported or record.state.holds_devices)
        return is_new and can_move and record.trial_id in self._at.here and record.trial_id not in self._offered

    def _waiting(self) -> dict[str, float]:
        """For how many seconds trials have waited here that others might run, by id."""
        now, before, self._queued_at = self._now(), self._queued_at, {}
        if not len(self._at.state.queue) or len(self._at.log.present) < 2:
            return {}
        for trial_id in self._at.here:
            if self._at.state.trials[trial_id].state is TrialState.QUEUED and trial_id not in self._offered:
                self._queued_at[trial_id] = before.get(trial_id, now)
        return {trial_id: now - at for trial_id, at in self._queued_at.items()}

    def _patience_s(self, trial_id: str) -> float:
        """Seconds for which a trial waits here before it is for others: some times what its move takes."""
        saves = self._at.state.estimates.of_key(self._at.state.trials[trial_id]).saves
        return max(_SOON_S, _PATIENT * median(saves) if saves else 0.0)

    @property
    def _is_idle(self) -> bool:
        return bool(self._at.state.occupancy.idle_since) and not len(self._at.state.queue)

    def _set_aside(self, trial_id: str) -> None:
        """Has a trial leave its devices, and be saved, for another member."""
        self._offered[trial_id] = False
        if self._at.state.trials[trial_id].state is not TrialState.DONE:
            self._handle(TrialSetAside(self._now(), trial_id, OFFERED))
        self._handle(TrialOffered(self._now(), trial_id))


def _is_on_disk(record: TrialRecord) -> bool:
    residence = record.residence
    if residence.lane is not None or residence.saving:
        return False
    durable = 0 if residence.durable is None else residence.durable.iteration
    return residence.checkpoint is None or durable >= residence.checkpoint.iteration
