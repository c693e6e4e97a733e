"""What a lane takes on its GPU besides tensors, against stand-ins for PyTorch's allocator and for NVML."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fluid.gpu.nvml import Gpu
from fluid.lane import own_memory
from fluid.lane.messages import LaneOptions
from fluid.lane.own_memory import OwnMemory

MB = 1e6


class FakeGpu:
    """One GPU with the allocator of this process.

    Attributes:
        others: bytes that other processes hold.
        context: bytes of this process's context.
        reserved: bytes that its tensors take.
        listed: whether NVML lists this process.
    """

    def __init__(self) -> None:
        self.others = self.context = self.reserved = 0.0
        self.listed = True
        self.known = True

    def process_bytes(self, token: str, pid: int) -> float | None:
        assert (token, pid) == ("GPU-1", os.getpid())
        return self.context + self.reserved if self.listed else None

    def used_bytes(self, token: str) -> float | None:
        return self.others + self.context + self.reserved if self.known else None

    def make_context(self, size: float = 500 * MB, *, others: float = 0.0, tensors: float = 2 * MB) -> None:
        self.context, self.reserved = size, tensors
        self.others += others


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    cuda = SimpleNamespace(is_initialized=lambda: made.context > 0.0, memory_reserved=lambda index: made.reserved)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(own_memory, "find_gpus", lambda: [Gpu("GPU-1", 1e9)])
    monkeypatch.setattr(own_memory, "process_bytes", made.process_bytes)
    monkeypatch.setattr(own_memory, "used_bytes", made.used_bytes)
    return made


@pytest.fixture
def lane(tmp_path: Path) -> Callable[[], OwnMemory]:
    """Makes what measures a further lane of the device."""
    return lambda: OwnMemory(LaneOptions(0, kind="gpu", note=str(tmp_path / "lane-0")))


def start(gpu: FakeGpu, own: OwnMemory, size: float = 500 * MB, others: float = 0.0) -> float:
    """A further lane makes its context, while other processes take or free memory."""
    gpu.others += gpu.context + gpu.reserved
    gpu.context = gpu.reserved = 0.0
    return own.around(lambda: gpu.make_context(size, others=others))


def test_what_tensors_take_is_not_the_lanes_own(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    gpu.others = 7000 * MB
    assert start(gpu, lane(), others=900 * MB) == 500 * MB


def test_the_smallest_difference_counts_where_the_process_is_not_listed(
    gpu: FakeGpu, lane: Callable[[], OwnMemory]
) -> None:
    gpu.listed = False
    first = lane()
    assert start(gpu, first, others=900 * MB) == 1400 * MB, "a neighbour has allocated meanwhile"
    assert start(gpu, lane()) == 500 * MB
    assert start(gpu, lane(), others=300 * MB) == 500 * MB
    assert start(gpu, lane(), others=-500 * MB) == 500 * MB, "a neighbour has freed memory meanwhile"
    assert first.changed() == 500 * MB, "the first lane corrects itself"
    assert first.changed() is None


@pytest.mark.parametrize(("others", "expected"), [(9000 * MB, 3000 * MB), (-500 * MB, 0.0), (0.0, 500 * MB)])
def test_only_a_likely_difference_is_believed(gpu: FakeGpu, others: float, expected: float) -> None:
    gpu.listed, gpu.others = False, 5000 * MB
    own = OwnMemory(LaneOptions(0, kind="gpu"))
    assert start(gpu, own, others=others) == expected


def test_nothing_is_known_without_nvml(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    gpu.listed = gpu.known = False
    own = lane()
    assert start(gpu, own) == 0.0
    assert own.changed() is None


def test_one_lane_of_a_device_makes_its_context_at_a_time(
    gpu: FakeGpu, lane: Callable[[], OwnMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.listed = False
    naps = []
    with open(tmp_path / "context-GPU-1.lock", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def nap(seconds: float) -> None:
            naps.append(seconds)
            assert not gpu.context, "it waits before it makes its context"
            if len(naps) == 3:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(own_memory, "nap", nap)
        assert start(gpu, lane()) == 500 * MB
        assert len(naps) == 3


def test_a_lane_that_hangs_keeps_no_other_from_starting(
    gpu: FakeGpu, lane: Callable[[], OwnMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.listed = False
    monkeypatch.setattr(own_memory, "_PATIENCE_S", 0.0)
    with open(tmp_path / "context-GPU-1.lock", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert start(gpu, lane()) == 0.0, "its difference may be the other lane's"


def test_lanes_do_not_wait_where_processes_are_listed(
    gpu: FakeGpu, lane: Callable[[], OwnMemory], tmp_path: Path
) -> None:
    start(gpu, lane())
    with open(tmp_path / "context-GPU-1.lock", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert start(gpu, lane(), 400 * MB) == 400 * MB


def test_a_context_that_fails_lets_the_next_lane_try(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    with pytest.raises(ZeroDivisionError):
        lane().around(lambda: 1 // 0 and None)
    assert start(gpu, lane()) == 500 * MB


def test_a_lane_starts_where_nothing_can_be_written(gpu: FakeGpu, tmp_path: Path) -> None:
    own = OwnMemory(LaneOptions(0, kind="gpu", note=str(tmp_path / "gone" / "lane-0")))
    assert start(gpu, own) == 500 * MB
    gpu.listed = False
    assert start(gpu, own) == 0.0


def test_what_libraries_add_later_is_told_once(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    own = lane()
    start(gpu, own)
    assert own.changed() is None
    gpu.context, gpu.reserved = 800 * MB, 4000 * MB
    assert own.changed() == 800 * MB
    gpu.context = 801 * MB
    assert own.changed() is None, "not worth telling"


def test_a_lane_whose_trial_loads_pytorch_late(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    own = lane()
    assert own.changed() is None
    gpu.make_context()
    assert own.changed() == 500 * MB


def test_a_cpu_has_no_context(gpu: FakeGpu) -> None:
    gpu.make_context()
    assert OwnMemory(LaneOptions(0)).changed() is None
