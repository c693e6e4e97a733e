"""What a lane takes on its GPU besides tensors, against stand-ins for PyTorch's allocator and for NVML."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluid.gpu.nvml import Gpu, GpuProcess
from fluid.lane.device import own_memory
from fluid.lane.device import own_memory as context_sizes
from fluid.lane.device.device import ProcessMemoryMeter
from fluid.lane.device.own_memory import LEAST, MOST, OwnMemory
from fluid.lane.failures import LaneFailures
from fluid.lane.protocol import LaneOptions

MB = 1e6


class FakeGpu:
    """One GPU with the allocator of this process.

    Attributes:
        others: bytes that other processes hold.
        context: bytes of this process's context.
        reserved: bytes that its tensors take.
        pid: the number under which NVML lists this process; 0 if it lists none.
        other_pids: those of other processes.
        known: whether NVML tells how much memory is in use.
    """

    def __init__(self) -> None:
        self.others = self.context = self.reserved = 0.0
        self.pid = os.getpid()
        self.other_pids: set[int] = set()
        self.known = True

    def processes_on(self, token: str) -> list[GpuProcess] | None:
        assert token == "GPU-1"
        own = [GpuProcess(self.pid, self.context + self.reserved)] if self.context else []
        return [*own, *(GpuProcess(pid, 9000 * MB) for pid in self.other_pids)] if self.pid else None

    def process_bytes(self, token: str, pid: int) -> float | None:
        return next((each.memory_bytes for each in self.processes_on(token) or () if each.pid == pid), None)

    def used_bytes(self, token: str, *, reserved: bool = True) -> float | None:
        return self.others + self.context + self.reserved + 600 * MB * reserved if self.known else None

    def make_context(self, size: float = 500 * MB, *, others: float = 0.0, tensors: float = 2 * MB) -> None:
        self.context, self.reserved = size, tensors
        self.others += others


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "580.82")
    return tmp_path / "fluid"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    cuda = SimpleNamespace(is_initialized=lambda: made.context > 0.0, memory_reserved=lambda index: made.reserved)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__="2.9.0+cu130"))
    monkeypatch.setattr(own_memory, "find_gpus", lambda: [Gpu("GPU-1", 1e9, "NVIDIA H200")])
    for name in ("processes_on", "process_bytes", "used_bytes"):
        monkeypatch.setattr(own_memory, name, getattr(made, name))
    return made


@pytest.fixture
def lane(tmp_path: Path) -> Callable[[], OwnMemory]:
    """Makes what measures a further lane of the device."""
    (tmp_path / "notes").mkdir()
    return lambda: OwnMemory(LaneOptions(0, kind="gpu", note=str(tmp_path / "notes" / "lane-0")))


def start(gpu: FakeGpu, own: OwnMemory, size: float = 500 * MB, others: float = 0.0) -> float:
    """A further lane makes its context, while other processes take or free memory."""
    gpu.others += gpu.context + gpu.reserved
    gpu.context = gpu.reserved = 0.0
    return own.around(lambda: gpu.make_context(size, others=others))


def test_what_tensors_take_is_not_the_lanes_own(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    gpu.others = 7000 * MB
    assert start(gpu, lane(), others=900 * MB) == 500 * MB


@pytest.mark.parametrize("listed", [True, False])
def test_other_processes_have_filled_the_gpu(gpu: FakeGpu, lane: Callable[[], OwnMemory], listed: bool) -> None:
    gpu.pid, gpu.others, own = gpu.pid * listed, 7000 * MB, lane()
    assert not own.others_have_grown(), "CUDA was not used"
    start(gpu, own)
    gpu.reserved, gpu.context = 70_000 * MB, 900 * MB
    assert not own.others_have_grown()
    gpu.others += 2000 * MB
    assert own.others_have_grown()
    nothing: Any = None
    failures = LaneFailures(LaneOptions(0), *[nothing] * 2, ProcessMemoryMeter(), own, *[nothing] * 3)
    assert [failures.describe(error)[0].squeezed for error in (MemoryError(), ValueError())] == [True, False]
    gpu.known = False
    assert not own.others_have_grown()


# --- Where NVML lists processes under other numbers


def test_a_process_is_known_by_the_number_that_came_with_its_context(
    gpu: FakeGpu, lane: Callable[[], OwnMemory]
) -> None:
    gpu.pid, gpu.other_pids = 4711, {17, 42}
    own = lane()
    assert start(gpu, own, others=900 * MB) == 500 * MB, "whatever neighbours do meanwhile"
    gpu.context, gpu.others = 800 * MB, 0.0
    assert own.changed(2 * MB) == 800 * MB


def test_two_new_numbers_say_nothing(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    gpu.pid, own = 4711, lane()

    def make_context() -> None:
        gpu.make_context(others=700 * MB)
        gpu.other_pids.add(42)

    gpu.others = 5000 * MB
    assert own.around(make_context) == 1200 * MB, "the difference, as good as it is"


def test_another_process_may_have_the_number_of_this_one(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    gpu.pid, gpu.other_pids = 4711, {os.getpid()}
    own = lane()
    assert start(gpu, own) == 500 * MB
    assert own.changed(2 * MB) is None


# --- Where it lists none


def test_the_median_difference_counts_on_a_device_that_others_use(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    gpu.pid, gpu.others = 0, 5000 * MB
    first = lane()
    assert start(gpu, first, others=900 * MB) == 1400 * MB, "a neighbour has allocated meanwhile"
    assert start(gpu, lane(), others=-300 * MB) == LEAST, "a neighbour has freed memory meanwhile"
    assert start(gpu, lane()) == 500 * MB
    assert first.changed(2 * MB) == 500 * MB, "the first lane corrects itself"
    assert first.changed(2 * MB) is None


@pytest.mark.parametrize(("others", "expected"), [(9000 * MB, MOST), (-600 * MB, LEAST), (0.0, 500 * MB)])
def test_only_a_likely_difference_is_believed(gpu: FakeGpu, others: float, expected: float) -> None:
    gpu.pid, gpu.others = 0, 5000 * MB
    own = OwnMemory(LaneOptions(0, kind="gpu"))
    assert start(gpu, own, others=others) == expected


def test_a_size_found_on_an_unused_device_is_remembered(
    gpu: FakeGpu, lane: Callable[[], OwnMemory], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.pid = 0
    assert start(gpu, lane(), 180 * MB) == 180 * MB, "however small it is"
    (note,) = cache.iterdir()
    assert note.name == "context-bytes-580.82-NVIDIA-H200-torch-2.9.0+cu130"
    later = OwnMemory(LaneOptions(0, kind="gpu", note=str(tmp_path / "lane-0")))
    gpu.others = 5000 * MB
    assert start(gpu, later, others=-900 * MB) == 180 * MB, "in another session, whatever neighbours do"
    gpu.others = 5000 * MB
    assert start(gpu, OwnMemory(LaneOptions(1, kind="gpu", environment=(("A", "b"),)))) == 500 * MB, "a client of MPS"
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "595.10")
    gpu.others = 5000 * MB
    assert start(gpu, OwnMemory(LaneOptions(1, kind="gpu"))) == 500 * MB, "with another driver"


@pytest.mark.parametrize("text", ["", "nan", "-5", "much", "9e99"])
def test_a_damaged_note_is_ignored(gpu: FakeGpu, lane: Callable[[], OwnMemory], cache: Path, text: str) -> None:
    gpu.pid, gpu.others = 0, 5000 * MB
    cache.mkdir()
    (cache / "context-bytes-580.82-NVIDIA-H200-torch-2.9.0+cu130").write_text(text)
    assert start(gpu, lane()) == 500 * MB


def test_what_libraries_add_is_seen_by_a_lane_that_has_the_device_for_itself(
    gpu: FakeGpu, lane: Callable[[], OwnMemory]
) -> None:
    gpu.pid = 0
    first, second = lane(), lane()
    start(gpu, first)
    assert first.changed(2 * MB) is None
    gpu.context, gpu.reserved = 800 * MB, 4000 * MB
    assert first.changed(4000 * MB) == 800 * MB
    start(gpu, second)
    assert second.changed(2 * MB) == 800 * MB, "its trial has loaded them, too, as far as is known"
    gpu.context = 1500 * MB
    assert first.changed(2 * MB) is None, "now it could be the second lane's"


def test_nothing_is_known_without_nvml(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    gpu.pid, gpu.known = 0, False
    own = lane()
    assert start(gpu, own) == 0.0
    assert own.changed(2 * MB) is None


# --- One lane at a time


def test_one_lane_of_a_device_makes_its_context_at_a_time(
    gpu: FakeGpu, lane: Callable[[], OwnMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.pid = 0
    naps = []
    with open(tmp_path / "notes" / "context-GPU-1.turn", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def nap(seconds: float) -> None:
            naps.append(seconds)
            assert not gpu.context, "it waits before it makes its context"
            if len(naps) == 3:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(context_sizes, "nap", nap)
        assert start(gpu, lane()) == 500 * MB
        assert len(naps) == 3


def test_a_lane_that_hangs_keeps_no_other_from_starting(
    gpu: FakeGpu, lane: Callable[[], OwnMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.pid = 0
    monkeypatch.setattr(context_sizes, "PATIENCE_S", 0.0)
    with open(tmp_path / "notes" / "context-GPU-1.turn", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert start(gpu, lane()) == 0.0, "its difference may be the other lane's"


def test_lanes_do_not_wait_where_files_cannot_be_locked(
    gpu: FakeGpu, lane: Callable[[], OwnMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system that is mounted without locks."""
    gpu.pid = 0

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(context_sizes, "nap", None)
    assert start(gpu, lane()) == 0.0, "its difference may be that of another lane, too"


