"""Hosts on two nodes of a real cluster: what dies takes its own lanes only, and nothing is left at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray_drive import OTHER_MACHINE, Drive, in_host_memory, is_hanging, parent_of
from waiting import eventually

from fluid.engine.commands import Persist, Resize, RunIteration, Save, StartLane, StopLane
from fluid.engine.events import Checkpoint, DeviceLost, IterationDone, LaneLost, TrialNotKept, TrialSaved, TrialSetBack
from fluid.errors import FluidError
from fluid.lane.checkpoints.seal import damage_of
from fluid.lane.checkpoints.store import CheckpointStore
from fluid.resources import Device

ray = pytest.importorskip("ray")
from fluid.backends.hosts.folders import HERE  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("device", [0, 4], ids=["driver's node", "other node"])
def test_a_killed_lane_is_lost_alone(cluster: Any, make: Callable[..., Drive], device: int) -> None:
    drive = make(None)
    first, second = drive.lanes(device, device + 1)
    drive.start("bystander", second, 1)
    drive.start("victim", first, 2, hang_at=2)
    pid = drive.until(IterationDone, trial_id="victim").metrics["pid"]
    eventually(lambda: is_hanging(pid))
    os.kill(pid, signal.SIGKILL)
    lost = drive.until(LaneLost)
    assert (lost.lane_id, lost.culprit, lost.reason) == (first, "victim", "was killed by SIGKILL")
    drive.do(RunIteration("bystander", (second,), 1))
    drive.until(IterationDone, trial_id="bystander", iteration=2)
    (third,) = drive.lanes(device)
    drive.start("next", third, 1)
    drive.until(IterationDone, trial_id="next")


def test_a_stopped_lane_of_another_node_is_killed_blameless_within_seconds(
    cluster: Any, make: Callable[..., Drive]
) -> None:
    drive = make(None)
    first, second = drive.lanes(4, 5)
    drive.start("bystander", second, 1)
    drive.start("victim", first, 2, hang_at=2)
    pid = drive.until(IterationDone, trial_id="victim").metrics["pid"]
    os.kill(pid, signal.SIGSTOP)
    lost = drive.until(LaneLost)
    assert lost.lane_id == first and lost.blameless and "was stopped (SIGSTOP) for 5 s" in lost.reason
    drive.do(RunIteration("bystander", (second,), 1))
    drive.until(IterationDone, trial_id="bystander", iteration=2)


def test_a_killed_host_costs_its_lanes_only_and_another_one_takes_its_place(
    cluster: Any, make: Callable[..., Drive]
) -> None:
    """What the trials of that machine have saved is still there."""
    drive = make(None)
    here, there = drive.lanes(0, 4)
    drive.start("bystander", here, 1)
    drive.start("a", there, 3)
    pid = drive.until(IterationDone, trial_id="a", iteration=3).metrics["pid"]
    drive.do(Save("a", (there,)))
    checkpoint = drive.until(TrialSaved, trial_id="a").checkpoint
    assert checkpoint.in_memory and checkpoint.host == OTHER_MACHINE
    server = parent_of(pid)
    guardian = parent_of(server)
    os.kill(parent_of(guardian), signal.SIGKILL)
    lost = drive.until(LaneLost)
    assert lost.lane_id == there and lost.blameless
    assert lost.reason.startswith("lost the host that it came from, which died")
    assert not any(isinstance(event, DeviceLost) for event in drive.seen)
    (again,) = drive.lanes(4)
    drive.start("a", again, 1, checkpoint)
    assert drive.until(IterationDone, trial_id="a", iteration=4).metrics["count"] == 4
    drive.do(RunIteration("bystander", (here,), 1))
    drive.until(IterationDone, trial_id="bystander", iteration=2)


def test_a_host_that_cannot_start_says_why(
    cluster: Any, make: Callable[..., Drive], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluid.backends.hosts.sockets.LaneListener.listen", lambda self, ip: (ip, 9))
    drive = make(None)
    drive.do(StartLane(0, 4))
    assert "ConnectionRefusedError" in drive.until(LaneLost, lane_id=0).reason


def test_lanes_of_all_nodes_are_forked_with_what_was_preloaded(cluster: Any, make: Callable[..., Drive]) -> None:
    drive = make(None, preload=["colorsys"])
    asked = {"parent": "os.getppid()", "preloaded": "'colorsys' in sys.modules", "ray": "os.environ['RAY_ADDRESS']"}
    seen = [drive.evaluate(lane, **asked) for lane in drive.lanes(0, 1, 4, 5)]
    assert all(metrics["preloaded"] for metrics in seen)
    parents = [metrics["parent"] for metrics in seen]
    assert parents[0] == parents[1] and parents[2] == parents[3] and parents[0] != parents[2]
    assert {metrics["ray"] for metrics in seen} == {cluster.address}


def test_a_trial_on_another_node_can_join_the_cluster(make: Callable[..., Drive]) -> None:
    drive = make(None)
    (lane,) = drive.lanes(4)
    joined = drive.evaluate(lane, joined="__import__('ray').init(logging_level='ERROR').address_info['gcs_address']")
    assert joined == {"joined": ray.get_runtime_context().gcs_address}
    assert drive.evaluate(lane, got="__import__('ray').get(__import__('ray').put(1))") == {"got": 1}


#: Both machines of a test have one disk; with this, a lane finds only what is in the folders of its own machine.
BLIND = """
import os
from fluid.lane.checkpoints.restore import CheckpointLocator

