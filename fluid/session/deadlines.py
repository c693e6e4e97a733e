"""The deadlines of a session: its own, and those of sweeps that run in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fluid.sizing.goals import format_duration


class SweepInTime(Protocol):
    """A sweep with a deadline of its own: what cannot end by then rests. Called in the session's thread."""

    def open_trials(self) -> list[str]:
        """Ids of its trials that have not ended and were not stopped."""
        ...

    def cut(self, reason: str, trial_ids: Sequence[str]) -> None:
        """Has these trials rest after their iteration."""
        ...

    def close(self, reason: str, run_on: Sequence[str]) -> None:
        """Starts nothing any more, and has all trials but these rest."""
        ...


@dataclass(slots=True, eq=False)
class DeadlineInForce:
    """A deadline of the session, or of one of its sweeps.

    Attributes:
        at: seconds on the clock of the events.
        seconds: as it was given.
        sweep: the sweep; ``None`` for the session.
        look_at: when to look at what can still end by then.
        soonest_s: seconds that an iteration of the sweep takes at least, by the last look; infinite if unknown.
    """

    at: float
    seconds: float
    sweep: SweepInTime | None = None
    look_at: float = -math.inf
    soonest_s: float = math.inf

    @property
    def reason(self) -> str:
        """Why what has not ended is over then."""
        return f"the deadline of {format_duration(self.seconds)} has come"
