"""A session that works a sweep together with other drivers, through a shared folder (docs/cluster.md).

The engine runs the trials that this driver has, and knows the others as held (:mod:`fluid.policies.elsewhere`). What it
reports of its trials goes to the log first, and from there, in the log's order, to the run folder and to who submitted
them, along with what other drivers report: each of them hears the same in the same order. So a sweep decides the same
everywhere, and only what needs doing once is asked for by an entry: to run a trial, and to begin a new one.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from fluid._logs import logger_of
from fluid.engine.commands import Command, NoteDeviceLost, Report, ReportEnd, ReportStart
from fluid.engine.events import (
    BudgetExtended,
    Checkpoint,
    DeviceAdded,
    EndedElsewhere,
    Event,
    FailRequested,
    Failure,
    IteratedElsewhere,
    StopRequested,
    TrialHistory,
    TrialMoved,
    TrialSpec,
)
from fluid.engine.records import TrialRecord
from fluid.errors import InvalidFieldError
from fluid.joint.entries import (
    Begun,
    Claimed,
    Ended,
    Extended,
    Founded,
    Iterated,
    Joined,
    OtherCode,
    Released,
    Started,
    StopAsked,
    Submitted,
    Wants,
)
from fluid.joint.membership import Entry, Membership
from fluid.joint.state import BegunTrial, Fact, Gone, JointTrial
from fluid.policies.engine import EngineState
from fluid.processes.identity import has_ended
from fluid.resources import Device
from fluid.results.run_files import is_used
from fluid.session.folder.folder import folder_of
from fluid.session.joint.checkpoints import find_checkpoint
from fluid.session.joint.claims import Claims, Early, JointGroup, JointSweep, Standing
from fluid.session.joint.content import GroupContent, differing
from fluid.session.output import Output
from fluid.trainables.encoded_metrics import EncodedMetrics, IterationRun, numbers_in
from fluid.trialgroup import TrialState

_log = logger_of("fluid.session")
#: Of a trial whose member is gone.
_NO_LEASE = -1


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
        self.at = Standing(state)
        self.claims = Claims(self.at, membership.post, now, handle, name_of)
        self._has_joined = threading.Event()
        #: What the log told of groups that the program has not come to.
        self._early: dict[str, list[Early]] = {}
        #: While the program comes to trials: how they stood when what is done now was told; ``None`` before they began.
        self._then: dict[str, JointTrial | None] = {}
        #: Whether what the log tells is being done: what a sweep decides then, it decides in every member.
        self._applies = False
        #: Who has told what is being done.
        self._writer = ""
        #: What was told to the log and has not come back: reports by trial and iteration, and ends by trial.
        self._sent: dict[tuple[str, int], Report] = {}
        self._ends: dict[str, deque[ReportEnd]] = {}
        #: Stops of trials that members have, by id, until those have told how they ended.
        self._stops: dict[str, Event] = {}
        #: Iterations that this member's program has let trials run in all, by id.
        self._budgets: dict[str, int] = {}
        #: The numbers of other members' devices in this one's files, by name and number there.
        self._devices: dict[tuple[str, int], int] = {}
        #: Seconds from each member's clock to this one's, as far as is known.
        self._ahead: dict[str, float] = {}
        #: The folders of members whose checkpoints in memory were moved to disk, or are about to be.
        self._reclaimed: set[str] = set()

    # -- from the session ----------------------------------------------------------------------------------

    def attach(self, sweep: JointSweep, founds: Founded, begins: Sequence[Begun]) -> Callable[[], object]:
        """Has a sweep begin its trials as the log says; returns what ends that.

        Args:
            sweep: the sweep.
            founds: what is told where no member has begun it.
            begins: its trials that begin then, for any member.
        """
        name = founds.group
        self.at.groups[name] = JointGroup(sweep, founds.codes)
        founded = self.at.log.founded.get(name)
        if founded is None:
            self.membership.post(founds, *begins)
        elif sweep.founded(founded, is_own=False):
            self._note_other_code(name)
        begun = [known.trial_id for known in self.at.log.trials.values() if known.group == name]
        self._catch_up(begun, self._early.pop(name, []))
        return partial(self._detach, name)

    def submitted(self, name: str, content: GroupContent) -> None:
        """The engine knows trials of a group, which are held, and goes on with what the log tells of them."""
        is_new, group = name not in self.at.groups, self.at.groups.setdefault(name, JointGroup(codes=content.codes))
        if group.sweep is None:
            self._tell(name, content.trials, is_new=is_new)
        for early in self._early.pop(name, []):
            group.early.setdefault(_trial_of(early.fact), []).append(early)
        for trial_id in content.trials:
            if (told := group.early.pop(trial_id, None)) is not None:
                self._catch_up([trial_id], told)
            known = self._known(trial_id)
            if known is None or (known.lease is None and not known.is_over):
                self.claims.set_free(trial_id)
            elif known.holder == self.at.me and known.lease is not None:
                self._go_on(known)
            if group.sweep is not None:
                continue
            if trial_id in self.at.log.budgets:
                self._of_trial(Extended(trial_id, self.at.log.budgets[trial_id]))
            if trial_id in self.at.log.stops:
                self._of_trial(StopAsked(trial_id, self.at.log.stops[trial_id]))
        if is_new:
            for trial in list(self.at.log.trials.values()):
                self._look_left(trial)

    def _tell(self, name: str, trials: Mapping[str, str], *, is_new: bool) -> None:
        """Tells the log what the program has submitted, or finds that another one has submitted something else."""
        group = self.at.groups[name]
        group.submitted |= trials
        unknown = {trial_id: text for trial_id, text in trials.items() if trial_id not in self.at.log.submitted}
        if is_new and name not in self.at.log.founded:
            self.membership.post(Founded(name, {}, (), group.codes))
        elif is_new:
            self._note_other_code(name)
        if unknown:
            self.membership.post(Submitted(name, unknown))
        self._require_alike(name, trials)

    def _require_alike(self, name: str, trial_ids: Iterable[str]) -> None:
        """Breaks off if another program has submitted something else as one of these trials."""
        for trial_id in trial_ids:
            mine = self.at.groups[name].submitted.get(trial_id)
            theirs = self.at.log.submitted.get(trial_id, mine)
            if mine is not None and theirs != mine:
                reason = f"has {mine} here and {theirs} in another driver of the shared folder"
                text = f"{reason}: the program of each must submit the same trials of the group {name!r}"
                self.membership.break_off(InvalidFieldError("trial_id", trial_id, text))
                return

    def _note_other_code(self, name: str) -> None:
        names = differing(self.at.log.founded[name].codes, self.at.groups[name].codes)
        if names and (name, self.at.me) not in self.at.log.other_code:
            _log.warning("%s: this driver runs other code than the first one: %s", name, ", ".join(names))
            self.membership.post(OtherCode(name, names))

    def _look_left(self, trial: JointTrial) -> None:
        """Tells of a trial that no member has and that is to go on, if this member's program has not submitted it."""
        group = self.at.groups.get(trial.group)
        if group is None or group.sweep is not None or trial.trial_id in self._state.trials:
            return
        if trial.lease is None and trial.tenures and not trial.ended:
            self._left(trial.group, trial.trial_id)

    def await_log(self, timeout: float) -> None:
        """Waits until what was in the log as this member joined is known here; from any thread but the session's."""
        self._has_joined.wait(timeout)

    def under_way(self, name: str) -> list[str]:
        """Ids of a group's trials that have not ended, by the log."""
        return [trial.trial_id for trial in self.at.log.trials.values() if trial.group == name and not trial.ended]

    def _catch_up(self, trial_ids: Iterable[str], told: Iterable[Early]) -> None:
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
        return self._then[trial_id] if trial_id in self._then else self.at.log.trials.get(trial_id)

    def _detach(self, name: str) -> None:
        """A sweep is over here: others may go on with the trials that this member has of it."""
        del self.at.groups[name]
        self.claims.leave(name)

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
            lease = self.at.here.get(command.trial_id)
            if lease is None:
                known = self._known(command.trial_id)
                if isinstance(command, ReportEnd) and (known is None or known.lease is None):
                    self.claims.taken(command.trial_id)
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
        if not self._replicates(group) and trial_id not in self.at.log.stops and isinstance(event, StopRequested):
            self.membership.post(StopAsked(trial_id, "" if event.outcome is None else event.outcome.value))
        known = self._known(trial_id)
        if known is None or known.lease is None:
            return True
        self._stops[trial_id] = event
        return trial_id in self.at.here or self._state.trials[trial_id].state is TrialState.DONE

    def extends(self, trial_id: str, by: int, group: str) -> int:
        """A submitter gives a trial further iterations; returns how many the engine is to give it.

        Where each member's program extends a trial by itself, as all do the same, the first one counts.
        """
        self.claims.extended()
        if self._replicates(group) or (record := self._state.trials.get(trial_id)) is None:
            return by
        budget = self._budgets.get(trial_id, record.spec.budget) + by
        self._budgets[trial_id] = budget
        if budget > self.at.log.budgets.get(trial_id, 0):
            self.membership.post(Extended(trial_id, budget))
        return max(0, budget - record.progress.budget)

    def forgotten(self, trial_id: str) -> None:
        """The engine knows a trial no more, which has ended."""
        if (lease := self.at.here.get(trial_id)) is not None:
            self.membership.post(Released(trial_id, lease))
        self.claims.forget(trial_id)
        for names in (self.at.here, self.at.coming, self._budgets, self._stops):
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
        self.claims.leave()

    def _replicates(self, group: str) -> bool:
        """Whether every member stops and extends the trials of a group by itself, as it does now."""
        found = self.at.groups.get(group)
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
                if writer == self.at.me:
                    self.claims.came_back(item)
                for fact in self.at.log.apply(number, writer, item):
                    if isinstance(fact, Joined):
                        self._joined(writer, fact)
                    else:
                        self._take(fact)
        self._applies = False
        self.claims.look()

    def _joined(self, name: str, joined: Joined) -> None:
        if joined.folder != self.membership.folder.name:
            self._name_devices(name, joined)
            return
        self.at.me = name
        self._has_joined.set()
        self.claims.joined()
        for group in self.at.groups.values():
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
            if (group := self.at.groups.get(fact.group)) is not None:
                is_own = self._writer == self.at.me
                if group.sweep is None or group.sweep.founded(fact, is_own=is_own):
                    self._note_other_code(fact.group)
        elif isinstance(fact, Submitted):
            if fact.group in self.at.groups:
                self._require_alike(fact.group, fact.trials)
        elif isinstance(fact, BegunTrial):
            group = self.at.groups.get(fact.begun.group)
            if group is None or group.sweep is None:
                self._early.setdefault(fact.begun.group, []).append(Early(fact, _copy(fact.trial)))
            else:
                group.sweep.begin(fact.begun.config, is_own=fact.writer == self.at.me)
            trial = fact.trial
            if fact.writer == self.at.me and trial.trial_id not in self._state.trials and trial.lease is not None:
                self.membership.post(Released(trial.trial_id, trial.lease))  # The sweep is over here.
        elif not isinstance(fact, (Wants, OtherCode)):
            self._of_trial(fact)

    def _of_trial(self, fact: Any) -> None:
        trial_id = fact.trial_id
        known = self._known(trial_id)
        if trial_id not in self._state.trials:
            self._keep(trial_id, fact)
            return
        if isinstance(fact, Claimed):
            self.claims.taken(trial_id)
            if known is not None and known.holder == self.at.me:
                self._go_on(known)
        elif isinstance(fact, Started):
            if trial_id not in self.at.here:
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
            if trial_id in self.at.here or known is None or known.lease is None:
                self._handle(event)

    def _keep(self, trial_id: str, fact: Fact) -> None:
        """Keeps what the log tells of a trial that the program has not come to."""
        known = self.at.log.trials.get(trial_id)
        if known is None:
            return  # It was stopped or extended, which is seen when it is submitted.
        early, group = Early(fact, _copy(known)), self.at.groups.get(known.group)
        if group is None:
            self._early.setdefault(known.group, []).append(early)
        elif group.sweep is None:
            group.early.setdefault(trial_id, []).append(early)

    def _iterated(self, fact: Iterated) -> None:
        trial_id = fact.trial_id
        own = self._sent.pop((trial_id, fact.iteration), None) if trial_id in self.at.here else None
        if own is None:
            tenures = self.at.log.trials[trial_id].tenures  # What is told late may be of an earlier one.
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
        is_here = trial_id in self.at.here and fact.lease == self.at.here[trial_id]
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
            self.claims.forget(trial_id)
            for names in (self.at.here, self.at.coming, self._stops, self._ends):
                names.pop(trial_id, None)
            if asked is not None and not is_here:  # What its submitter said of it is to be with its end.
                self._handle(structs.replace(asked, at=at))
        self._deliver(notice, others=not is_here)

    def _extend(self, fact: Extended) -> None:
        record = self._state.trials[fact.trial_id]
        more = fact.budget - record.progress.budget
        is_over = record.state.is_over or record.progress.finished_early
        if more > 0 and not is_over:
            self._give(BudgetExtended(self._now(), fact.trial_id, more))

    def _released(self, trial_id: str) -> None:
        if self.at.here.pop(trial_id, None) is not None:
            self._give_up(trial_id)
        self.claims.set_free(trial_id)
        self._end_stopped(trial_id)

    def _gone(self, gone: Gone) -> None:
        if gone.member == self.at.me:
            self.at.me = ""
            if gone.is_lost:
                _log.warning("this driver was taken for dead (%s): others go on with its trials", gone.reason)
            for trial_id in list(self.at.here):
                self._give_up(trial_id)
            self.claims.lost()
            for names in (self.at.here, self.at.coming, self._sent, self._ends):
                names.clear()
        elif gone.is_lost and gone.trials and self.at.me:  # Else it was before this member joined.
            trials = "trial" if len(gone.trials) == 1 else f"{len(gone.trials)} trials"
            _log.warning("driver %s is gone (%s); others go on with its %s", gone.member, gone.reason, trials)
        lost = [number for (name, _), number in self._devices.items() if name == gone.member]
        self._deliver(*[NoteDeviceLost(number, self._now()) for number in lost], others=True)
        for trial_id in gone.trials:
            self._of_trial(Released(trial_id, _NO_LEASE))
            self._look_left(self.at.log.trials[trial_id])

    def _end_stopped(self, trial_id: str) -> None:
        """Stops a trial that no member has any more, if that was asked for: every member does, at this place."""
        event = self._stops.pop(trial_id, None)
        if event is None:
            return
        record = self._state.trials[trial_id]
        if record.state.is_over:  # It was done, and its member was to tell.
            at, done = self._now(), record.progress.done
            self._deliver(ReportEnd(trial_id, record.group_id, state=record.state, iteration=done, at=at))
        else:
            self._handle(structs.replace(event, at=self._now()))

    def _give_up(self, trial_id: str) -> None:
        """Has the engine hold a trial that ran here, as it stands by the log."""
        known, record = self.at.log.trials[trial_id], self._state.trials[trial_id]
        moved = self._moved(record, known.reported, None, here=False)
        if known.ended == TrialState.DONE and (known.by_itself or moved.history.budget <= known.reported):
            moved = structs.replace(moved, history=structs.replace(moved.history, ended=TrialState.DONE))
        self._handle(moved)

    # -- what runs here ------------------------------------------------------------------------------------

    def _go_on(self, known: JointTrial) -> None:
        """Runs a trial that this member has, from the newest checkpoint of those who had it before."""
        trial_id, lease = known.trial_id, known.lease
        record = self._state.trials.get(trial_id)
        if record is None or lease is None or lease in (self.at.coming.get(trial_id), self.at.here.get(trial_id)):
            return
        group = self.at.groups.get(known.group)
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
        self.at.coming[trial_id] = lease
        if not known.reported:
            self._arrived(trial_id, lease, None)
            return
        shared, tenures = self.membership.shared, list(known.tenures)
        members = [self.at.log.members[tenure.member] for tenure in tenures]
        folders = {member.name: member.joined.folder for member in members}
        ended = [member.joined for member in members if member.gone and has_ended(member.joined.process)]
        left = {joined.folder for joined in ended} - self._reclaimed
        self._reclaimed |= left
        find = partial(find_checkpoint, shared, trial_id, tenures, folders, left)
        self.membership.call(find, lambda found: self._post(partial(self._arrived, trial_id, lease, found)))

    def _arrived(self, trial_id: str, lease: int, checkpoint: Checkpoint | None) -> None:
        known = self.at.log.trials[trial_id]
        if self.at.coming.get(trial_id) != lease or known.lease != lease:
            return  # It was lost again meanwhile.
        del self.at.coming[trial_id]
        if known.group not in self.at.groups:
            self.membership.post(Released(trial_id, lease))
            return
        self.at.here[trial_id] = lease
        record = self._state.trials[trial_id]
        self._handle(self._moved(record, known.reported, checkpoint, here=True))
        if (event := self._stops.get(trial_id)) is not None:
            self._handle(structs.replace(event, at=self._now()))
        self.claims.look()

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
