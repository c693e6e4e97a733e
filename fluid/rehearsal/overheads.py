"""What packing, scaling, resizes and moves cost in a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass

from fluid.errors import require_number


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """The overheads of the runtime model (docs/theory.md, section 1), and the seconds of starts and moves.

    Example:
        >>> from fluid.rehearsal import Overheads
        >>> overheads = Overheads(alpha=1.2, lane_s=8.0, source="measured on one H200")
        >>> overheads.alpha, overheads.epsilon
        (1.2, 0.0)

    Attributes:
        alpha: of two trials on one device, each takes so many times what it would take with half of a device.
        beta: of each further device of a trial.
        epsilon: seconds of a resize.
        lane_s: seconds until a new lane is ready.
        start_s: seconds until a trial is set up in a lane.
        save_s, restore_s: seconds to save a trial, and to go on from what was saved.
        source: where these come from, in words, for people.

    Raises:
        InvalidFieldError: one of them cannot be used.
    """

    alpha: float = 1.0
    beta: float = 1.0
    epsilon: float = 0.0
    lane_s: float = 0.0
    start_s: float = 0.0
    save_s: float = 0.0
    restore_s: float = 0.0
    source: str = "none: packing, scaling and moves cost nothing"

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            require_number(name, getattr(self, name), at_least=1.0)
        for name in ("epsilon", "lane_s", "start_s", "save_s", "restore_s"):
            require_number(name, getattr(self, name), at_least=0.0)


#: Nothing costs anything.
FREE = Overheads()
