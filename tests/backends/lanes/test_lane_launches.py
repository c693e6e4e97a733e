"""Lanes that are not ready: how long they may take, and when they are launched again."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fluid._clock import VirtualClock
from fluid.backends.base import DeviceBinding, LaneConnected
from fluid.backends.lanes import launches as lane_launches
from fluid.backends.lanes.connections import LaneConnection, LaneConnections
from fluid.backends.lanes.launches import LaneLaunches
from fluid.engine.commands import StartLane, StopLane
from fluid.engine.events import LaneLost, LaneReady
from fluid.errors import FluidError
from fluid.executor import FluidExecutor
from fluid.gpu.nvml import Gpu
from fluid.lane.protocol import LaneUnusable, LaneWarming
from fluid.trialgroup import Trial, TrialGroup

FULL = LaneUnusable("CUDA error: out of memory")
NOT_READY = LaneUnusable("CUDA error: the MPS server is not ready", may_pass=True)


class Starts:
    """The starts of lanes whose launcher only counts."""

    def __init__(self) -> None:
        unused: Any = None  # Only waiting needs the launcher.
        self.clock = VirtualClock()
        self.lanes = LaneConnections(unused)
        self.launched: list[int] = []
        self.told: list[int] = []
        self.lost: dict[int, str] = {}
        self.killed: list[int] = []
        self.refuses = False
        launcher: Any = self
        self.starts = LaneLaunches(launcher, self.lanes, lambda lane: self.told.append(lane.lane_id), self.clock)

    def launch(self, lane_id: int, binding: DeviceBinding) -> LaneConnected | None:
        if self.refuses:
            raise FluidError("it is refused")
        self.launched.append(lane_id)
        return None

    def begin(self, lane_id: int, *devices: int) -> LaneConnection:
        lane = self.lanes.add(lane_id)
        self.starts.begin(lane, DeviceBinding(devices or (0,), "gpu"))
        return lane

    def end(self, lane: LaneConnection, message: LaneUnusable, *, blameless: bool = False) -> bool:
        """The lane says why it ends, and does; returns whether it is lost."""
        self.starts.hear(lane, LaneWarming())
        assert self.starts.hear(lane, message)
        if not blameless and self.starts.again(lane):
            return False
        self.lanes.remove(lane)
        self.starts.ended(lane, blameless=blameless)
        return True

    def wait(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        if self.clock.now() >= self.starts.due_at:
            self.starts.act(
                lambda lane, reason: self.lost.update({lane.lane_id: reason}),
                lambda lane: self.killed.append(lane.lane_id),
            )


@pytest.fixture
def made() -> Iterator[Starts]:
    starts = Starts()
    yield starts
    starts.lanes.close()


def test_a_lane_that_an_mps_server_refuses_gets_another_process_for_a_few_seconds(made: Starts) -> None:
    lane = made.begin(7)
    for attempt in range(2, 5):
        assert not made.end(lane, NOT_READY)
        made.wait(0.4)
        assert len(made.launched) == attempt - 1, "not at once"
        made.wait(0.2)
        assert made.launched == made.told == [7] * attempt
    made.wait(8.0)
    assert made.end(lane, NOT_READY), "it counts as one that cannot use its device"
    assert lane.failed_position == 0 and lane.killed_because == f"cannot use its device: {NOT_READY.reason}"


def test_a_lane_that_was_refused_can_become_ready(made: Starts) -> None:
    lane = made.begin(7)
    made.end(lane, NOT_READY)
    made.wait(0.5)
    assert (lane.killed_because, lane.failed_position) == ("", None)
    assert not made.starts.hear(lane, LaneReady(0.0, 1))
    made.wait(1e6)
    assert made.launched == [7, 7] and not made.killed


def test_lanes_of_a_device_that_could_not_be_used_are_launched_ever_later(made: Starts) -> None:
    """Three that fail within a second would cost the session the device."""
    waits = []
    for number in range(5):
        lane = made.begin(number)
        before = made.clock.now()
        while number not in made.launched:
            made.wait(1.0)
        waits.append(made.clock.now() - before)
        assert made.end(lane, FULL)
    assert waits == [0.0, 2.0, 8.0, 30.0, 30.0]
    made.begin(8, 1)
    assert 8 in made.launched, "another device"


def test_a_device_that_works_again_has_no_wait(made: Starts) -> None:
    made.end(made.begin(0), FULL)
    ready = made.begin(1)
    made.wait(2.0)
    made.starts.hear(ready, LaneReady(0.0, 1))
    made.begin(2)
    assert made.launched == [0, 1, 2]


def test_of_several_devices_the_one_that_failed_has_to_wait(made: Starts) -> None:
    made.end(made.begin(0, 4, 5), structs.replace(FULL, position=1))
    made.begin(1, 4)
    made.begin(2, 5)
    assert made.launched == [0, 1]


def test_what_a_fault_of_mps_has_ended_does_not_make_others_wait(made: Starts) -> None:
    assert made.end(made.begin(0), NOT_READY, blameless=True)
    made.begin(1)
    assert made.launched == [0, 1]


def test_a_lane_that_hangs_while_it_warms_up_is_killed(made: Starts) -> None:
    waiting, hanging = made.begin(0), made.begin(1)
    made.starts.hear(hanging, LaneWarming())
    made.wait(299.0)
    assert made.killed == []
    made.wait(2.0)
    assert made.killed == [1], "the other one has not begun: it waits for MPS, or for modules that are loaded"
    assert (hanging.failed_position, waiting.failed_position) == (0, None)
    assert "was not ready after 300 s" in hanging.killed_because
    made.wait(1e6)
    assert made.killed == [1] and made.starts.due_at == math.inf


def test_a_lane_that_is_to_end_is_not_launched(made: Starts) -> None:
    made.end(made.begin(0), FULL)
    later, refused = made.begin(1), made.begin(2, 1)
    assert made.starts.cancel(later), "it has no process"
    made.starts.hear(refused, NOT_READY)
    assert not made.starts.cancel(refused), "its process is about to end"
    assert not made.starts.again(refused)
    made.wait(1e6)
    assert made.launched == [0, 2]


def test_a_lane_that_cannot_be_launched_later_is_lost(made: Starts) -> None:
    made.end(made.begin(0), FULL)
    made.begin(1)
    made.refuses = True
    made.wait(2.0)
    assert made.lost == {1: "could not be started: it is refused"}


# --- With real lanes

#: A stand-in for PyTorch. The first so many processes cannot use the GPU.
TORCH = """
import os, signal
from pathlib import Path
from types import SimpleNamespace

