"""Lanes on a real GPU: contexts, memory, faults, and states that stay on the device. Needs PyTorch."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid.engine.commands import Pause, RunIteration, StartLane, StartTrial
from fluid.engine.events import IterationDone, LaneLost, LaneReady, PausePurpose, TrialPaused
from fluid.executor import FluidExecutor
from fluid.gpu.mps_support import unsupported_reason_here
from fluid.gpu.nvml import describe_gpus, find_gpus
from fluid.measure.profile import Profile
from fluid.resources import Device
from fluid.trainables.payload import payload_of
from fluid.trialgroup import Trial, TrialGroup

pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
TORCH = ["torch"]


def gpu() -> Device:
    found = find_gpus()[0]
    return Device(0, kind="gpu", memory_bytes=found.memory_bytes, model=found.name)


def taught(key: str, most: int) -> Profile:
    """A profile that says that trials do not slow each other down."""
    profile = Profile()
    for p in range(1, most + 1):
        while profile.needs_measuring(key, co_residents=p):
            profile.observe(key, 0.1, co_residents=p)
    return profile


class Holder:
    """Keeps a tensor on its device, and says where.

    With ``folder`` and ``share`` it takes that share of the GPU's memory in its iterations once two trials have been
    set up there.
    """

    def setup(self, config: dict[str, Any]) -> None:
        import torch

        self._config, self._torch, self._done = config, torch, 0
        self._kept = torch.arange(1000, device="cuda")
        if "folder" in config:
            os.close(tempfile.mkstemp(dir=config["folder"])[0])

    def step(self) -> dict[str, Any]:
        self._done += 1
        if "folder" in self._config:
            self._take()
        return {"at": self._kept.data_ptr(), "sum": int(self._kept.sum()), "pid": os.getpid()}

    def _take(self) -> None:
        share = self._config["share"] if len(os.listdir(self._config["folder"])) > 1 else 0.0
        total = self._torch.cuda.get_device_properties(0).total_memory
        taken = self._torch.ones(int(share * total), dtype=self._torch.uint8, device="cuda")
        time.sleep(0.2)
        del taken

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "done").write_text(str(self._done))

    def load_checkpoint(self, folder: str) -> None:
        self._done = int(Path(folder, "done").read_text())


class Filler:
    """Multiplies matrices that fill the GPU."""

    def setup(self, config: dict[str, Any]) -> None:
        import torch

        self._torch, self._matrix = torch, torch.randn(4096, 4096, device="cuda")

    def step(self) -> dict[str, float]:
        for _ in range(8):
            product = self._matrix @ self._matrix
        return {"value": float(product[0, 0])}


# --- Lanes


def test_lanes_measure_the_memory_of_their_contexts_alike(make_drive: Callable[..., Any]) -> None:
    drive = make_drive([gpu()], preload=TORCH)
    drive.do(StartLane(0, 0), StartLane(1, 0))
    own = [drive.until(LaneReady).own_bytes for _ in range(2)]
    assert all(50e6 < one < 3e9 for one in own), own
    assert max(own) < 1.5 * min(own), own


def test_a_lane_without_a_usable_gpu_is_not_ready(make_drive: Callable[..., Any], monkeypatch: Any) -> None:
    drive = make_drive([gpu()], preload=TORCH)
    bindings = drive.backend._pool._bind.__self__
    monkeypatch.setattr(bindings, "token", lambda device: "GPU-00000000-0000-0000-0000-000000000000")
    drive.do(StartLane(0, 0))
    drive.until(LaneLost, lambda event: event.lane_id == 0)
    assert not any(isinstance(event, LaneReady) for event in drive.seen)


def test_a_state_stays_where_it_is_while_another_trial_runs(make_drive: Callable[..., Any]) -> None:
    drive = make_drive([gpu()], preload=TORCH)
    (lane,) = drive.lanes(0)
    places: dict[str, set[int]] = {"one": set(), "other": set()}
    for name in places:
        drive.backend.register(name, payload_of(Holder, {}))
        drive.do(StartTrial(name, (lane,), iterations=1))
        places[name].add(drive.of(IterationDone, name).metrics["at"])
        drive.do(Pause(name, (lane,), purpose=PausePurpose.PREEMPT))
        drive.of(TrialPaused, name)
    for name in ("one", "other", "one"):
        drive.do(RunIteration(name, (lane,), 1))
        metrics = drive.of(IterationDone, name).metrics
        assert metrics["sum"] == 499500
        places[name].add(metrics["at"])
        drive.do(Pause(name, (lane,), purpose=PausePurpose.PREEMPT))
        drive.of(TrialPaused, name)
    assert [len(at) for at in places.values()] == [1, 1] and places["one"] != places["other"]


def test_several_lanes_are_clients_of_mps_at_once(make_drive: Callable[..., Any]) -> None:
    require_mps()
    drive = make_drive([gpu()], preload=TORCH, sharing="mps")
    lanes = drive.lanes(0, 0, 0)
    pids = set()
    for index, lane in enumerate(lanes):
        drive.backend.register(f"t{index}", payload_of(Holder, {}))
        drive.do(StartTrial(f"t{index}", (lane,), iterations=1))
        pids.add(drive.of(IterationDone, f"t{index}").metrics["pid"])
    assert len(pids) == 3 and drive.backend.sharing.way == "mps"


def require_mps() -> None:
    why_not = unsupported_reason_here(describe_gpus()[:1])
    if why_not:
        pytest.skip(f"MPS cannot be used: {why_not}")


# --- Packing


def test_trials_that_outgrow_the_gpu_go_on_with_fewer_neighbours(tmp_path: Path) -> None:
    """Each takes 0.6 of the memory as soon as there are two, which its first iterations do not tell."""
    started = tmp_path / "started"
    started.mkdir()
    config = {"folder": str(started), "share": 0.6}
    trials = [Trial(Holder, config, budget=20, profile_key="grows") for _ in range(2)]
    with FluidExecutor(
        "local",
        [gpu()],
        packing="timeslice",
        max_packing=2,
        profile=taught("grows", 2),
        run_dir=tmp_path / "run",
        verbose=0,
    ) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        handle.wait()
        assert handle.failures == {}
        assert set(handle.states.values()) == {"DONE"}
    assert len(list(started.iterdir())) > 2, "one of them started again"


@pytest.mark.parametrize("way", ["timeslice", "mps"])
def test_a_device_side_fault_leaves_the_other_trials_whole(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In time slices it ends its own lane; under MPS all end, and the culprit is found."""
    if way == "mps":
        require_mps()
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path))
    import packing_safety

    found = packing_safety.fault(gpu(), way)
    assert found["faulty"] == "FAILED" and found["others_are_whole"], found


def test_trials_that_fill_the_gpu_are_not_packed(tmp_path: Path) -> None:
    trials = [Trial(Filler, {}, budget=400, profile_key="fills") for _ in range(2)]
    with FluidExecutor(
        "local", [gpu()], packing="timeslice", max_packing=2, run_dir=tmp_path / "run", verbose=0
    ) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        handle.wait()
        handle.raise_failures()
        profile = executor.profile
    measured = profile.measured_packing("fills")
    assert profile.packing_limit("fills", max(1, measured)) == 1, (profile.alpha("fills"), measured)
