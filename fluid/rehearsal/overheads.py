"""What packing, scaling, resizes and moves cost in a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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

    def with_given(self, given: Mapping[str, float]) -> Overheads:
        """The same with some that a user gives in place of these.

        Example:
            >>> from fluid.rehearsal import Overheads
            >>> Overheads(lane_s=8.0, source="measured on one H200").with_given({"alpha": 1.2}).source
            'given: alpha 1.2; others measured on one H200'

        Args:
            given: by name.

        Raises:
            InvalidFieldError: one of them cannot be used.
        """
        if not given:
            return self
        told = ", ".join(f"{name} {value:g}" for name, value in given.items())
        rest = "" if self == FREE else f"; others {self.source}"
        return replace(self, **dict(given), source=f"given: {told}{rest}")


#: Nothing costs anything.
FREE = Overheads()
