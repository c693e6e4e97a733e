"""When an idle lane gives the device memory back that it has cached, against a meter that says what it is told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest

from fluid._clock import VirtualClock
from fluid.engine.events import IterationDone
from fluid.lane import serve as lane_serve
from fluid.lane.device.device import DeviceMemoryMeter
from fluid.lane.device.own_memory import OwnMemory
from fluid.lane.output import LaneStreams
from fluid.lane.protocol import LaneOptions, ShipTrainable
from fluid.trainables.driver_link import in_trial
from fluid.trainables.pickling import dump_config, dump_trainable


class Meter(DeviceMemoryMeter):
    """Measures that every trial holds one byte."""

    def __init__(self, *, may_keep: bool) -> None:
        super().__init__("cpu")
        self.may_keep = may_keep
        self.told: list[str] = []

    def begin(self) -> None:
        pass

    def end(self, *, settle: bool = False) -> tuple[float, float]:
        return 1.0, 1.0

    def change_trial(self) -> None:
        self.told.append("change")

    def limit(self, limit_bytes: float | None) -> None:
        pass

    def may_keep_cache(self) -> bool:
        return self.may_keep

    def release_cached(self, *, collect: bool = False) -> None:
        self.told.append("release")


class ScriptedChannel:
    """Delivers batches of messages, empty ones where none come in time, and then the end of the driver."""

    def __init__(self, *batches: list[Any]) -> None:
        self.batches = list(batches)
        self.waits: list[float | None] = []
        self._has_just_come = False

    def receive(self, *, timeout: float | None) -> list[Any]:
        if self._has_just_come:  # There is no more so far.
            self._has_just_come = False
            return []
        self.waits.append(timeout)
        if not self.batches:
            raise EOFError
        batch = self.batches.pop(0)
        self._has_just_come = bool(batch)
        return batch

    def send(self, message: Any, *, at_once: bool = True) -> None:
        pass

    def send_short(self, done: IterationDone) -> None:
        pass

    def flush(self) -> None:
        pass

    def wake(self) -> None:
        pass


class Counting:
    def __init__(self, config: dict[str, Any]) -> None:
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"count": self.count}


@pytest.fixture
def run_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Meter]:
    def run(channel: ScriptedChannel, *, may_keep: bool = True) -> Meter:
        meter = Meter(may_keep=may_keep)
        monkeypatch.setattr(lane_serve, "make_memory_meter", lambda options: meter)
        output = LaneStreams(sys.stdout, sys.stderr, echo=False)
        options = LaneOptions(0, kind="gpu", run_folder=str(tmp_path))
        own = OwnMemory(options)
        lane_serve._Lane(channel, options, VirtualClock(), output, own).run()  # type: ignore[arg-type]
        return meter

    return run


def started(trial_id: str = "a") -> list[Any]:
    return [ShipTrainable(0, dump_trainable(Counting), ()), to.set_up(trial_id, 0, dump_config({}), 1)]


def test_a_lane_waits_a_moment_before_it_gives_memory_back(run_lane: Callable[..., Meter]) -> None:
    channel = ScriptedChannel(started(), [to.run("a", 1)], [to.run("a", 1)], [])
    meter = run_lane(channel)
    assert not in_trial(), "the lane has ended, and no trial's code runs here"
    # Three decisions, one at a time; then there is none in time.
    assert channel.waits == [None, 0.05, 0.05, 0.05, None]
    assert meter.told == ["change", "release"]


def test_a_lane_gives_memory_back_at_once_where_it_is_short(run_lane: Callable[..., Meter]) -> None:
    channel = ScriptedChannel(started(), [])
    meter = run_lane(channel, may_keep=False)
    assert channel.waits == [None, 0.0, None]
    assert meter.told == ["change", "release"]


def test_a_trial_that_comes_into_the_lane_may_use_what_is_cached(run_lane: Callable[..., Meter]) -> None:
    channel = ScriptedChannel(started(), started("b")[1:], [])
    assert run_lane(channel).told == ["change", "change", "release"]
