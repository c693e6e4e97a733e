"""The memory ledger: who takes which part of a device's memory, and what still fits (docs/theory.md, section 8)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fluid.resources import MemoryNeed, usable_bytes

# -- sharing groups ------------------------------------------------------------------------------
#
# Sharing groups: trials that share a device only with trials like them, as those that are fused in one process do.


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

    def typical(self, group: str | None, need: MemoryNeed) -> MemoryNeed:
        """What a trial takes among many of its group: its part of its lane's size, and of what fused trials share."""
        if group is None:
            return need
        rows = self.rows.get(group, 1)
        if group in self.turns:
            return MemoryNeed(need.persistent_bytes, need.ephemeral_bytes / rows)
        return MemoryNeed(need.own_persistent_bytes + need.shared_bytes / rows, need.ephemeral_bytes)

    # -- trials that are fused -----------------------------------------------------------------------------

    def saved_bytes(self, index: int, needs: Sequence[MemoryNeed]) -> float:
        """Bytes by which trials of these needs take less on a device than each by itself, as fused ones share some.

        Each lane has what its trials share once. A device's trials are of one group, that of the trials that are there.
        """
        if len(needs) < 2 or not self.of or not (largest := max(need.shared_bytes for need in needs)):
            return 0.0
        group = self.of.get(next(iter(self._residents[index]), -1))
        if group is None or group in self.turns:
            return 0.0
        lanes = -(-len(needs) // self.rows.get(group, 1))
        return max(0.0, sum(need.shared_bytes for need in needs) - lanes * largest)

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


# -- memory ledger -------------------------------------------------------------------------------


#: What is booked of the lanes of a device without any: see :meth:`MemoryLedger.set_lanes`.
_NO_LANES = (0, 0.0, 0.0, 0)


class MemoryLedger:
    """Device memory by trial, by state that is kept, and by lane. Trials are known by their row.

    A device is never filled beyond its usable memory when a trial is placed; a need that turns out larger afterwards
    may exceed it. All bytes here are whole (:func:`~fluid.resources.whole_bytes`): what is freed leaves nothing behind.

    Args:
        watermark: share of a device's memory that trials may fill.
        residents: device index -> rows on it, as :class:`~fluid.devices.occupancy.Occupancy` keeps it.
        held: row -> devices that it holds, likewise.
        groups: tell which trials run in one lane, and which of them take turns there: they need the largest of their
            ephemeral bytes once for each lane, the others each their own.

    Attributes:
        has_freed: whether a trial that holds devices turned out to need less, so that others may fit.
    """

    def __init__(
        self,
        watermark: float,
        residents: Mapping[int, Sequence[int]],
        held: Mapping[int, Sequence[int]],
        groups: SharingGroups | None = None,
    ) -> None:
        self.watermark = watermark
        self._residents = residents
        self._held = held
        self._groups = groups or SharingGroups(residents)
        self.has_freed = False
        #: device index -> bytes that trials may fill there; ``None`` where memory does not bound packing.
        self._usable: dict[int, float | None] = {}
        #: Devices whose memory bounds packing.
        self._bounded = 0
        self._needs: dict[int, MemoryNeed] = {}
        #: row -> its need when it was placed, or less of each part as learnt since, where that was known.
        self._placed: dict[int, MemoryNeed] = {}
        #: device index -> bytes held there by states of trials that hold no device; absent where there are none.
        self.reserved: dict[int, float] = {}
        #: device index -> number of lanes, bytes they take together, bytes that a further one is expected to take.
        self._lanes: dict[int, tuple[int, float, float, int]] = {}
        #: devices to be named by :meth:`pop_grown`.
        self._grown: set[int] = set()
        #: devices to be named by :meth:`pop_changed`.
        self._changed: set[int] = set()

    # -- devices -------------------------------------------------------------------------------------------

    def add_device(self, index: int, memory_bytes: float | None) -> None:
        """Adds a device with so much memory; ``None`` where memory does not bound packing."""
        self._usable[index] = None if memory_bytes is None else usable_bytes(memory_bytes, self.watermark)
        self._bounded += memory_bytes is not None

    def remove_device(self, index: int) -> None:
        """Removes a device, and what lanes and kept states take on it."""
        self._bounded -= self._usable.pop(index) is not None
        self.reserved.pop(index, None)
        self._lanes.pop(index, None)

    @property
    def is_bounded(self) -> bool:
        """Whether memory bounds packing on any device."""
        return self._bounded > 0

    def usable_bytes(self, index: int) -> float | None:
        """Bytes that trials may fill on a device; ``None`` where its memory does not bound packing."""
        return self._usable[index]

    # -- trials --------------------------------------------------------------------------------------------

    def place(self, row: int, need: MemoryNeed | None) -> None:
        """Books a trial that was just given devices; ``None`` where its need is unknown."""
        if need is not None:
            self._needs[row] = self._placed[row] = need
        self._grown.update(self._held[row])
        self.note_change(row)

    def set_need(self, row: int, need: MemoryNeed | None) -> None:
        """Changes the need of a trial that holds devices; trials that come later must leave as much to it."""
        before = self._needs.pop(row, None)
        if before is not None and (need is None or not need.covers(before)):
            self.has_freed = self._bounded > 0
        if need is None:
            self._placed.pop(row, None)  # Fused trials of its shape have not been measured.
        else:
            self._needs[row] = need
            if (placed := self._placed.get(row)) is not None:
                # Measured on this device's model: trials are placed by it from now on.
                self._placed[row] = MemoryNeed.least(placed, need)
            self._grown.update(self._held[row])
            self.note_change(row)

    def forget_placing(self, rows: Collection[int]) -> None:
        """Notes that trials were placed on a guess with which others they share memory, and it was wrong."""
        for row in rows:
            self._placed.pop(row, None)

    def note_change(self, row: int) -> None:
        """Makes :meth:`pop_changed` name a trial's devices: the trial begins to run there, or its need has changed."""
        if self._bounded:
            self._changed.update(self._held[row])

    def release(self, row: int) -> None:
        """Forgets a trial that leaves its devices, which it still holds."""
        self.note_change(row)
        self._needs.pop(row, None)
        self._placed.pop(row, None)
        self._groups.lane_of.pop(row, None)

    def need_of(self, row: int) -> MemoryNeed | None:
        """The need with which the trial was placed, or which was learnt since."""
        return self._needs.get(row)

    def placed_need_of(self, row: int) -> MemoryNeed | None:
        """The need with which the trial was placed, or a smaller one that was learnt since."""
        return self._placed.get(row)

    # -- kept states and lanes -----------------------------------------------------------------------------

    def reserve(self, index: int, memory: float) -> None:
        """Adds so many bytes on a device for states of trials that hold no device; a negative number frees them."""
        left = self.reserved.pop(index, 0.0) + memory
        if left > 0.0:
            self.reserved[index] = left
        self._changed.add(index)
        if memory > 0.0:
            self._grown.add(index)

    def set_lanes(self, index: int, count: int, memory: float, each: float, resting: int = 0) -> None:
        """Books what the lanes of a device take for themselves, such as for CUDA contexts.

        Trials run in a lane each, or fused in one. Room for one lane is beyond the watermark; the others count.

        Args:
            index: the device.
            count: number of lanes.
            memory: bytes that they take together.
            each: bytes that a further one is expected to take.
            resting: those of them in which no trial runs, and only the one whose state it keeps ever can.
        """
        self._lanes[index] = (count, memory, each, resting)
        self._grown.add(index)
        self._changed.add(index)

    def lane_bytes(self, index: int, trials: int, *, returns: bool = False) -> float:
        """Bytes that lanes take on a device if so many trials run there, but for the one beyond the watermark.

        Args:
            index: the device.
            trials: how many run there.
            returns: whether one of them goes on in the lane that keeps its state.
        """
        count, memory, each, resting = self._lanes.get(index, _NO_LANES)
        lanes = self._groups.lanes(index, trials) + max(0, resting - returns)
        return max(0.0, memory + each * (max(count, lanes) - count - 1))

    def new_lane_bytes(self, index: int) -> float:
        """Bytes that one more lane is expected to add to those of a device's lanes: none for the first."""
        _, memory, each, _ = self._lanes.get(index, _NO_LANES)
        return min(memory, each)

    # -- sums per device -----------------------------------------------------------------------------------

    def request_check(self, index: int) -> None:
        """Makes :meth:`pop_grown` name a device."""
        self._grown.add(index)

    def pop_grown(self) -> list[int]:
        """Devices on which more memory is taken than at the last call, or for which a check was requested."""
        if not self._grown:
            return []
        grown = sorted(index for index in self._grown if index in self._usable)
        self._grown.clear()
        return grown

    def pop_changed(self) -> list[int]:
        """Devices on which trials, their needs, kept states or lanes have changed since the last call."""
        if not self._changed:
            return []
        changed = sorted(index for index in self._changed if self._usable.get(index) is not None)
        self._changed.clear()
        return changed

    def pop_freed(self) -> bool:
        """Clears :attr:`has_freed`; returns what it was."""
        freed, self.has_freed = self.has_freed, False
        return freed

    def running_bytes(self, index: int) -> float:
        """Bytes that the trials on a device take, as known when they were placed, or learnt since."""
        return self._sum(index, self._needs)

    def placed_bytes(self, index: int) -> float:
        """Bytes that the trials on a device take, as known when they were placed, or found to be less since."""
        return self._sum(index, self._placed)

    def _sum(self, index: int, needs: Mapping[int, MemoryNeed]) -> float:
        known = [needs[row] for row in self._residents[index] if row in needs]
        if not self._groups.take_turns(index):
            return sum(need.peak_bytes for need in known) - self._groups.saved_bytes(index, known)
        return sum(need.persistent_bytes for need in known) + self._groups.ephemeral_bytes(index, needs)

    def part_bytes(self, index: int, row: int) -> float | None:
        """Bytes that a trial on a device takes, with its part of what fused trials share; ``None`` if unknown."""
        need = self._needs.get(row)
        if need is None:
            return None
        known = self._needs_without(index, ())
        return need.peak_bytes - self._groups.saved_bytes(index, known) / len(known)

    def _needs_without(self, index: int, rows: Collection[int]) -> list[MemoryNeed]:
        """The needs, where they are known, of the trials on a device but for these."""
        return [self._needs[row] for row in self._residents[index] if row in self._needs and row not in rows]

    def ephemeral_bytes(
        self, index: int, *, without: Collection[int] = (), joining: Sequence[MemoryNeed | None] = ()
    ) -> float:
        """Most ephemeral bytes that trials of a device on which they take turns have at once.

        Args:
            index: the device.
            without: trials that have left.
            joining: the needs of further trials, where they are known.
        """
        return self._groups.ephemeral_bytes(index, self._needs, without=without, joining=joining)

    def taken_bytes(self, index: int) -> float:
        """Bytes taken on a device by trials that run, states that are kept, and all lanes but one."""
        taken = self.reserved.get(index, 0.0) + self.running_bytes(index)
        return taken + self.lane_bytes(index, len(self._residents[index]))

    def filled_bytes(self, index: int, *, own_state: float = 0.0) -> float:
        """Bytes on a device that one more trial there cannot have, as far as they are known.

        Args:
            index: the device.
            own_state: bytes reserved there for that trial's own state, which its need includes.
        """
        taken = max(0.0, self.reserved.get(index, 0.0) - own_state) + self.running_bytes(index)
        return taken + self.lane_bytes(index, len(self._residents[index]) + 1, returns=own_state > 0.0)

    def added_bytes(self, index: int, need: MemoryNeed | None, *, without: Collection[int] = ()) -> float:
        """Bytes that one more trial adds to those that the trials on a device take.

        Args:
            index: the device.
            need: what it needs, where that is known.
            without: trials there that have paused or left by then.
        """
        if not self._groups.take_turns(index):
            return need.peak_bytes - self._saved_by(index, need, without) if need else 0.0
        more = self.ephemeral_bytes(index, without=without, joining=(need,))
        return (need.persistent_bytes if need else 0.0) + more - self.ephemeral_bytes(index, without=without)

    def _saved_by(self, index: int, need: MemoryNeed, without: Collection[int]) -> float:
        """Bytes that a trial shares with those on a device, but for some of these."""
        if not need.shared_bytes:
            return 0.0
        others = self._needs_without(index, without)
        return self._groups.saved_bytes(index, [*others, need]) - self._groups.saved_bytes(index, others)

    def paused_bytes(self, index: int, row: int) -> float:
        """Bytes that are free on a device once a trial there has paused and keeps its state there."""
        need = self._needs.get(row)
        if not self._groups.take_turns(index):
            return 0.0 if need is None else need.peak_bytes - need.persistent_bytes
        return self.ephemeral_bytes(index) - self.ephemeral_bytes(index, without=(row,))

    def left_bytes(self, index: int, joining: MemoryNeed, gone: Sequence[int]) -> float:
        """Bytes that become free on a device when the last of these trials leaves it, the others having left before.

        Args:
            index: the device.
            joining: the need of a trial that waits to come there.
            gone: at least one trial that is there.
        """
        need = self._needs.get(gone[-1])
        if not self._groups.take_turns(index):
            return 0.0 if need is None else need.peak_bytes - self._saved_by(index, need, gone)
        before, after = (self.ephemeral_bytes(index, without=rows, joining=(joining,)) for rows in (gone[:-1], gone))
        return (0.0 if need is None else need.persistent_bytes) + before - after

    def fits(self, index: int, need: MemoryNeed | None, *, own_state: float = 0.0) -> bool:
        """The safety condition of docs/theory.md, section 8, for one more trial."""
        usable = self._usable[index]
        if usable is None:
            return True
        return self.filled_bytes(index, own_state=own_state) + self.added_bytes(index, need) <= usable

    def fits_in_place_of(self, index: int, need: MemoryNeed | None, row: int) -> bool:
        """Whether one more trial fits on a device once a trial there has paused and keeps its state there."""
        usable = self._usable[index]
        if usable is None or need is None:
            return True
        left = self.filled_bytes(index) - self.paused_bytes(index, row)
        return left + self.added_bytes(index, need, without=(row,)) <= usable
