"""How a session stands to its deadline and its budget, as data: what the live view shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fluid.sizing.goals import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalStatus:
    """How a session stands to its deadline and its budget.

    Attributes:
        deadline_s: seconds left until the deadline; ``None`` without one.
        devices: that are to be held; ``None`` while too little was measured to say.
        odds: that the deadline is met; ``None`` if unknown.
        meets: whether it is met with the odds asked for; ``None`` if unknown.
        earliest_s: seconds from now by which all would end with these odds, if the deadline cannot be met.
        device_seconds: seconds for which devices were held so far, added up over the devices.
        spent_usd, budget_usd: US dollars spent and to spend at most; ``None`` if unknown.
        missing_usd: US dollars by which the expected cost of what is left exceeds what the budget has left; ``None``
            while the budget suffices, or without one.
    """

    deadline_s: float | None = None
    devices: int | None = None
    odds: float | None = None
    meets: bool | None = None
    earliest_s: float | None = None
    device_seconds: float = 0.0
    spent_usd: float | None = None
    budget_usd: float | None = None
    missing_usd: float | None = None

    @property
    def is_missed(self) -> bool:
        """Whether the deadline cannot be met, or the budget does not suffice."""
        return self.meets is False or self.missing_usd is not None

    @property
    def text(self) -> str:
        """In a line, for the live view; empty if there is nothing to say."""
        parts = []
        if self.deadline_s is not None:
            parts.append(f"deadline in {format_duration(self.deadline_s)}")
            if self.meets is False and self.earliest_s is not None:
                parts[-1] += f" cannot be met: the earliest end is in {format_duration(self.earliest_s)}"
            elif self.odds is not None:
                parts[-1] += f", met with {self.odds:.0%}"
        if self.devices is not None:
            parts.append(f"{self.devices} device{'s' if self.devices != 1 else ''} needed")
        if self.spent_usd is not None:
            limit = "" if self.budget_usd is None else f" of ${self.budget_usd:.2f}"
            parts.append(f"${self.spent_usd:.2f}{limit} spent")
        if self.missing_usd is not None:
            parts.append(f"the budget does not suffice: ${self.missing_usd:.2f} more are expected to be needed")
        return "; ".join(parts)


# -- forecast ------------------------------------------------------------------------------------
#
# A forecast: when a group of trials ends, with odds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """When a group ends, with odds.

    Example:
        >>> from fluid import Forecast
        >>> Forecast(seconds={0.5: 60.0, 0.9: 90.0}, age_s=2.0).seconds[0.9]
        90.0

    Attributes:
        seconds: by probability, the seconds from now by which the group has ended with that probability.
        age_s: seconds since this was worked out; what has happened since is not in it.
    """

    seconds: Mapping[float, float]
    age_s: float = 0.0


# -- deadlines -----------------------------------------------------------------------------------
#
# The deadlines of a session: its own, and those of sweeps that run in it.


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
