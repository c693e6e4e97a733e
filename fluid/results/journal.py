"""The journal of a session: a write-ahead log from which a session whose driver was killed is resumed. Pure: no IO.

An entry is a JSON object: ``v``, the version; ``what``, the class of an event or command; and that one's fields.

* :class:`GroupSubmitted`, :class:`GroupRecovered`, :class:`TrialsAdded`, :class:`BudgetExtended`,
  :class:`StopRequested`, :class:`FailRequested`, :class:`PauseRequested`, :class:`ResumeRequested`,
  :class:`TrialForgotten`: what the submitter asked for.
* :class:`TrialSaved`, :class:`TrialForked`, :class:`ReportSetBack`: where a trial can be restored from, and from where
  it could not be.
* :class:`IterationReported`, :class:`ReportEnd`: how far a trial came, and how it ended.
* :class:`DeviceAdded`, :class:`NoteDeviceLost`, :class:`NoteResize`: devices and widths, for reports.
* :class:`ProfileSaved`: a snapshot of what was measured.
* :class:`LaneReady`, :class:`TrialStarted`, :class:`TrialNotKept`, :class:`KillLane`, :class:`DeviceDraining`,
  :class:`SessionDraining`, :class:`TrialSetAside` and the notices of :mod:`fluid.engine.commands`: what happened and
  why, for reports; :func:`replay` passes over them.

Calls of trials' methods are not written: their callers end with the driver. The entries of one call of the engine are
written together, events before commands, after the engine has accepted the call and before its commands are carried
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from msgspec import Struct, structs

from fluid.engine.commands import (
    KillLane,
    NoteDeviceLost,
    NoteDrained,
    NoteHung,
    NoteLateness,
    NoteMeasured,
    NotePaused,
    NotePlaced,
    NotePreempted,
    NoteQueued,
    NoteResize,
    NoteTrial,
    NoteWaiting,
    Report,
    ReportEnd,
    ReportSetBack,
)
from fluid.engine.events import (
    PLAIN_TERMS,
    RETIREMENTS,
    BudgetExtended,
    Checkpoint,
    DeviceAdded,
    DeviceDraining,
    FailRequested,
    Failure,
    GroupRecovered,
    GroupSubmitted,
    GroupTerms,
    LaneReady,
    PauseRequested,
    ResumeRequested,
    SessionDraining,
    StopRequested,
    TrialForgotten,
    TrialForked,
    TrialHistory,
    TrialNotKept,
    TrialsAdded,
    TrialSaved,
    TrialSetAside,
    TrialSpec,
    TrialStarted,
)
from fluid.errors import InvalidFieldError
from fluid.measure.json_input import read_record
from fluid.measure.profile import Profile
from fluid.results.run_files import BROKEN, parsed
from fluid.trialgroup import TrialState
from fluid.wire import Frame, plain

# -- recovered -----------------------------------------------------------------------------------
#
# A session as its journal tells it: what :func:`fluid.results.journal.replay` returns. Pure: no IO.


T = TypeVar("T", bound=Struct)


def changed(record: T, **fields: Any) -> T:
    """A dataclass's instance with other fields; itself where they are as they were, as of most trials of a session."""
    for name, value in fields.items():
        if getattr(record, name) != value:
            return structs.replace(record, **fields)
    return record


