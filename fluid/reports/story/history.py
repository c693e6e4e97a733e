"""What happened in a run, from its journal: who held which devices, who waited for what, and what each trial met.

It reads the journal's entries as they are, not through :func:`fluid.results.journal.replay`, and passes over what it
does not know: entries of later versions, and fields that are missing.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain
from typing import Any, NamedTuple

from fluid.engine.events import ELSEWHERE, OFFERED, SET_ASIDE
from fluid.errors import InvalidFieldError
from fluid.resources import Device, Requires
from fluid.results.iterations import FinishedIterations
from fluid.results.run_files import device_from
from fluid.sizing.held_time import HeldTime

# -- history records -----------------------------------------------------------------------------
#
# What :class:`fluid.reports.story.history.RunHistory` finds in a journal: entries, stays, waits and measurements.


#: What a reader of an entry raises that is not as it should be: of an older Fluid, and damaged.
UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


class Entry(NamedTuple):
    """An entry of the journal.

    Attributes:
        at: seconds since the first iteration of the run began; negative before.
        what: its kind.
        fields: the other fields.
    """

    at: float
    what: str
    fields: Mapping[str, Any]


@dataclass
class Stay:
    """A stretch in which a trial held the same devices.

    Attributes:
        trial: the submitted trial.
        start, end: seconds; infinite if the trial held them when the journal ended.
        width: its width.
        devices: their indices.
        beside: trials that it shared its device with when it came.
        lanes: its lanes.
        joins: those of them that were in its lane, to be fused with it or to take turns with it.
        takes_turns: whether it takes turns with them.
        warm: whether a trial had been set up before in each of its lanes.
        set_up: when the trial was set up there; infinite if its lane kept its state, or it came by a resize.
    """

    trial: str
    start: float
    width: float
    devices: tuple[int, ...]
    beside: tuple[str, ...] = ()
    end: float = math.inf
    warm: bool = False
    set_up: float = math.inf
    lanes: tuple[int, ...] = ()
    joins: tuple[str, ...] = ()
    takes_turns: bool = False

    @property
    def shares_lane(self) -> bool:
        """Whether it joins trials in their lane; those that are fused are all in one."""
        return bool(self.joins) and (self.takes_turns or len(self.joins) == len(self.beside))


@dataclass(frozen=True)
class Reason:
    """Why trials of one line waited.

    Attributes:
        at: from when on, seconds.
        reason: ``"DEVICES"``, ``"MEMORY"`` or ``"LANE"``.
        note: the fields of the note.
        devices: number of devices at that time.
    """

    at: float
    reason: str
    note: Mapping[str, Any]
    devices: int


@dataclass
class Wait:
    """A stretch in which a trial was queued.

    Attributes:
        trial: the submitted trial.
        start, end: seconds; infinite if the trial waited when the journal ended.
        reasons: why, in order; empty if it started at once, or the journal does not say.
    """

    trial: str
    start: float
    end: float = math.inf
    reasons: list[Reason] = field(default_factory=list)


class Measured(NamedTuple):
    """Measurements of a profile key on a device model that changed how far its trials are packed.

    Attributes:
        at: when, seconds.
        packing: c, the packing limit.
        alpha: packing overhead.
        model: the device model.
        seconds: per iteration, alone on one device; ``None`` if unknown.
        rows: most trials that are fused; 1 if none are.
    """

    at: float
    packing: int
    alpha: float
    model: str | None
    seconds: float | None = None
    rows: int = 1


def requires_of(spec: Mapping[str, Any]) -> Requires | None:
    """What a trial requires of devices, as the journal has it; ``None`` for nothing, or what cannot be read."""
    asked = spec.get("requires")
    if not isinstance(asked, Mapping):
        return None
    known = {each.name for each in fields(Requires)}
    try:
        requires = Requires(**{name: value for name, value in asked.items() if name in known})
    except InvalidFieldError:
        return None
    return requires if requires.asks else None


#: Why a trial rests that the user has not paused, in words, by what its journal says.
_WORDS = {
    SET_ASIDE: "set aside, as no further one would end in time",
    OFFERED: "set aside, as another driver may run it",
    ELSEWHERE: "left to the other drivers",
    "extended": "left to the other drivers, with further iterations",  # Only what they run rests then.
}


def is_set_aside(paused: Entry) -> bool:
    """Whether it is the session that has paused a trial, or another driver that runs it, and not the user."""
    return paused.fields.get("why") in _WORDS


def is_elsewhere(paused: Entry) -> bool:
    """Whether it is other drivers that may run the trial."""
    return paused.fields.get("why") in (ELSEWHERE, "extended")


def is_awaiting(why: str) -> bool:
    """Whether a trial is queued for the state from which it starts, and not for a device."""
    return why.startswith(("waits for the state of", "waits for its start state"))


def why_paused(paused: Entry) -> str:
    """Why a trial rests, in words."""
    return _WORDS.get(str(paused.fields.get("why")), "paused by the user")


# -- history -------------------------------------------------------------------------------------


#: Most devices of which the trials are named.
_MOST_DEVICES = 6


class RunHistory:
    """Follows a journal entry by entry.

    Args:
        done: the finished iterations of the run, which give the time axis.

    Attributes:
        of_trial: the entries that name a trial, by submitted trial.
        done: the newest iteration that each submitted trial has reported.
        group_of: the group of each submitted trial.
        lateness: how groups stood with regard to their deadlines, in order, by group.
        stays, waits: by submitted trial, in order.
        measured: by profile key, in order, those of all device models.
        key_of: the profile key of each submitted trial.
        start, end: seconds; times of the first and the last entry.
        zero: time 0 on the session's clock, seconds: when the first iteration began; if none has finished, when the
            first entry was written.
        drained: when a device, or with ``None`` the session, began to be drained: nothing starts there any more.
        paused: the trials that the user had paused when the journal ended.
        kinds: the kind of each device that there has been.
        devices: those devices, as far as the journal can be read.
        requires: what trials require of devices, of those that do, by submitted trial.
        meter: for how long devices were held.
        tells: whether the journal has notes about starts; journals of older versions have none.
    """

    def __init__(self, done: FinishedIterations) -> None:
        self.of_trial: dict[str, list[Entry]] = {}
        self.stays: dict[str, list[Stay]] = {}
        self.waits: dict[str, list[Wait]] = {}
        self.lateness: dict[str, list[Entry]] = {}
        self.done: dict[str, int] = {}
        self.group_of: dict[str, str] = {}
        self.measured: dict[str, list[Measured]] = {}
        self.key_of: dict[str, str] = {}
        self.start = self.end = self.zero = 0.0
        self.drained: dict[int | None, float] = {}
        self.tells = False
        self.paused: set[str] = set()
        self.kinds: dict[int, str] = {}
        self.devices: dict[int, Device] = {}
        self.requires: dict[str, Requires] = {}
        self.models: dict[int, str | None] = {}
        self.meter = HeldTime()
        #: Trials on each device, and the devices, while the journal is read.
        self._on: dict[int, list[str]] = {}
        self._devices: set[int] = set()
        #: Lanes in which a trial was set up.
        self._warm: set[int] = set()
        #: Times at which trials got devices, in order.
        self._placed_at: list[float] = []
        #: The stays on each device by their start, and the latest end of those up to each.
        self._on_device: dict[int, list[Stay]] = {}
        self._latest_ends: dict[int, list[float]] = {}
        #: The line that each trial joined last; by line, its present reason, and the trials that wait in it.
        self._line_of: dict[str, Hashable] = {}
        self._reason_of: dict[Hashable, Reason] = {}
        self._in_line: dict[Hashable, dict[str, Wait]] = {}
        self._handlers: dict[str, Callable[[Entry], None]] = {
            "DeviceAdded": self._device_added,
            "NoteDeviceLost": self._device_lost,
            "GroupSubmitted": self._submitted,
            "TrialsAdded": self._submitted,
            "GroupRecovered": self._recovered,
            "NotePlaced": self._placed,
            "TrialStarted": self._started,
            "NoteWaiting": self._waiting,
            "NoteQueued": self._queued,
            "NotePaused": self._paused,
            "NoteResize": self._resized,
            "NoteMeasured": self._was_measured,
            "DeviceDraining": self._draining,
            "SessionDraining": self._draining,
            "ReportEnd": self._ended,
            "IterationReported": self._reported,
            "NoteLateness": self._stands,
        }
        self._clock = done.clock() if done.by_trial else None
        self.zero = done.origin
        self._begun = False
        #: The time of the entry before.
        self._before = 0.0

    def extend(self, entries: Iterable[Mapping[str, Any]]) -> set[str]:
        """Takes further entries, in the order written; returns the trials that they name."""
        named = set[str]()
        for line in entries:
            entry = _entry(line)
            if entry is None:
                continue
            if not self._begun and self._clock is None:
                self.zero = entry.at
            at = entry.at - self.zero if self._clock is None else self._clock.seconds(entry.at)
            if not self._begun:
                self.start = self.end = at
                self._begun = True
            self._before, self.end = self.end, max(self.end, at)
            entry = entry._replace(at=at)
            if isinstance(trial := entry.fields.get("trial_id"), str):
                self.of_trial.setdefault(trial, []).append(entry)
                named.add(trial)
            handler = self._handlers.get(entry.what)
            if handler is not None:
                with contextlib.suppress(*UNUSABLE):  # An entry that is not as it should be.
                    handler(entry)
        self._index()
        return named

    def _index(self) -> None:
        """Orders the stays on each device by time."""
        self._on_device, self._latest_ends = {}, {}
        for stays in self.stays.values():
            for stay in stays:
                for device in stay.devices:
                    self._on_device.setdefault(device, []).append(stay)
        self._placed_at.sort()
        for device, there in self._on_device.items():
            there.sort(key=lambda stay: stay.start)
            self._latest_ends[device] = list(accumulate((stay.end for stay in there), max))

    def is_waiting(self, trial: str) -> bool:
        """Whether a trial was queued when the journal ended, so far as the journal tells."""
        waits = self.waits.get(trial, [])
        return self.tells and bool(waits) and math.isinf(waits[-1].end)

    def placed_between(self, start: float, end: float) -> int:
        """How many times a trial got devices after one time and before another."""
        return bisect.bisect_left(self._placed_at, end) - bisect.bisect_right(self._placed_at, start)

    def fitting(self, trial: str) -> frozenset[int] | None:
        """The devices, of all that there have been, that are as a trial requires; ``None`` if it requires nothing."""
        requires = self.requires.get(trial)
        if requires is None:
            return None
        return frozenset(index for index, device in self.devices.items() if requires.met_by(device))

    def taken_at(self, at: float, only: frozenset[int] | None = None) -> dict[int, tuple[str, ...]]:
        """The trials on each device at a time, for the first few of the devices that were held, or of ``only``."""
        found: dict[int, tuple[str, ...]] = {}
        for device in sorted(self._on_device if only is None else only.intersection(self._on_device)):
            stays, latest_ends = self._on_device[device], self._latest_ends[device]
            there = []
            position = bisect.bisect_right(stays, at, key=lambda stay: stay.start) - 1
            while position >= 0 and latest_ends[position] > at:
                if stays[position].end > at:
                    there.append(stays[position].trial)
                position -= 1
            if there:
                found[device] = tuple(reversed(there))
            if len(found) == _MOST_DEVICES:
                break
        return found

    def seconds_alone(self, trial: str, at: float) -> float | None:
        """Seconds of an iteration of a trial's key alone on a device, as known at a time; ``None`` if unknown."""
        of_key = self.measured.get(self.key_of.get(trial, ""), [])
        return next((each.seconds for each in reversed(of_key) if each.at <= at and each.seconds is not None), None)

    def stay_at(self, trial: str, at: float) -> Stay | None:
        """The stay in which a trial was at a time; ``None`` if it held no device."""
        return next((stay for stay in self.stays.get(trial, ()) if stay.start <= at < stay.end), None)

    # -- entries -------------------------------------------------------------------------------------------

    def _device_added(self, entry: Entry) -> None:
        device = entry.fields["device"]
        index = int(device["index"])
        if index in self.meter.held:  # The session was resumed: it had given its devices back by its last entry.
            self.meter.all_left(self._before)
            for trial in list(dict.fromkeys(chain.from_iterable(self._on.values()))):
                self._leave(trial, entry.at)  # Lanes have the same numbers again, and groups come one after another.
        self.meter.came(index, entry.at)
        self._devices.add(index)
        self.kinds[index] = str(device.get("kind", "device"))
        with contextlib.suppress(InvalidFieldError, TypeError):
            self.devices[index] = device_from(device)
        self.models[index] = device.get("model")

    def _device_lost(self, entry: Entry) -> None:
        self._devices.discard(int(entry.fields["device_id"]))
        self.meter.left(int(entry.fields["device_id"]), entry.at)

    def _draining(self, entry: Entry) -> None:
        device = entry.fields.get("device_id")
        self.drained.setdefault(None if device is None else int(device), entry.at)

    def _submitted(self, entry: Entry) -> None:
        group = str(entry.fields["group_id"])
        for spec in entry.fields["trials"]:
            self.group_of[str(spec["trial_id"])] = group
            self._begin(str(spec["trial_id"]), spec, entry)

    def _recovered(self, entry: Entry) -> None:
        """The session was resumed: all that ran before has left its devices."""
        self.drained.pop(None, None)
        for history in entry.fields["trials"]:
            trial = str(history["trial"]["trial_id"])
            self.group_of[trial] = str(entry.fields["group_id"])
            self._leave(trial, entry.at)
            self._end_wait(trial, entry.at)
            fields = {name: history.get(name) for name in ("reported", "checkpoint", "ended", "budget", "paused")}
            self.of_trial.setdefault(trial, []).append(Entry(entry.at, entry.what, fields))
            self.key_of[trial] = str(history["trial"].get("profile_key", ""))
            if (requires := requires_of(history["trial"])) is not None:
                self.requires[trial] = requires
            if history.get("ended") is None and history.get("paused"):
                self.paused.add(trial)
            elif history.get("ended") is None:
                self._wait(trial, entry.at)

    def _begin(self, trial: str, spec: Mapping[str, Any], entry: Entry) -> None:
        self.of_trial.setdefault(trial, []).append(Entry(entry.at, entry.what, spec))
        if (requires := requires_of(spec)) is not None:
            self.requires[trial] = requires
        self.key_of[trial] = str(spec.get("profile_key", ""))
        self._wait(trial, entry.at)

    def _placed(self, entry: Entry) -> None:
        self.tells = True
        trial = str(entry.fields["trial_id"])
        self._end_wait(trial, entry.at)
        self._leave(trial, entry.at)
        self._placed_at.append(entry.at)
        stay = self._stay(trial, entry)
        stay.warm = self._warm.issuperset(entry.fields["lane_ids"])
        stay.lanes = tuple(entry.fields["lane_ids"])
        stay.joins = tuple(other for other in stay.beside if self.stays[other][-1].lanes == stay.lanes)
        stay.takes_turns = bool(entry.fields.get("takes_turns"))  # Not written by earlier versions.

    def _started(self, entry: Entry) -> None:
        self._warm.add(entry.fields["lane_id"])
        stays = self.stays.get(str(entry.fields["trial_id"]), [])
        if stays and math.isinf(stays[-1].end):
            stays[-1].set_up = min(stays[-1].set_up, entry.at)

    def _waiting(self, entry: Entry) -> None:
        self.tells = True
        line = entry.fields["line"]
        reason = Reason(entry.at, str(entry.fields["reason"]), entry.fields, len(self._devices))
        self._reason_of[line] = reason
        in_line = self._in_line.setdefault(line, {})
        for trial in map(str, entry.fields["trial_ids"]):
            if (before := self._line_of.get(trial)) is not None:
                self._in_line[before].pop(trial, None)
            self._line_of[trial] = line
            if self.is_waiting(trial):
                wait = in_line[trial] = self.waits[trial][-1]
                wait.reasons = [known for known in wait.reasons if known.at > wait.start]
        for wait in in_line.values():
            wait.reasons.append(reason)

    def _stands(self, entry: Entry) -> None:
        self.lateness.setdefault(str(entry.fields["group_id"]), []).append(entry)

    def _queued(self, entry: Entry) -> None:
        trial = str(entry.fields["trial_id"])
        self.paused.discard(trial)
        self._leave(trial, entry.at)
        self._end_wait(trial, entry.at)
        if not is_awaiting(str(entry.fields.get("why"))):
            self._wait(trial, entry.at)

    def _paused(self, entry: Entry) -> None:
        trial = str(entry.fields["trial_id"])
        self._leave(trial, entry.at)
        self._end_wait(trial, entry.at)
        if not is_set_aside(entry):
            self.paused.add(trial)

    def _resized(self, entry: Entry) -> None:
        trial = str(entry.fields["trial_id"])
        self._leave(trial, entry.at)
        self._stay(trial, entry)

    def _was_measured(self, entry: Entry) -> None:
        fields = entry.fields
        seconds, rows = fields.get("seconds"), int(fields.get("rows", 1))
        # Of trials that were fused from the start on, none was alone.
        was_alone = rows == 1 or fields.get("fused_gain", 1.0) != 1.0
        alone = float(seconds) if was_alone and isinstance(seconds, (int, float)) and seconds > 0.0 else None
        found = Measured(entry.at, int(fields["packing"]), float(fields["alpha"]), fields.get("model"), alone, rows)
        self.measured.setdefault(str(fields["profile_key"]), []).append(found)

    def _reported(self, entry: Entry) -> None:
        self.done[str(entry.fields["trial_id"])] = int(entry.fields["iteration"])

    def _ended(self, entry: Entry) -> None:
        trial = str(entry.fields["trial_id"])
        self.paused.discard(trial)
        self._leave(trial, entry.at)
        self._end_wait(trial, entry.at)

    # -- steps ---------------------------------------------------------------------------------------------

    def _stay(self, trial: str, entry: Entry) -> Stay:
        devices = tuple(int(device) for device in entry.fields["device_ids"])
        beside = dict.fromkeys(other for device in devices for other in self._on.get(device, ()))
        stay = Stay(trial, entry.at, float(entry.fields["width"]), devices, tuple(beside))
        self.stays.setdefault(trial, []).append(stay)
        for device in devices:
            self._on.setdefault(device, []).append(trial)
        return stay

    def _leave(self, trial: str, at: float) -> None:
        stays = self.stays.get(trial)
        if stays and math.isinf(stays[-1].end):
            stays[-1].end = at
            for device in stays[-1].devices:
                self._on[device].remove(trial)

    def _wait(self, trial: str, at: float) -> None:
        wait = Wait(trial, at)
        self.waits.setdefault(trial, []).append(wait)
        # A trial that joins the line it was in last is not noted again.
        line = self._line_of.get(trial)
        if line in self._reason_of:
            wait.reasons.append(self._reason_of[line])
            self._in_line[line][trial] = wait

    def _end_wait(self, trial: str, at: float) -> None:
        waits = self.waits.get(trial)
        if waits and math.isinf(waits[-1].end):
            waits[-1].end = at
            self._in_line.get(self._line_of.get(trial), {}).pop(trial, None)


def _entry(fields: Mapping[str, Any]) -> Entry | None:
    at, what = fields.get("at"), fields.get("what")
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not math.isfinite(at) or not isinstance(what, str):
        return None
    return Entry(float(at), what, fields)
