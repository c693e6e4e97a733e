"""Virtual devices: which trials run where, how fast by the runtime model, and when each iteration will end."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable

from fluid._clock import Clock
from fluid.backends.simulated.steps import LaneRows, PlayedIteration, SimulatedTrial, VirtualStep, work_of
from fluid.engine.events import Event, Failure, ResizeDone
from fluid.measure.runtime_model import stretch_of
from fluid.planners.rollout import Segment
from fluid.resources import Device


class VirtualDevices:
    """Devices, the lanes on them, and the trials that run there now.

    Args:
        clock: tells the virtual time.
        record: whether to keep :attr:`segments`.
        lane_policy: which of several trials a lane runs next; ``None`` for the one that has waited longest.

    Attributes:
        segments: stretches of time in which a trial held devices, as they end.
    """

    def __init__(self, clock: Clock, *, record: bool = True, lane_policy: str | None = None) -> None:
        self._policy = lane_policy
        self._records = record
        self.segments: list[Segment] = []
        self._clock = clock
        self._devices: dict[int, Device] = {}
        #: lane -> its devices, several for the lane of a gang
        self._lanes: dict[int, tuple[int, ...]] = {}
        #: device -> trials that run on it now, by id
        self._busy: dict[int, dict[str, SimulatedTrial]] = {}
        #: device -> lanes in which they run: processes that share it
        self._processes: Counter[int] = Counter()
        self._rows: dict[int, LaneRows] = {}
        #: Lanes that may begin a step once all commands of this instant are known.
        self._due: dict[int, None] = {}
        #: Heap of what is predicted: when, a number that orders what comes at once, the step, and its version then.
        self._predicted: list[tuple[float, int, VirtualStep, int]] = []
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
        del self._devices[index], self._busy[index], self._processes[index]

    def __contains__(self, index: object) -> bool:
        return index in self._devices

    def __len__(self) -> int:
        return len(self._devices)

    def start_lane(self, lane_id: int, device_ids: tuple[int, ...]) -> None:
        """Binds a lane to devices."""
        self._lanes[lane_id], self._rows[lane_id] = device_ids, LaneRows(policy=self._policy)

    def limit_rows(self, lane_id: int, rows: int) -> None:
        """Lets a lane fuse at most so many trials in one step from now on."""
        if lane_id in self._rows:
            self._rows[lane_id].limit = rows

    def has_lane(self, lane_id: int) -> bool:
        """Whether a lane was started and not removed."""
        return lane_id in self._lanes

    def host_of(self, lane_id: int) -> str:
        """The host of a lane's devices."""
        return self._devices[self._lanes[lane_id][0]].host

    def stop_lane(self, lane_id: int) -> None:
        """Removes a lane; the trials that ran there have been vacated."""
        self._lanes.pop(lane_id, None)
        self._rows.pop(lane_id, None)
        self._due.pop(lane_id, None)

    def occupy(self, trial: SimulatedTrial) -> None:
        """Lets a trial hold the devices of its lanes."""
        trial.busy, trial.opened, trial.pause, trial.company = True, self._clock.now(), 0.0, 1
        for device in self._devices_of(trial):
            self._busy[device][trial.trial_id] = trial
        shares_lane = False
        for lane_id in trial.lanes:
            trials = self._rows[lane_id].trials
            shares_lane |= bool(trials)
            if not trials:
                self._processes.update(self._lanes[lane_id])
            self._rows[lane_id].join(trial)
        self._repace_neighbours(trial, shares_lane)

    def vacate(self, trial: SimulatedTrial) -> None:
        """Takes a trial off its devices, and out of the step that it takes part in."""
        trial.busy = False
        if trial.step is not None:
            trial.step.trials.remove(trial)
            if not trial.step.trials:
                trial.step.version = next(self._sequence)
            trial.step = None
        self._record(trial)
        for device in self._devices_of(trial):
            self._busy[device].pop(trial.trial_id, None)
        shares_lane = False
        for lane_id in trial.lanes:
            trials = self._rows[lane_id].trials
            del trials[trial.trial_id]
            if trials:
                shares_lane, self._due[lane_id] = True, None
            else:
                self._processes.subtract(self._lanes[lane_id])
        self._repace_neighbours(trial, shares_lane)

    def begin_iteration(self, trial: SimulatedTrial) -> None:
        """Lets a trial that holds its devices begin an iteration.

        It begins at once if no other trial could take that step with it; else by :meth:`begin_steps`.
        """
        rows = self._rows[trial.lanes[0]]
        if trial.truth.fusion_key is None and len(rows.trials) == 1:
            self._begin([trial], rows)
        else:
            self._due[trial.lanes[0]] = None

    def begin_steps(self) -> None:
        """Begins the steps of lanes that wait for others to take part, as no command of this instant is to come."""
        while self._due:
            lane_id = next(iter(self._due))
            del self._due[lane_id]
            trials = self._rows[lane_id].next_step()
            if trials:
                self._begin(trials, self._rows[lane_id])

    def begin_resize(self, trial: SimulatedTrial, seconds: float) -> None:
        """Begins a resize of a trial that holds its devices, which takes so many seconds."""
        self.begin_event(trial, ResizeDone(self._clock.now() + seconds, trial.trial_id, seconds, trial.lanes[0]))

    def begin_event(self, trial: SimulatedTrial, event: Event) -> None:
        """Begins what a trial that holds its devices does until an event."""
        trial.pause = event.at - self._clock.now()
        trial.step = VirtualStep([trial], version=next(self._sequence), ended=event)
        self._predict(event.at, trial.step)

    def next_at(self) -> float:
        """When the next step or resize ends; infinite if none is in flight."""
        while self._predicted and self._predicted[0][2].version != self._predicted[0][3]:
            heapq.heappop(self._predicted)
        return self._predicted[0][0] if self._predicted else float("inf")

    def pop(self) -> VirtualStep:
        """Returns the step, or resize, that :meth:`next_at` is about; its trials are in it no more."""
        step = heapq.heappop(self._predicted)[2]
        for trial in step.trials:
            trial.step = None
        return step

    def _begin(self, trials: list[SimulatedTrial], rows: LaneRows) -> None:
        now = self._clock.now()
        for trial in trials:
            trial.next_iteration()
            self._allocate(trial)
        step = VirtualStep(
            trials, work=work_of(trials), began=now, since=now, rows=len(trials), settled=rows.begin(trials)
        )
        for trial in trials:
            trial.step = step
        self._pace(step)

    def _allocate(self, trial: SimulatedTrial) -> None:
        """Fails the iteration that a trial begins if it needs more memory than those beside it leave."""
        played = trial.played
        if played is None or played.memory is None or played.failure is not None:
            return
        for device in self._devices_of(trial):
            has = self._devices[device].memory_bytes
            if has is None:
                continue
            others = [other.played for other in self._busy[device].values() if other is not trial]
            held = sum([other.memory.persistent_bytes for other in others if other and other.memory])
            if held + played.memory.peak_bytes > has:
                message = f"out of memory: {played.memory.peak_bytes:.0f} bytes on device {device}"
                message += f", which has {has:.0f}" + (f" and {held:.0f} of them taken" if held else "")
                trial.played = PlayedIteration(0.0, failure=Failure("out_of_memory", message))
                return

    def _devices_of(self, trial: SimulatedTrial) -> list[int]:
        return [device for lane in trial.lanes for device in self._lanes.get(lane, ())]

    def _repace_neighbours(self, trial: SimulatedTrial, shares_lane: bool) -> None:
        """Adapts the steps in flight beside a trial that has come or gone, unless its lane is as busy as before."""
        for device in self._devices_of(trial):
            neighbours = self._busy[device]
            for _, other in sorted(neighbours.items()):
                other.company = max(other.company, len(neighbours))
                step = other.step
                if shares_lane or other is trial or step is None or step.work <= 0.0:
                    continue
                if other is step.trials[0]:
                    self._pace(step)

    def _pace(self, step: VirtualStep) -> None:
        """Sets the rate of a step in flight, and predicts when it will end."""
        now, trial = self._clock.now(), step.trials[0]
        step.work = max(0.0, step.work - step.rate * max(0.0, now - step.since))
        step.since = max(now, step.since)
        devices = self._devices_of(trial)
        # A gang, in one lane, has its seconds on all of its devices.
        width = float(len(trial.lanes)) if len(devices) > 1 else 1.0 / self._processes[devices[0]]
        used, on_model = [self._devices[device] for device in devices], trial.truth.speeds
        speed = min(device.speed * on_model.get(device.model, 1.0) for device in used)
        step.rate = speed / stretch_of(trial.truth.alpha, trial.truth.beta, width)
        step.version = next(self._sequence)
        self._predict(step.since + step.work / step.rate, step)

    def _predict(self, at: float, step: VirtualStep) -> None:
        heapq.heappush(self._predicted, (at, next(self._sequence), step, step.version))

    def _record(self, trial: SimulatedTrial) -> None:
        now = self._clock.now()
        if self._records and now > trial.opened:
            devices = tuple(self._devices_of(trial))
            width = float(len(devices)) if len(devices) > 1 else 1.0 / trial.company
            pause = min(trial.pause, now - trial.opened)
            self.segments.append(Segment(trial.truth.row, trial.opened, now, devices, width, pause))
