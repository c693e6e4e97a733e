"""What the engine tells the journal about its decisions, for reports: where a trial runs, why it waits, what it costs.

No backend and no submitter sees these. :mod:`fluid.reports.history` reads them.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum

from fluid.engine.commands import Notice


class WaitReason(str, Enum):
    """Why the engine could not start a queued trial."""

    #: No device has an open slot, or too few devices are idle for the trial's width.
    DEVICES = "DEVICES"
    #: A device has an open slot, and too little free memory.
    MEMORY = "MEMORY"
    #: The trial's state cannot be saved, and another trial runs in the lane that keeps it.
    LANE = "LANE"
    #: No device, free or taken, is as the trial requires: it waits until such a one comes.
    REQUIREMENTS = "REQUIREMENTS"


@dataclass(frozen=True, slots=True)
class NotePlaced(Notice):
    """A trial got devices and lanes, and starts there as soon as the lanes are ready.

    Attributes:
        iteration: iterations done by the state that it goes on from; 0 if it begins afresh.
        resident: whether one of these lanes keeps that state.
        alpha: packing overhead of its profile key, if it may share its device; ``None`` if not.
        predicted_s: seconds per iteration, alone on a device of speed 1, as its config tells them; ``None`` if that was
            not predicted, or the trial was observed by itself.
        cohort: the profile key of its cohort; ``None`` if its key is not parted.
        takes_turns: whether it runs an iteration in turn with other trials of its lane, and is not fused with them.
    """

    trial_id: str
    _: KW_ONLY
    at: float
    width: float
    device_ids: tuple[int, ...]
    lane_ids: tuple[int, ...]
    iteration: int = 0
    resident: bool = False
    alpha: float | None = None
    predicted_s: float | None = None
    cohort: str | None = None
    takes_turns: bool = False


@dataclass(frozen=True, slots=True)
class NoteKeptWidth(Notice):
    """A resize that the re-planner wanted was not begun: it would not have paid for all (docs/theory.md, section 16).

    Told once for a trial and a width, until it runs at another width.

    Attributes:
        width: the width that it does not get.
        old_width: the width that it keeps.
        gain: predicted seconds by which the trial alone would end earlier; negative if it makes room for others.
        stall_s: predicted seconds that trials would stand still for it, its own pause included.
    """

    trial_id: str
    _: KW_ONLY
    at: float
    width: float
    old_width: float
    gain: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Device memory, in bytes, as placement saw it.

    Attributes:
        free: bytes that one more trial could have had.
        usable: bytes that trials may fill in all.
    """

    device_id: int
    free: float
    usable: float


@dataclass(frozen=True, slots=True)
class NoteWaiting(Notice):
    """Trials of one line wait. Trials of a line are alike to placement: they wait for the same.

    Written when trials join a line, and when its reason or width changes. A trial is in the line that it joined last.

    Attributes:
        line: number of the line.
        trial_ids: the trials that join it now.
        width: the width that the trials of the line wait for.
        reason: why the first of the line could not start.
        need_bytes: device memory that each needs; ``None`` if unknown.
        memory: for the reason MEMORY, the devices with an open slot, at most four, those with the most memory first.
        wanted: for the reason REQUIREMENTS, the devices that they wait for, in words.
    """

    line: int
    _: KW_ONLY
    at: float
    trial_ids: tuple[str, ...]
    width: float
    reason: WaitReason
    need_bytes: float | None = None
    memory: tuple[FreeMemory, ...] = ()
    wanted: str | None = None


@dataclass(frozen=True, slots=True)
class NoteQueued(Notice):
    """A trial that had a device, or had ended, waits again.

    Attributes:
        iteration: iterations done by the state that it will go on from.
        why: for people.
        kind: the kind of failure that sent it back (:class:`fluid.engine.events.Failure`); ``None`` if none did.
        failures: failures counted so far.
    """

    trial_id: str
    _: KW_ONLY
    at: float
    iteration: int
    why: str
    kind: str | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True)
class NotePaused(Notice):
    """A trial that the user paused holds no device any more, and waits for none until it is resumed.

    Attributes:
        iteration: iterations done by the state that it will go on from.
        why: for people.
        kind: the kind of failure after which it rests; ``None`` if there was none.
        failures: failures counted so far.
    """

    trial_id: str
    _: KW_ONLY
    at: float
    iteration: int
    why: str
    kind: str | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True)
class NotePreempted(Notice):
    """A running trial was told to pause after its iteration.

    Attributes:
        successor: the trial that takes its device over; ``None`` if too many trials shared the device.
        co_residents: trials on its device, itself included.
        urgent_group: group of the successor, if it preempts trials of groups of a lower priority.
    """

    trial_id: str
    _: KW_ONLY
    at: float
    successor: str | None
    co_residents: int
    urgent_group: str | None = None


@dataclass(frozen=True, slots=True)
class NoteTrial(Notice):
    """Something rare happened to a trial.

    Attributes:
        text: for people.
    """

    trial_id: str
    _: KW_ONLY
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class NoteMeasured(Notice):
    """Measurements changed how far trials of a profile key are packed or widened, or gave its first pace.

    Attributes:
        model: the device model on which that was measured; ``None`` if unknown. Widths hold for all models.
        seconds: per iteration, alone on one device of speed 1; ``None`` if unknown.
        packing: c, the packing limit.
        width: d, the width limit.
        rows: most trials that are fused on a device; 1 if none are.
        fused_gain: how many times the iterations per second of one trial alone so many do, as far as measured.
    """

    profile_key: str
    _: KW_ONLY
    at: float
    seconds: float | None
    packing: int
    width: int
    alpha: float
    beta: float
    model: str | None = None
    rows: int = 1
    fused_gain: float = 1.0


@dataclass(frozen=True, slots=True)
class NoteHung(Notice):
    """A trial has given no result for long; its stacks were dumped.

    Attributes:
        seconds: without a result until then.
        limit: seconds without a result after which its lanes are killed; ``None`` if they are not.
        killed: whether its lanes are killed now.
    """

    trial_id: str
    _: KW_ONLY
    at: float
    seconds: float
    limit: float | None
    killed: bool = False


@dataclass(frozen=True, slots=True)
class NoteDrained(Notice):
    """A drain has ended: everything was saved, or its deadline has come, or the device was lost.

    Attributes:
        device_id: the device, which is removed; ``None`` for the session.
        unsaved: ids of the trials that lose progress if what was drained goes now.
    """

    at: float
    _: KW_ONLY
    device_id: int | None
    unsaved: tuple[str, ...]
