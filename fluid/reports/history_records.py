"""What :class:`fluid.reports.history.RunHistory` finds in a journal: entries, stays, waits and measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from fluid.errors import InvalidFieldError
from fluid.resources import Requires

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


def is_set_aside(paused: Entry) -> bool:
    """Whether it is the session that has paused a trial, to save it before a deadline, and not the user."""
    return str(paused.fields.get("why", "")).startswith("set aside")


def why_paused(paused: Entry) -> str:
    """Why a trial rests, in words."""
    return "set aside, as no further one would end in time" if is_set_aside(paused) else "paused by the user"
