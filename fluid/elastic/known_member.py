"""What a controller knows of a member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fluid.elastic.messages import LOOPBACK


@dataclass(slots=True)
class KnownMember:
    """The controller's record of a member.

    Attributes:
        iteration: iterations done; ``None`` until it is prepared.
        address: at which other machines reach its machine.
        metrics: of its last iteration, if it ran that itself.
        has_state: whether it has the trial's state, and not only its initial one.
        broken_generation: the last generation that it reported as broken.
    """

    iteration: int | None = None
    address: str = LOOPBACK
    metrics: Any = None
    has_state: bool = False
    broken_generation: int = 0
