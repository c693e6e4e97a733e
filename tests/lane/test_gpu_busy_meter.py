"""When a GPU's lane says how busy its trial keeps the GPU, on a virtual clock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fluid._clock import VirtualClock
from fluid.gpu.utilization import UnitUse
from fluid.lane.device import busy as gpu_busy_meter
from fluid.lane.device.busy import BusyMeter, GpuBusyMeter, make_busy_meter
from fluid.lane.protocol import LaneOptions


class Lane:
    """A lane whose trial keeps the GPU so busy, as often as NVML is asked."""

    def __init__(self, share: float = 0.97) -> None:
        self.clock = VirtualClock()
        self.asked = 0
        self.share = share
        self.meter = GpuBusyMeter(self.clock, self.read)

    def read(self) -> float:
        self.asked += 1
        return self.share

    def iterate(self, seconds: float, gap: float = 0.0) -> float | None:
        self.clock.advance_to(self.clock.now() + gap)
        self.meter.begin()
        self.clock.advance_to(self.clock.now() + seconds)
        return self.meter.end(seconds)


def test_it_says_so_once_a_second() -> None:
    lane = Lane()
    said = [lane.iterate(0.25) for _ in range(8)]
    assert said == [None, None, None, 0.97] * 2
    assert lane.asked == 3, "at the begin, and once a second: NVML's answers take time"
    assert lane.iterate(30.0) == 0.97


def test_it_says_nothing_of_a_second_in_which_the_trial_paused() -> None:
    lane = Lane()
    assert lane.iterate(0.8) is None
    assert lane.iterate(0.8, gap=0.5) is None
    assert lane.iterate(1.1) == 0.97


def test_what_is_used_counts_for_the_iterations_if_others_decide_in_between() -> None:
    lane = Lane(0.6)
    said = [lane.iterate(0.03, gap=0.01) for _ in range(26)]
    assert [share for share in said if share is not None] == pytest.approx([0.6 * 1.03 / 0.78])
    assert [share for share in (lane.iterate(0.01, gap=0.02) for _ in range(34)) if share is not None] == []


def test_it_says_nothing_of_a_second_that_two_trials_shared() -> None:
    lane = Lane()
    assert lane.iterate(0.8) is None
    lane.meter.change_trial()
    assert lane.iterate(0.8) is None
    assert lane.iterate(0.3) == 0.97


@pytest.mark.parametrize("mps", [False, True])
def test_under_mps_the_units_count(mps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    if mps:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", os.fspath(tmp_path))
    read = gpu_busy_meter._reader()
    assert isinstance(getattr(read, "__self__", None), UnitUse) is mps
    assert read() is None, "there is no GPU here"


def test_a_gpu_that_tells_nothing_is_asked_all_the_same() -> None:
    clock = VirtualClock()
    meter = make_busy_meter(LaneOptions(0, kind="gpu"), clock)
    assert isinstance(meter, GpuBusyMeter)
    for _ in range(3):
        meter.begin()
        clock.advance_to(clock.now() + 2.0)
        assert meter.end(2.0) is None
    assert isinstance(make_busy_meter(LaneOptions(0), clock), BusyMeter)
