"""What is written down of a session, so that one whose driver was killed can go on. Pure: others write and read files.

One entry, a JSON object, for each event or command that matters then:

* ``GroupSubmitted``, ``GroupRecovered``, ``TrialAdded``, ``BudgetExtended``, ``StopRequested``: what was asked for.
* ``TrialForgotten``: that it is no more.
* ``TrialSaved``: where a trial can go on from.
* ``Report``: how far it was reported; ``ReportEnd``: that it ended, and how.
* ``DeviceAdded``, ``NoteDeviceLost``, ``NoteResize``: what there was to run on, and what trials were given of it.
  Whoever goes on does not need them; reports do.

Calls of trials' methods are not written: nobody waits for them once the driver is gone.

Entries of one call of the engine are written together, events before commands, after the call was accepted and before
its commands are carried out. Profile snapshots (:func:`encode_profile`) may stand anywhere between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fluid.engine.commands import NoteDeviceLost, NoteResize, Report, ReportEnd
from fluid.engine.events import (
    BudgetExtended,
    Checkpoint,
    DeviceAdded,
    Failure,
    GroupRecovered,
    GroupSubmitted,
    StopRequested,
    TrialAdded,
    TrialForgotten,
    TrialHistory,
    TrialSaved,
    TrialSpec,
)
from fluid.errors import InvalidFieldError
from fluid.planning.profile import Profile
from fluid.resources import Device, MemoryNeed

#: Version of what :func:`encode` makes.
VERSION = 1

Entry = dict[str, Any]


@dataclass(frozen=True)
class PastTrial:
    """A trial that was forgotten.

    Attributes:
        group_id: its group.
        history: how it stood then.
        failure: why it failed for good; ``None`` if it did not.
    """

    group_id: str
    history: TrialHistory
    failure: Failure | None = None


@dataclass
class Recovered:
    """What a journal tells about a session.

    Attributes:
        groups: group id -> trial id -> how the trial stood, in order of submission.
        durable: newest checkpoint that outlives its host's memory, by trial id.
        failures: why trials failed for good, by trial id.
        forgotten: ids of trials that were forgotten, by group id.
        past: those trials, as far as they are told of, by id.
        outcomes: what came of trials in their submitter's eyes, where that was said, by id.
        places: devices that came and went, and trials that went on at another width, in order.
        profile: the newest snapshot; ``None`` if none was written.
        at: time of the last entry, on the clock of the session that wrote it.
        torn: whether the last line was cut off, as by a crash.
    """

    groups: dict[str, dict[str, TrialHistory]] = field(default_factory=dict)
    durable: dict[str, Checkpoint] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    forgotten: dict[str, list[str]] = field(default_factory=dict)
    past: dict[str, PastTrial] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    places: list[DeviceAdded | NoteDeviceLost | NoteResize] = field(default_factory=list)
    profile: Profile | None = None
    at: float = 0.0
    torn: bool = False

    def events(self, at: float, readable: Callable[[Checkpoint], bool] = lambda _: True) -> list[GroupRecovered]:
        """What to tell a fresh engine so that it goes on where this session was.

        Args:
            at: seconds, on the clock of the session that goes on.
            readable: whether a checkpoint is still there; where the newest one is not, the newest durable one is
                tried, and the trial begins afresh otherwise.
        """

        def standing(history: TrialHistory) -> TrialHistory:
            choices = (history.checkpoint, self.durable.get(history.trial.trial_id))
            found = next((choice for choice in choices if choice is not None and readable(choice)), None)
            return replace(history, checkpoint=found)

        return [
            GroupRecovered(
                at,
                group_id,
                tuple(standing(history) for history in trials.values()),
                tuple(self.forgotten.get(group_id, ())),
            )
            for group_id, trials in self.groups.items()
        ]

    @property
    def unfinished(self) -> bool:
        """Whether a trial has not ended."""
        return any(history.ended is None for trials in self.groups.values() for history in trials.values())


# -- writing --------------------------------------------------------------------------------------------------


def encode(item: object) -> Entry | None:
    """Makes the entry of an event or command; ``None`` for one that need not be written."""
    if isinstance(item, GroupSubmitted):
        trials = [_spec_to_json(spec) for spec in item.trials]
        return _entry("group", at=item.at, group=item.group_id, trials=trials)
    if isinstance(item, GroupRecovered):
        histories = [_history_to_json(history) for history in item.trials]
        forgotten = list(item.forgotten)
        return _entry("recovered", at=item.at, group=item.group_id, trials=histories, forgotten=forgotten)
    if isinstance(item, TrialAdded):
        return _entry("trial", at=item.at, group=item.group_id, trial=_spec_to_json(item.trial))
    if isinstance(item, BudgetExtended):
        return _entry("extended", at=item.at, trial=item.trial_id, iterations=item.iterations)
    if isinstance(item, StopRequested):
        said = {} if item.outcome is None else {"outcome": item.outcome}
        return _entry("stop", at=item.at, trial=item.trial_id, **said)
    if isinstance(item, TrialForgotten):
        return _entry("forgotten", at=item.at, trial=item.trial_id)
    if isinstance(item, TrialSaved):
        return _entry("saved", at=item.at, trial=item.trial_id, checkpoint=asdict(item.checkpoint))
    if isinstance(item, Report):
        return _entry("iteration", at=item.at, trial=item.trial_id, iteration=item.iteration)
    if isinstance(item, ReportEnd):
        failure = None if item.failure is None else _failure_to_json(item.failure)
        return _entry(
            "end", at=item.at, trial=item.trial_id, state=item.state, iteration=item.iteration, failure=failure
        )
    return _encode_place(item)


def _encode_place(item: object) -> Entry | None:
    """The entry of what tells where trials ran."""
    if isinstance(item, DeviceAdded):
        return _entry("device", at=item.at, device=asdict(item.device))
    if isinstance(item, NoteDeviceLost):
        return _entry("lost", at=item.at, device=item.device_id)
    if isinstance(item, NoteResize):
        place = {"width": item.width, "devices": item.device_ids, "seconds": item.seconds}
        return _entry("resized", at=item.at, trial=item.trial_id, **place)
    return None


def encode_profile(profile: Profile, at: float) -> Entry:
    """Makes the entry of a profile snapshot."""
    return _entry("profile", at=at, profile=profile.to_json())


def _entry(what: str, **content: Any) -> Entry:
    return {"v": VERSION, "what": what, **content}


def _failure_to_json(failure: Failure) -> Entry:
    # The exception is of use to whoever waits for the trial now.
    return {"kind": failure.kind, "message": failure.message, "traceback": failure.traceback}


def _spec_to_json(spec: TrialSpec) -> Entry:
    return asdict(spec)


def _history_to_json(history: TrialHistory) -> Entry:
    return asdict(history)


# -- reading --------------------------------------------------------------------------------------------------


def replay(lines: Iterable[str | bytes]) -> Recovered:
    """Reads a journal.

    Args:
        lines: one entry each. The last one may be cut off; it is passed over.

    Raises:
        InvalidFieldError: a line that is not the last is no entry, or its version or content is unknown.
    """
    reader, bad = _Reader(), None
    for number, line in enumerate(lines, start=1):
        text = line.decode("utf-8", errors="replace") if isinstance(line, bytes) else line
        if not text.strip():
            continue
        if bad is not None:
            raise bad
        try:
            entry = json.loads(text)
        except ValueError:
            bad = InvalidFieldError("journal", text[:80], f"line {number} is not JSON")
            continue
        reader.take(entry, number)
    reader.result.torn = bad is not None
    return reader.result


class _Reader:
    """Follows a session, entry by entry."""

    def __init__(self) -> None:
        self.result = Recovered()
        self._group_of: dict[str, str] = {}
        self._readers = {
            "group": self._group,
            "recovered": self._recovered,
            "trial": self._trial,
            "extended": self._extended,
            "stop": self._stop,
            "forgotten": self._forgotten,
            "saved": self._saved,
            "iteration": self._iteration,
            "end": self._end,
            "device": self._device,
            "lost": self._lost,
            "resized": self._resized,
            "profile": self._profile,
        }

    def take(self, entry: object, number: int) -> None:
        """Takes one entry; ``number`` is its line."""
        if not isinstance(entry, Mapping):
            raise InvalidFieldError("journal", entry, f"line {number} is no entry")
        if entry.get("v") != VERSION:
            reason = f"line {number} is of an unknown version; this Fluid reads version {VERSION}"
            raise InvalidFieldError("v", entry.get("v"), reason)
        if entry.get("what") not in self._readers:
            raise InvalidFieldError("what", entry.get("what"), f"line {number} is unknown")
        try:
            self._readers[entry["what"]](entry)
            self.result.at = max(self.result.at, float(entry["at"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidFieldError("journal", dict(entry), f"line {number} cannot be read: {error!r}") from error

    # Entries about trials that are unknown were written by a session that had refused them; they change nothing.

    def _group(self, entry: Mapping[str, Any]) -> None:
        self.result.groups[entry["group"]] = {}
        for data in entry["trials"]:
            self._add(entry["group"], _new(_spec_from_json(data)))

    def _recovered(self, entry: Mapping[str, Any]) -> None:
        self.result.groups[entry["group"]] = {}
        for data in entry["trials"]:
            self._add(entry["group"], _history_from_json(data))
        self.result.forgotten[entry["group"]] = list(entry.get("forgotten", ()))

    def _trial(self, entry: Mapping[str, Any]) -> None:
        self._add(entry["group"], _new(_spec_from_json(entry["trial"])))

    def _add(self, group_id: str, history: TrialHistory) -> None:
        self._group_of[history.trial.trial_id] = group_id
        self.result.groups[group_id][history.trial.trial_id] = history

    def _extended(self, entry: Mapping[str, Any]) -> None:
        history = self._of(entry)
        if history is not None and history.ended in (None, "DONE"):
            self._change(entry, budget=history.budget + int(entry["iterations"]), ended=None)

    def _stop(self, entry: Mapping[str, Any]) -> None:
        # Whoever asked was told so: it must not run on, though it had not left its lane yet.
        history = self._of(entry)
        if history is not None and entry.get("outcome") is not None:
            self.result.outcomes[entry["trial"]] = str(entry["outcome"])
        if history is not None and history.ended in (None, "DONE"):
            self._change(entry, ended="STOPPED")

    def _forgotten(self, entry: Mapping[str, Any]) -> None:
        trial_id = entry["trial"]
        group_id = self._group_of.pop(trial_id, None)
        if group_id is not None:
            history = self.result.groups[group_id].pop(trial_id)
            self.result.forgotten.setdefault(group_id, []).append(trial_id)
            self.result.durable.pop(trial_id, None)
            self.result.past[trial_id] = PastTrial(group_id, history, self.result.failures.pop(trial_id, None))

    def _saved(self, entry: Mapping[str, Any]) -> None:
        history, checkpoint = self._of(entry), Checkpoint(**entry["checkpoint"])
        if history is not None and (history.checkpoint is None or checkpoint.iteration >= history.checkpoint.iteration):
            self._change(entry, checkpoint=checkpoint)
            if not checkpoint.in_memory:
                self.result.durable[entry["trial"]] = checkpoint

    def _iteration(self, entry: Mapping[str, Any]) -> None:
        self._change(entry, reported=int(entry["iteration"]))

    def _end(self, entry: Mapping[str, Any]) -> None:
        history = self._of(entry)
        if history is None:
            return
        state = str(entry["state"])
        # One that ended of its own accord has less to do than its budget said.
        budget = max(1, int(entry["iteration"])) if state == "DONE" else history.budget
        self._change(entry, ended=state, budget=budget)
        if entry["failure"] is not None:
            self.result.failures[entry["trial"]] = Failure(**entry["failure"])

    def _device(self, entry: Mapping[str, Any]) -> None:
        self.result.places.append(DeviceAdded(float(entry["at"]), Device(**entry["device"])))

    def _lost(self, entry: Mapping[str, Any]) -> None:
        self.result.places.append(NoteDeviceLost(int(entry["device"]), float(entry["at"])))

    def _resized(self, entry: Mapping[str, Any]) -> None:
        devices = tuple(int(device) for device in entry["devices"])
        place = float(entry["width"]), devices, float(entry["seconds"])
        self.result.places.append(NoteResize(str(entry["trial"]), float(entry["at"]), *place))

    def _profile(self, entry: Mapping[str, Any]) -> None:
        self.result.profile = Profile.from_json(entry["profile"])

    def _of(self, entry: Mapping[str, Any]) -> TrialHistory | None:
        group_id = self._group_of.get(entry["trial"])
        return None if group_id is None else self.result.groups[group_id][entry["trial"]]

    def _change(self, entry: Mapping[str, Any], **changes: Any) -> None:
        history = self._of(entry)
        if history is not None:
            group = self.result.groups[self._group_of[entry["trial"]]]
            group[entry["trial"]] = replace(history, **changes)


def _new(spec: TrialSpec) -> TrialHistory:
    return TrialHistory(spec, spec.budget)


def _spec_from_json(data: Mapping[str, Any]) -> TrialSpec:
    memory = data["memory"]
    return TrialSpec(**{**data, "memory": None if memory is None else MemoryNeed(**memory)})


def _history_from_json(data: Mapping[str, Any]) -> TrialHistory:
    checkpoint = data["checkpoint"]
    return TrialHistory(
        **{
            **data,
            "trial": _spec_from_json(data["trial"]),
            "checkpoint": None if checkpoint is None else Checkpoint(**checkpoint),
        }
    )