def zeros(count, device):
    if os.environ["HOW"] == "hangs":
        signal.pause()
    counter = Path(os.environ["COUNTER"])
    counter.write_text(counter.read_text() + "x")
    if len(counter.read_text()) <= int(os.environ["REFUSED"]):
        raise RuntimeError(os.environ["HOW"])

mm = lambda one, other: None
backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True))
cuda = SimpleNamespace(
    synchronize=lambda gpu=0: None,
    empty_cache=lambda: None,
    memory_reserved=lambda gpu: 0.0,
    is_initialized=lambda: False,
    device_count=lambda: 1,
)
set_num_threads = lambda threads: None
"""


@pytest.fixture
def make_gpu(make_drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the drive of a GPU that its first lanes cannot use."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "torch.py").write_text(TORCH, encoding="utf-8")
    (tmp_path / "counter").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setattr("fluid.backends.local.find_gpus", lambda: [Gpu("GPU-0", 80e9)])
    monkeypatch.setattr("fluid.backends.hosts.gpu.sharing.find_program", lambda: None)
    monkeypatch.setenv("COUNTER", str(tmp_path / "counter"))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))  # They are clients.

    def make(how: str, refused: int = 0) -> Any:
        monkeypatch.setenv("HOW", how)
        monkeypatch.setenv("REFUSED", str(refused))
        return make_drive(1, preload=["torch"])

    return make


def processes_of(tmp_path: Path) -> int:
    return len((tmp_path / "counter").read_text())


def test_a_real_lane_is_ready_once_the_server_is(
    make_gpu: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_launches, "_PAUSE_S", 0.01)
    monkeypatch.setattr(lane_launches, "_PATIENCE_S", 90.0)
    drive = make_gpu("CUDA error: the MPS server is not ready", refused=2)
    assert drive.lanes(0) == [0] and processes_of(tmp_path) == 3
    assert not any(isinstance(event, LaneLost) for event in drive.seen)


def test_a_real_lane_that_hangs_in_the_driver_is_lost(
    make_gpu: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_launches, "_LONGEST_WARM_UP_S", 0.2)
    drive = make_gpu("hangs")
    drive.do(StartLane(0, 0))
    lost = drive.until(LaneLost)
    assert (lost.failed_position, lost.blameless) == (0, False)
    assert lost.reason == "cannot use its device: it was not ready after 0.2 s"


def test_a_gpu_that_is_full_for_a_moment_is_not_given_up(
    make_gpu: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_launches, "_FIRST_WAIT_S", 0.05)
    backend = make_gpu("CUDA error: out of memory", refused=2).backend
    with FluidExecutor(backend=backend, run_dir=tmp_path / "session", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(count, {}, budget=1, trial_id="t")]))
        assert handle.wait() and handle.states == {"t": "DONE"}
    assert processes_of(tmp_path) >= 3


def count(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"pid": os.getpid()}


def test_a_lane_that_waits_for_its_device_can_be_stopped(make_gpu: Callable[..., Any], tmp_path: Path) -> None:
    drive = make_gpu("CUDA error: out of memory", refused=1)
    drive.do(StartLane(0, 0))
    drive.until(LaneLost)
    drive.do(StartLane(1, 0), StopLane(1), StartLane(2, 0))
    drive.until(LaneReady, lambda event: event.lane_id == 2)
    assert processes_of(tmp_path) == 2
