"""The Ray backend, with a real cluster of real processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.backends.base import Backend
from fluid.engine.commands import Command, Resize, RunIteration, Save, StartLane, StartTrial
from fluid.engine.events import (
    Checkpoint,
    DeviceAdded,
    DeviceLost,
    Event,
    IterationDone,
    LaneLost,
    LaneReady,
    ResizeDone,
    TrialSaved,
    TrialStarted,
)
from fluid.engine.set_back import TrialSetBack
from fluid.errors import FluidError, InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.lane.checkpoint_seal import seal
from fluid.resources import Device
from fluid.trainables.payload import payload_of
from fluid.trialgroup import Trial, TrialGroup

ray = pytest.importorskip("ray")
from fluid.backends.hosts.folders import HERE, HostFolders, SessionFolders  # noqa: E402
from fluid.backends.ray import RayBackend, lane_actor  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0
OTHER_MACHINE = "127.0.0.3"
ROOT = str(Path(__file__).resolve().parents[3])


class Counter:
    """Counts, says where it runs, and can be told to kill its process, once."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        print("step", self.count)
        once = Path(self.config.get("die_once", "/"))
        if self.count == 3 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self.config.get("hang_at"):
            threading.Event().wait()
        # A trial takes its time, so that a test can do something meanwhile.
        threading.Event().wait(self.config.get("seconds", 0.0))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {"count": self.count, "pid": os.getpid(), "folder": os.getcwd(), "visible": visible}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "count").write_text(str(self.count), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        self.count = int((Path(folder) / "count").read_text(encoding="utf-8"))


def two(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"value": 1}
    yield {"value": 2}


class Drive:
    """A backend, and what it has reported so far."""

    def __init__(self, backend: RayBackend) -> None:
        self.backend = backend
        self.seen: list[Event] = []
        self._lanes = 0

    def do(self, *commands: Command) -> None:
        self.backend.execute(commands)

    def lanes(self, *device_ids: int) -> list[int]:
        numbers = list(range(self._lanes, self._lanes + len(device_ids)))
        self._lanes += len(device_ids)
        self.do(*(StartLane(number, device) for number, device in zip(numbers, device_ids, strict=True)))
        for number in numbers:
            self.until(LaneReady, lane_id=number)
        return numbers

    def start(self, trial_id: str, lane: int, iterations: int, *checkpoint: Checkpoint, **config: Any) -> None:
        self.backend.register(trial_id, payload_of(Counter, config))
        restored = checkpoint[0] if checkpoint else None
        self.do(StartTrial(trial_id, (lane,), iterations=iterations, checkpoint=restored))

    def until(self, kind: Any, **fields: Any) -> Any:
        """The first event of a kind, with these fields, that was not returned before."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for index, event in enumerate(self.seen):
                if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                    return self.seen.pop(index)
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__} came, but {self.seen}"
            new = self.backend.poll(left)
            at = [event.at for event in [*self.seen[-1:], *new]]
            assert at == sorted(at)
            self.seen += new


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster that this process is connected to, with four CPUs on one node."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    assert ray.is_initialized(), "a backend has ended Ray, which it had not started"
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def make(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Drive]]:
    """Makes backends, and closes them."""
    made: list[RayBackend] = []

    def make(devices: Any = 2, **options: Any) -> Drive:
        made.append(RayBackend(devices, **{"run_dir": tmp_path / "run", "preload": [], "grace": 1.0, **options}))
        return Drive(made[-1])

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def other_node(cluster: Any) -> Iterator[Any]:
    """A node that has the address of another machine."""
    node = cluster.add_node(num_cpus=2, node_ip_address=OTHER_MACHINE, resources={"there": 10})
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node)


def eventually(condition: Callable[[], Any]) -> Any:
    """Waits until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not come true"
        threading.Event().wait(0.02)
    return result


def groups_left() -> list[Any]:
    return [entry for entry in ray.util.placement_group_table().values() if entry["state"] != "REMOVED"]


# -- devices ------------------------------------------------------------------------------------------------------


def test_it_is_a_backend(make: Callable[..., Drive]) -> None:
    backend = make(2).backend
    assert isinstance(backend, Backend)
    assert backend.devices() == [Device(0), Device(1)]
    assert backend.poll(0.0) == []


def test_more_than_there_is_is_refused(make: Callable[..., Drive]) -> None:
    with pytest.raises(InvalidFieldError, match="devices=5: the Ray cluster has 4 CPUs, 4 of them free"):
        make(5)
    with pytest.raises(InvalidFieldError, match="0 GPUs"):
        make([Device(0, kind="gpu")])
    for wrong in (0, -1, [], 1.5):
        with pytest.raises((InvalidFieldError, TypeError)):
            make(wrong)
    assert groups_left() == []


def test_what_others_use_is_not_taken(make: Callable[..., Drive]) -> None:
    make(3)
    with pytest.raises(InvalidFieldError, match=r"waited 0\.5 s"):
        make(2, timeout=0.5)
    assert len(make(None).backend.devices()) == 1
    with pytest.raises(InvalidFieldError, match="4 CPUs, 0 of them free"):
        make(None)


def test_each_gpus_lanes_see_that_gpu(cluster: Any, make: Callable[..., Drive]) -> None:
    node = cluster.add_node(num_cpus=0, num_gpus=2)
    try:
        drive = make(None, spares=False)
        assert [device.kind for device in drive.backend.devices()] == ["gpu", "gpu"]
        for lane in drive.lanes(0, 0, 1):
            drive.start(f"t{lane}", lane, 1)
        seen = [drive.until(IterationDone, trial_id=f"t{lane}").metrics["visible"] for lane in range(3)]
        assert seen[0] == seen[1] and {seen[0], seen[2]} == {"0", "1"}
        drive.backend.close()
    finally:
        cluster.remove_node(node)
    eventually(lambda: "GPU" not in ray.cluster_resources())


# -- trials -------------------------------------------------------------------------------------------------------


def test_trials_run_to_the_end(make: Callable[..., Drive], tmp_path: Path) -> None:
    backend = make(2).backend
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


def test_a_killed_actor_is_a_lost_lane(make: Callable[..., Drive]) -> None:
    drive = make(2)
    first, second = drive.lanes(0, 1)
    drive.start("bystander", second, 1)
    drive.start("victim", first, 2, hang_at=2)
    pid = drive.until(IterationDone, trial_id="victim").metrics["pid"]
    eventually(lambda: drive.backend._launcher.culprit(first) == "victim")
    os.kill(pid, signal.SIGKILL)
    lost = drive.until(LaneLost)
    assert (lost.lane_id, lost.culprit) == (first, "victim")
    assert lost.reason.startswith("died: its worker process has died")
    drive.do(RunIteration("bystander", (second,), 1))
    drive.until(IterationDone, trial_id="bystander", iteration=2)
    (third,) = drive.lanes(0)
    drive.start("next", third, 1)
    drive.until(IterationDone, trial_id="next")


def test_a_stopped_actor_is_killed_blameless_within_seconds(make: Callable[..., Drive]) -> None:
    drive = make(2)
    first, second = drive.lanes(0, 1)
    drive.start("bystander", second, 1)
    drive.start("victim", first, 2, hang_at=2)
    pid = drive.until(IterationDone, trial_id="victim").metrics["pid"]
    os.kill(pid, signal.SIGSTOP)
    lost = drive.until(LaneLost)
    assert lost.lane_id == first and lost.blameless and "was stopped (SIGSTOP) for 5 s" in lost.reason
    drive.do(RunIteration("bystander", (second,), 1))
    drive.until(IterationDone, trial_id="bystander", iteration=2)


def test_a_session_goes_on_after_an_actor_was_killed(make: Callable[..., Drive], tmp_path: Path) -> None:
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


def test_a_lane_that_cannot_start_says_why(make: Callable[..., Drive], monkeypatch: pytest.MonkeyPatch) -> None:
    drive = make(1)
    monkeypatch.setattr(drive.backend._launcher._listener, "listen", lambda ip: (ip, 9))
    drive.do(StartLane(0, 0))
    assert "ConnectionRefusedError" in drive.until(LaneLost, lane_id=0).reason


def test_the_next_lane_is_warm(make: Callable[..., Drive]) -> None:
    drive = make(2)
    drive.lanes(0)
    launcher = drive.backend._launcher
    # It comes without being asked for, and is told what to load.
    eventually(lambda: drive.backend.poll(0.01) or any(a.socket is not None for a in launcher._actors.values()))
    spares = [actor.number for actor in launcher._actors.values() if actor.lane_id is None]
    drive.backend.register("a", payload_of(Counter, {}))
    (lane,) = drive.lanes(1)
    assert launcher._by_lane[lane].number in spares
    drive.start("a", lane, 1)
    drive.until(IterationDone, trial_id="a")


# -- the end ------------------------------------------------------------------------------------------------------


def in_host_memory() -> set[str]:
    """Folders of sessions on Ray; of a session that was killed one stays until the next one begins."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("fluid-ray-")}


@pytest.mark.parametrize("busy", [False, True])
def test_closing_leaves_nothing(make: Callable[..., Drive], processes: Any, busy: bool) -> None:
    before = in_host_memory()
    drive = make(2, grace=0.2)
    for lane in drive.lanes(0, 1):
        drive.start(f"t{lane}", lane, 1 + busy, seconds=0.0)
        processes.watch(drive.until(IterationDone, trial_id=f"t{lane}").metrics["pid"])
        if busy:
            drive.start(f"b{lane}", lane, 1, seconds=1e6)
    drive.backend.close()
    assert processes.have_ended()
    assert ray.is_initialized()
    eventually(lambda: not groups_left())
    eventually(lambda: ray.available_resources().get("CPU") == 4)
    assert in_host_memory() <= before
    with pytest.raises(FluidError):
        drive.backend.poll(0.0)
    drive.backend.close()


DRIVER = """
import os, sys, ray
from fluid.backends.ray import RayBackend
from fluid.engine.commands import StartLane, StartTrial
from fluid.engine.events import IterationDone
from fluid.trainables.payload import payload_of
class Pid:
    def __init__(self, config): pass
    def step(self): return {"pid": os.getpid()}
if __name__ == "__main__":
    with RayBackend(2, run_dir=sys.argv[1]) as backend:
        backend.execute([StartLane(0, 0)])
        backend.register("a", payload_of(Pid, {}))
        backend.execute([StartTrial("a", (0,), iterations=10**9 if sys.argv[2] == "run" else 1)])
        while not (done := [event for event in backend.poll(60) if isinstance(event, IterationDone)]):
            pass
        print(done[0].metrics["pid"], flush=True)
        while sys.argv[2] == "run":
            backend.poll(None)
    print(ray.is_initialized(), flush=True)
"""


def start_driver(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": ROOT, **environment}
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "run"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_lanes_end_with_a_killed_driver(cluster: Any, tmp_path: Path, processes: Any) -> None:
    before = in_host_memory()
    with start_driver(tmp_path, "run", RAY_ADDRESS=cluster.address) as driver:
        assert driver.stdout is not None
        processes.watch(int(driver.stdout.readline()))
        driver.kill()
    assert processes.have_ended(within=30.0)
    eventually(lambda: ray.available_resources().get("CPU") == 4)
    # The next session sweeps up what this one left in memory, if its lanes had no time to.
    RayBackend(1, run_dir=tmp_path / "next").close()
    assert in_host_memory() <= before


def test_ray_is_started_where_there_is_none_and_ended_again(tmp_path: Path, processes: Any) -> None:
    with start_driver(tmp_path, "end", RAY_ADDRESS="") as driver:
        out, _ = driver.communicate(timeout=PATIENCE)
    pid, is_initialized = out.split()
    assert is_initialized == "False" and driver.returncode == 0
    assert not os.path.exists(f"/proc/{pid}")


# -- several machines ---------------------------------------------------------------------------------------------


def test_a_node_that_goes_takes_its_devices_and_trials_go_on(
    cluster: Any, other_node: Any, make: Callable[..., Drive], tmp_path: Path
) -> None:
    backend = make(None).backend
    hosts = {device.index: device.host for device in backend.devices()}
    assert sorted(hosts.values()) == [OTHER_MACHINE] * 2 + [HERE] * 4
    trials = [Trial(Counter, {"seconds": 0.02}, budget=60, trial_id=f"t{index}") for index in range(6)]
    with FluidExecutor(backend, verbose=0, run_dir=tmp_path / "run") as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        where = dict.fromkeys((HERE, OTHER_MACHINE), False)
        for result in handle.results():
            where[hosts[result.device_ids[0]]] = True
            if all(where.values()):
                break
        cluster.remove_node(other_node, allow_graceful=False)
        assert handle.wait(PATIENCE)
        assert set(handle.states.values()) == {"DONE"}
        for trial in trials:
            counts = [r.metrics["count"] for r in handle.results() if r.trial_id == trial.id]
            assert counts == list(range(1, 61))
        eventually(lambda: {device.host for device in executor.devices} == {HERE})


def test_a_lost_device_is_reported_before_its_lanes(cluster: Any, other_node: Any, make: Callable[..., Drive]) -> None:
    drive = make([Device(0, host=ray.util.get_node_ip_address()), Device(4, host=OTHER_MACHINE)])
    assert [device.host for device in drive.backend.devices()] == [HERE, OTHER_MACHINE]
    here, there = drive.lanes(0, 4)
    drive.start("a", there, 10**9, seconds=0.01)
    drive.until(IterationDone, trial_id="a")
    drive.do(Save("a", (there,)))
    checkpoint = drive.until(TrialSaved, trial_id="a").checkpoint
    assert (checkpoint.host, checkpoint.in_memory) == (OTHER_MACHINE, True)
    # As when it is switched off: Ray itself takes half a minute to notice.
    cluster.remove_node(other_node, allow_graceful=False)
    lost = drive.until(DeviceLost)
    assert lost.device_id == 4
    assert not any(isinstance(event, LaneLost) and event.at < lost.at for event in drive.seen)
    # What that machine kept is not used, though the engine asks for it.
    drive.start("a", here, 1, checkpoint)
    assert drive.until(TrialStarted, trial_id="a", lane_id=here).iteration == 0
    drive.do(StartLane(99, 4))
    assert drive.until(LaneLost, lane_id=99).reason, "the launch fails one way or another; Ray says how"


def test_another_node_makes_up_for_one_that_went(cluster: Any, other_node: Any, make: Callable[..., Drive]) -> None:
    drive = make(5)
    (there,) = [device for device in drive.backend.devices() if device.host == OTHER_MACHINE]
    cluster.remove_node(other_node)
    assert drive.until(DeviceLost).device_id == there.index
    node = cluster.add_node(num_cpus=1, node_ip_address="127.0.0.4")
    try:
        device = drive.until(DeviceAdded).device
        assert (device.index, device.host) == (there.index, "127.0.0.4")
        (lane,) = drive.lanes(device.index)
        drive.start("a", lane, 1)
        drive.until(IterationDone, trial_id="a")
        drive.backend.close()
    finally:
        cluster.remove_node(node)


def test_what_joins_later_can_be_used(cluster: Any, make: Callable[..., Drive]) -> None:
    drive = make(4)
    assert drive.backend.discover() == []
    with pytest.raises(InvalidFieldError, match="Ray has not reserved it"):
        drive.backend.add_devices([Device(4)])
    node = cluster.add_node(num_cpus=1, node_ip_address=OTHER_MACHINE)
    try:
        (found,) = eventually(drive.backend.discover)
        assert (found.index, found.host) == (4, OTHER_MACHINE)
        drive.backend.add_devices([found])
        first, second = drive.lanes(0, 4)
        # It moves there and back.
        drive.start("a", first, 2)
        drive.until(IterationDone, trial_id="a", iteration=2)
        drive.do(Resize("a", (second,), (first,), iterations=2))
        drive.until(ResizeDone)
        assert drive.until(IterationDone, trial_id="a", iteration=4).metrics["count"] == 4
        drive.do(Resize("a", (first,), (second,), iterations=1))
        assert drive.until(IterationDone, trial_id="a", iteration=5).metrics["count"] == 5
        drive.backend.close()
    finally:
        cluster.remove_node(node)


class Wire:
    """A connection with one message in it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def recv_bytes(self) -> bytes:
        return self._data

    send_bytes = fileno = close = None


def test_a_checkpoint_is_fetched_from_the_machine_that_wrote_it(
    cluster: Any, other_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = SessionFolders("0c" * 8, str(tmp_path), temporary=True)
    there, here = HostFolders(session, OTHER_MACHINE), HostFolders(session, HERE)
    path = os.path.join(there.run_folder, "trials/a/checkpoints/00000007-1-1")
    os.makedirs(path)
    (Path(path) / "count").write_text("7", encoding="utf-8")
    seal(path)
    # Here, all machines are one; the process that is asked for it is another one, and finds it.
    monkeypatch.setattr(lane_actor, "locate", lambda path, run_folder: None)
    start: Any = type("Start", (), {"session": session, "driver_ip": "192.0.2.1"})

    def received(checkpoint: str) -> Any:
        message = lane_actor.StartResident("a", 0, b"", 1, checkpoint, 7)
        connection: Any = Wire(lane_actor.encode([message]))
        return lane_actor.decode(lane_actor.FetchingConnection(connection, start, here).recv_bytes())[0].checkpoint

    fetched = received(path)
    assert fetched != path and (Path(fetched) / "count").read_text(encoding="utf-8") == "7"
    # A machine that is gone, and a checkpoint that is: what cannot be had is asked for as it was, and not found.
    gone = path.replace(OTHER_MACHINE, "127.0.0.99")
    assert received(gone) == gone
    assert received(path.replace("00000007", "00000006")).endswith("00000006-1-1")
    assert received(path.replace("00000007", "00000008")) == fetched, "in its place, the one before"
    there.leave(clear=True)
    here.leave(clear=True)


def test_a_trial_whose_checkpoint_is_nowhere_begins_afresh(make: Callable[..., Drive]) -> None:
    drive = make(1)
    (lane,) = drive.lanes(0)
    drive.start("a", lane, 1, Checkpoint(3, "/dev/shm/fluid-ray-0d-localhost/a/00000003-0-1", HERE, True))
    back = drive.until(TrialSetBack, trial_id="a")
    assert (back.checkpoint, back.reason) == (None, "the checkpoint of iteration 3 is gone")
    assert drive.until(IterationDone, trial_id="a").iteration == 1
