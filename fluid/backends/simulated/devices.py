"""Virtual devices: which trials run where, how fast by the runtime model, and when each iteration will end."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fluid._clock import Clock
from fluid.engine.events import PausePurpose, ResizeDone
from fluid.planning.rollout import Segment
from fluid.planning.runtime_model import stretch_of
from fluid.resources import Device


@dataclass(frozen=True)
class Truth:
    """How a trial really behaves.

    Attributes:
        seconds: seconds per iteration at width 1, alone on a device of speed 1.
        alpha, beta: its overheads.
        row: its number in the recorded segments.
        speeds: by device model, how fast it is there, beside the device's own speed; 1 for models left out.

    Example:
        >>> from fluid.backends.simulated import Truth
        >>> from fluid.planning.runtime_model import stretch_of
        >>> truth = Truth(seconds=2.0, alpha=1.25)
        >>> truth.seconds * stretch_of(truth.alpha, truth.beta, 0.5)  # An iteration, with two trials on the device.
        2.5
    """

    seconds: float
    alpha: float = 1.0
    beta: float = 1.0
    row: int = 0
    speeds: Mapping[str | None, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SimulatedTrial:
    """A trial in its lanes.

    Attributes:
        lanes: where it runs, or ran last; rank 0 first.
        done: iterations it has done.
        left: iterations it still has to run.
        busy: whether it holds its devices: it iterates, or is being resized.
        work: seconds of work left in the iteration in flight at width 1 and speed 1, as of ``since``.
        rate: work done per second.
        began: when that iteration began.
        version: changes whenever what was predicted for the trial no longer holds; no number is used twice.
        pausing: why it is to pause at the end of the iteration; ``None`` if it is not.
        stopping: lanes that it is to leave then.
        keeping: whether it is saved for good before it leaves them.
        opened: when it began to hold these devices, seconds.
        pause: seconds of that time lost to a resize.
        company: most trials that ran there at once since then.
    """

    trial_id: str
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
    pausing: PausePurpose | None = None
    stopping: tuple[int, ...] = ()
    keeping: bool = False
    opened: float = 0.0
    pause: float = 0.0
    company: int = 1


class VirtualDevices:
    """Devices, the lanes on them, and the trials that run there now.

    Args:
        clock: tells the virtual time.
        record: whether to keep :attr:`segments`.

    Attributes:
        segments: stretches of time in which a trial held devices, as they end.
    """

    def __init__(self, clock: Clock, *, record: bool = True) -> None:
        self._records = record
        self.segments: list[Segment] = []
        self._clock = clock
        self._devices: dict[int, Device] = {}
        #: lane -> its devices, several for the lane of a gang
        self._lanes: dict[int, tuple[int, ...]] = {}
        #: device -> trials that run on it now, by id
        self._busy: dict[int, dict[str, SimulatedTrial]] = {}
        #: Heap of what is predicted: when, a number that orders what comes at once, the trial, its version then, and
        #: the resize that ends; ``None`` where an iteration does.
        self._predicted: list[tuple[float, int, SimulatedTrial, int, ResizeDone | None]] = []
        self._sequence = itertools.count()

    def all(self) -> list[Device]:
        """Returns the devices, in order of their index."""
        return [self._devices[index] for index in sorted(self._devices)]

    def add(self, devices: Iterable[Device]) -> None:
        """Adds devices; one of a known index replaces the other."""
        for device in devices:
            self._devices[device.index] = device
            self._busy.setdefault(device.index, {})

    def remove(self, index: int) -> None:
        """Removes a device whose lanes were stopped."""
        del self._devices[index], self._busy[index]

    def __contains__(self, index: object) -> bool:
        return index in self._devices

    def __len__(self) -> int:
        return len(self._devices)

    def start_lane(self, lane_id: int, device_ids: tuple[int, ...]) -> None:
        """Binds a lane to devices."""
        self._lanes[lane_id] = device_ids

    def has_lane(self, lane_id: int) -> bool:
        """Whether a lane was started and not removed."""
        return lane_id in self._lanes

    def host_of(self, lane_id: int) -> str:
        """The host of a lane's devices."""
        return self._devices[self._lanes[lane_id][0]].host

    def stop_lane(self, lane_id: int) -> None:
        """Removes a lane; the trials that ran there have been vacated."""
        self._lanes.pop(lane_id, None)

    def occupy(self, trial: SimulatedTrial) -> None:
        """Lets a trial hold the devices of its lanes."""
        trial.busy, trial.opened, trial.pause, trial.company = True, self._clock.now(), 0.0, 1
        for device in self._devices_of(trial):
            self._busy[device][trial.trial_id] = trial
        self._repace_neighbours(trial)

    def vacate(self, trial: SimulatedTrial) -> None:
        """Takes a trial off its devices."""
        trial.busy, trial.version = False, next(self._sequence)
        self._record(trial)
        for device in self._devices_of(trial):
            self._busy[device].pop(trial.trial_id, None)
        self._repace_neighbours(trial)

    def begin_iteration(self, trial: SimulatedTrial) -> None:
        """Begins an iteration of a trial that holds its devices."""
        trial.work = trial.truth.seconds
        trial.began = trial.since = self._clock.now()
        self._pace(trial)

    def begin_resize(self, trial: SimulatedTrial, seconds: float) -> None:
        """Begins a resize of a trial that holds its devices, which takes so many seconds."""
        trial.pause, trial.version = seconds, next(self._sequence)
        done = ResizeDone(self._clock.now() + seconds, trial.trial_id, seconds, trial.lanes[0])
        self._predict(done.at, trial, done)

    def next_at(self) -> float:
        """When the next iteration or resize ends; infinite if none is in flight."""
        while self._predicted and self._predicted[0][2].version != self._predicted[0][3]:
            heapq.heappop(self._predicted)
        return self._predicted[0][0] if self._predicted else float("inf")

    def pop(self) -> tuple[SimulatedTrial, ResizeDone | None]:
        """Returns the trial that :meth:`next_at` is about, and the resize that ended; ``None`` for an iteration."""
        _, _, trial, _, resize = heapq.heappop(self._predicted)
        return trial, resize

    def _devices_of(self, trial: SimulatedTrial) -> list[int]:
        return [device for lane in trial.lanes for device in self._lanes.get(lane, ())]

    def _repace_neighbours(self, trial: SimulatedTrial) -> None:
        for device in self._devices_of(trial):
            neighbours = self._busy[device]
            for _, other in sorted(neighbours.items()):
                other.company = max(other.company, len(neighbours))
                if other is not trial and other.work > 0.0:
                    self._pace(other)

    def _pace(self, trial: SimulatedTrial) -> None:
        """Sets the rate of the iteration in flight, and predicts when it will end."""
        now = self._clock.now()
        trial.work = max(0.0, trial.work - trial.rate * max(0.0, now - trial.since))
        trial.since = max(now, trial.since)
        devices = self._devices_of(trial)
        # A gang, in one lane, has its seconds on all of its devices.
        width = float(len(trial.lanes)) if len(devices) > 1 else 1.0 / len(self._busy[devices[0]])
        used, on_model = [self._devices[device] for device in devices], trial.truth.speeds
        speed = min(device.speed * on_model.get(device.model, 1.0) for device in used)
        trial.rate = speed / stretch_of(trial.truth.alpha, trial.truth.beta, width)
        trial.version = next(self._sequence)
        self._predict(trial.since + trial.work / trial.rate, trial, None)

    def _predict(self, at: float, trial: SimulatedTrial, resize: ResizeDone | None) -> None:
        heapq.heappush(self._predicted, (at, next(self._sequence), trial, trial.version, resize))

    def _record(self, trial: SimulatedTrial) -> None:
        now = self._clock.now()
        if self._records and now > trial.opened:
            devices = tuple(self._devices_of(trial))
            width = float(len(devices)) if len(devices) > 1 else 1.0 / trial.company
            pause = min(trial.pause, now - trial.opened)
            self.segments.append(Segment(trial.truth.row, trial.opened, now, devices, width, pause))
