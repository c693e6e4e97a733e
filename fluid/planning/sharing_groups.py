"""Sharing groups: trials that share a device only with trials like them, as those that are fused in one process do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: The group of all trials that take turns in lanes, whatever their profile keys.
TURNS = "(take turns)"


class SharingGroups:
    """The groups of trials; one that is in no group shares a device with others that are in none.

    Args:
        residents: device index -> rows on it.

    Attributes:
        of: row -> its group; absent for a trial that is in none.
        rows: group -> how many of its trials share a lane.
    """

    def __init__(self, residents: Mapping[int, Sequence[int]]) -> None:
        self._residents = residents
        self.of: dict[int, str] = {}
        self.rows: dict[str, int] = {}

    def agree(self, row: int, index: int) -> bool:
        """Whether a trial may share a device with those that are there."""
        if not self.of:
            return True
        group = self.of.get(row)
        return all(self.of.get(other) == group for other in self._residents[index])

    def lanes(self, index: int, trials: int) -> int:
        """Lanes in which so many trials run on a device: those of a group share lanes, others have one each."""
        rows = self._residents[index] if self.of else ()
        group = self.of.get(rows[0]) if rows else None
        return trials if group is None else -(-trials // self.rows.get(group, 1))
