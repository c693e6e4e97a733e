"""A trial that goes on from an earlier state than that of its newest checkpoint: the event, and what is told of it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from fluid.engine.commands import TrialNotice
from fluid.engine.events import Checkpoint, Event


@dataclass(frozen=True, slots=True)
class TrialSetBack(Event):
    """A trial could not be restored from the checkpoint it was to start from; comes before the answer to the command.

    Attributes:
        checkpoint: an earlier one, from which it was restored instead; ``None`` if it begins afresh.
        reason: why, in one line.
        cannot_load: whether the trial's own code raised for every checkpoint that is not damaged.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    checkpoint: Checkpoint | None
    reason: str
    cannot_load: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSetBack(TrialNotice):
    """The trial goes on from an earlier state than that of its newest checkpoint, which is damaged or gone.

    Attributes:
        lost: iterations done by the state that is lost.
        checkpoint: the one that it goes on from; ``None`` if it begins afresh.
        reason: why, in one line.
        cannot_load: whether the trial's own code raised for every checkpoint that is not damaged; Fluid then moves it
            no more.
    """

    at: float
    lost: int
    checkpoint: Checkpoint | None
    reason: str
    cannot_load: bool
