"""What the residents of a lane hold and take of their device's memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fluid._clock import Clock
from fluid.lane.device import MemoryMeter
from fluid.lane.device_messages import HeldAtRest
from fluid.lane.work_queue import ResidentTrial

#: An idle lane keeps cached memory for the time of so many iterations, within these limits, seconds.
_IDLE_ITERATIONS = 10
_SHORTEST_IDLE_S = 0.05
_LONGEST_IDLE_S = 1.0
#: A change below this many bytes is not worth telling the driver: PyTorch's smallest segment has two of these.
_NOTABLE = 2**20


class ResidentMemory:
    """Measures and limits what residents take of a device.

    Args:
        meter: of the device's memory.
        clock: the lane's.
        residents: all of the lane, whenever they are asked for.

    Attributes:
        may_hold_cache: whether the lane may hold device memory that no trial uses.
    """

    def __init__(self, meter: MemoryMeter, clock: Clock, residents: Iterable[ResidentTrial]) -> None:
        self.may_hold_cache = False
        self._meter = meter
        self._clock = clock
        self._residents = residents

    def limit(self, rows: Sequence[ResidentTrial]) -> None:
        """Applies the limits of trials that run at once to the process, which holds the states of others besides."""
        limit = 0.0
        for resident in rows:
            if resident.limit is None:
                self._meter.limit(None)
                return
            limit += resident.limit
        running = set(rows)
        self._meter.limit(limit + sum(each.held or 0.0 for each in self._residents if each not in running))

    def begin(self) -> None:
        """Starts a measurement."""
        self._meter.begin()

    def measure(self, rows: Sequence[ResidentTrial], *, settle: bool = False) -> tuple[float, float] | None:
        """Ends a measurement of trials that ran at once, each of which has an equal part of what was measured.

        So the parts of all residents add up to what the lane holds, and takes in a step. What a pack keeps beside its
        rows, such as the copy of their states to go back to, is theirs, too.

        Args:
            rows: the trials.
            settle: whether to release cached memory first: what cannot be released is held, too.

        Returns:
            The bytes that one holds, and what it took on top of that; ``None`` where that is not measured.
        """
        measured = self._meter.end(settle=settle)
        if measured is None:
            return None
        self.may_hold_cache = True
        held = (sum(resident.held or 0.0 for resident in rows) + measured[0]) / len(rows)
        for resident in rows:
            resident.held = held
        return max(0.0, held), max(0.0, measured[1]) / len(rows)

    def idle_timeout(self, current: ResidentTrial | None) -> float | None:
        """Returns the seconds to wait for messages before cached memory is released; ``None`` for no end.

        A driver that decides iteration by iteration answers soon, and the next iteration reuses what is cached.

        Args:
            current: the resident that ran last.
        """
        if not self.may_hold_cache:
            return None
        if not self._meter.may_keep_cache():
            return 0.0
        pace = None if current is None else current.pace
        return min(_LONGEST_IDLE_S, max(_SHORTEST_IDLE_S, _IDLE_ITERATIONS * (pace or 0.0)))

    def release_cached(self) -> None:
        """Returns device memory that no trial uses, also what only reference cycles keep."""
        self._meter.release_cached(collect=True)

    def settle(self, current: ResidentTrial | None, resident: ResidentTrial | None) -> HeldAtRest | None:
        """Returns device memory that no trial uses, and measures what the trial that ran last still holds.

        Args:
            current: that trial.
            resident: one that does not run.

        Returns:
            What to tell the driver of ``resident``; ``None`` if it knows, or nothing is measured.
        """
        self.may_hold_cache = False
        grown = self._meter.settle()
        if current is not None and current.held is not None:
            current.held += grown
        if resident is None or resident.held is None:
            return None
        told, held = resident.told_held, max(0.0, resident.held)
        if told is not None and abs(held - told) < _NOTABLE:
            return None
        resident.told_held = held
        return HeldAtRest(self._clock.now(), resident.trial_id, held)

    @property
    def held_bytes(self) -> float:
        """Device memory that all residents hold, as last measured."""
        return sum(max(0.0, each.held or 0.0) for each in self._residents)
