"""What all tests share: the hypothesis profile, helper modules, and real lanes and processes."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fluid.backends.hosts.forkserver.host_end import ForkServerProcess
from fluid.backends.hosts.sockets import FramedSocket
from fluid.engine.events import IterationDone, TrialFailed
from fluid.gpu.nvml import find_gpus
from fluid.lane.protocol import FromLane, LaneOptions, ShipTrainable
from fluid.trainables.pickling import dump_config, dump_trainable
from fluid.wire import decoder

# Tests are imported in importlib mode, which leaves sys.path alone; helpers such as brute_force.py live here.
_HERE = Path(__file__).parent
if str(_HERE) not in sys.path:
    sys.path.append(str(_HERE))

import lane_messages as to  # noqa: E402
from browser import Browser, chromium, running_browser  # noqa: E402
from iteration_runs import one_by_one  # noqa: E402
from long_tests import long_tests  # noqa: E402

# Nothing is timed. On CI every run tries the same examples, so that a failure belongs to the change it shows up with.
settings.register_profile(
    "fluid",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fluid")

#: Milliseconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE_MS = 90_000
#: Descriptors that select(2) takes: FD_SETSIZE.
_MOST_SELECTED = 1024


class Probe:
    """Evaluates expressions in a lane."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def step(self) -> dict[str, Any]:
        return {name: eval(code, {"sys": sys, "os": os}) for name, code in self.config.items()}


class Lane:
    """The driver's end of a lane."""

    def __init__(self, sock: socket.socket, server: ForkServerProcess) -> None:
        self.wire = FramedSocket(sock, decoder(FromLane))
        self._server = server
        self.messages: list[Any] = []
        self._trainables: list[Any] = []

    def send(self, *messages: Any) -> None:
        self.wire.send(messages)

    def start(self, trial_id: str, trainable: Any, config: Any, iterations: int, *how: Any, **facts: Any) -> None:
        """Starts a trial; for what else there is to say, see :func:`lane_messages.set_up`."""
        if trainable not in self._trainables:
            self._trainables.append(trainable)
            self.send(ShipTrainable(len(self._trainables) - 1, dump_trainable(trainable), ()))
        key = self._trainables.index(trainable)
        self.send(to.set_up(trial_id, key, dump_config(config), iterations, *how, **facts))

    def receive(self, kind: type, trial_id: str | None = None) -> Any:
        """The first message of a kind, and about a trial, that was not returned before."""

        def wanted(message: Any) -> bool:
            return isinstance(message, kind) and trial_id in (None, getattr(message, "trial_id", None))

        poller = select.poll()
        poller.register(self.wire.fileno(), select.POLLIN)
        patience = time.monotonic() + PATIENCE_MS / 1e3
        while not any(map(wanted, self.messages)):
            while not poller.poll(20):  # Lanes that wait for modules are forked in a poll.
                self._server.poll()
                assert time.monotonic() < patience, f"no {kind.__name__}, but {self.messages}"
            self.messages += [each for message in self.wire.receive() for each in one_by_one(message)]
            assert not self.wire.ended, f"the lane ended after {self.messages}"
        found = next(filter(wanted, self.messages))
        self.messages.remove(found)
        return found

    def ask(self, **expressions: str) -> dict[str, Any]:
        """The values of expressions in the lane."""
        self.start("probe", Probe, expressions, 1)
        assert not any(isinstance(message, TrialFailed) for message in self.messages), self.messages
        return dict(self.receive(IterationDone, "probe").metrics)


#: Folders and files whose tests do not run beside each other.
_GROUPS = {
    # They share clusters, and look for what is left of a session on Ray.
    "ray": ("backends/ray/", "conformance/", "trainables/test_trainable.py"),
    # They look for what is left of a daemon of MPS.
    "mps": (
        "backends/hosts/test_mps_sharing.py",
        "backends/local/test_on_gpu.py",
        "gpu/test_mps",
        "gpu/test_on_gpu.py",
        "test_gpu_day.py",
        "test_packing_benchmarks.py",
    ),
}


#: Files and folders whose tests take longest. They begin first, so that no worker is left alone with them at the end.
_LONGEST = (
    "integrations/ray_tune/test_elastic.py",
    "integrations/ray_tune/test_faults.py",
    "integrations/ray_tune/parity/",
    "examples/test_sweeps.py",
    "test_packing_benchmarks.py",
    "backends/ray/",
    "conformance/",
    "test_executor.py",
    "backends/local/",
    "integrations/",
)


