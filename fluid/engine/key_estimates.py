"""Key estimates: a profile key's figures as planning uses them, and how far packing and widening were tried."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

from fluid.engine import tuning
from fluid.planning.profile import Profile
from fluid.resources import MemoryNeed


@dataclass(slots=True)
class KeyEstimate:
    """A copy of what the profile says about one key, taken when the profile learnt something.

    Attributes:
        pace: seconds per iteration at width 1; ``None`` until measured.
        packing: c, the packing limit. Rises from 1 by one co-resident after each that was measured to pay.
        width: d, the width limit. Doubles from 1 after each measured width while beta allows.
        tried: the widest measured width.
        memory: device memory; ``None`` until measured.
        starts: seconds of its trials' latest starts, afresh or from a checkpoint.
        saves: seconds of its trials' latest saves.
        latest: seconds of its trials' latest iterations, whatever ran beside them.
        longest: seconds of the longest one.
        observed: (co-residents, width) -> iterations seen.
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
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_TIMES))
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=tuning.LATEST_ITERATIONS))
    longest: float = 0.0
    observed: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def interruption(self) -> float:
        """Seconds to save a trial and to resume it elsewhere; a save that was never measured counts as a start."""
        start = median_low(self.starts) if self.starts else 0.0
        return start + (median_low(self.saves) if self.saves else start)

    def add_iteration(self, seconds: float) -> None:
        """Records how long an iteration took."""
        self.latest.append(seconds)
        if seconds > self.longest:
            self.longest = seconds

    def worth_observing(self, co_residents: int, width: int) -> bool:
        """Counts an iteration; returns whether the profile is to learn from it."""
        seen = self.observed.get((co_residents, width), 0)
        self.observed[co_residents, width] = seen + 1
        return seen < tuning.OBSERVE_ALL or seen % tuning.OBSERVE_EVERY == 0

    def update(self, profile: Profile, *, trying_pays: bool = True) -> bool:
        """Copies the figures from the profile; returns whether c or d changed.

        Args:
            profile: what was measured.
            trying_pays: whether the work left repays trying one more co-resident.
        """
        self.update_memory(profile)
        self.pace = profile.seconds_per_iteration(self.key)
        if self.pace is None:
            return False
        self.alpha, self.beta = profile.alpha(self.key), profile.beta(self.key)
        before = self.packing, self.width
        self.packing = self._packing(profile, self.pace, trying_pays)
        self.width = self._width(profile)
        return before != (self.packing, self.width)

    def update_memory(self, profile: Profile) -> None:
        """Copies the memory from the profile."""
        self.memory = profile.memory(self.key)

    def _packing(self, profile: Profile, pace: float, trying_pays: bool) -> int:
        if pace < tuning.TOO_SHORT_TO_PACK_S:
            return 1
        limit, measured = profile.packing_limit(self.key, self.max_packing), profile.measured_packing(self.key)
        tries = trying_pays or self.packing > measured  # a trial of packing that has begun is completed
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
