"""What a lane measures on its device, against a stand-in for PyTorch's allocator and for NVML."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fluid.lane.device import device as lane_device
from fluid.lane.device.device import DeviceMemoryMeter, DeviceUnusableError, bind, make_memory_meter
from fluid.lane.device.own_memory import OwnMemory
from fluid.lane.device.warming import warm_up
from fluid.lane.protocol import LaneOptions

MB = 1e6
#: Memory of the GPU.
TOTAL = 10_000 * MB


class Allocator:
    """PyTorch's, as far as the meter sees it: what is freed stays reserved until the cache is emptied."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0.0
        #: Bytes of segments that hold a tensor.
        self.stuck = 0.0
        #: Limits that were set.
        self.shares: list[float] = []
        self.emptied = self.asked = 0
        self.free_elsewhere = TOTAL
        self.answers = True
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

    def memory_stats_as_nested_dict(self, gpu: int) -> dict[str, dict[str, dict[str, float]]]:
        self.asked += 1
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.most_allocated}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.most_reserved}},
        }

    def memory_reserved(self, gpu: int) -> float:
        return self.reserved

    def mem_get_info(self, gpu: int) -> tuple[float, float]:
        if not self.answers:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.free_elsewhere - self.reserved, TOTAL

    def reset_peak_memory_stats(self, gpu: int) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        self.emptied += 1
        self.reserved = self.allocated + self.stuck

    def get_device_properties(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=TOTAL)

    def set_per_process_memory_fraction(self, share: float, gpu: int) -> None:
        self.shares.append(share)

    def synchronize(self, gpu: int = 0) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()

    def zeros(count: int, device: str) -> None:
        made.allocate(2 * MB)
        made.free(2 * MB)

    torch = SimpleNamespace(
        cuda=made,
        zeros=zeros,
        mm=lambda one, other: None,
        set_num_threads=lambda count: None,
        backends=SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
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


def test_what_cannot_be_released_is_held(cuda: Allocator) -> None:
    meter = DeviceMemoryMeter("gpu")
    meter.begin()
    cuda.allocate(300 * MB)
    cuda.free(250 * MB)
    cuda.stuck = 40 * MB
    assert meter.end(settle=True) == (90 * MB, 210 * MB)
    meter.begin()
    assert meter.end() == (0.0, 0.0)
    cuda.stuck = 70 * MB
    meter.release_cached()
    meter.begin()
    cuda.allocate(100 * MB)
    cuda.free(90 * MB)
    assert meter.end() == (40 * MB, 20 * MB), "10 MB in tensors and 30 MB beside them"
    meter.change_trial()
    assert cuda.emptied == 2, "20 MB are little, and what cannot be released does not count"
    meter.begin()
    assert meter.end() == (0.0, 20 * MB), "it is not the next trial's"


def test_memory_is_given_back_only_where_there_is_some(cuda: Allocator) -> None:
    meter = DeviceMemoryMeter("gpu")
    cuda.allocate(100 * MB)
    meter.release_cached()
    assert cuda.emptied == 0
    cuda.free(40 * MB)
    meter.release_cached()
    assert (cuda.emptied, cuda.reserved) == (1, 60 * MB)


def test_an_iteration_asks_the_allocator_once(cuda: Allocator) -> None:
    """Each figure by itself takes PyTorch a fifth of a millisecond, as it sorts and copies all of them."""
    meter = DeviceMemoryMeter("gpu")
    meter.begin()
    meter.end()
    cuda.asked = 0
    for _ in range(10):
        meter.begin()
        cuda.allocate(MB)
        assert meter.end() == (MB, 0.0)
    assert cuda.asked == 10


def test_what_another_trial_holds_is_not_counted(cuda: Allocator) -> None:
    meter = DeviceMemoryMeter("gpu")
    meter.begin()
    cuda.allocate(300 * MB)
    assert meter.end() == (300 * MB, 0.0)
    cuda.free(200 * MB)  # Of a trial that has left.
    meter.change_trial()
    meter.begin()
    cuda.allocate(50 * MB)
    assert meter.end() == (50 * MB, 0.0)


@pytest.mark.parametrize(
    ("cached", "free", "while_idle", "at_switch"),
    [
        (90 * MB, 8000 * MB, True, True),
        (400 * MB, 8000 * MB, True, False),
        (600 * MB, 8000 * MB, False, False),
        (90 * MB, 2000 * MB, False, False),  # Others take the GPU.
        (0.0, 0.0, True, True),
    ],
)
def test_little_is_kept_where_there_is_plenty(
    cuda: Allocator, cached: float, free: float, while_idle: bool, at_switch: bool
) -> None:
    meter = DeviceMemoryMeter("gpu")
    cuda.allocate(100 * MB + cached)
    cuda.free(cached)
    cuda.free_elsewhere = free + cuda.reserved
    assert meter.may_keep_cache() == while_idle
    meter.change_trial()
    assert cuda.emptied == (not at_switch)


def test_a_gpu_that_does_not_answer_keeps_nothing(cuda: Allocator) -> None:
    meter = DeviceMemoryMeter("gpu")
    cuda.allocate(MB)
    cuda.free(MB)
    cuda.answers = False
    assert not meter.may_keep_cache()
    meter.change_trial()
    assert cuda.emptied == 1


@pytest.mark.parametrize("why", ["cpu", "not initialised"])
def test_nothing_is_measured_without_a_device(cuda: Allocator, why: str) -> None:
    cuda.initialised = why == "cpu"
    meter = DeviceMemoryMeter("cpu" if why == "cpu" else "gpu")
    meter.begin()
    assert meter.end() is None
    meter.change_trial()
    meter.release_cached(collect=True)
    assert cuda.emptied == 0 and cuda.asked == 0 and meter.may_keep_cache() and meter.is_usable()


# --- Before the first trial


def warmed_up(visible: str | None = None) -> float:
    options = LaneOptions(0, kind="gpu", visible=visible)
    return warm_up(options, OwnMemory(options))


def test_a_lane_that_cannot_use_its_device_says_so(cuda: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "synchronize", raising("CUDA error: busy or unavailable"))
    with pytest.raises(DeviceUnusableError, match="RuntimeError: CUDA error: busy or unavailable"):
        warmed_up()


def test_a_gangs_lane_names_the_device_that_it_cannot_use(cuda: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:

    def zeros(count: int, device: str) -> None:
        if device == "cuda:1":
            raise RuntimeError("CUDA error: invalid device ordinal")

    monkeypatch.setattr(sys.modules["torch"], "zeros", zeros)
    with pytest.raises(DeviceUnusableError) as caught:
        warmed_up("GPU-1,GPU-2,GPU-3")
    assert caught.value.position == 1


def test_pytorch_without_cuda_has_nothing_to_warm_up(cuda: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "synchronize", raising("Torch not compiled with CUDA enabled"))
    sys.modules["torch"].backends.cuda.is_built = lambda: False  # type: ignore[attr-defined]
    assert warmed_up() == 0.0
    assert DeviceMemoryMeter("gpu").is_usable("CUDA error")


@pytest.mark.parametrize(
    ("initialised", "error", "usable"),
    [(True, "", False), (False, "ValueError: bad shape", True), (False, "RuntimeError: No CUDA GPUs are there", False)],
)
def test_a_device_is_checked_if_cuda_was_used_or_is_named(
    cuda: Allocator, monkeypatch: pytest.MonkeyPatch, initialised: bool, error: str, usable: bool
) -> None:
    cuda.initialised = initialised
    monkeypatch.setattr(cuda, "synchronize", raising("CUDA error: unspecified launch failure"))
    assert DeviceMemoryMeter("gpu").is_usable(error) is usable


def raising(text: str) -> Callable[..., None]:
    def fails(gpu: int = 0) -> None:
        raise RuntimeError(text)

    return fails


class BrokenAllocator:
    """PyTorch's, as expandable segments leave it after a mapping that failed in its middle."""

    def __init__(self, free: float, error: str) -> None:
        self.free, self.error = free, error
        self.asked: list[int] = []

    def empty(self, size: int, *, dtype: object, device: str) -> None:
        self.asked.append(size)
        if self.error:
            raise RuntimeError(self.error)


_ASSERTION = '!handles_.at(i) INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":487, please report a bug'


@pytest.mark.parametrize(
    ("free", "error", "usable", "asked"),
    [
        (1e9, "", True, [2 << 20, 32 << 20, 256 << 20]),
        (1e8, "", True, [2 << 20, 32 << 20]),
        (1e9, _ASSERTION, False, [2 << 20]),
        (1e9, "CUDA out of memory. Another process was faster", True, [2 << 20, 32 << 20, 256 << 20]),
    ],
)
def test_after_memory_ran_out_a_device_is_asked_for_some(
    cuda: Allocator, free: float, error: str, usable: bool, asked: list[int]
) -> None:
    broken = BrokenAllocator(free, error)
    sys.modules["torch"].empty, sys.modules["torch"].uint8 = broken.empty, "uint8"  # type: ignore[attr-defined]
    cuda.free_elsewhere = free
    meter = DeviceMemoryMeter("gpu")
    assert meter.is_usable() and broken.asked == []
    assert meter.is_usable(allocates=True) is usable
    assert broken.asked == asked


def test_an_allocator_that_is_broken_for_good_is_a_fault_of_the_device(cuda: Allocator) -> None:
    assert not DeviceMemoryMeter("gpu").is_usable(f"RuntimeError: {_ASSERTION}")
    assert DeviceMemoryMeter("gpu").is_usable("RuntimeError: INTERNAL ASSERT FAILED at some.cpp")


def test_lanes_without_a_gpu_or_pytorch_take_nothing(monkeypatch: pytest.MonkeyPatch, cuda: Allocator) -> None:
    for options in (LaneOptions(0, kind="cpu"), LaneOptions(0, kind="gpu")):
        assert warm_up(options, OwnMemory(options)) == 0.0
        monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_the_environment_comes_before_all_else(monkeypatch: pytest.MonkeyPatch, cuda: Allocator) -> None:
    monkeypatch.setattr(os, "environ", {})
    bind(LaneOptions(0, kind="gpu", visible="GPU-1", threads=3, environment=(("CUDA_MPS_PIPE_DIRECTORY", "/x"),)))
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/x"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert os.environ["OMP_NUM_THREADS"] == "3"


# --- A CPU whose memory has an end


@pytest.mark.slow
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


# --- A limit of what trials may take


def test_a_limit_is_a_share_of_the_gpu(cuda: Allocator) -> None:
    meter = DeviceMemoryMeter("gpu")
    meter.limit(None)
    assert cuda.shares == [], "nothing changes"
    for limit_bytes in (2500 * MB, 2500 * MB, 2 * TOTAL, None):
        meter.limit(limit_bytes)
    assert cuda.shares == [0.25, 1.0, 1.0]


def test_a_limit_waits_for_the_first_use_of_the_gpu(cuda: Allocator) -> None:
    meter = DeviceMemoryMeter("gpu")
    cuda.initialised = False
    meter.limit(5000 * MB)
    cuda.initialised = True
    meter.limit(5000 * MB)
    assert cuda.shares == [0.5]