def group_of(path: str) -> str:
    """What tests of a file, given relative to this folder, must share a process with: the file, or all like it."""
    return next((name for name, paths in _GROUPS.items() if path.startswith(paths)), path)


def pytest_configure(config: pytest.Config) -> None:
    """Makes tests independent of how they were started, hides GPUs, and keeps Ray's clusters apart from all others.

    ``ray.init()`` joins the cluster whose address a file in Ray's temporary folder tells, also where that has ended
    since. And a cluster on the loopback interface does not depend on the network.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A parent that ignores interrupts, as nohup and a shell's & do, passes that on to the drivers that tests start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        # A short name: the path of a socket has 107 characters at most.
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["RAY_TMPDIR"] = folder
        # Where sessions find each other: those of other workers are none of a test's business.
        os.environ["XDG_RUNTIME_DIR"] = folder
        # Despite its name this is for every system: without clusters of several machines, an address is 127.0.0.1.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if not _tests_gpus(config):
            # Tests that ask for two devices mean CPU cores, also on a machine with one GPU.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_teardown() -> None:
    """Puts back the handlers of interrupts that Ray Tune sets, and leaves: they take the next interrupt for theirs."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGUSR1, signal.SIG_DFL)):
        if getattr(signal.getsignal(number), "__module__", "") == "ray.tune.tune":
            signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)  # Before -m selects.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what long.txt names, and brings the tests of the longest files to the front, alike in every worker."""
    named = long_tests()

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(_HERE).as_posix() if item.path.is_relative_to(_HERE) else ""
        return next((place for place, longest in enumerate(_LONGEST) if path.startswith(longest)), len(_LONGEST))

    for item in items:
        test = item.nodeid.removeprefix("tests/")
        if test in named or test.partition("[")[0] in named:
            item.add_marker(pytest.mark.long)
    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run side by side, those of a file stay together, as do all that share a thing of the machine's."""
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = config.rootpath / nodeid.partition("::")[0]
            return group_of(path.relative_to(_HERE).as_posix())

    config.option.loadscopereorder = False  # xdist would begin with the files that have the most tests
    return Grouped(config, log)


def _tests_gpus(config: pytest.Config) -> bool:
    """Whether pytest was asked for the tests marked ``gpu``: other tests are not run in their processes.

    A process that has used CUDA keeps its context, and one that has looked for GPUs in vain finds none later.
    """
    return re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")) is not None


def _require_gpus(item: pytest.Item, mark: pytest.Mark) -> None:
    """Skips a test that is marked ``gpu`` if it is not asked for, or if there are too few GPUs."""
    if not _tests_gpus(item.config):
        pytest.skip("pytest -m gpu runs it")
    needed, found = next(iter(mark.args), 1), len(find_gpus())
    if found < needed:
        require("FLUID_REQUIRE_GPU", f"needs {needed} GPU{'s' if needed > 1 else ''}, and there are {found}")


def require(variable: str, missing: str) -> None:
    """Skips a test for want of something, or fails it if a variable of the environment is 1."""
    if os.environ.get(variable) == "1":
        pytest.fail(missing)
    pytest.skip(missing)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests of what is missing, or fails them if told so.

    ``FLUID_REQUIRE_GPU=1``, ``FLUID_REQUIRE_HOROVOD=1``, ``FLUID_REQUIRE_CHROMIUM=1`` and
    ``FLUID_REQUIRE_FRAMEWORKS=1`` tell so. A mark ``gpu`` is for a test that needs a GPU, ``gpu(2)`` for one that
    needs two; all others see none. A mark ``frameworks("keras", "torch")`` names the modules that a test needs.
    """
    gpus = item.get_closest_marker("gpu")
    if gpus is not None:
        _require_gpus(item, gpus)
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        require("FLUID_REQUIRE_HOROVOD", "Horovod is not installed: scripts/build_horovod.py builds it")
    if item.get_closest_marker("browser") and chromium() is None:
        require("FLUID_REQUIRE_CHROMIUM", "Chromium is not installed")
    for mark in item.iter_markers("frameworks"):
        missing = [name for name in mark.args if importlib.util.find_spec(name) is None]
        if missing:
            needed = f"not installed: {', '.join(missing)}; make test-integrations installs what is needed"
            require("FLUID_REQUIRE_FRAMEWORKS", needed)


#: Whose lanes load what the driver has loaded, as the lanes of users do.
_LANES_OF_USERS = ("integrations/", "examples/", "test_docs.py")


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """This process has so many files open that the next ones have numbers beyond what select(2) takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST_SELECTED
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(_MOST_SELECTED)]
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module", autouse=True)
def lean_lanes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lanes load what their trials import, and not all that other tests have loaded here: that takes seconds each."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.path.relative_to(_HERE).as_posix().startswith(_LANES_OF_USERS):
            patch.setattr("fluid.backends.local._LIKELY", ())
        yield


