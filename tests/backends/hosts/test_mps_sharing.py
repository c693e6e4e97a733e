"""Lanes as clients of MPS: real processes, and a control program that is real in all but the GPU.

CPU cores stand in for GPUs: a lane only learns of MPS by its environment, and a fault is what the daemon says it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mps_program import Fake

from fluid.backends.base import Sharing
from fluid.backends.hosts.gpu_sharing import LaneSharing
from fluid.backends.hosts.mps_watchdog import MpsWatchdog
from fluid.backends.local.backend import LocalBackend
from fluid.engine.commands import StartTrial
from fluid.engine.events import IterationDone, LaneLost
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.mps import MpsDaemon
from fluid.resources import Device
from fluid.trainables.payload import payload_of
from fluid.trialgroup import Trial, TrialGroup

ROOT = Path(__file__).resolve().parents[3]
#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


class Probe:
    """Says what its process sees of MPS; may bring a fault on all clients, once, and die of it."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.steps = config, 0

    def step(self) -> dict[str, Any]:
        if self.config.get("faults_at") == self.steps + 1 and not Path(self.config["once"]).exists():
            Path(self.config["once"]).write_text(str(os.getpid()))
            Path(os.environ["FAKE_MPS"], "fault").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if "until" in self.config and self.steps == 1:
            with open(self.config["until"], encoding="utf-8"):  # a pipe that is opened once the fault is over
                pass
        self.steps += 1
        seen = {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}
        return {"pid": os.getpid(), **seen}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "steps").write_text(json.dumps(self.steps))

    def load_checkpoint(self, folder: str) -> None:
        self.steps = json.loads(Path(folder, "steps").read_text())


@pytest.fixture
def backend(fake: Fake, tmp_path: Path) -> Iterator[LocalBackend]:
    """Two devices, whose lanes are clients."""
    made = LocalBackend(
        2, run_dir=tmp_path / "run", preload=[], grace=0.2, sharing="mps", _mps_program=str(fake.program)
    )
    with made:
        yield made


def daemon_of(backend: LocalBackend) -> MpsDaemon:
    watchdog = backend._host._sharing.watchdog
    assert watchdog is not None
    return watchdog._daemon


def watch(daemon: MpsDaemon, processes: Any) -> None:
    processes.watch(daemon.pid, *daemon.servers())


# --- Becoming a client


def test_lanes_and_nobody_else_become_clients(backend: LocalBackend, make_drive: Any) -> None:
    before = dict(os.environ)
    drive = type(make_drive())(backend)
    assert backend.sharing == Sharing("mps")
    lanes = drive.lanes(0, 1)
    for index, lane in enumerate(lanes):
        backend.register(f"t{index}", payload_of(Probe, {}))
        drive.do(StartTrial(f"t{index}", (lane,), iterations=1))
        seen = drive.of(IterationDone, f"t{index}").metrics
        assert seen["CUDA_MPS_PIPE_DIRECTORY"] == daemon_of(backend).pipe_folder
        assert seen["CUDA_VISIBLE_DEVICES"] == f"GPU-{index}", "by its UUID"
        assert seen["pid"] != os.getpid()
    assert dict(os.environ) == before
    server = Path(f"/proc/{backend._host._server.pid}/environ").read_bytes()
    assert b"CUDA_MPS_PIPE_DIRECTORY" not in server, "the fork server, from which all lanes come, is no client"


def test_lanes_are_no_clients_unless_that_is_asked_for(make_drive: Callable[..., Any]) -> None:
    drive = make_drive(1)
    assert drive.backend.sharing == Sharing("timeslice")
    drive.backend.register("t", payload_of(Probe, {}))
    (lane,) = drive.lanes(0)
    drive.do(StartTrial("t", (lane,), iterations=1))
    assert drive.of(IterationDone, "t").metrics["CUDA_VISIBLE_DEVICES"] == ""


