"""A session that works a sweep together with other drivers, through a shared folder (docs/shared_folder.md).

The engine runs the trials that this driver has, and knows the others as held (:mod:`fluid.policies.elsewhere`). What it
reports of its trials goes to the log first, and from there, in the log's order, to the run folder and to who submitted
them, along with what other drivers report: each of them hears the same in the same order. So a sweep decides the same
everywhere, and only what needs doing once is asked for by an entry: to run a trial, and to begin a new one.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from msgspec import structs

from fluid._logs import logger_of
from fluid.backends.hosts import memory as host_memory
from fluid.engine.commands import Command, NoteDeviceLost, Report, ReportEnd, ReportStart
from fluid.engine.events import (
    OFFERED,
    BudgetExtended,
    Checkpoint,
    DeviceAdded,
    EndedElsewhere,
    Event,
    FailRequested,
    Failure,
    IteratedElsewhere,
    ResumeRequested,
    StopRequested,
    TrialHistory,
    TrialMoved,
    TrialOffered,
    TrialSetAside,
    TrialSpec,
)
from fluid.engine.records import TrialRecord
from fluid.engine.tuning import OVERTAKES
from fluid.errors import InvalidFieldError
from fluid.joint.entries import (
    Begun,
    Claimed,
    Ended,
    Extended,
    Founded,
    Item,
    Iterated,
    Joined,
    Released,
    Started,
    StopAsked,
    Wants,
)
from fluid.joint.membership import MEMBERS, Entry, Membership
from fluid.joint.state import BegunTrial, Fact, Gone, JointState, JointTrial, Tenure
from fluid.lane.checkpoints.files import entries_of, iteration_of
from fluid.policies.engine import EngineState
from fluid.processes.identity import has_ended
from fluid.resources import Device
from fluid.results.run_files import is_used
from fluid.session.folder.folder import folder_of
from fluid.session.folder.resume import CheckpointFolders
from fluid.session.output import Output
from fluid.trainables.encoded_metrics import EncodedMetrics, IterationRun, numbers_in
from fluid.trialgroup import TrialState

_log = logger_of("fluid.session")
#: Seconds to wait for the processes of a driver that was killed to move its checkpoints from memory to disk.
_PATIENCE_S = 5.0
#: States of trials that are about to be over for all members.
_ENDING = (TrialState.STOPPING, TrialState.STOPPED, TrialState.FAILED)
#: Seconds in which a device may be free soon; and how many times what a trial's move takes it waits here before others
#: may run it.
_SOON_S, _PATIENT = 0.5, 4.0
#: Seconds for which no trials are taken to be packed after some had waited for that.
_UNPACKED_S = 10.0
#: Of a trial whose member is gone.
_NO_LEASE = -1


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

    def founded(self, founded: Founded, *, is_own: bool) -> None:
        """Takes what all members agree on.

        Args:
            founded: what that is.
            is_own: whether this member has said it.
        """
        ...

    def rejoined(self) -> None:
        """This member was taken for dead: what it was about to begin has not begun."""
        ...


class _Early(NamedTuple):
    """What the log told of a trial before the program came to it.

    Attributes:
        fact: what it told.
        trial: the trial as it stood then.
    """

    fact: Fact
    trial: JointTrial


@dataclass
class _Group:
    """A group of which this member's program has told the session.

    Attributes:
        sweep: begins its trials; ``None`` if the program itself submits them.
        early: what the log told of trials before the program submitted them, by id.
        unfit: a trial of the sweep for which this member has no devices; empty if it has them.
    """

    sweep: JointSweep | None = None
    early: dict[str, list[_Early]] = field(default_factory=dict)
    unfit: str = ""


class JointSession:
    """What a session does in a shared folder. All methods are for the session's thread.

    Args:
        state: the engine.
        membership: reads and writes the log.
        now: tells the time, on the clock of the events.
        handle: gives the engine events, at one instant.
        extend: gives the engine further iterations of a trial, and has waiters wait for it.
        stop: notes that a submitter stops a trial.
        deliver: writes what trials report to the run folder, and tells who submitted them.
        post: has a call made in the session's thread, from any thread.
        name_of: the name of a group, by its id.
        left: told of a group, by its name, and of a trial there that a member has left and only that one had submitted.
    """

    def __init__(
        self,
        state: EngineState,
        membership: Membership,
        now: Callable[[], float],
        handle: Callable[..., None],
        extend: Callable[[BudgetExtended], None],
        stop: Callable[[StopRequested], None],
        deliver: Callable[..., None],
        post: Callable[[Callable[[], None]], None],
        name_of: Callable[[str], str],
        left: Callable[[str, str], None],
    ) -> None:
        self._state = state
        self._name_of = name_of
        self._left = left
        self.membership = membership
        self._now = now
        self._handle = handle
        self._give = extend
        self._note_stop = stop
        self._deliver = deliver
        self._post = post
        self.log = JointState()
        #: This member's name of now; empty while it has none.
        self.me = ""
        self._has_joined = threading.Event()
        self._groups: dict[str, _Group] = {}
        #: What the log told of groups that the program has not come to.
        self._early: dict[str, list[_Early]] = {}
        #: While the program comes to trials: how they stood when what is done now was told; ``None`` before they began.
        self._then: dict[str, JointTrial | None] = {}
        #: Whether what the log tells is being done: what a sweep decides then, it decides in every member.
        self._applies = False
        #: Who has told what is being done.
        self._writer = ""
        #: The trials that run here: id -> lease.
        self._here: dict[str, int] = {}
        #: Those that are to, once their checkpoint is found.
        self._coming: dict[str, int] = {}
        #: Known trials that nobody has, as keys; and these in the order in which they are asked for, the last first,
        #: ``None`` if that is not known.
        self._free: dict[str, None] = {}
        self._order: list[str] | None = None
        #: Seconds of the longest of them after which further rungs come.
        self._longest_s = math.inf
        #: What was told to the log and has not come back: reports by trial and iteration, and ends by trial.
        self._sent: dict[tuple[str, int], Report] = {}
        self._ends: dict[str, deque[ReportEnd]] = {}
        #: What was asked for and has not come back: trials by id, and how many are to begin.
        self._claims: set[str] = set()
        self._begins = 0
        #: Stops of trials that members have, by id, until those have told how they ended.
        self._stops: dict[str, Event] = {}
        #: Trials that are given up for others, as keys; and those of them of which the log knows.
        self._offered: dict[str, bool] = {}
        #: How far trials had come when they were given up last, by id: if nobody has taken one, it stays.
        self._gave: dict[str, int] = {}
        self._wanted = 0
        #: Since when trials wait here, by id; and when trials are taken for packing again.
        self._queued_at: dict[str, float] = {}
        self._packs_at = -math.inf
        #: Iterations that this member's program has let trials run in all, by id.
        self._budgets: dict[str, int] = {}
        #: The numbers of other members' devices in this one's files, by name and number there.
        self._devices: dict[tuple[str, int], int] = {}
        #: Seconds from each member's clock to this one's, as far as is known.
        self._ahead: dict[str, float] = {}
        #: The folders of members whose checkpoints in memory were moved to disk, or are about to be.
        self._reclaimed: set[str] = set()
        #: Whether nothing is begun any more.
        self._is_leaving = False

    # -- from the session ----------------------------------------------------------------------------------

    def attach(self, sweep: JointSweep, founds: Founded, begins: Sequence[Begun]) -> Callable[[], object]:
        """Has a sweep begin its trials as the log says; returns what ends that.

        Args:
            sweep: the sweep.
            founds: what is told where no member has begun it.
            begins: its trials that begin then, for any member.
        """
        name = founds.group
        self._groups[name] = _Group(sweep)
        founded = self.log.founded.get(name)
        if founded is None:
            self.membership.post(founds, *begins)
        else:
            sweep.founded(founded, is_own=False)
        begun = [known.trial_id for known in self.log.trials.values() if known.group == name]
        self._catch_up(begun, self._early.pop(name, []))
        return partial(self._detach, name)

    def submitted(self, name: str, trial_ids: Iterable[str]) -> None:
        """The engine knows trials of a group, which are held, and goes on with what the log tells of them."""
        is_new, group = name not in self._groups, self._groups.setdefault(name, _Group())
        for early in self._early.pop(name, []):
            group.early.setdefault(_trial_of(early.fact), []).append(early)
        for trial_id in trial_ids:
            if (told := group.early.pop(trial_id, None)) is not None:
                self._catch_up([trial_id], told)
            known = self._known(trial_id)
            if known is None or (known.lease is None and not known.is_over):
                self._set_free(trial_id)
            elif known.holder == self.me and known.lease is not None:
                self._go_on(known)
            if group.sweep is not None:
                continue
            if trial_id in self.log.budgets:
                self._of_trial(Extended(trial_id, self.log.budgets[trial_id]))
            if trial_id in self.log.stops:
                self._of_trial(StopAsked(trial_id, self.log.stops[trial_id]))
        if is_new:
            for trial in list(self.log.trials.values()):
                self._look_left(trial)

    def _set_free(self, trial_id: str) -> None:
        self._free[trial_id], self._order = None, None

    def _look_left(self, trial: JointTrial) -> None:
        """Tells of a trial that nobody has and that is to go on, where this member's program has not submitted it."""
        group = self._groups.get(trial.group)
        if group is None or group.sweep is not None or trial.trial_id in self._state.trials:
            return
        if trial.lease is None and trial.tenures and not trial.ended:
            self._left(trial.group, trial.trial_id)

    def await_log(self, timeout: float) -> None:
        """Waits until what was in the log as this member joined is known here; from any thread but the session's."""
        self._has_joined.wait(timeout)

    def under_way(self, name: str) -> list[str]:
        """Ids of a group's trials that have not ended, by the log."""
        return [trial.trial_id for trial in self.log.trials.values() if trial.group == name and not trial.ended]

    def _catch_up(self, trial_ids: Iterable[str], told: Iterable[_Early]) -> None:
        """Does what the log has told of trials before the program came to them, each as they stood then."""
        then, applies = self._then, self._applies
        self._then, self._applies = {**then, **dict.fromkeys(trial_ids)}, True
        try:
            for fact, trial in told:
                self._then[trial.trial_id] = trial
                self._take(fact)
        finally:
            self._then, self._applies = then, applies

    def _known(self, trial_id: str) -> JointTrial | None:
        """What the log has told of a trial."""
        return self._then[trial_id] if trial_id in self._then else self.log.trials.get(trial_id)

    def _detach(self, name: str) -> None:
        """A sweep is over here: others may go on with the trials that this member has of it."""
        del self._groups[name]
        for trial_id in [one for one in self._free if self._name_of(self._state.trials[one].group_id) == name]:
            del self._free[trial_id]
        for trial_id in list(self._here):
            record = self._state.trials[trial_id]
            if self._name_of(record.group_id) == name and record.state not in _ENDING:
                self._set_aside(trial_id)

    def holding(self, specs: Iterable[TrialSpec]) -> list[TrialMoved]:
        """The events by which the engine holds trials, to be handled together with the one that tells of them."""
        at = self._now()
        return [TrialMoved(at, spec.trial_id, TrialHistory(spec, budget=spec.budget), here=False) for spec in specs]

    def withhold(self, commands: Sequence[Command]) -> list[Command]:
        """Takes what the engine reports of trials, for the log; returns all else.

        The end of a trial that no member has is told at once: every member comes to it by itself.
        """
        kept: list[Command] = []
        for command in commands:
            if not isinstance(command, (Report, ReportEnd, ReportStart)):
                kept.append(command)
                continue
            lease = self._here.get(command.trial_id)
            if lease is None:
                known = self._known(command.trial_id)
                if isinstance(command, ReportEnd) and (known is None or known.lease is None):
                    self._free.pop(command.trial_id, None)
                    kept.append(command)
            elif isinstance(command, ReportStart):
                self.membership.post(Started(command.trial_id, lease))
                kept.append(command)
            elif isinstance(command, Report):
                self._sent[command.trial_id, command.iteration] = command
                self.membership.post(_iterated(command, lease))
            elif command.failure is not None and command.failure.kind == "no_device":
                self.membership.post(Released(command.trial_id, lease))  # Others may have one.
            else:
                self._ends.setdefault(command.trial_id, deque()).append(command)
                by_itself = self._state.trials[command.trial_id].progress.finished_early
                self.membership.post(_ended(command, lease, by_itself=by_itself))
        return kept

    def stops(self, event: StopRequested | FailRequested, group: str) -> bool:
        """Whether the engine is to be told to stop a trial now; one of another member ends when that says so."""
        trial_id = event.trial_id
        if not self._replicates(group) and trial_id not in self.log.stops and isinstance(event, StopRequested):
            self.membership.post(StopAsked(trial_id, "" if event.outcome is None else event.outcome.value))
        known = self._known(trial_id)
        if known is None or known.lease is None:
            return True
        self._stops[trial_id] = event
        return trial_id in self._here or self._state.trials[trial_id].state is TrialState.DONE

    def extends(self, trial_id: str, by: int, group: str) -> int:
        """A submitter gives a trial further iterations; returns how many the engine is to give it.

        Where each member's program extends a trial by itself, as all do the same, the first one counts.
        """
        self._order = None
        if self._replicates(group) or (record := self._state.trials.get(trial_id)) is None:
            return by
        budget = self._budgets.get(trial_id, record.spec.budget) + by
        self._budgets[trial_id] = budget
        if budget > self.log.budgets.get(trial_id, 0):
            self.membership.post(Extended(trial_id, budget))
        return max(0, budget - record.progress.budget)

    def forgotten(self, trial_id: str) -> None:
        """The engine knows a trial no more, which has ended."""
        if (lease := self._here.get(trial_id)) is not None:
            self.membership.post(Released(trial_id, lease))
        for names in (self._here, self._free, self._coming, self._offered, self._gave, self._budgets, self._stops):
            names.pop(trial_id, None)
        self._ends.pop(trial_id, None)

    @property
    def others(self) -> str:
        """Who goes on with what this member leaves, for people."""
        return f"the other drivers of {str(self.membership.shared)!r} go on, and so does the same call"

    def is_settled(self, group: str) -> bool:
        """Whether all that was stopped of a group has ended."""
        return not any(self._name_of(self._state.trials[trial_id].group_id) == group for trial_id in self._stops)

    def leave(self) -> None:
        """Begins and claims nothing any more."""
        self._is_leaving = True

    def _replicates(self, group: str) -> bool:
        """Whether every member stops and extends the trials of a group by itself, as it does now."""
        found = self._groups.get(group)
        return self._applies and found is not None and found.sweep is not None

    # -- from the log --------------------------------------------------------------------------------------

    def apply(self, entries: Sequence[Entry]) -> None:
        """Does what entries of the log tell, in their order."""
        now = self._now()
        for _, writer, items in entries:
            for item in items:
                if isinstance(item, Iterated):  # What was told soonest tells how far the clocks are apart.
                    self._ahead[writer] = min(now - item.at, self._ahead.get(writer, math.inf))
        self._applies = True
        for number, writer, items in entries:
            self._writer = writer
            for item in items:
                if writer == self.me:
                    self._came_back(item)
                for fact in self.log.apply(number, writer, item):
                    if isinstance(fact, Joined):
                        self._joined(writer, fact)
                    else:
                        self._take(fact)
        self._applies = False
        self.look()

    def _came_back(self, item: Item) -> None:
        if isinstance(item, Claimed):
            self._claims.discard(item.trial_id)
        elif isinstance(item, Begun) and not item.is_free:
            self._begins -= 1

    def _joined(self, name: str, joined: Joined) -> None:
        if joined.folder != self.membership.folder.name:
            self._name_devices(name, joined)
            return
        self.me = name
        self._has_joined.set()
        self._claims.clear()
        self._begins = self._wanted = 0
        for group in self._groups.values():
            if group.sweep is not None:
                group.sweep.rejoined()

    def _name_devices(self, name: str, joined: Joined) -> None:
        """Gives another member's devices numbers of their own in this one's files."""
        known = {
            device: number for (whose, device), number in self._devices.items() if whose.split("~")[0] == joined.folder
        }
        first = max([*self._state.occupancy.residents, *self._devices.values()], default=-1) + 1
        added = []
        for number, (device, kind) in enumerate(joined.devices.items()):
            self._devices[name, device] = known.get(device, first + number)
            if device not in known:
                shown = Device(first + number, host=joined.folder, kind="gpu" if kind == "gpu" else "cpu")
                added.append(DeviceAdded(self._now(), shown))
        self._deliver(events=added, others=True)

    def _take(self, fact: Fact) -> None:
        """Does what follows from one fact."""
        if isinstance(fact, Gone):
            self._gone(fact)
        elif isinstance(fact, Founded):
            group = self._groups.get(fact.group)
            if group is not None and group.sweep is not None:
                group.sweep.founded(fact, is_own=self._writer == self.me)
        elif isinstance(fact, BegunTrial):
            group = self._groups.get(fact.begun.group)
            if group is None or group.sweep is None:
                self._early.setdefault(fact.begun.group, []).append(_Early(fact, _copy(fact.trial)))
            else:
                group.sweep.begin(fact.begun.config, is_own=fact.writer == self.me)
            trial = fact.trial
            if fact.writer == self.me and trial.trial_id not in self._state.trials and trial.lease is not None:
                self.membership.post(Released(trial.trial_id, trial.lease))  # The sweep is over here.
        elif not isinstance(fact, Wants):
            self._of_trial(fact)

    def _of_trial(self, fact: Any) -> None:
        trial_id = fact.trial_id
        known = self._known(trial_id)
        if trial_id not in self._state.trials:
            self._keep(trial_id, fact)
            return
        if isinstance(fact, Claimed):
            self._free.pop(trial_id, None)
            if known is not None and known.holder == self.me:
                self._go_on(known)
        elif isinstance(fact, Started):
            if trial_id not in self._here:
                group_id = self._state.trials[trial_id].group_id
                self._deliver(ReportStart(trial_id, group_id, at=self._now(), width=1.0, device_ids=()))
        elif isinstance(fact, Iterated):
            self._iterated(fact)
        elif isinstance(fact, Ended):
            self._ended(fact)
        elif isinstance(fact, Released):
            self._released(trial_id)
        elif isinstance(fact, Extended):
            self._extend(fact)
        elif isinstance(fact, StopAsked):
            outcome = TrialState(fact.outcome) if fact.outcome else None
            event = StopRequested(self._now(), trial_id, outcome=outcome)
            self._note_stop(event)
            if known is not None and known.lease is not None:
                self._stops[trial_id] = event
            if trial_id in self._here or known is None or known.lease is None:
                self._handle(event)

    def _keep(self, trial_id: str, fact: Fact) -> None:
        """Keeps what the log tells of a trial that the program has not come to."""
        known = self.log.trials.get(trial_id)
        if known is None:
            return  # It was stopped or extended, which is seen when it is submitted.
        early, group = _Early(fact, _copy(known)), self._groups.get(known.group)
        if group is None:
            self._early.setdefault(known.group, []).append(early)
        elif group.sweep is None:
            group.early.setdefault(trial_id, []).append(early)

    def _iterated(self, fact: Iterated) -> None:
        trial_id = fact.trial_id
        own = self._sent.pop((trial_id, fact.iteration), None) if trial_id in self._here else None
        if own is None:
            tenures = self.log.trials[trial_id].tenures  # What is told late may be of an earlier one.
            member = next(tenure.member for tenure in tenures if tenure.lease == fact.lease)
            devices = tuple([self._devices.get((member, device), 0) for device in fact.device_ids])
            at = fact.at + self._ahead[member]
            report = _report(fact, self._state.trials[trial_id].group_id, at, devices)
            self._handle(IteratedElsewhere(self._now(), trial_id, fact.iteration))
            self._deliver(report, others=True)
        else:
            self._deliver(own)

    def _ended(self, fact: Ended) -> None:
        trial_id = fact.trial_id
        record, known = self._state.trials[trial_id], self._known(trial_id)
        assert known is not None
        own = self._ends.get(trial_id)
        is_here = trial_id in self._here and fact.lease == self._here[trial_id]
        failure = Failure(fact.kind, fact.message, fact.traceback) if fact.kind else None
        state, at = TrialState(fact.state), self._now()
        notice = ReportEnd(trial_id, record.group_id, state=state, iteration=fact.iteration, at=at, failure=failure)
        if is_here:
            if own:
                notice = own.popleft()
        else:
            self._handle(
                EndedElsewhere(
                    at, trial_id, state=state, iteration=fact.iteration, by_itself=fact.by_itself, failure=failure
                )
            )
        asked = self._stops.get(trial_id)
        if known.is_over:
            for names in (self._here, self._free, self._stops, self._coming, self._offered, self._ends):
                names.pop(trial_id, None)
            if asked is not None and not is_here:  # What its submitter said of it is to be with its end.
                self._handle(structs.replace(asked, at=at))
        self._deliver(notice, others=not is_here)

    def _extend(self, fact: Extended) -> None:
        record = self._state.trials[fact.trial_id]
        more = fact.budget - record.progress.budget
        is_over = record.state in (TrialState.STOPPED, TrialState.FAILED) or record.progress.finished_early
        if more > 0 and not is_over:
            self._give(BudgetExtended(self._now(), fact.trial_id, more))

    def _released(self, trial_id: str) -> None:
        if self._here.pop(trial_id, None) is not None:
            self._give_up(trial_id)
        self._set_free(trial_id)
        self._end_stopped(trial_id)

    def _gone(self, gone: Gone) -> None:
        if gone.member == self.me:
            self.me = ""
            if gone.is_lost:
                _log.warning("this driver was taken for dead (%s): others go on with its trials", gone.reason)
            for trial_id in list(self._here):
                self._give_up(trial_id)
            for names in (self._here, self._coming, self._offered, self._sent, self._ends):
                names.clear()
        elif gone.is_lost and gone.trials and self.me:  # Else it was before this member joined.
            trials = "trial" if len(gone.trials) == 1 else f"{len(gone.trials)} trials"
            _log.warning("driver %s is gone (%s); others go on with its %s", gone.member, gone.reason, trials)
        lost = [number for (name, _), number in self._devices.items() if name == gone.member]
        self._deliver(*[NoteDeviceLost(number, self._now()) for number in lost], others=True)
        for trial_id in gone.trials:
            self._of_trial(Released(trial_id, _NO_LEASE))
            self._look_left(self.log.trials[trial_id])

    def _end_stopped(self, trial_id: str) -> None:
        """Stops a trial that nobody has any more, if that was asked for: every member does, at this place."""
        event = self._stops.pop(trial_id, None)
        if event is None:
            return
        record = self._state.trials[trial_id]
        if record.state in (TrialState.STOPPED, TrialState.FAILED):  # It was done, and its member was to tell.
            at, done = self._now(), record.progress.done
            self._deliver(ReportEnd(trial_id, record.group_id, state=record.state, iteration=done, at=at))
        else:
            self._handle(structs.replace(event, at=self._now()))

    def _give_up(self, trial_id: str) -> None:
        """Has the engine hold a trial that ran here, as it stands by the log."""
        known, record = self.log.trials[trial_id], self._state.trials[trial_id]
        moved = self._moved(record, known.reported, None, here=False)
        if known.ended == TrialState.DONE and (known.by_itself or moved.history.budget <= known.reported):
            moved = structs.replace(moved, history=structs.replace(moved.history, ended=TrialState.DONE))
        self._handle(moved)

    # -- what runs here ------------------------------------------------------------------------------------

    def _go_on(self, known: JointTrial) -> None:
        """Runs a trial that this member has, from the newest checkpoint of those who had it before."""
        trial_id, lease = known.trial_id, known.lease
        record = self._state.trials.get(trial_id)
        if record is None or lease is None or lease in (self._coming.get(trial_id), self._here.get(trial_id)):
            return
        group = self._groups.get(known.group)
        if record.state.ended or group is None:
            self.membership.post(Released(trial_id, lease))
            return
        if self._state.lacks_devices(trial_id):
            if not group.unfit:
                text = "trials of %r need %s, which this driver does not have: others run them"
                _log.warning(text, known.group, record.spec.wanted_devices)
            group.unfit = trial_id
            self.membership.post(Released(trial_id, lease))
            return
        self._coming[trial_id] = lease
        if not known.reported:
            self._arrived(trial_id, lease, None)
            return
        shared, tenures = self.membership.shared, list(known.tenures)
        members = [self.log.members[tenure.member] for tenure in tenures]
        folders = {member.name: member.joined.folder for member in members}
        ended = [member.joined for member in members if member.gone and has_ended(member.joined.process)]
        left = {joined.folder for joined in ended} - self._reclaimed
        self._reclaimed |= left
        find = partial(find_checkpoint, shared, trial_id, tenures, folders, left)
        self.membership.call(find, lambda found: self._post(partial(self._arrived, trial_id, lease, found)))

    def _arrived(self, trial_id: str, lease: int, checkpoint: Checkpoint | None) -> None:
        known = self.log.trials[trial_id]
        if self._coming.get(trial_id) != lease or known.lease != lease:
            return  # It was lost again meanwhile.
        del self._coming[trial_id]
        if known.group not in self._groups:
            self.membership.post(Released(trial_id, lease))
            return
        self._here[trial_id] = lease
        record = self._state.trials[trial_id]
        self._handle(self._moved(record, known.reported, checkpoint, here=True))
        if (event := self._stops.get(trial_id)) is not None:
            self._handle(structs.replace(event, at=self._now()))
        self.look()

    def _moved(
        self,
        record: TrialRecord,
        reported: int,
        checkpoint: Checkpoint | None,
        *,
        here: bool,
    ) -> TrialMoved:
        progress = record.progress
        spec = structs.replace(record.spec, follow_up_iterations=progress.follow_up_iterations)
        # What it ended with here may not count; then it is to run as far as it was.
        budget = progress.budget if not progress.finished_early else max(record.spec.budget, progress.budget)
        history = TrialHistory(spec, budget=budget, reported=reported, checkpoint=checkpoint, outcome=record.outcome)
        return TrialMoved(self._now(), record.trial_id, history, here)

    # -- which trials to run -------------------------------------------------------------------------------

    def look(self) -> None:
        """Asks for trials if there are devices for them, and gives up such as wait for others' idle devices."""
        if not self.me or self._is_leaving or self._state.drained:
            return
        idle = sum(not self._state.occupancy.is_closed(device) for device in self._state.occupancy.idle_since)
        waiting = len(self._state.queue) + len(self._state.arrivals) + len(self._coming)
        waiting += len(self._claims) + self._begins
        free = len(self._free) - len(self._claims)
        present = [member for member in self.log.present if member.name != self.me]
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
        is_fit = any(not group.unfit for group in self._groups.values())
        self._want(idle if waiting + asked == 0 and is_fit else 0)
        self._offer()

    @property
    def _soon(self) -> int:
        """How many trials may start here soon: beside those that run, or as they end."""
        devices, packed = len(self._state.devices), self._state.estimates.max_packing
        if packed > 1 and self._now() >= self._packs_at:
            return devices * packed
        return sum(self._left_s(record) <= _SOON_S for record in self._running)

    @property
    def _running(self) -> list[TrialRecord]:
        found = (self._state.trials.by_row.get(row) for row in self._state.occupancy.held)
        return [record for record in found if record is not None]

    def _left_s(self, record: TrialRecord) -> float:
        """Seconds until a trial that runs here has come to its budget, as far as is known."""
        pace_s = record.pace.seconds or self.log.pace_s
        return record.progress.left * pace_s if pace_s else math.inf

    def _may_run(self, trial_id: str) -> bool:
        record = self._state.trials.get(trial_id)
        if record is None or record.state.ended or self._name_of(record.group_id) not in self._groups:
            return False
        return not self._state.lacks_devices(trial_id)

    def _ready(self, most: int) -> dict[str, int]:
        """How many trials of each sweep can begin, so many at most."""
        found: dict[str, int] = {}
        for name, group in self._groups.items():
            if group.unfit and not self._state.lacks_devices(group.unfit):
                group.unfit = ""
            may_begin = name in self.log.founded and not group.unfit
            if group.sweep is not None and may_begin and sum(found.values()) < most:
                found[name] = group.sweep.ready(most - sum(found.values()))
        return found

    def _ask(self, wanted: int) -> int:
        """Asks the log for so many trials; returns for how many there are."""
        items: list[Item] = [
            Claimed(self._name_of(self._state.trials[trial_id].group_id), trial_id) for trial_id in self._chosen(wanted)
        ]
        self._claims.update(item.trial_id for item in items if isinstance(item, Claimed))
        for name, number in self._ready(wanted - len(items)).items():
            sweep = self._groups[name].sweep
            begun = [] if sweep is None else sweep.begins(number)
            self._begins += len(begun)
            items += begun
        if items:
            self.membership.post(*items)
        return len(items)

    def _chosen(self, wanted: int) -> list[str]:
        """The trials to ask for; members that ask at once ask for different ones."""
        if self._order is None:
            records = (self._state.trials.get(trial_id) for trial_id in self._free)
            led = [record for record in records if record is not None and record.progress.follow_up_iterations]
            self._longest_s = max(map(self._path_s, led), default=math.inf)
            self._order = sorted(self._free, key=self._urgency)
        among = len(self.log.present)
        first: list[str] = []
        for trial_id in reversed(self._order):
            if len(first) == wanted * among:
                break
            if trial_id in self._free and trial_id not in self._claims and self._may_run(trial_id):
                first.append(trial_id)
        place = sum(member.number < self.log.members[self.me].number for member in self.log.present)
        mine = first[place::among]
        return [*mine, *(trial_id for trial_id in first if trial_id not in mine)][:wanted]

    def _urgency(self, trial_id: str) -> tuple[bool, float, int]:
        """Those start first after which most follows, later rungs included, and of equal ones the first to begin.

        A rung waits for the last of its trials: they go before those after which none comes, unless these are longer.
        """
        record = self._state.trials.get(trial_id)
        if record is None:
            return False, 0.0, 0
        path_s = self._path_s(record)
        leads = record.progress.follow_up_iterations > 0 or path_s > OVERTAKES * self._longest_s
        return leads, path_s, -record.row

    def _path_s(self, record: TrialRecord) -> float:
        """Seconds of what begins with a trial; the pace of what follows in later rungs, of other trials, is a guess."""
        known, progress = self.log.trials.get(record.trial_id), record.progress
        done = max(progress.done, 0 if known is None else known.reported)
        mean_s = self.log.pace_s or 1.0
        pace_s = record.pace.seconds or (0.0 if known is None else known.pace_s) or mean_s
        return max(0, progress.budget - done) * pace_s + progress.follow_up_iterations * mean_s

    def _preempt(self) -> int:
        """Gives up a trial that runs for one that nobody runs, and that ends later; returns how many.

        So no device is left with a long trial at the end, while the others have nothing to run.
        """
        chosen = self._chosen(1)
        running = [record for record in self._running if record.state is TrialState.RUNNING and record.spec.can_save]
        if not chosen or not running or any(not told for told in self._offered.values()):
            return 0
        first = self._state.trials[chosen[0]]
        last = min(running, key=lambda record: self._urgency(record.trial_id))
        are_few = len(self._free) <= sum(len(member.joined.devices) for member in self.log.present)
        leads = first.progress.follow_up_iterations > 0 and not last.progress.follow_up_iterations
        gain_s = self._path_s(first) - OVERTAKES * self._path_s(last)
        if not (are_few or leads) or gain_s < 2.0 * self._patience_s(last.trial_id):
            return 0
        if last.trial_id not in self._here or self._gave.get(last.trial_id) == last.progress.reported:
            return 0
        self._set_aside(last.trial_id)
        return 1

    def _want(self, devices: int) -> None:
        if devices != self._wanted:
            self._wanted = devices
            self.membership.post(Wants(devices))

    def _offer(self) -> None:
        """Gives up trials that wait here, where others have idle devices; those that were not begun first."""
        wanted = sum(member.wants for member in self.log.present if member.name != self.me)
        for trial_id, is_told in list(self._offered.items()):
            record = self._state.trials.get(trial_id)
            if record is None or trial_id not in self._here:
                del self._offered[trial_id]
            elif is_told:
                continue
            elif record.state in (TrialState.PAUSED, TrialState.DONE) and (
                _is_on_disk(record) or not (record.spec.can_save or self._may_run(trial_id))
            ):
                self._offered[trial_id] = True
                self._gave[trial_id] = record.progress.reported
                self.membership.post(Released(trial_id, self._here[trial_id]))
            elif (
                not (wanted and record.spec.can_save) and self._may_run(trial_id) and self._is_idle
            ):  # It goes on here.
                del self._offered[trial_id]
                self._handle(ResumeRequested(self._now(), trial_id))
        waiting = self._waiting()
        overdue = sum(waits_s > self._patience_s(trial_id) for trial_id, waits_s in waiting.items())
        if overdue:
            self._packs_at = self._now() + _UNPACKED_S
        for trial_id in sorted(waiting, key=self._urgency)[: max(wanted - len(self._offered), overdue)]:
            record = self._state.trials[trial_id]
            if self._gave.get(trial_id) != record.progress.reported and (
                record.spec.can_save or not record.progress.reported
            ):
                self._set_aside(trial_id)

    def _waiting(self) -> dict[str, float]:
        """For how many seconds trials have waited here that others might run, by id."""
        now, before, self._queued_at = self._now(), self._queued_at, {}
        if not len(self._state.queue) or len(self.log.present) < 2:
            return {}
        for trial_id in self._here:
            if self._state.trials[trial_id].state is TrialState.QUEUED and trial_id not in self._offered:
                self._queued_at[trial_id] = before.get(trial_id, now)
        return {trial_id: now - at for trial_id, at in self._queued_at.items()}

    def _patience_s(self, trial_id: str) -> float:
        """Seconds for which a trial waits here before it is for others: some times what its move takes."""
        saves = self._state.estimates.of_key(self._state.trials[trial_id]).saves
        return max(_SOON_S, _PATIENT * median(saves) if saves else 0.0)

    @property
    def _is_idle(self) -> bool:
        return bool(self._state.occupancy.idle_since) and not len(self._state.queue)

    def _set_aside(self, trial_id: str) -> None:
        """Has a trial leave its devices, and be saved, for another member."""
        self._offered[trial_id] = False
        if self._state.trials[trial_id].state is not TrialState.DONE:
            self._handle(TrialSetAside(self._now(), trial_id, OFFERED))
        self._handle(TrialOffered(self._now(), trial_id))


