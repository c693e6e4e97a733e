"""Divides the CPU threads of a device among the lanes that run trials there: its threads over its co-residents.

Lanes of a GPU that each used all cores would take them from one another, and from the workers that load data. A lane
gets fewer threads at once when another one begins to run; more only after a while, as a trial that has used up its
iterations often gets further ones within milliseconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fluid.backends.base import DeviceBinding
from fluid.engine.commands import Command, Resize, RunIteration, StartTrial
from fluid.engine.events import Event, IterationDone, TrialFailed, TrialPaused, TrialReleased

_ENDS = (TrialPaused, TrialReleased, TrialFailed)


@dataclass(slots=True)
class _TrialInLanes:
    """A trial with iterations left, and the lanes that run it."""

    lane_ids: tuple[int, ...]
    left: int


@dataclass(slots=True)
class _SharingLane:
    """A lane that has a share.

    Attributes:
        devices: threads of each of its devices, by the device's index.
        threads: what it was told last.
    """

    devices: dict[int, int]
    threads: int


class ThreadShares:
    """Knows which lanes run trials, from commands and events, and so how many threads each may use."""

    def __init__(self) -> None:
        #: Only those whose devices divide their threads.
        self._lanes: dict[int, _SharingLane] = {}
        self._trials: dict[str, _TrialInLanes] = {}
        #: How many trials each lane runs, if any.
        self._load: Counter[int] = Counter()
        #: The lanes that run trials, by device.
        self._co_residents: defaultdict[int, set[int]] = defaultdict(set)
        #: Devices on which lanes have begun to run trials, and those on which they have ended, since lanes were told.
        self._fuller: set[int] = set()
        self._emptier: set[int] = set()

    def add(self, lane_id: int, bindings: Sequence[DeviceBinding]) -> int:
        """Adds a lane that is started, bound so to its devices; returns the threads to start it with."""
        devices = {binding.device_ids[0]: binding.threads for binding in bindings if binding.divides_threads}
        if not devices:
            return sum(binding.threads for binding in bindings)
        lane = self._lanes[lane_id] = _SharingLane(devices, 0)
        lane.threads = self._share(lane, others=1)
        return lane.threads

    def remove(self, lane_id: int) -> None:
        """Removes a lane that is gone."""
        if lane_id in self._lanes:
            self._count(lane_id, -self._load[lane_id])
            del self._lanes[lane_id]

    def follow(self, command: Command) -> None:
        """Takes note of a command that makes lanes run trials."""
        if not self._lanes or not isinstance(command, (StartTrial, RunIteration, Resize)):
            return
        before = self._trials.get(command.trial_id)
        left = command.iterations
        if before is not None:
            if isinstance(command, RunIteration):
                left += before.left
            if before.lane_ids == command.lane_ids:
                before.left = left
                return
            self._end(command.trial_id)
        if left > 0:
            self._trials[command.trial_id] = _TrialInLanes(command.lane_ids, left)
            for lane_id in command.lane_ids:
                self._count(lane_id, 1)

    def hear(self, events: Iterable[Event]) -> None:
        """Takes note of events that tell that trials do not run any more."""
        if not self._trials:
            return
        for event in events:
            if isinstance(event, IterationDone):
                trial = self._trials.get(event.trial_id)
                if trial is not None:
                    trial.left -= event.count
                    if trial.left <= 0 or event.finished:
                        self._end(event.trial_id)
            elif isinstance(event, _ENDS):
                self._end(event.trial_id)

    def fewer(self) -> list[tuple[int, int]]:
        """Returns the lanes that must use fewer threads from now on, and how many."""
        fuller, self._fuller = self._fuller, set()
        return self._tell(fuller, grow=False) if fuller else []

    def settled(self) -> list[tuple[int, int]]:
        """Returns the lanes that may use more threads, and how many; to be called once in a while."""
        emptier, self._emptier = self._emptier, set()
        return self._tell(emptier, grow=True) if emptier else []

    def _tell(self, devices: set[int], *, grow: bool) -> list[tuple[int, int]]:
        told = []
        for lane_id in sorted(set().union(*(self._co_residents[device_id] for device_id in devices))):
            lane = self._lanes[lane_id]
            threads = self._share(lane)
            if threads < lane.threads or (grow and threads > lane.threads):
                lane.threads = threads
                told.append((lane_id, threads))
        return told

    def _end(self, trial_id: str) -> None:
        trial = self._trials.pop(trial_id, None)
        for lane_id in () if trial is None else trial.lane_ids:
            self._count(lane_id, -1)

    def _count(self, lane_id: int, trials: int) -> None:
        """Adds to the number of trials that a lane runs."""
        lane = self._lanes.get(lane_id)
        if lane is None:
            return
        before = self._load[lane_id]
        now = self._load[lane_id] = max(0, before + trials)
        for device_id in lane.devices:
            if now and not before:
                self._co_residents[device_id].add(lane_id)
                self._fuller.add(device_id)
                self._emptier.add(device_id)  # This lane may have been told of others that have ended since.
            elif before and not now:
                self._co_residents[device_id].discard(lane_id)
                self._emptier.add(device_id)
        if not now:
            del self._load[lane_id]

    def _share(self, lane: _SharingLane, *, others: int = 0) -> int:
        """The threads of a lane, with so many co-residents besides those that run trials now."""
        return max(
            1,
            sum(
                threads // max(1, len(self._co_residents[device_id]) + others)
                for device_id, threads in lane.devices.items()
            ),
        )