@pytest.fixture(scope="module", autouse=True)
def ray_is_disconnected(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module that leaves this process connected to a Ray cluster fails itself, not those that come after it."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
        pytest.fail(f"{request.path.name} left this process connected to a Ray cluster")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The address of a Ray cluster of two cores and one ``seat``, which a module connects to and disconnects from.

    Its start takes seconds of both cores, so all modules that run in one process share it.
    """
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    tune = _HERE / "integrations" / "ray_tune"
    folders = (tune, tune / "parity", _HERE.parent / "examples", os.environ.get("PYTHONPATH"))
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers are no children of this process: they inherit from the cluster's processes.
        patch.setenv("PYTHONPATH", os.pathsep.join(str(folder) for folder in folders if folder))
        patch.setenv("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"seat": 1}, "include_dashboard": False}
        )
    yield cluster.address
    cluster.shutdown()


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A folder for ``RAY_TMPDIR`` of another process, in which ``ray.init()`` finds no cluster of this one.

    Its name is short, as those of Ray's sockets must be.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Any]:
    """A Ray cluster of the driver's node, with four CPUs, and another one, with two, at another machine's address.

    Modules connect to it and disconnect from it, and leave the nodes as they are: each takes seconds to start.
    """
    from ray_drive import OTHER_MACHINE

    yield from _cluster(4, (OTHER_MACHINE, 2))


@pytest.fixture(scope="session")
def four_nodes() -> Iterator[Any]:
    """The same, of four nodes with a CPU each: two at the driver's address, and two at other machines'."""
    from ray_drive import OTHER_MACHINE, THIRD_MACHINE, THIS_MACHINE

    yield from _cluster(1, (THIS_MACHINE, 1), (OTHER_MACHINE, 1), (THIRD_MACHINE, 1))


def _cluster(cpus: int, *others: tuple[str, int]) -> Iterator[Any]:
    """A Ray cluster: so many CPUs on the driver's node, and the address and the CPUs of each other one.

    Those have a custom resource each, named after the address.
    """
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False})
    for address, count in others:
        cluster.add_node(num_cpus=count, node_ip_address=address, resources={f"at-{address}": 1})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the control program of MPS, in a folder of its own."""
    from mps_program import Fake

    made = Fake(tmp_path)
    monkeypatch.setenv("FAKE_MPS", str(made.told))
    return made


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., ForkServerProcess]]:
    """Starts fork servers."""
    made: list[ForkServerProcess] = []

    def make(**options: Any) -> ForkServerProcess:
        made.append(ForkServerProcess(str(tmp_path), **{"mark": secrets.token_hex(8), **options}))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., Lane]]:
    """Forks lanes."""
    lanes: list[Lane] = []

    def make(server: ForkServerProcess, lane_id: int, **options: Any) -> Lane:
        ours, theirs = socket.socketpair()
        server.fork(LaneOptions(lane_id, run_folder=str(tmp_path), **options), theirs)
        lanes.append(Lane(ours, server))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.wire.close()


class Processes:
    """Processes that must end. A handle is held to each, so that no other is taken for it."""

    def __init__(self) -> None:
        self._handles: dict[int, int] = {}

    def watch(self, *pids: int) -> None:
        for pid in pids:
            self._handles[pid] = os.pidfd_open(pid)

    def have_ended(self, within: float = 0.0) -> bool:
        """Whether all have ended; waits for that, seconds."""
        return all(self._has_ended(handle, within) for handle in self._handles.values())

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)

    @staticmethod
    def _has_ended(handle: int, within: float) -> bool:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return bool(poller.poll(within * 1000))


@pytest.fixture
def processes() -> Iterator[Processes]:
    watched = Processes()
    yield watched
    watched.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless browser, for tests marked ``browser``."""
    with running_browser() as found:
        yield found