def joining(output: Output, *, rehearsed: bool) -> Membership | None:
    """The membership of a new session in a shared folder; ``None`` for a session by itself.

    Args:
        output: what the user said.
        rehearsed: whether the session is on a virtual clock.

    Raises:
        InvalidFieldError: the folder cannot be shared.
    """
    if not output.join or output.run_dir is None:
        return None
    if rehearsed:
        raise InvalidFieldError("join", True, "cannot be in a rehearsal: other drivers are on a real clock")
    shared = folder_of(output.run_dir)
    if is_used(shared):
        raise InvalidFieldError("run_dir", str(shared), "holds the session of one driver: give a fresh folder")
    try:
        return Membership(shared)
    except OSError as error:
        raise InvalidFieldError("run_dir", str(shared), f"cannot be used: {error.strerror}") from error


def _copy(trial: JointTrial) -> JointTrial:
    return replace(trial, tenures=[replace(tenure) for tenure in trial.tenures])


def _trial_of(fact: Any) -> str:
    return fact.trial.trial_id if isinstance(fact, BegunTrial) else getattr(fact, "trial_id", "")


def _is_on_disk(record: TrialRecord) -> bool:
    residence = record.residence
    if residence.lane is not None or residence.saving:
        return False
    durable = 0 if residence.durable is None else residence.durable.iteration
    return residence.checkpoint is None or durable >= residence.checkpoint.iteration


