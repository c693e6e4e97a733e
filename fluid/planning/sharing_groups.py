"""Sharing groups: trials that share a device only with trials like them, as those that are fused in one process do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fluid.resources import MemoryNeed

#: The group of all trials that take turns in lanes, whatever their profile keys.
TURNS = "(take turns)"


class SharingGroups:
    """The groups of trials; one that is in no group shares a device with others that are in none.

    Args:
        residents: device index -> rows on it.

    Attributes:
        of: row -> its group; absent for a trial that is in none.
        rows: group -> how many of its trials share a lane.
        turns: groups whose trials take turns in a lane, an iteration each, instead of training in one step.
        lane_of: row of a trial of such a group -> the lane that it was given on its device; absent until then.
    """

    def __init__(self, residents: Mapping[int, Sequence[int]]) -> None:
        self._residents = residents
        self.of: dict[int, str] = {}
        self.rows: dict[str, int] = {}
        self.turns: set[str] = set()
        self.lane_of: dict[int, int] = {}

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

    # -- trials that take turns ----------------------------------------------------------------------------

    def take_turns(self, index: int) -> bool:
        """Whether there are trials on a device, and they take turns there."""
        if not self.turns:
            return False
        rows = self._residents[index]
        return bool(rows) and self.of.get(rows[0]) in self.turns

    def typical_bytes(self, group: str | None, need: MemoryNeed) -> float:
        """Bytes that a trial takes among many of its group: of its lane's size, each trial there counts its part."""
        if group is None or group not in self.turns:
            return need.peak_bytes
        return need.persistent_bytes + need.ephemeral_bytes / self.rows.get(group, 1)

    def ephemeral_bytes(
        self,
        index: int,
        needs: Mapping[int, MemoryNeed],
        *,
        without: Collection[int] = (),
        joining: Sequence[MemoryNeed | None] = (),
    ) -> float:
        """Most ephemeral bytes that the trials of a device, which take turns, have at once: the sizes of its lanes.

        The lanes of some trials may not be known, as they are yet to be given one. Each lane is as large as the largest
        of its trials. So all of them together are at most as large as the l largest of the known lanes and of the other
        trials, where l is the number of lanes. Trials that join are given a lane in which they cost least.

        Args:
            index: a device on which trials take turns.
            needs: row -> its need, where it is known.
            without: trials that have left.
            joining: the needs of further trials, where they are known.
        """
        sizes: dict[int, float] = {}
        held: dict[int, int] = {}
        unknown: list[float] = []
        rows = [row for row in self._residents[index] if row not in without]
        for row in rows:
            need, lane = needs.get(row), self.lane_of.get(row)
            size = 0.0 if need is None else need.ephemeral_bytes
            if lane is None:
                unknown.append(size)
            else:
                sizes[lane], held[lane] = max(sizes.get(lane, 0.0), size), held.get(lane, 0) + 1
        new = [0.0 if need is None else need.ephemeral_bytes for need in joining]
        lanes = max(len(sizes), self.lanes(index, len(rows) + len(new)))
        bound = _largest([*sizes.values(), *unknown, *new], lanes)
        if not new or unknown:
            return bound
        most = self.rows.get(self.of[self._residents[index][0]], 1) - len(new)
        into = max((lane for lane in sizes if held[lane] <= most), key=lambda lane: sizes[lane], default=None)
        if into is None:
            return bound
        sizes[into] = max(sizes[into], *new)
        return min(bound, sum(sizes.values()))


def _largest(sizes: Sequence[float], count: int) -> float:
    """The sum of so many of the largest."""
    return sum(sorted(sizes, reverse=True)[:count])