def test_a_size_is_not_remembered_if_another_lane_did_not_wait_for_its_end(
    gpu: FakeGpu, lane: Callable[[], OwnMemory], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.pid = 0
    monkeypatch.setattr(context_sizes, "PATIENCE_S", 0.0)
    slow, hurried = lane(), lane()

    def make_context() -> None:
        hurried.around(lambda: None)
        gpu.make_context(others=500 * MB)

    assert slow.around(make_context) == 1000 * MB, "the difference is all that is known"
    assert not cache.exists(), "it is that of two contexts, and would count in all later sessions"
    gpu.others = 0.0
    start(gpu, lane())
    assert slow.changed(2 * MB) == 500 * MB, "the median of more"


@pytest.mark.parametrize("is_listed", [True, False])
def test_lanes_do_not_wait_where_there_is_nothing_to_compare(
    gpu: FakeGpu, lane: Callable[[], OwnMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    gpu.pid = os.getpid() if is_listed else 0
    start(gpu, lane())
    monkeypatch.setattr(context_sizes, "nap", None)
    with open(tmp_path / "notes" / "context-GPU-1.turn", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert start(gpu, lane(), 400 * MB) == (400 * MB if is_listed else 500 * MB)


def test_a_context_that_fails_lets_the_next_lane_try(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    with pytest.raises(ZeroDivisionError):
        lane().around(lambda: 1 // 0 and None)
    assert start(gpu, lane()) == 500 * MB


def test_a_lane_starts_where_nothing_can_be_written(gpu: FakeGpu, tmp_path: Path, cache: Path) -> None:
    cache.touch()  # A file where the folder should be.
    own = OwnMemory(LaneOptions(0, kind="gpu", note=str(tmp_path / "gone" / "lane-0")))
    assert start(gpu, own) == 500 * MB
    gpu.pid = 0
    assert start(gpu, own) == 0.0


# --- Later on


def test_what_libraries_add_later_is_told_once(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    own = lane()
    start(gpu, own)
    assert own.changed(2 * MB) is None
    gpu.context, gpu.reserved = 800 * MB, 4000 * MB
    assert own.changed(4000 * MB) == 800 * MB
    gpu.context = 801 * MB
    assert own.changed(4000 * MB) is None, "not worth telling"


def test_what_no_trial_holds_is_the_lanes_own(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    own = lane()
    start(gpu, own)
    gpu.reserved = 300 * MB
    assert own.changed(200 * MB) == 600 * MB, "100 MB are workspaces that outlive the trials"
    assert own.changed(350 * MB) == 500 * MB


def test_a_lane_whose_trial_loads_pytorch_late(gpu: FakeGpu, lane: Callable[[], OwnMemory]) -> None:
    own = lane()
    assert own.changed(0.0) is None
    gpu.make_context()
    assert own.changed(2 * MB) == 500 * MB


def test_a_lane_whose_trial_loads_pytorch_late_beside_one_that_had_it(
    gpu: FakeGpu, lane: Callable[[], OwnMemory]
) -> None:
    late = lane()
    start(gpu, lane())
    gpu.context = 700 * MB
    assert late.changed(2 * MB) == 700 * MB


def test_a_cpu_has_no_context(gpu: FakeGpu) -> None:
    gpu.make_context()
    assert OwnMemory(LaneOptions(0)).changed(0.0) is None
