"""The outcome of a sweep: the best trial, how long everything took, and how busy the devices were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from fluid.planners.rollout import Segment
from fluid.reports.run.timeline import Timeline
from fluid.resources import Device


class Iteration(NamedTuple):
    """One iteration of a trial; times are in seconds since the sweep was started.

    Attributes:
        trial: the trial's number, in the order in which trials were made.
        trial_id: the id under which Tune and ``fluid report`` show it.
        iteration: the trial's iterations so far.
        value: of the metric.
        config: the hyperparameters of this iteration.
        begun: when it began.
        seconds: how long it took.
        process: id of the process that ran it.
        reported: when the driver received it.
    """

    trial: int
    trial_id: str
    iteration: int
    value: float
    config: Mapping[str, Any]
    begun: float
    seconds: float
    process: int
    reported: float

    @property
    def end(self) -> float:
        """When it was done."""
        return self.begun + self.seconds


class Outcome:
    """A sweep that has ended.

    Args:
        iterations: in the order in which the driver received their results.
        wall_time: seconds from the call to its return, start-up included.
        devices: number of devices.
        mode: ``"max"`` or ``"min"``.
        target: the value of the metric to reach.
        cut_off: how many trials a signal has cut off, with results or without.
    """

    def __init__(
        self,
        iterations: Sequence[Iteration],
        wall_time: float,
        devices: int,
        mode: str,
        target: float,
        *,
        cut_off: int = 0,
    ) -> None:
        self.iterations = tuple(iterations)
        self.wall_time = wall_time
        self.devices = devices
        self.mode = mode
        self.target = target
        self.cut_off = cut_off

    @cached_property
    def trials(self) -> int:
        """How many trials reported results."""
        return len({one.trial for one in self.iterations})

    @cached_property
    def best(self) -> Iteration:
        """The iteration with the best value; of equal ones the first."""
        sign = 1.0 if self.mode == "max" else -1.0
        return max(self.iterations, key=lambda one: sign * one.value)

    @cached_property
    def to_target(self) -> float | None:
        """Seconds until the driver received a value at the target or better; ``None`` if it received none."""
        sign = 1.0 if self.mode == "max" else -1.0
        return min((one.reported for one in self.iterations if sign * one.value >= sign * self.target), default=None)

    @cached_property
    def last_end(self) -> float:
        """Seconds from the call to the end of the last iteration: the start-up and the makespan."""
        return max(one.end for one in self.iterations)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start of an iteration to the end of the last one, as in ``fluid report``."""
        return self.last_end - min(one.begun for one in self.iterations)

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of the devices; the device of a process is inferred from when its iterations ran."""
        ordered = sorted(self.iterations, key=lambda one: one.begun)
        segments = tuple(
            Segment(one.trial, one.begun, one.end, (device,), 1.0)
            for one, device in zip(ordered, _places(ordered, self.devices), strict=True)
        )
        names = tuple(f"trial {number}" for number in range(1 + max(one.trial for one in ordered)))
        return Timeline(tuple(map(Device, range(self.devices))), segments, names, self.last_end)

    @property
    def utilisation(self) -> float:
        """Share of the devices' time during the makespan in which a trial trained."""
        return self.utilisation_since_call * self.last_end / self.makespan

    @property
    def utilisation_since_call(self) -> float:
        """Share of the devices' time, from the call to the end of the last iteration, in which a trial trained."""
        return self.timeline.utilisation


def _places(iterations: Iterable[Iteration], devices: int) -> list[int]:
    """Returns a device for each iteration, in order of their start: the process's last one if it is free."""
    free_at = [0.0] * devices
    last: dict[int, int] = {}
    places = []
    for one in iterations:
        device = last.get(one.process)
        if device is None or free_at[device] > one.begun:
            # The device that became free last, so that a process keeps its device to itself.
            idle = [number for number in range(devices) if free_at[number] <= one.begun]
            device = max(idle, key=free_at.__getitem__) if idle else min(range(devices), key=free_at.__getitem__)
        last[one.process] = device
        free_at[device] = max(free_at[device], one.end)
        places.append(device)
    return places
