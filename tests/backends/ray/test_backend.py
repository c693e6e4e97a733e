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
from fluid.resources import Device
from fluid.trainables.payload import payload_of
from fluid.trialgroup import Trial, TrialGroup

ray = pytest.importorskip("ray")
from fluid.backends.hosts.folders import HERE  # noqa: E402
from fluid.backends.ray import RayBackend  # noqa: E402

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


class Family:
    """Tells what its process comes from."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.preloaded = "colorsys" in sys.modules

    def step(self) -> dict[str, Any]:
        return {"parent": os.getppid(), "preloaded": self.preloaded, "ray": os.environ.get("RAY_ADDRESS")}


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


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


def is_hanging(pid: int) -> bool:
    """Whether a process waits for something."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "S"


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


def test_mps_for_cpu_devices_is_refused(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=r"packing='mps': MPS cannot be used: the devices are CPU cores"):
        FluidExecutor("ray", packing="mps", run_dir=tmp_path, verbose=0)
    eventually(lambda: not groups_left())


def test_each_gpus_lanes_see_that_gpu(cluster: Any, make: Callable[..., Drive]) -> None:
    node = cluster.add_node(num_cpus=0, num_gpus=2)
    try:
        drive = make(None)
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


@pytest.mark.parametrize("device", [0, 4], ids=["driver's node", "other node"])
def test_a_killed_lane_is_lost_alone(cluster: Any, other_node: Any, make: Callable[..., Drive], device: int) -> None:
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
    cluster: Any, other_node: Any, make: Callable[..., Drive]
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
    cluster: Any, other_node: Any, make: Callable[..., Drive]
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


def test_a_host_that_cannot_start_says_why(
    cluster: Any, other_node: Any, make: Callable[..., Drive], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluid.backends.hosts.listener.LaneListener.listen", lambda self, ip: (ip, 9))
    drive = make(None)
    drive.do(StartLane(0, 4))
    assert "ConnectionRefusedError" in drive.until(LaneLost, lane_id=0).reason


def test_lanes_of_all_nodes_are_forked_with_what_was_preloaded(
    cluster: Any, other_node: Any, make: Callable[..., Drive]
) -> None:
    drive = make(None, preload=["colorsys"])
    for lane in drive.lanes(0, 1, 4, 5):
        drive.backend.register(f"t{lane}", payload_of(Family, {}))
        drive.do(StartTrial(f"t{lane}", (lane,), iterations=1))
    seen = [drive.until(IterationDone, trial_id=f"t{lane}").metrics for lane in range(4)]
    assert all(metrics["preloaded"] for metrics in seen)
    parents = [metrics["parent"] for metrics in seen]
    assert parents[0] == parents[1] and parents[2] == parents[3] and parents[0] != parents[2]
    assert {metrics["ray"] for metrics in seen} == {cluster.address}, "a trial can join the cluster"


# -- the end ------------------------------------------------------------------------------------------------------


def in_host_memory(folder: Path) -> list[str]:
    """Folders in host memory of sessions that have theirs on disk below this one."""
    sessions = Path("/dev/shm").glob("fluid-*/.session")
    return [session.parent.name for session in sessions if f'"{folder}' in session.read_text(encoding="utf-8")]


@pytest.mark.parametrize("busy", [False, True])
def test_closing_leaves_nothing(
    cluster: Any, other_node: Any, make: Callable[..., Drive], processes: Any, tmp_path: Path, busy: bool
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


DRIVER = """
import os, sys, ray
from fluid.backends.ray import RayBackend
from fluid.engine.commands import StartLane, StartTrial
from fluid.engine.events import IterationDone
from fluid.trainables.payload import payload_of
class Pid:
    def __init__(self, config): pass
    def step(self): return {"pids": [os.getpid(), os.getppid()]}
if __name__ == "__main__":
    with RayBackend(None, run_dir=sys.argv[1], preload=[]) as backend:
        for index in (0, len(backend.devices()) - 1):
            backend.execute([StartLane(index, index)])
            backend.register(f"t{index}", payload_of(Pid, {}))
            backend.execute([StartTrial(f"t{index}", (index,), iterations=10**9 if sys.argv[2] == "run" else 1)])
        pids = {}
        while len(pids) < 2:
            done = [event for event in backend.poll(60) if isinstance(event, IterationDone)]
            pids |= {event.lane_id: event.metrics["pids"] for event in done}
        print(*pids[0], *pids[index], flush=True)
        while sys.argv[2] == "run":
            backend.poll(None)
    print(ray.is_initialized(), flush=True)
"""


def start_driver(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": ROOT, **environment}
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "run"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_a_killed_driver_leaves_nothing_on_any_node_within_ten_seconds(
    cluster: Any, other_node: Any, tmp_path: Path, processes: Any
) -> None:
    with start_driver(tmp_path, "run", RAY_ADDRESS=cluster.address) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        lanes_and_servers = [*pids, *map(parent_of, (pids[1], pids[3]))]
        processes.watch(*lanes_and_servers, parent_of(parent_of(pids[3])))
        driver.kill()
    assert processes.have_ended(within=10.0)
    eventually(lambda: not in_host_memory(tmp_path))
    eventually(lambda: ray.available_resources().get("CPU") == 6)


def test_ray_is_started_where_there_is_none_and_ended_again(tmp_path: Path, processes: Any) -> None:
    with start_driver(tmp_path, "end", RAY_ADDRESS="") as driver:
        out, _ = driver.communicate(timeout=PATIENCE)
    *pids, is_initialized = out.split()
    assert is_initialized == "False" and driver.returncode == 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


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


#: Both machines of a test have one disk; with this, a lane finds only what is in the folders of its own machine.
BLIND = """
import os
from fluid.lane.locating import CheckpointLocator

def is_here(self, trial_id, path):
    return any(os.path.isdir(os.path.join(folder, os.path.basename(path))) for folder in self._folders(trial_id))

CheckpointLocator._is_here = is_here
"""


def test_a_checkpoint_goes_straight_to_the_machine_where_its_trial_goes_on(
    cluster: Any, other_node: Any, make: Callable[..., Drive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_trial_whose_checkpoint_is_nowhere_begins_afresh(make: Callable[..., Drive]) -> None:
    drive = make(1)
    (lane,) = drive.lanes(0)
    drive.start("a", lane, 1, Checkpoint(3, "/dev/shm/fluid-0d0d0d0d0d0d0d0d-localhost/a/00000003-0-1", HERE, True))
    back = drive.until(TrialSetBack, trial_id="a")
    assert (back.checkpoint, back.reason) == (None, "the checkpoint of iteration 3 is gone")
    assert drive.until(IterationDone, trial_id="a").iteration == 1
