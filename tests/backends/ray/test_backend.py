"""The Ray backend, with a real cluster of real processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_drive import PATIENCE, Counter, Drive
from waiting import eventually

from fluid.backends.base import Backend
from fluid.engine.events import Checkpoint, IterationDone, TrialSetBack
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.resources import Device
from fluid.trialgroup import Trial, TrialGroup

ray = pytest.importorskip("ray")
from fluid.backends.hosts.folders import HERE  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def two(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"value": 1}
    yield {"value": 2}


def here(count: int) -> list[Device]:
    """Devices of the driver's node."""
    return [Device(index, host=ray.util.get_node_ip_address()) for index in range(count)]


def groups_left() -> list[Any]:
    return [entry for entry in ray.util.placement_group_table().values() if entry["state"] != "REMOVED"]


def test_it_is_a_backend(make: Callable[..., Drive]) -> None:
    backend = make(here(2)).backend
    assert isinstance(backend, Backend)
    assert backend.devices() == [Device(0), Device(1)]
    assert backend.poll(0.0) == []


def test_more_than_there_is_is_refused(make: Callable[..., Drive]) -> None:
    with pytest.raises(InvalidFieldError, match="devices=7: the Ray cluster has 6 CPUs, 6 of them free"):
        make(7)
    with pytest.raises(InvalidFieldError, match="0 GPUs"):
        make([Device(0, kind="gpu")])
    for wrong in (0, -1, [], 1.5):
        with pytest.raises((InvalidFieldError, TypeError)):
            make(wrong)
    assert groups_left() == []


def test_what_others_use_is_not_taken(make: Callable[..., Drive]) -> None:
    make(5)
    with pytest.raises(InvalidFieldError, match=r"waited 0\.5 s"):
        make(2, timeout=0.5)
    assert len(make(None).backend.devices()) == 1
    with pytest.raises(InvalidFieldError, match="6 CPUs, 0 of them free"):
        make(None, timeout=0.5)


def test_mps_for_cpu_devices_is_refused(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=r"packing='mps': MPS cannot be used: the devices are CPU cores"):
        FluidExecutor("ray", packing="mps", run_dir=tmp_path, verbose=0)
    eventually(lambda: not groups_left())


def test_trials_run_to_the_end(make: Callable[..., Drive], tmp_path: Path) -> None:
    backend = make(here(2)).backend
    trials = [Trial(Counter, {"seconds": 0.005}, budget=5, trial_id=f"c{index}") for index in range(4)]
    with FluidExecutor(backend, verbose=0, run_dir=tmp_path / "run") as executor:
        handle = executor.submit_trialgroup(TrialGroup([*trials, Trial(two, {}, budget=9, trial_id="g")]))
        assert handle.wait(PATIENCE)
        results = list(handle.results())
    for trial in trials:
        assert [r.metrics["count"] for r in results if r.trial_id == trial.id] == [1, 2, 3, 4, 5]
    assert [r.metrics["value"] for r in results if r.trial_id == "g"] == [1, 2]
    assert {device for r in results for device in r.device_ids} == {0, 1}
    assert {r.metrics["folder"] for r in results if r.trial_id == "c0"} == {os.getcwd()}
    assert (tmp_path / "run/trials/c0/output.log").read_text(encoding="utf-8").startswith("step 1\nstep 2\n")


def test_a_session_goes_on_after_a_lane_was_killed(make: Callable[..., Drive], tmp_path: Path) -> None:
    trials = [
        Trial(Counter, {"die_once": str(tmp_path / "dead")}, budget=6, trial_id=f"t{index}") for index in range(3)
    ]
    with FluidExecutor(make(2).backend, verbose=0, run_dir=tmp_path / "run") as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        assert handle.wait(PATIENCE)
        assert set(handle.states.values()) == {"DONE"}
        for trial in trials:
            assert [r.iteration for r in handle.results() if r.trial_id == trial.id] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "dead").exists()


def test_a_trial_whose_checkpoint_is_nowhere_begins_afresh(make: Callable[..., Drive]) -> None:
    drive = make(here(1))
    (lane,) = drive.lanes(0)
    drive.start("a", lane, 1, Checkpoint(3, "/dev/shm/fluid-0d0d0d0d0d0d0d0d-localhost/a/00000003-0-1", HERE, True))
    back = drive.until(TrialSetBack, trial_id="a")
    assert (back.checkpoint, back.reason) == (None, "the checkpoint of iteration 3 is gone")
    assert drive.until(IterationDone, trial_id="a").iteration == 1