@dataclass
class Recovered:
    """A session as its journal tells it.

    Attributes:
        groups: the trials by group id and trial id, in order of submission.
        durable: newest checkpoint on disk, by trial id.
        failures: why trials failed for good, by trial id; also those that were forgotten.
        forgotten: ids of forgotten trials, by group id.
        past: how the trials stood that were forgotten, by trial id.
        outcomes: what the submitter said of trials that it stopped, by trial id.
        forked: iterations done by the states from which trials start, by the id of these trials, once they are there.
        terms: on which groups were submitted, by group id.
        places: devices added and lost, and trials resized, in order.
        profile: the newest snapshot; ``None`` if the journal holds none.
        at: time of the last entry, in seconds on the time axis of the files; 0 if there is none.
        torn: whether the last line is cut off, as by a crash.
        mixed: whether two sessions wrote the journal: a group or a trial was submitted twice.
    """

    groups: dict[str, dict[str, TrialHistory]] = field(default_factory=dict)
    durable: dict[str, Checkpoint] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    forgotten: dict[str, list[str]] = field(default_factory=dict)
    past: dict[str, TrialHistory] = field(default_factory=dict)
    outcomes: dict[str, TrialState] = field(default_factory=dict)
    forked: dict[str, int] = field(default_factory=dict)
    terms: dict[str, GroupTerms] = field(default_factory=dict)
    places: list[DeviceAdded | NoteDeviceLost | NoteResize] = field(default_factory=list)
    profile: Profile | None = None
    at: float = 0.0
    torn: bool = False
    mixed: bool = False

    def events(self, at: float, readable: Callable[[Checkpoint], bool] = lambda _: True) -> list[GroupRecovered]:
        """The events that make a new engine resume this session.

        Args:
            at: seconds, on the new session's clock.
            readable: whether a checkpoint still exists. A trial resumes from its newest checkpoint, else from its
                newest durable one, else from the start.
        """

        def resumable(history: TrialHistory) -> TrialHistory:
            trial_id = history.trial.trial_id
            choices = (history.checkpoint, self.durable.get(trial_id))
            found = next((choice for choice in choices if choice is not None and readable(choice)), None)
            return changed(history, checkpoint=found, outcome=self.outcomes.get(trial_id))

        return [
            GroupRecovered(
                at,
                group_id,
                tuple(resumable(history) for history in trials.values()),
                tuple(self.forgotten.get(group_id, ())),
                self.terms.get(group_id, PLAIN_TERMS),
            )
            for group_id, trials in self.groups.items()
        ]

    @property
    def histories(self) -> dict[str, TrialHistory]:
        """How each trial stands, also forgotten ones, by trial id."""
        known = {trial_id: history for trials in self.groups.values() for trial_id, history in trials.items()}
        return {**self.past, **known}

    @property
    def reported(self) -> dict[str, int]:
        """Iterations that each trial has reported, also of forgotten ones, by trial id."""
        return {trial_id: history.reported for trial_id, history in self.histories.items()}

    @property
    def skipped(self) -> dict[str, int]:
        """Iterations that trials never report, as another trial has done them for itself, by trial id."""
        histories = self.histories
        starts = {name: histories[name].trial.start for name in self.forked if name in histories}
        return {name: self.forked[name] for name, start in starts.items() if start is None or not start.is_shared}

    @property
    def unfinished(self) -> bool:
        """Whether a trial has not ended."""
        return any(history.ended is None for trials in self.groups.values() for history in trials.values())


# -- journal -------------------------------------------------------------------------------------


#: Version of the entries.
VERSION = 2

Entry = dict[str, Any]


# -- writing --------------------------------------------------------------------------------------------------


class IterationReported(Frame, frozen=True):
    """What is written of a :class:`Report`, of a run of iterations the last; results.jsonl has the rest."""

    at: float
    trial_id: str
    iteration: int


class ProfileSaved(Frame, frozen=True):
    """A profile snapshot, as :meth:`Profile.to_json` makes it."""

    at: float
    profile: dict[str, Any]


#: What is written for reports only.
_TOLD: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(TrialStarted, NotePlaced, NoteWaiting, NoteQueued, NotePaused, NotePreempted, NoteTrial, NoteMeasured),
        *(NoteHung, NoteLateness, KillLane, DeviceDraining, SessionDraining, NoteDrained, TrialNotKept),
        *(TrialSetAside, LaneReady, *RETIREMENTS),
    )
}
#: Earlier versions wrote these, too, for reports only.
_NO_LONGER_WRITTEN = frozenset(("NoteKeptWidth",))
#: Stands for the history of a trial of which all that is known is among the changes.
_UNSETTLED = TrialHistory(TrialSpec("", 1), budget=1)
#: Trials that are encoded together: a submission may have a hundred thousand.
_BATCH = 256
#: What is written, by the name in ``what``.
_WRITTEN: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *_TOLD.values(),
        *(GroupSubmitted, GroupRecovered, TrialsAdded, BudgetExtended, StopRequested, TrialForgotten, TrialSaved),
        *(PauseRequested, ResumeRequested, ReportSetBack, DeviceAdded, NoteDeviceLost, NoteResize, ReportEnd),
        *(IterationReported, ProfileSaved, FailRequested, TrialForked),
    )
}


def encode(item: Frame) -> Entry | None:
    """Makes the entry of an event or command; ``None`` for one that need not be written."""
    if isinstance(item, Report):
        return _entry(IterationReported(item.at, item.trial_id, item.iteration))
    if isinstance(item, ReportEnd) and item.failure is not None:
        # The exception is of use only to the submitter of this session.
        item = structs.replace(item, failure=replace(item.failure, exception=None))
    if isinstance(item, LaneReady) and math.isinf(item.seconds):
        return None  # What is written of it is how long it took.
    return _entry(item) if type(item).__name__ in _WRITTEN else None


def encode_apart(item: Frame) -> tuple[Entry, Iterator[list[Entry]]] | None:
    """Makes the entry of many submitted trials in two: without them, and batches of what it has under ``trials``.

    Returns:
        Both; ``None`` for what has few trials or none, which :func:`encode` encodes.
    """
    trials = item.trials if isinstance(item, (GroupSubmitted, GroupRecovered, TrialsAdded)) else ()
    if len(trials) <= _BATCH:
        return None
    batches = (trials[start : start + _BATCH] for start in range(0, len(trials), _BATCH))
    entry = _entry(structs.replace(item, trials=()))
    del entry["trials"]
    return entry, map(plain, batches)