def is_here(self, trial_id, path):
    return any(os.path.isdir(os.path.join(folder, os.path.basename(path))) for folder in self._folders(trial_id))

CheckpointLocator._is_here = is_here
"""


def test_a_checkpoint_goes_straight_to_the_machine_where_its_trial_goes_on(
    make: Callable[..., Drive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blind.py").write_text(BLIND, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    drive = make(None, preload=["blind"])
    here, there = drive.lanes(0, 4)
    drive.start("a", here, 2)
    drive.until(IterationDone, trial_id="a", iteration=2)
    for old, new, machine, iteration in ((here, there, OTHER_MACHINE, 3), (there, here, HERE, 4)):
        drive.do(Resize("a", (new,), (old,), iterations=1))
        name = Path(drive.until(TrialSaved, trial_id="a").checkpoint.path).name
        assert drive.until(IterationDone, trial_id="a", iteration=iteration).metrics["count"] == iteration
        (memory,) = [folder for folder in in_host_memory(tmp_path) if folder.endswith(f"-{machine}")]
        assert Path("/dev/shm", memory, "a", name).is_dir(), "the lane has fetched it"


def test_a_trial_waits_for_another_host_on_the_machine_that_has_its_checkpoint(make: Callable[..., Drive]) -> None:
    drive = make(None)
    here, there = drive.lanes(0, 4)
    drive.start("a", there, 3)
    pid = drive.until(IterationDone, trial_id="a", iteration=3).metrics["pid"]
    drive.do(Save("a", (there,)))
    checkpoint = drive.until(TrialSaved, trial_id="a").checkpoint
    os.kill(parent_of(parent_of(parent_of(pid))), signal.SIGKILL)
    drive.until(LaneLost)
    # As lanes see it that do not share that machine's memory.
    drive.start("a", here, 1, replace(checkpoint, path=f"/not/here{checkpoint.path}"))
    drive.do(RunIteration("a", (here,), 1))
    assert drive.until(IterationDone, trial_id="a", iteration=5).metrics["count"] == 5
    assert not any(isinstance(event, TrialSetBack) for event in drive.seen)


def test_a_trial_does_not_wait_for_a_machine_that_the_session_does_not_use(make: Callable[..., Drive]) -> None:
    drive = make(1)
    (lane,) = drive.lanes(0)
    path = "/dev/shm/fluid-0d0d0d0d0d0d0d0d-10.0.0.7/a/00000003-0-1"
    drive.start("a", lane, 1, Checkpoint(3, path, "10.0.0.7", True))
    assert drive.until(TrialSetBack, trial_id="a").reason == "the checkpoint of iteration 3 is gone"


def saved_there(drive: Drive, lane: int) -> tuple[Checkpoint, int]:
    """Saves a trial to the memory of a lane's machine; returns the checkpoint, and the number of the lane's process."""
    drive.start("a", lane, 3)
    pid = drive.until(IterationDone, trial_id="a", iteration=3).metrics["pid"]
    drive.do(Save("a", (lane,)))
    return drive.until(TrialSaved, trial_id="a").checkpoint, pid


def polled(drive: Drive, condition: Callable[[], bool]) -> None:
    """Waits until a condition holds, and polls meanwhile, as a session does."""
    eventually(lambda: drive.backend.poll(0.0) is not None and condition())


def test_a_machine_copies_and_deletes_checkpoints_though_no_lane_is_left_there(
    make: Callable[..., Drive], processes: Any, tmp_path: Path
) -> None:
    drive = make(None)
    (there,) = drive.lanes(4)
    checkpoint, pid = saved_there(drive, there)
    assert checkpoint.in_memory and checkpoint.host == OTHER_MACHINE
    processes.watch(pid)
    drive.do(StopLane(there))
    eventually(processes.have_ended)
    folder, name = tmp_path / "run/trials/a", Path(checkpoint.path).name
    places = {False: folder / "checkpoints" / name, True: folder / "kept" / name}
    for keep, place in places.items():
        drive.do(Persist("a", checkpoint, keep=keep))
        saved = drive.until(TrialSaved, trial_id="a")
        assert (saved.lane_id, saved.copied, saved.kept is not None) == (None, True, keep)
        assert saved.checkpoint == Checkpoint(3, str(place), host=OTHER_MACHINE) and damage_of(str(place)) is None
    drive.backend.forget("a")
    polled(drive, lambda: not places[False].exists() and not Path(checkpoint.path).exists())
    drive.backend.discard_kept(OTHER_MACHINE, str(places[True]), demote=True)
    polled(drive, lambda: places[False].exists() and not places[True].exists())
    drive.backend.discard_kept(OTHER_MACHINE, str(places[False]), demote=False)
    polled(drive, lambda: not places[False].exists())


def test_another_host_copies_what_is_on_the_machine_of_one_that_was_killed(make: Callable[..., Drive]) -> None:
    drive = make(None)
    (there,) = drive.lanes(4)
    checkpoint, pid = saved_there(drive, there)
    os.kill(parent_of(parent_of(parent_of(pid))), signal.SIGKILL)
    drive.until(LaneLost)
    drive.do(Persist("a", checkpoint, keep=True))
    assert drive.until(TrialSaved, trial_id="a").kept is not None


def test_the_driver_copies_and_deletes_what_is_on_its_machine_where_it_has_no_device(
    make: Callable[..., Drive], tmp_path: Path
) -> None:
    """As after a session that goes on elsewhere."""
    drive = make([Device(0, host=OTHER_MACHINE)])

    def write(folder: str) -> None:
        Path(folder, "data").touch()

    path = CheckpointStore(0, str(tmp_path / "run")).save("a", 3, write).path
    drive.do(Persist("a", Checkpoint(3, path), keep=True))
    assert Path(drive.until(TrialSaved, trial_id="a").checkpoint.path).parent == tmp_path / "run/trials/a/kept"
    drive.backend.forget("a")
    polled(drive, lambda: not Path(path).exists())
    drive.do(Persist("b", Checkpoint(3, "/elsewhere/00000003-0-1", host="10.0.0.7"), keep=True))
    assert drive.until(TrialNotKept, trial_id="b").reason == "10.0.0.7 has no host of this session"


@pytest.mark.parametrize("busy", [False, True])
def test_closing_leaves_nothing(
    cluster: Any, make: Callable[..., Drive], processes: Any, tmp_path: Path, busy: bool
) -> None:
    drive = make(None, grace=0.2)
    for lane in drive.lanes(0, 4):
        drive.start(f"t{lane}", lane, 1 + busy, seconds=0.0)
        processes.watch(drive.until(IterationDone, trial_id=f"t{lane}").metrics["pid"])
        if busy:
            drive.start(f"b{lane}", lane, 1, seconds=1e6)
    drive.backend.close()
    assert processes.have_ended()
    assert ray.is_initialized()
    eventually(lambda: not groups_left())
    eventually(lambda: ray.available_resources().get("CPU") == 6)
    assert not in_host_memory(tmp_path)
    with pytest.raises(FluidError):
        drive.backend.poll(0.0)
    drive.backend.close()


def groups_left() -> list[Any]:
    return [entry for entry in ray.util.placement_group_table().values() if entry["state"] != "REMOVED"]
