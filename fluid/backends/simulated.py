"""A backend on a virtual clock: it answers the engine's commands as devices would, by the runtime model.

Time stands still while the engine thinks, and jumps to the next thing that happens when it waits.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fluid._clock import VirtualClock
from fluid.engine.commands import (
    Call,
    Command,
    Pause,
    Resize,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopLane,
    StopTrial,
)
from fluid.engine.events import (
    Checkpoint,
    Event,
    IterationDone,
    LaneReady,
    ResizeDone,
    TrialCalled,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialStarted,
)
from fluid.planning.rollout import Segment
from fluid.planning.runtime_model import stretch_of
from fluid.resources import Device

#: Events closer together than this share of the time are one instant.
_SAME_INSTANT = 1e-12


@dataclass(frozen=True)
class Truth:
    """How a trial really behaves.

    Attributes:
        seconds: seconds per iteration at width 1, alone on a device of speed 1.
        alpha, beta: its overheads.
        row: its number in the recorded segments.
    """

    seconds: float
    alpha: float = 1.0
    beta: float = 1.0
    row: int = 0


@dataclass
class _Resident:
    """A trial in its lanes.

    Attributes:
        lanes: where it runs, or ran last; rank 0 first.
        left: iterations it still has to run.
        busy: whether it holds its devices: it iterates, or is being resized.
        work: seconds of work left in the iteration in flight at width 1 and speed 1, as of ``since``.
        began: when that iteration began.
        version: another one whenever what was predicted for it no longer holds; never used twice.
        pausing: whether it is to pause at the end of the iteration.
        stopping: lanes that it is to leave then.
        opened, pause, company: when the stretch of time began in which it holds these devices, seconds of it lost to a
            resize, and the most trials that ran there at once.
    """

    truth: Truth
    lanes: tuple[int, ...]
    done: int = 0
    left: int = 0
    busy: bool = False
    work: float = 0.0
    rate: float = 0.0
    since: float = 0.0
    began: float = 0.0
    version: int = -1
    pausing: bool = False
    stopping: tuple[int, ...] = ()
    opened: float = 0.0
    pause: float = 0.0
    company: int = 1


@dataclass
class SimulatedBackend:
    """Devices that exist on paper.

    Args:
        truth: how the trial of an id behaves.
        epsilon: seconds a resize really costs.
        saves: whether every iteration is saved, at no cost, so that a trial that loses its lane loses no more than the
            iteration in flight.
        clock: the virtual clock, shared with whoever submits.
    """

    truth: Callable[[str], Truth]
    epsilon: float = 0.0
    saves: bool = False
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self.segments: list[Segment] = []
        self.resizes = 0
        self._devices: dict[int, Device] = {}
        self._lanes: dict[int, int] = {}
        self._residents: dict[str, _Resident] = {}
        #: trial -> lanes that hold a part of it
        self._parts: dict[str, set[int]] = {}
        #: device -> trials that run on it now
        self._busy: dict[int, set[str]] = {}
        self._ready: list[Event] = []
        self._later: list[tuple[float, int, str, int, Event | None]] = []
        self._sequence = itertools.count()

    # -- the backend's interface ---------------------------------------------------------------------------

    def now(self) -> float:
        """Virtual seconds."""
        return self.clock.now()

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Makes devices known, before the engine hears of them."""
        for device in devices:
            self._devices[device.index] = device
            self._busy.setdefault(device.index, set())

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out, at this instant."""
        for command in commands:
            if isinstance(command, StartLane):
                self._lanes[command.lane_id] = command.device_id
                self._ready.append(LaneReady(self.now(), command.lane_id))
            elif isinstance(command, StopLane):
                self._stop_lane(command.lane_id)
            elif isinstance(command, StartTrial):
                self._start(command)
            elif isinstance(command, RunIteration):
                self._run(command.trial_id, command.lane_ids, command.iterations)
            elif isinstance(command, Pause):
                self._pause(command.trial_id)
            elif isinstance(command, StopTrial):
                self._stop(command.trial_id, command.lane_ids)
            elif isinstance(command, Save):
                self._save(command)
            elif isinstance(command, Resize):
                self._resize(command)
            elif isinstance(command, Call) and command.trial_id in self._residents:
                called = TrialCalled(self.now(), command.trial_id, command.lane_ids[0], call_id=command.call_id)
                self._ready.append(called)

    def next_at(self) -> float:
        """When the next thing happens; infinite where nothing will."""
        return self.now() if self._ready else self._next_later()

    def poll(self) -> list[Event]:
        """Advances to the next instant at which something happens, and returns all that happens then."""
        if not self._ready and self.next_at() < float("inf"):
            instant = max(self.next_at(), self.now())
            self.clock.advance_to(instant)
            while self._next_later() <= instant + _SAME_INSTANT * max(1.0, instant):
                _, _, trial_id, _, event = heapq.heappop(self._later)
                if event is None:
                    self._end_iteration(trial_id)
                elif isinstance(event, ResizeDone):
                    self._end_resize(event)
        events, self._ready = self._ready, []
        return events

    def _next_later(self) -> float:
        while self._later and not self._is_current(self._later[0]):
            heapq.heappop(self._later)
        return self._later[0][0] if self._later else float("inf")

    # -- commands ------------------------------------------------------------------------------------------

    def _start(self, command: StartTrial) -> None:
        done = command.checkpoint.iteration if command.checkpoint else 0
        self._residents[command.trial_id] = _Resident(self.truth(command.trial_id), command.lane_ids, done=done)
        self._parts[command.trial_id] = set(command.lane_ids)
        self._ready.append(TrialStarted(self.now(), command.trial_id, command.lane_ids[0], iteration=done, seconds=0.0))
        self._run(command.trial_id, command.lane_ids, command.iterations)

    def _run(self, trial_id: str, lanes: tuple[int, ...], iterations: int) -> None:
        resident = self._residents[trial_id]
        resident.left += iterations
        if not resident.busy and resident.left > 0:
            resident.lanes = lanes
            self._occupy(trial_id)
            self._begin_iteration(trial_id)

    def _pause(self, trial_id: str) -> None:
        resident = self._residents.get(trial_id)
        if resident is not None:
            resident.pausing = True
            if not resident.busy:
                self._answer(trial_id)

    def _stop(self, trial_id: str, lanes: tuple[int, ...]) -> None:
        resident = self._residents.get(trial_id)
        if resident is not None and resident.busy and resident.lanes[0] in lanes:
            resident.stopping = lanes
        else:
            self._release(trial_id, lanes)

    def _release(self, trial_id: str, lanes: tuple[int, ...]) -> None:
        parts = self._parts.get(trial_id, set())
        for lane in lanes:
            if lane in parts:
                parts.remove(lane)
                self._ready.append(TrialReleased(self.now(), trial_id, lane))
        if trial_id in self._residents and self._residents[trial_id].lanes[0] not in parts:
            del self._residents[trial_id]

    def _save(self, command: Save) -> None:
        resident = self._residents.get(command.trial_id)
        if resident is None:
            return
        lane, checkpoint = command.lane_ids[0], Checkpoint(resident.done, "", in_memory=True)
        self._ready.append(TrialSaved(self.now(), command.trial_id, lane, checkpoint, dropped=command.drop))
        if command.drop:
            self._parts[command.trial_id].discard(lane)
            del self._residents[command.trial_id]

    def _resize(self, command: Resize) -> None:
        resident = self._residents[command.trial_id]
        resident.lanes, resident.left = command.lane_ids, command.iterations
        self._parts[command.trial_id] = set(command.lane_ids)
        self.resizes += 1
        self._occupy(command.trial_id)
        resident.pause = self.epsilon
        resident.version = next(self._sequence)
        done = ResizeDone(self.now() + self.epsilon, command.trial_id, self.epsilon, command.lane_ids[0])
        self._push(done.at, command.trial_id, done)

    def _stop_lane(self, lane_id: int) -> None:
        told: list[tuple[str, tuple[int, ...]]] = []
        for trial_id, resident in list(self._residents.items()):
            if lane_id in resident.lanes and lane_id in self._parts[trial_id]:
                if resident.busy:
                    self._vacate(trial_id)
                left = tuple(lane for lane in resident.lanes if lane != lane_id and lane in self._parts[trial_id])
                if left and not resident.stopping:  # they stand still until they are told how to go on
                    resident.lanes, resident.left, resident.work, resident.pausing = left, 0, 0.0, False
                    continue
                del self._residents[trial_id]
                told.append((trial_id, resident.stopping))
        for parts in self._parts.values():
            parts.discard(lane_id)
        self._lanes.pop(lane_id, None)
        for trial_id, lanes in told:  # its other lanes still owe the answer to a StopTrial
            self._release(trial_id, lanes)

    # -- what happens --------------------------------------------------------------------------------------

    def _begin_iteration(self, trial_id: str) -> None:
        resident = self._residents[trial_id]
        resident.work = resident.truth.seconds
        resident.began = resident.since = self.now()
        self._pace(trial_id)

    def _end_iteration(self, trial_id: str) -> None:
        resident = self._residents[trial_id]
        resident.done += 1
        resident.left -= 1
        resident.work = resident.rate = 0.0
        seconds = self.now() - resident.began
        self._ready.append(
            IterationDone(self.now(), trial_id, resident.lanes[0], iteration=resident.done, seconds=seconds)
        )
        if self.saves:
            checkpoint = Checkpoint(resident.done, "")
            self._ready.append(TrialSaved(self.now(), trial_id, resident.lanes[0], checkpoint))
        self._go_on(trial_id)

    def _end_resize(self, event: ResizeDone) -> None:
        self._ready.append(event)
        self._go_on(event.trial_id)

    def _go_on(self, trial_id: str) -> None:
        resident = self._residents[trial_id]
        if resident.left > 0 and not (resident.pausing or resident.stopping):
            self._begin_iteration(trial_id)
        else:
            self._vacate(trial_id)
            self._answer(trial_id)

    def _answer(self, trial_id: str) -> None:
        """Answers what was asked of a trial while it was busy."""
        resident = self._residents[trial_id]
        if resident.pausing:
            resident.pausing = False
            resident.left = 0
            self._ready.append(TrialPaused(self.now(), trial_id, resident.lanes[0], iteration=resident.done))
        if resident.stopping:
            self._release(trial_id, resident.stopping)

    # -- rates ---------------------------------------------------------------------------------------------

    def _devices_of(self, resident: _Resident) -> list[int]:
        return [self._lanes[lane] for lane in resident.lanes if lane in self._lanes]

    def _occupy(self, trial_id: str) -> None:
        resident = self._residents[trial_id]
        resident.busy, resident.opened, resident.pause, resident.company = True, self.now(), 0.0, 1
        for device in self._devices_of(resident):
            self._busy[device].add(trial_id)
        self._repace_neighbours(trial_id, resident)

    def _vacate(self, trial_id: str) -> None:
        resident = self._residents[trial_id]
        resident.busy, resident.version = False, next(self._sequence)
        self._close(resident)
        for device in self._devices_of(resident):
            self._busy[device].discard(trial_id)
        self._repace_neighbours(trial_id, resident)

    def _repace_neighbours(self, trial_id: str, resident: _Resident) -> None:
        for device in self._devices_of(resident):
            trials = self._busy[device]
            for other in sorted(trials):
                self._residents[other].company = max(self._residents[other].company, len(trials))
                if other != trial_id and self._residents[other].work > 0.0:
                    self._pace(other)

    def _pace(self, trial_id: str) -> None:
        """Sets the rate of the iteration in flight, and when it will end."""
        resident = self._residents[trial_id]
        resident.work = max(0.0, resident.work - resident.rate * max(0.0, self.now() - resident.since))
        resident.since = max(self.now(), resident.since)
        devices = self._devices_of(resident)
        width = float(len(devices)) if len(devices) > 1 else 1.0 / len(self._busy[devices[0]])
        speed = min(self._devices[device].speed for device in devices)
        resident.rate = speed / stretch_of(resident.truth.alpha, resident.truth.beta, width)
        resident.version = next(self._sequence)
        self._push(resident.since + resident.work / resident.rate, trial_id, None)

    def _push(self, at: float, trial_id: str, event: Event | None) -> None:
        version = self._residents[trial_id].version
        heapq.heappush(self._later, (at, next(self._sequence), trial_id, version, event))

    def _is_current(self, entry: tuple[float, int, str, int, Event | None]) -> bool:
        resident = self._residents.get(entry[2])
        return resident is not None and resident.version == entry[3]

    def _close(self, resident: _Resident) -> None:
        if self.now() > resident.opened:
            devices = tuple(self._devices_of(resident))
            width = float(len(devices)) if len(devices) > 1 else 1.0 / resident.company
            pause = min(resident.pause, self.now() - resident.opened)
            self.segments.append(Segment(resident.truth.row, resident.opened, self.now(), devices, width, pause))
