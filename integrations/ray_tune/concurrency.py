"""How many trials of a sweep of Ray Tune are under way at once."""

from __future__ import annotations

from dataclasses import dataclass

from fluid.sweeping.under_way import most_fusible


@dataclass(slots=True)
class Concurrency:
    """A bound on the trials under way.

    Attributes:
        most: that bound; ``None`` for none.
        is_given: whether the user has set it, so that it holds for trials that can be fused, too.
        rows: of the largest fused pack so far.
    """

    most: int | None = None
    is_given: bool = False
    rows: int = 1

    def note(self, rows: int) -> None:
        """Takes note of a step of so many trials."""
        self.rows = max(self.rows, rows)

    def limit(self, devices: int, *, fusible: bool) -> int | None:
        """The bound for trials of which many may be fused on so many devices, or which cannot be fused."""
        if self.most is None or self.is_given or not fusible:
            return self.most
        return max(self.most, most_fusible(devices, self.rows))