def _iterated(report: Report, lease: int) -> Iterated:
    found = list(report.iterations)
    return Iterated(
        report.trial_id,
        lease,
        iteration=report.iteration,
        metrics=tuple([metrics.text for _, _, _, metrics in found]),
        seconds=tuple([seconds for _, _, seconds, _ in found]),
        at=report.at,
        ages=tuple([report.at - at for _, at, _, _ in found]),
        width=report.width,
        device_ids=report.device_ids,
        rows=report.rows,
        usage=report.usage,
    )


def _report(fact: Iterated, group_id: str, at: float, device_ids: tuple[int, ...]) -> Report:
    """The report of what another member has run, by the clock and the devices of this one's files."""
    metrics = tuple([EncodedMetrics(text, numbers_in(json.loads(text))) for text in fact.metrics])
    run = IterationRun(tuple([at - age for age in fact.ages]), fact.seconds, metrics)
    return Report(
        fact.trial_id,
        group_id,
        iteration=fact.iteration,
        metrics=metrics[-1],
        seconds=fact.seconds[-1],
        width=fact.width,
        device_ids=device_ids,
        at=at,
        rows=fact.rows,
        run=run if len(metrics) > 1 else None,
        usage=fact.usage,
    )


def _ended(command: ReportEnd, lease: int, *, by_itself: bool) -> Ended:
    failure = command.failure or Failure("", "")
    return Ended(
        command.trial_id,
        lease,
        state=command.state.value,
        iteration=command.iteration,
        by_itself=by_itself,
        kind=failure.kind,
        message=failure.message,
        traceback=failure.traceback,
    )


def find_checkpoint(
    shared: Path, trial_id: str, tenures: Sequence[Tenure], folders: Mapping[str, str], left: Iterable[str] = ()
) -> Checkpoint | None:
    """The newest checkpoint of a trial that those have written who had it before; ``None`` if there is none.

    What a member has saved counts as far as its iterations count: it may have gone on after it was taken for dead.

    Args:
        shared: the shared folder.
        trial_id: the trial.
        tenures: whose it was.
        folders: the members' folders, by their names.
        left: those of members whose processes have ended on this machine, and may have left checkpoints in its memory.
    """
    best: Checkpoint | None = None
    for folder in left:
        host_memory.reclaim_of(str(shared / MEMBERS / folder), _PATIENCE_S)
    for tenure in reversed(tenures):
        # What is kept for its value may make way for a better one meanwhile: it comes last.
        for root in reversed(CheckpointFolders(str(shared / MEMBERS / folders[tenure.member])).of(trial_id)):
            for path in entries_of(root):
                iteration = iteration_of(path) if os.path.basename(path)[:1].isdigit() else 0
                if 0 < iteration <= tenure.reported and (best is None or iteration > best.iteration):
                    best = Checkpoint(iteration, path)
    return best