def test_a_device_that_comes_later_is_shared_by_time_slices(backend: LocalBackend, make_drive: Any) -> None:
    """The daemon serves the devices it was started for."""
    drive = type(make_drive())(backend)
    backend.add_devices([Device(7, kind="cpu")])
    backend.register("t", payload_of(Probe, {}))
    (lane,) = drive.lanes(7)
    drive.do(StartTrial("t", (lane,), iterations=1))
    assert "CUDA_MPS_PIPE_DIRECTORY" not in drive.of(IterationDone, "t").metrics


# --- Where it cannot be had


def test_mps_for_cpu_cores_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match=r"sharing='mps'.*the devices are CPU cores") as caught:
        LocalBackend(1, preload=[], sharing="mps")
    assert caught.value.field == "sharing"


def test_a_backend_that_cannot_have_it_leaves_nothing(fake: Fake, tmp_path: Path) -> None:
    fake.tell("refuses")
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with pytest.raises(Exception, match="operation not permitted"):
        LocalBackend(1, preload=[], run_dir=tmp_path / "run", sharing="mps", _mps_program=str(fake.program))
    assert children.read_text() == before


def test_auto_takes_time_slices_where_there_is_no_gpu() -> None:
    made = LaneSharing("auto", [])
    assert (made.sharing, made.watchdog, made.lane_environment("GPU-0")) == (Sharing("timeslice"), None, ())


def test_auto_says_why_it_takes_time_slices(caplog: pytest.LogCaptureFixture) -> None:
    made = LaneSharing("auto", ["GPU-of-nowhere"])
    assert made.sharing == Sharing("timeslice", "not all GPUs answer")
    assert made.lane_environment("GPU-0") == ()


# --- Faults


