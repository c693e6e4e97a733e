"""What packing, scaling, resizes and moves cost in a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fluid.errors import require_number

#: What each overhead is where it costs nothing.
_COSTS = {
    **{"alpha": 1.0, "beta": 1.0, "epsilon": 0.0},
    **dict.fromkeys(("server_s", "lane_s", "start_s", "save_s", "restore_s"), 0.0),
}
#: Said where alpha is 1.
UNPACKED = "trials are not packed, as it is not known what that costs"


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """The overheads of the runtime model (docs/theory.md, section 1), and the seconds of starts and moves.

    Example:
        >>> from fluid.rehearsal import Overheads
        >>> overheads = Overheads(alpha=1.2, lane_s=8.0, source="measured on one H200")
        >>> overheads.alpha, overheads.epsilon
        (1.2, 0.0)
        >>> Overheads(alpha=1.2, lane_s=8.0).source
        'given: alpha 1.2, lane_s 8; all else costs nothing'

    Attributes:
        alpha: each of two trials on one device takes so many times as long as alone, and each of p trials
            ``alpha**(p - 1)`` times. At 1, the default, trials are not packed, as it is not known what that costs.
        beta: on two devices, a trial takes so many times half as long as on one, and on w devices
            ``beta**(w - 1) / w`` times as long.
        epsilon: seconds of a resize.
        server_s: seconds until the fork server of a host has loaded what trials import; its first lanes wait for it.
        lane_s: seconds until a new lane is ready. A trial with a process of its own waits for that each time that it
            starts, unless a spare lane is ready.
        start_s: seconds until a trial is set up in a lane.
        save_s, restore_s: seconds to save a trial, and to go on from what was saved.
        source: where these come from, in words, for people; empty, the default, for what is given here.

    Raises:
        InvalidFieldError: one of them cannot be used.
    """

    alpha: float = 1.0
    beta: float = 1.0
    epsilon: float = 0.0
    server_s: float = 0.0
    lane_s: float = 0.0
    start_s: float = 0.0
    save_s: float = 0.0
    restore_s: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name, least in _COSTS.items():
            require_number(name, getattr(self, name), at_least=least)
        if not self.source:
            object.__setattr__(self, "source", self._given())

    def _given(self) -> str:
        """What is given, in words."""
        given = [f"{name} {getattr(self, name):g}" for name in _COSTS if getattr(self, name) != _COSTS[name]]
        told = f"given: {', '.join(given)}; all else costs nothing" if given else "none: scaling and moves cost nothing"
        return told if self.alpha > 1.0 else f"{told}; {UNPACKED}"

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
        if self == FREE:
            return replace(self, **dict(given), source="")
        told = ", ".join(f"{name} {value:g}" for name, value in given.items())
        return replace(self, **dict(given), source=f"given: {told}; others {self.source}")


#: Nothing costs anything.
FREE = Overheads()
