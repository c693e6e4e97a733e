"""Fused trials: several trials of one shape that train in one step, in one lane."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from fluid.engine.events import Event


@dataclass(frozen=True, slots=True)
class FusionLimited(Event):
    """A lane has found that it can train at most so many trials like this one in one step.

    Attributes:
        rows: 1 if they cannot be fused; more if so many fit into the device's memory.
        reason: why, in one line.
    """

    trial_id: str
    lane_id: int
    _: KW_ONLY
    rows: int
    reason: str
