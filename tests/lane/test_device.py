"""What a lane measures on its device, against a stand-in for PyTorch's allocator and for NVML."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from fluid.gpu.nvml import Gpu
from fluid.lane import device as lane_device
from fluid.lane.device import DeviceMemoryMeter, bind, make_memory_meter, warm_up
from fluid.lane.messages import LaneOptions

MB = 1e6


class Allocator:
    """PyTorch's, as far as the meter sees it: what is freed stays reserved until the cache is emptied."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0.0
        self.emptied = 0
        self.initialised = True

    def allocate(self, size: float) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def free(self, size: float) -> None:
        self.allocated -= size

    def is_initialized(self) -> bool:
        return self.initialised

    def device_count(self) -> int:
        return 1

    def memory_allocated(self, gpu: int) -> float:
        return self.allocated

    def memory_reserved(self, gpu: int) -> float:
        return self.reserved

    def max_memory_allocated(self, gpu: int) -> float:
        return self.most_allocated

    def max_memory_reserved(self, gpu: int) -> float:
        return self.most_reserved

    def reset_peak_memory_stats(self, gpu: int) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        self.emptied += 1
        self.reserved = self.allocated

    def synchronize(self, gpu: int = 0) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()

    def zeros(count: int, device: str) -> None:
        made.allocate(2 * MB)
        made.free(2 * MB)

    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=made, zeros=zeros, set_num_threads=lambda count: None)
    )
    return made


# --- A piece of work


def test_a_peak_is_what_was_reserved(cuda: Allocator) -> None:
    meter = DeviceMemoryMeter("gpu")
    cuda.allocate(100 * MB)
    meter.begin()
    cuda.allocate(300 * MB)
    cuda.free(250 * MB)
    assert meter.end() == (50 * MB, 250 * MB)
    meter.begin()
    cuda.allocate(10 * MB)
    cuda.free(10 * MB)
    assert meter.end() == (0.0, 250 * MB), "tensors took 10 MB, and the rest is for no other trial"
    meter.release_cached()
    meter.begin()
    cuda.allocate(10 * MB)
    cuda.free(10 * MB)
    assert meter.end() == (0.0, 10 * MB)


def test_memory_is_given_back_only_where_there_is_some(cuda: Allocator) -> None:
    meter = DeviceMemoryMeter("gpu")
    cuda.allocate(100 * MB)
    meter.release_cached()
    assert cuda.emptied == 0
    cuda.free(40 * MB)
    meter.release_cached()
    assert (cuda.emptied, cuda.reserved) == (1, 60 * MB)


@pytest.mark.parametrize("why", ["cpu", "not initialised"])
def test_nothing_is_measured_without_a_device(cuda: Allocator, why: str) -> None:
    cuda.initialised = why == "cpu"
    meter = DeviceMemoryMeter("cpu" if why == "cpu" else "gpu")
    meter.begin()
    assert meter.end() is None
    meter.release_cached(collect=True)
    assert cuda.emptied == 0 and meter.is_usable()


# --- What the process takes for itself


def nvml(monkeypatch: pytest.MonkeyPatch, used: list[float | None], own: float | None) -> None:
    answers = iter(used)
    monkeypatch.setattr(lane_device, "find_gpus", lambda: [Gpu("GPU-1", 1e9)])
    monkeypatch.setattr(lane_device, "used_bytes", lambda token: next(answers))
    monkeypatch.setattr(lane_device, "process_bytes", lambda token, pid: own if pid == os.getpid() else None)


@pytest.mark.parametrize(
    ("used", "own", "expected"),
    [
        ([100 * MB], 500 * MB, 500 * MB),
        ([100 * MB, 580 * MB], None, 480 * MB),  # NVML knows it by the host's number.
        ([100 * MB, 580 * MB], 0.0, 480 * MB),  # Or has not seen it yet.
        ([None, 580 * MB], None, 0.0),
        ([600 * MB, 580 * MB], None, 0.0),  # Another process has left meanwhile.
    ],
)
def test_a_warm_lane_knows_what_it_takes(
    cuda: Allocator, monkeypatch: pytest.MonkeyPatch, used: list[float | None], own: float | None, expected: float
) -> None:
    nvml(monkeypatch, used, own)
    assert warm_up(LaneOptions(0, kind="gpu")) == expected


def test_what_tensors_take_is_not_the_lanes_own(cuda: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, [0.0], 500 * MB)
    cuda.allocate(100 * MB)
    assert warm_up(LaneOptions(0, kind="gpu")) == 400 * MB


def test_a_lane_that_cannot_use_its_device_comes_all_the_same(
    cuda: Allocator, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nvml(monkeypatch, [0.0], 500 * MB)
    monkeypatch.setattr(cuda, "synchronize", lambda gpu: 1 / 0)
    assert warm_up(LaneOptions(0, kind="gpu")) == 0.0
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_lanes_without_a_gpu_or_pytorch_take_nothing(monkeypatch: pytest.MonkeyPatch, cuda: Allocator) -> None:
    assert warm_up(LaneOptions(0, kind="cpu")) == 0.0
    monkeypatch.delitem(sys.modules, "torch")
    assert warm_up(LaneOptions(0, kind="gpu")) == 0.0


def test_the_environment_comes_before_all_else(monkeypatch: pytest.MonkeyPatch, cuda: Allocator) -> None:
    monkeypatch.setattr(os, "environ", {})
    bind(LaneOptions(0, kind="gpu", visible="GPU-1", threads=3, environment=(("CUDA_MPS_PIPE_DIRECTORY", "/x"),)))
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/x"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert os.environ["OMP_NUM_THREADS"] == "3"


# --- A CPU whose memory has an end


def test_the_process_is_measured_where_a_cpu_has_so_much_and_no_more() -> None:
    meter = make_memory_meter(LaneOptions(0, bounded=True))
    meter.begin()
    kept, taken = b"k" * (64 << 20), b"t" * (32 << 20)
    del taken
    measured = meter.end()
    assert measured is not None and len(kept) == 64 << 20
    assert 60 << 20 < measured[0] < 72 << 20
    assert 28 << 20 < measured[1] < 40 << 20
    meter.release_cached(collect=True)
    assert meter.is_usable()


def test_nothing_is_measured_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = make_memory_meter(LaneOptions(0, bounded=True))
    monkeypatch.setattr(lane_device, "_memory_of_process", dict[str, float])
    meter.begin()
    assert meter.end() is None


@pytest.mark.parametrize("options", [LaneOptions(0), LaneOptions(0, kind="gpu", bounded=True)])
def test_others_are_measured_by_their_device(options: LaneOptions) -> None:
    meter = make_memory_meter(options)
    meter.begin()
    assert meter.end() is None
