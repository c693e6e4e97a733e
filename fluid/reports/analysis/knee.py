"""The knee: the number of devices up to which adding devices pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluid.display.format import percent

#: Adding devices pays if the makespan falls by at least this share of what perfect scaling would save.
_WORTHWHILE_SHARE = 0.5


@dataclass(frozen=True)
class Knee:
    """Where adding devices ceases to pay.

    A step from one number of devices to the next pays if the makespan falls by at least half of what perfect scaling
    would save, ``makespan x (1 - before/after)``. The knee is the number that the last such step leads to. A number
    with which it takes no less time than with fewer devices, as a search may by chance, is passed over: the next step
    counts from the fewer.

    Attributes:
        n: the number of devices.
        makespan: seconds with it.
        before: the number from which the step to it counts, and seconds with that; ``None`` if no step paid.
        most: the largest number that was tried.
        tried: how many numbers were.
    """

    n: int
    makespan: float
    before: tuple[int, float] | None
    most: int
    tried: int

    @classmethod
    def of(cls, makespans: Sequence[tuple[int, float]]) -> Knee:
        """The knee of makespans, seconds, by number of devices; at least one, in ascending order.

        Example:
            >>> from fluid.reports.analysis.knee import Knee
            >>> Knee.of([(1, 100.0), (2, 52.0), (4, 40.0)]).n
            2
        """
        (n, makespan), before = makespans[0], None
        fewer, longer = makespans[0]
        for more, shorter in makespans[1:]:
            if longer - shorter >= _WORTHWHILE_SHARE * longer * (1.0 - fewer / more):
                n, makespan, before = more, shorter, (fewer, longer)
            if shorter < longer:
                fewer, longer = more, shorter
        return cls(n, makespan, before, makespans[-1][0], len(makespans))

    def sentence(self, unit: str, tried: str = "simulated") -> str:
        """The knee in words.

        Args:
            unit: the word for a device.
            tried: what was done with each number of devices.
        """
        if self.tried == 1:
            return f"Only one number of devices was {tried}; give several to find the knee."
        if self.before is None:
            return (
                f"Knee: {self.n} {unit}{'' if self.n == 1 else 's'}. Each step to more {unit}s saves less than half of "
                "the time that perfect scaling would save."
            )
        fewer, longer = self.before
        saved = 1.0 - self.makespan / longer if longer > 0.0 else 0.0
        sentence = (
            f"Knee: adding {unit}s pays up to {self.n}. The step from {fewer} to {self.n} shortens the makespan by "
            f"{percent(saved)}; perfect scaling would shorten it by {percent(1.0 - fewer / self.n)}."
        )
        if self.most > self.n:
            return f"{sentence} Each step beyond saves less than half of the time that perfect scaling would save."
        return f"{sentence} {self.n} is the most that was {tried}; more may still pay."
