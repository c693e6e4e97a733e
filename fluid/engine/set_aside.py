"""Trials that are set aside: as a deadline nears, or the money ends, no further iteration would end in time."""

from __future__ import annotations

from dataclasses import dataclass

from fluid.engine.events import Event

#: Why a trial is held: see :class:`fluid.engine.records.TrialRecord`.
BY_USER, SET_ASIDE = "paused by the user", "set aside: no further iteration would end in time"


@dataclass(frozen=True, slots=True)
class TrialSetAside(Event):
    """A trial pauses after its iteration, is saved to disk, and starts no more; one that waits rests."""

    trial_id: str