def _entry(item: Frame) -> Entry:
    # All fields, also where they are as by default: what reads a line need not know what that was.
    fields = {name: plain(getattr(item, name)) for name in item.__struct_fields__}
    return {"v": VERSION, "what": type(item).__name__, **fields}


# -- reading --------------------------------------------------------------------------------------------------


def replay(lines: Iterable[str | bytes]) -> Recovered:
    """Reads a journal.

    Args:
        lines: one entry each. A last line that is cut off is ignored.

    Raises:
        InvalidFieldError: a line but the last is not JSON, or an entry's version, class or fields are wrong.
    """
    replayed = Replay()
    for number, line in enumerate(lines, start=1):
        text = line.encode() if isinstance(line, str) else line
        if not text.isspace() and text:
            replayed.take(parsed(text), number)
    return replayed.result


class Replay:
    """Follows a session entry by entry.

    The engine refuses requests about unknown trials after they were written: entries about them change nothing.
    """

    def __init__(self) -> None:
        self._told = Recovered()
        #: Changes of histories that the result does not have yet: there are several for each trial.
        self._changes: dict[str, dict[str, Any]] = {}
        self._bad: InvalidFieldError | None = None
        self._group_of: dict[str, str] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            GroupSubmitted: self._submitted,
            GroupRecovered: self._recovered,
            TrialsAdded: self._added,
            BudgetExtended: self._extended,
            StopRequested: self._stopped,
            FailRequested: self._failed,
            PauseRequested: self._held,
            ResumeRequested: self._held,
            TrialForgotten: self._forgotten,
            TrialSaved: self._saved,
            TrialForked: self._forked,
            ReportSetBack: self._set_back,
            IterationReported: self._reported,
            ReportEnd: self._ended,
            DeviceAdded: self._told.places.append,
            NoteDeviceLost: self._told.places.append,
            NoteResize: self._told.places.append,
            ProfileSaved: self._measured,
        }

    @property
    def result(self) -> Recovered:
        """The session as the entries so far tell it."""
        for trial_id in self._changes:
            self._settle(trial_id)
        self._changes.clear()
        return self._told

    def take(self, entry: object, number: int) -> None:
        """Takes the entry of line ``number``; one that is ``BROKEN``, no JSON, may be the last only, which was cut off.

        Raises:
            InvalidFieldError: the entry's version, class or fields are wrong, or the line before was not JSON.
        """
        if self._bad is not None:
            raise self._bad
        if entry is BROKEN:
            self._bad = InvalidFieldError("journal", "", f"line {number} is not JSON")
            self._told.torn = True
            return
        if not isinstance(entry, Mapping):
            raise InvalidFieldError("journal", entry, f"line {number} is not an object")
        if entry.get("v") != VERSION:
            reason = f"line {number} is of an unknown version; this Fluid reads version {VERSION}"
            raise InvalidFieldError("v", entry.get("v"), reason)
        what, at = entry.get("what"), entry.get("at")
        if not isinstance(what, str) or (what not in _WRITTEN and what not in _NO_LONGER_WRITTEN):
            raise InvalidFieldError("what", what, f"line {number} is of an unknown kind")
        if what in _TOLD or what in _NO_LONGER_WRITTEN:
            self._told.at = at if isinstance(at, float) else self._told.at
            return
        content = {name: value for name, value in entry.items() if name not in ("v", "what")}
        try:
            item: Any = read_record(content, _WRITTEN[what], "journal")
            self._handlers[type(item)](item)
        except InvalidFieldError as error:
            raise InvalidFieldError(error.field, error.value, f"{error.reason} (line {number})") from error
        self._told.at = item.at

    def _submitted(self, event: GroupSubmitted) -> None:
        self._told.mixed |= event.group_id in self._told.groups
        self.result.groups[event.group_id] = {}
        self._told.terms[event.group_id] = event.terms
        self._add_new(event.group_id, event.trials)

    def _recovered(self, event: GroupRecovered) -> None:
        self.result.groups[event.group_id] = {}
        self._told.terms[event.group_id] = event.terms
        for history in event.trials:
            self._add(event.group_id, history.trial.trial_id, history)
            if history.ended is None and history.outcome is None:  # It may be one that had failed.
                self._told.failures.pop(history.trial.trial_id, None)
                self._told.outcomes.pop(history.trial.trial_id, None)
        self._told.forgotten[event.group_id] = list(event.forgotten)

    def _added(self, event: TrialsAdded) -> None:
        if event.group_id not in self._told.groups:
            raise InvalidFieldError("group_id", event.group_id, "is of no group submitted before")
        self._add_new(event.group_id, event.trials)

    def _add_new(self, group_id: str, trials: Iterable[TrialSpec]) -> None:
        for spec in trials:
            self._told.mixed |= spec.trial_id in self._group_of or spec.trial_id in self._told.past
            self._add(group_id, spec.trial_id, _UNSETTLED)
            self._changes[spec.trial_id] = {"trial": spec, "budget": spec.budget}

    def _add(self, group_id: str, trial_id: str, history: TrialHistory) -> None:
        self._changes.pop(trial_id, None)
        self._group_of[trial_id] = group_id
        self._told.groups[group_id][trial_id] = history

    def _extended(self, event: BudgetExtended) -> None:
        history = self._history(event.trial_id)
        if history is not None and history.ended in (None, TrialState.DONE):
            self._change(event.trial_id, budget=history.budget + event.iterations, ended=None)

    def _stopped(self, event: StopRequested) -> None:
        # The submitter was told that the trial stops: it must not run on, even if it had not left its lane yet.
        history = self._history(event.trial_id)
        if history is not None and event.outcome is not None:
            self._told.outcomes[event.trial_id] = event.outcome
        if history is not None and history.ended in (None, TrialState.DONE):
            self._change(event.trial_id, ended=TrialState.STOPPED, paused=False)

    def _failed(self, event: FailRequested) -> None:
        history = self._history(event.trial_id)
        if history is not None and history.ended in (None, TrialState.DONE):
            self._change(event.trial_id, ended=TrialState.FAILED, paused=False)
            self._told.failures[event.trial_id] = event.failure

    def _held(self, event: PauseRequested | ResumeRequested) -> None:
        self._change(event.trial_id, paused=isinstance(event, PauseRequested))

    def _forgotten(self, event: TrialForgotten) -> None:
        trial_id = event.trial_id
        history = self._history(trial_id)
        if history is not None:
            group_id = self._group_of.pop(trial_id)
            del self._told.groups[group_id][trial_id]
            self._told.forgotten.setdefault(group_id, []).append(trial_id)
            self._told.durable.pop(trial_id, None)
            self._told.past[trial_id] = history

    def _forked(self, event: TrialForked) -> None:
        if event.checkpoint is not None and (history := self._history(event.trial_id)) is not None:
            self._told.forked[event.trial_id] = event.checkpoint.iteration
            self._saved(TrialSaved(event.at, event.trial_id, None, event.checkpoint))
            self._change(event.trial_id, reported=max(history.reported, event.checkpoint.iteration))

    def _saved(self, event: TrialSaved) -> None:
        history, checkpoint = self._history(event.trial_id), event.checkpoint
        if history is not None and (history.checkpoint is None or checkpoint.iteration >= history.checkpoint.iteration):
            self._change(event.trial_id, checkpoint=checkpoint)
            if not checkpoint.in_memory:
                self._told.durable[event.trial_id] = checkpoint

    def _set_back(self, command: ReportSetBack) -> None:
        checkpoint = command.checkpoint
        self._change(command.trial_id, checkpoint=checkpoint)
        durable = self._told.durable.get(command.trial_id)
        if durable is not None and (checkpoint is None or durable.iteration > checkpoint.iteration):
            del self._told.durable[command.trial_id]

    def _reported(self, entry: IterationReported) -> None:
        self._change(entry.trial_id, reported=entry.iteration)

    def _ended(self, command: ReportEnd) -> None:
        if command.state is TrialState.DONE:
            # One that finished by itself may have run less than its budget.
            budget = max(1, command.iteration)
            self._change(command.trial_id, ended=TrialState.DONE, paused=False, budget=budget)
        else:
            self._change(command.trial_id, ended=command.state, paused=False)
        if command.failure is not None and command.trial_id in self._group_of:
            self._told.failures[command.trial_id] = command.failure

    def _measured(self, entry: ProfileSaved) -> None:
        self._told.profile = Profile.from_json(entry.profile)

    def _history(self, trial_id: str) -> TrialHistory | None:
        group_id = self._group_of.get(trial_id)
        if group_id is None:
            return None
        if trial_id in self._changes:
            self._settle(trial_id)
            del self._changes[trial_id]
        return self._told.groups[group_id][trial_id]

    def _change(self, trial_id: str, **changes: Any) -> None:
        if trial_id in self._group_of:
            self._changes.setdefault(trial_id, {}).update(changes)

    def _settle(self, trial_id: str) -> None:
        trials, changes = self._told.groups[self._group_of[trial_id]], self._changes[trial_id]
        known = trials[trial_id]
        trials[trial_id] = TrialHistory(**changes) if known is _UNSETTLED else structs.replace(known, **changes)
