"""A profile key's figures as planning uses them, and how far packing and widening were tried."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from fluid.engine import tuning
from fluid.planning.profile import Profile
from fluid.resources import MemoryNeed


@dataclass(slots=True)
class KeyEstimate:
    """What the profile says about one key, read off it when it learnt something.

    Attributes:
        pace: seconds per iteration at width 1; ``None`` until measured.
        packing: c: a key starts alone on a device, and one more co-resident is tried for as long as the last paid.
        width: d: a key starts at width 1, and twice the width is tried for as long as the last one was measured and
            beta allows.
        tried: the widest of them that was measured.
    """

    key: str
    max_packing: int
    max_width: int
    pace: float | None = None
    alpha: float = 1.0
    beta: float = 1.0
    packing: int = 1
    width: int = 1
    tried: int = 1
    memory: MemoryNeed | None = None
    #: Seconds that the latest starts of its trials took, from checkpoints or afresh, and the latest saves.
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    #: (co-residents, width) -> iterations seen.
    observed: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def interruption(self) -> float:
        """Seconds to save a trial and to go on with it elsewhere; a save that nobody has seen is taken for a start."""
        start = median_low(self.starts) if self.starts else 0.0
        return start + (median_low(self.saves) if self.saves else start)

    def worth_observing(self, co_residents: int, width: int) -> bool:
        """Counts an iteration; returns whether the profile should hear of it."""
        seen = self.observed.get((co_residents, width), 0)
        self.observed[co_residents, width] = seen + 1
        return seen < tuning.OBSERVE_ALL or seen % tuning.OBSERVE_EVERY == 0

    def update(self, profile: Profile, *, trying_pays: bool = True) -> bool:
        """Reads the figures off the profile, which learnt something; returns whether c or d changed.

        Args:
            profile: what is known.
            trying_pays: whether there is enough left to do for trying one more co-resident to pay for itself.
        """
        self.memory = profile.memory(self.key)
        self.pace = profile.seconds_per_iteration(self.key)
        if self.pace is None:
            return False
        self.alpha, self.beta = profile.alpha(self.key), profile.beta(self.key)
        before = self.packing, self.width
        self.packing = self._packing(profile, self.pace, trying_pays)
        self.width = self._width(profile)
        return before != (self.packing, self.width)

    def _packing(self, profile: Profile, pace: float, trying_pays: bool) -> int:
        if pace < tuning.TOO_SHORT_TO_PACK_S:
            return 1
        limit, measured = profile.packing_limit(self.key, self.max_packing), profile.measured_packing(self.key)
        tries = trying_pays or self.packing > measured  # what has been begun is brought to an end
        return max(1, min(limit, measured + tries))

    def _width(self, profile: Profile) -> int:
        limit = profile.width_limit(self.key, n=self.max_width, d_max=self.max_width)
        width = self.tried = 1
        while not profile.needs_measuring(self.key, width=width):
            self.tried = min(width, limit)
            if width >= limit:
                break
            width *= 2
        return min(width, limit)