def test_after_a_fault_all_lanes_are_ended_and_come_back(backend: LocalBackend, processes: Any, tmp_path: Path) -> None:
    """Innocents go on from their checkpoints without a failure; the suspect runs alone from then on."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    daemon = daemon_of(backend)
    watch(daemon, processes)
    culprit = Trial(Probe, {"faults_at": 3, "once": str(tmp_path / "once")}, budget=4, trial_id="culprit")
    innocent = Trial(Probe, {"until": str(pipe)}, budget=3, trial_id="innocent")
    with FluidExecutor(backend=backend, run_dir=tmp_path / "session", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([innocent, culprit]))
        results = []
        for result in handle.results():
            results.append(result)
            if (result.trial_id, result.iteration) == ("culprit", 4):
                with open(pipe, "w", encoding="utf-8"):  # It waits in its second life.
                    pass
        assert handle.states == {"culprit": "DONE", "innocent": "DONE"}
        trials = executor._session._state.trials
        assert (trials["culprit"].limits.failures, trials["culprit"].limits.packing_cap) == (1, 1)
        assert (trials["innocent"].limits.failures, trials["innocent"].limits.packing_cap) == (0, None)
        assert daemon.restarts == 1
        assert processes.have_ended(PATIENCE), "the old daemon and its server"
        watch(daemon, processes)
    assert int((tmp_path / "once").read_text()) != results[-1].metrics["pid"]
    pipes = {result.metrics["CUDA_MPS_PIPE_DIRECTORY"] for result in results}
    assert pipes == {daemon.pipe_folder}, "new lanes find the daemon where it was"
    assert processes.have_ended(PATIENCE), "the executor ends the new one"
    assert not os.path.exists(daemon.pipe_folder)


def test_a_lane_that_dies_without_a_fault_takes_nobody_along(backend: LocalBackend, make_drive: Any) -> None:
    drive = type(make_drive())(backend)
    one, other = drive.lanes(0, 1)
    backend.register("t", payload_of(Probe, {}))
    drive.do(StartTrial("t", (one,), iterations=1))
    os.kill(drive.of(IterationDone, "t").metrics["pid"], signal.SIGKILL)
    lost = drive.until(LaneLost)
    assert (lost.lane_id, lost.reason, lost.blameless) == (one, "was killed by SIGKILL", False)
    backend.register("u", payload_of(Probe, {}))
    drive.do(StartTrial("u", (other,), iterations=1))
    drive.of(IterationDone, "u")
    assert daemon_of(backend).restarts == 0


def test_a_daemon_that_dies_is_noticed_though_no_lane_says_so(
    fake: Fake, make_drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluid.backends.hosts.mps_watchdog._CHECK_S", 0.05)
    drive = make_drive(sharing="mps", _mps_program=str(fake.program))
    lanes = drive.lanes(0, 1)
    daemon = daemon_of(drive.backend)
    os.kill(daemon.pid or 0, signal.SIGKILL)
    lost = [drive.until(LaneLost), drive.until(LaneLost)]
    assert sorted(event.lane_id for event in lost) == lanes
    assert all(event.blameless and event.culprit is None for event in lost)
    assert "was killed by SIGKILL" in lost[0].reason
    drive.backend.register("t", payload_of(Probe, {}))
    (lane,) = drive.lanes(0)  # It is not started before the daemon is back.
    drive.do(StartTrial("t", (lane,), iterations=1))
    assert drive.of(IterationDone, "t").metrics["CUDA_MPS_PIPE_DIRECTORY"] == daemon.pipe_folder
    assert daemon.problem() == ""


def test_lanes_share_by_time_slices_once_it_cannot_be_started_again(
    fake: Fake, make_drive: Any, monkeypatch: pytest.MonkeyPatch, processes: Any
) -> None:
    monkeypatch.setattr("fluid.backends.hosts.mps_watchdog._CHECK_S", 0.05)
    drive = make_drive(sharing="mps", _mps_program=str(fake.program))
    drive.lanes(0, 1)
    watch(daemon_of(drive.backend), processes)
    fake.tell("refuses")
    os.kill(daemon_of(drive.backend).pid or 0, signal.SIGKILL)
    drive.until(LaneLost)
    drive.until(LaneLost)
    (lane,) = drive.lanes(0)
    drive.backend.register("t", payload_of(Probe, {}))
    drive.do(StartTrial("t", (lane,), iterations=1))
    assert "CUDA_MPS_PIPE_DIRECTORY" not in drive.of(IterationDone, "t").metrics
    sharing = drive.backend.sharing
    assert sharing.way == "timeslice" and "operation not permitted" in sharing.why
    assert processes.have_ended(PATIENCE)


def test_a_daemon_that_fails_time_and_again_is_given_up(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.backends.hosts.mps_watchdog._MOST_RESTARTS", 0)
    watchdog = MpsWatchdog(MpsDaemon(["GPU-0"], program=str(fake.program)))
    watchdog.start(lambda: None)
    watchdog.restart()
    assert watchdog._thread is not None
    watchdog._thread.join(PATIENCE)
    assert watchdog.is_ready and watchdog.given_up == "it failed 1 times"
    assert watchdog.lane_environment("GPU-0") == ()
    watchdog.close()


# --- The end


def test_nothing_is_left_when_the_backend_is_closed(backend: LocalBackend, processes: Any) -> None:
    watch(daemon_of(backend), processes)
    backend.close()
    assert processes.have_ended()
    assert not os.path.exists(daemon_of(backend).pipe_folder)


def test_nothing_is_left_when_the_driver_is_killed(fake: Fake, processes: Any) -> None:
    code = """
        import os, sys
        from fluid.backends.local.backend import LocalBackend
        backend = LocalBackend(1, preload=[], sharing="mps", _mps_program=sys.argv[1])
        daemon = backend._host._sharing.watchdog._daemon
        supervisor = open(f"/proc/{daemon.pid}/stat").read().rsplit(")", 1)[1].split()[1]  # it deletes the folder
        print(daemon.pipe_folder, daemon.pid, *daemon.servers(), supervisor, flush=True)
        sys.stdin.read()
        """
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(fake.program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with driver:
        assert driver.stdout is not None
        folder, *pids = driver.stdout.readline().split()
        processes.watch(*map(int, pids))
        assert len(pids) == 3
        driver.kill()
    assert processes.have_ended(PATIENCE)
    assert not os.path.exists(folder)
