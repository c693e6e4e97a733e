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
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from mps_program import Fake
from waiting import eventually

from fluid.backends.base import GpuSharing
from fluid.backends.hosts.gpu import sharing as gpu_sharing
from fluid.backends.hosts.gpu.mps_watchdog import MpsWatchdog
from fluid.backends.hosts.gpu.sharing import LaneSharing
from fluid.backends.local import LocalBackend
from fluid.engine.commands import KillLane, RunIteration, StartLane, StartTrial
from fluid.engine.events import IterationDone, LaneLost, LaneReady
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.gpu.nvml import GpuState
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
            Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "fault").touch()
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


def watchdogs_of(backend: LocalBackend) -> tuple[MpsWatchdog, ...]:
    return backend._host._sharing.watchdogs


def daemons_of(backend: LocalBackend) -> list[MpsDaemon]:
    """The daemons that have started, in the order of the devices."""
    return [daemon for watchdog in watchdogs_of(backend) if (daemon := watchdog._daemon) is not None]


def watch(processes: Any, *daemons: MpsDaemon) -> None:
    for daemon in daemons:
        processes.watch(daemon.pid, *daemon.servers())


# --- Becoming a client


@pytest.mark.slow
def test_lanes_and_nobody_else_become_clients(backend: LocalBackend, make_drive: Any) -> None:
    before = dict(os.environ)
    drive = type(make_drive())(backend)
    assert backend.sharing == GpuSharing("mps")
    lanes = drive.lanes(0, 1)
    for index, lane in enumerate(lanes):
        backend.register(f"t{index}", payload_of(Probe, {}))
        drive.do(StartTrial(f"t{index}", (lane,), iterations=1))
        seen = drive.of(IterationDone, f"t{index}").metrics
        assert seen["CUDA_MPS_PIPE_DIRECTORY"] == daemons_of(backend)[index].pipe_folder
        assert seen["CUDA_VISIBLE_DEVICES"] == f"GPU-{index}", "by its UUID"
        assert seen["pid"] != os.getpid()
    assert dict(os.environ) == before
    server = Path(f"/proc/{backend._host._server.pid}/environ").read_bytes()
    assert b"CUDA_MPS_PIPE_DIRECTORY" not in server, "the fork server, from which all lanes come, is no client"


def test_lanes_are_no_clients_unless_that_is_asked_for(make_drive: Callable[..., Any]) -> None:
    drive = make_drive(1)
    assert drive.backend.sharing == GpuSharing("timeslice")
    drive.backend.register("t", payload_of(Probe, {}))
    (lane,) = drive.lanes(0)
    drive.do(StartTrial("t", (lane,), iterations=1))
    assert drive.of(IterationDone, "t").metrics["CUDA_VISIBLE_DEVICES"] == ""


def test_a_device_that_comes_later_gets_a_daemon_and_a_guard(
    backend: LocalBackend, fake: Fake, make_drive: Any, processes: Any
) -> None:
    drive = type(make_drive())(backend)
    fake.tell("busy")
    backend.add_devices([Device(7, kind="cpu")])
    assert [watchdog.devices for watchdog in watchdogs_of(backend)] == [("GPU-0",), ("GPU-1",), ("GPU-7",)]
    drive.do(StartLane(50, 7), StartLane(51, 7))
    assert not {50, 51} & set(backend._host._running), "its lanes wait for the daemon"
    fake.untell("busy")
    backend.register("t", payload_of(Probe, {}))
    drive.do(StartTrial("t", (50,), iterations=1))
    seen = drive.of(IterationDone, "t").metrics
    *_, daemon = daemons_of(backend)
    watch(processes, daemon)
    assert (seen["CUDA_MPS_PIPE_DIRECTORY"], seen["CUDA_VISIBLE_DEVICES"]) == (daemon.pipe_folder, "GPU-7")
    Path(daemon.pipe_folder, "fault").touch()
    os.kill(seen["pid"], signal.SIGKILL)
    lost = {event.lane_id: event.blameless for event in (drive.until(LaneLost), drive.until(LaneLost))}
    assert lost == {50: False, 51: True}
    assert processes.have_ended(PATIENCE), "the daemon that failed"


def test_a_device_that_comes_later_and_cannot_have_a_daemon_uses_time_slices(
    backend: LocalBackend, fake: Fake, make_drive: Any
) -> None:
    drive = type(make_drive())(backend)
    fake.tell("refuses")
    backend.add_devices([Device(7, kind="cpu")])
    backend.register("t", payload_of(Probe, {}))
    (lane,) = drive.lanes(7)
    drive.do(StartTrial("t", (lane,), iterations=1))
    assert "CUDA_MPS_PIPE_DIRECTORY" not in drive.of(IterationDone, "t").metrics
    assert backend.sharing.way == "timeslice" and "GPU-7: " in backend.sharing.why


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
    assert (made.sharing, made.watchdogs, made.lane_environment("GPU-0")) == (GpuSharing("timeslice"), (), ())


def test_auto_says_why_it_takes_time_slices(caplog: pytest.LogCaptureFixture) -> None:
    made = LaneSharing("auto", ["GPU-of-nowhere"])
    assert made.sharing == GpuSharing("timeslice", "GPU-of-nowhere does not answer")
    assert made.lane_environment("GPU-0") == ()


@pytest.fixture
def gpus(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[GpuState]:
    """This machine, with the program installed, no daemon running, and these GPUs."""
    states = [GpuState(token, "H200", 1e9, 0.0, 0.0, False, "DEFAULT", (9, 0), ()) for token in ("GPU-a", "GPU-b")]
    monkeypatch.setenv("PATH", str(fake.program.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    for module in ("fluid.gpu.mps_support", "fluid.backends.hosts.gpu.sharing"):  # None in the default folder.
        monkeypatch.setattr(f"{module}.foreign_daemon", lambda variables: variables.get("CUDA_MPS_PIPE_DIRECTORY"))
    monkeypatch.setattr("fluid.gpu.mps_support.is_wsl", lambda: False)
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "580.82")
    monkeypatch.setattr(gpu_sharing, "describe_gpus", lambda: states)
    return states


def test_auto_decides_gpu_by_gpu(gpus: list[GpuState], caplog: pytest.LogCaptureFixture) -> None:
    gpus[0] = gpus[0]._replace(mig=True)
    with closing(LaneSharing("auto", ["GPU-a", "GPU-b"])) as made:
        assert [watchdog.devices for watchdog in made.watchdogs] == [("GPU-b",)]
        assert made.watchdogs[0].await_start() == ""
        assert made.sharing == GpuSharing("timeslice", "GPU-a is split by MIG")
        assert made.lane_environment("GPU-a") == () != made.lane_environment("GPU-b")
    assert "time slices, without MPS: GPU-a is split" in caplog.text


@pytest.mark.usefixtures("gpus")
def test_gpus_that_come_later_are_decided_alike(gpus: list[GpuState]) -> None:
    gpus[1] = gpus[1]._replace(mig=True)
    with closing(LaneSharing("auto", ["GPU-a"])) as made:
        assert made.add(["GPU-a"]) == ()
        assert made.watchdogs[0].await_start() == "" and made.sharing == GpuSharing("mps")
        assert made.add(["GPU-b", "GPU-a"]) == ()
        assert made.sharing == GpuSharing("timeslice", "GPU-b is split by MIG")
    with closing(LaneSharing("mps", ["GPU-a"])) as made:
        with pytest.raises(InvalidFieldError, match="GPU-b is split by MIG"):
            made.add(["GPU-b"])
        gpus[1] = gpus[1]._replace(mig=False)
        (watchdog,) = made.add(["GPU-b"])
        assert watchdog.await_start() == "" and made.lane_environment("GPU-b") != ()
    assert LaneSharing("timeslice", ["GPU-a"]).add(["GPU-b"]) == ()


def test_gpus_in_exclusive_mode_have_one_daemon(gpus: list[GpuState]) -> None:
    gpus[:] = [gpu._replace(compute_mode="EXCLUSIVE_PROCESS") for gpu in gpus]
    with closing(LaneSharing("mps", ["GPU-a", "GPU-b"])) as made:
        assert [watchdog.devices for watchdog in made.watchdogs] == [("GPU-a", "GPU-b")]
        assert dict(made.lane_environment("GPU-a,GPU-b"))["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("wanted", ["auto", "timeslice"])
def test_lanes_learn_of_a_daemon_that_fluid_did_not_start(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are its clients in any case, and must not blame a trial for a fault that another client may have caused."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    with closing(LaneSharing(wanted, ["GPU-a"])) as made:
        assert [watchdog.foreign for watchdog in made.watchdogs] == [True]
        assert made.lane_environment("GPU-a") == (("CUDA_MPS_PIPE_DIRECTORY", "/run/mps"),)
        assert made.lane_environment("") == (), "the lane of a CPU core"
        assert made.control("GPU-a") is None, "it is told nothing"


@pytest.mark.usefixtures("gpus")
def test_a_foreign_daemon_is_not_watched_without_the_control_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    monkeypatch.setattr(gpu_sharing, "find_program", lambda: None)
    made = LaneSharing("timeslice", ["GPU-a"])
    assert made.watchdogs == () and made.lane_environment("GPU-a") != ()
    assert "cannot be noticed" in caplog.text


@pytest.mark.usefixtures("gpus")
def test_a_gpu_where_it_did_not_start_is_left_alone_until_mps_is_asked_for(fake: Fake) -> None:
    fake.tell("refuses")
    with closing(LaneSharing("auto", ["GPU-a"])) as made:
        assert "operation not permitted" in made.watchdogs[0].await_start()
    fake.untell("refuses")
    made = LaneSharing("auto", ["GPU-a"])
    assert made.watchdogs == ()
    assert "within the last day" in made.sharing.why and "operation not permitted" in made.sharing.why
    LaneSharing("mps", ["GPU-a"]).close()
    with closing(LaneSharing("auto", ["GPU-a"])) as made:
        assert made.watchdogs[0].await_start() == "", "the refusal was forgotten"


@pytest.mark.usefixtures("gpus")
def test_a_start_that_takes_too_long_is_tried_again_soon(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may only have been busy."""
    monkeypatch.setattr(gpu_sharing, "_TRIED_S", 0.5)
    fake.tell("never_answers")
    with closing(LaneSharing("auto", ["GPU-a"])) as made:
        assert "within 0.5 s" in made.watchdogs[0].await_start()
    assert "within the last 10 minutes" in LaneSharing("auto", ["GPU-a"]).sharing.why


# --- Faults


@pytest.mark.slow
def test_after_a_fault_all_lanes_are_ended_and_come_back(
    fake: Fake, processes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Innocents go on from their checkpoints without a failure; the suspect runs alone from then on."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # One daemon for both devices, as for GPUs in exclusive mode.
    monkeypatch.setattr(gpu_sharing, "_groups", lambda tokens, wanted, program: ([tuple(tokens)], ""))
    backend = LocalBackend(2, run_dir=tmp_path / "run", preload=[], sharing="mps", _mps_program=str(fake.program))
    (daemon,) = daemons_of(backend)
    watch(processes, daemon)
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
        watch(processes, daemon)
    assert int((tmp_path / "once").read_text()) != results[-1].metrics["pid"]
    pipes = {result.metrics["CUDA_MPS_PIPE_DIRECTORY"] for result in results}
    assert pipes == {daemon.pipe_folder}, "new lanes find the daemon where it was"
    assert processes.have_ended(PATIENCE), "the executor ends the new one"
    assert not os.path.exists(daemon.pipe_folder)


@pytest.mark.slow
def test_a_fault_on_one_gpu_leaves_the_lanes_of_the_other_alone(
    backend: LocalBackend, make_drive: Any, processes: Any
) -> None:
    drive = type(make_drive())(backend)
    culprit, beside, other = drive.lanes(0, 0, 1)
    for name, lane in (("culprit", culprit), ("other", other)):
        backend.register(name, payload_of(Probe, {}))
        drive.do(StartTrial(name, (lane,), iterations=1))
    before = drive.of(IterationDone, "other").metrics
    failing, well = daemons_of(backend)
    watch(processes, failing)
    Path(failing.pipe_folder, "fault").touch()
    os.kill(drive.of(IterationDone, "culprit").metrics["pid"], signal.SIGKILL)
    lost = {event.lane_id: event.blameless for event in (drive.until(LaneLost), drive.until(LaneLost))}
    assert lost == {culprit: False, beside: True}
    (again,) = drive.lanes(0)
    backend.register("again", payload_of(Probe, {}))
    drive.do(StartTrial("again", (again,), iterations=1), RunIteration("other", (other,), 1))
    assert drive.of(IterationDone, "again").metrics["CUDA_MPS_PIPE_DIRECTORY"] == failing.pipe_folder
    assert drive.of(IterationDone, "other").metrics["pid"] == before["pid"]
    assert (failing.restarts, well.restarts) == (1, 0)
    assert processes.have_ended(PATIENCE), "the daemon that failed"


def test_a_lane_on_several_gpus_is_no_client(backend: LocalBackend, make_drive: Any) -> None:
    """Each daemon knows one GPU only."""
    drive = type(make_drive())(backend)
    backend.register("t", payload_of(Probe, {}))
    drive.do(StartLane(50, 0, (1,)), StartTrial("t", (50,), iterations=1))
    seen = drive.of(IterationDone, "t").metrics
    assert "CUDA_MPS_PIPE_DIRECTORY" not in seen and seen["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"


# --- The start, in the background


@pytest.fixture
def hurried(fake: Fake, tmp_path: Path) -> Iterator[LocalBackend]:
    """A backend that did not wait for the daemons of its two devices, which do not answer yet."""
    fake.tell("busy")
    with LocalBackend(2, run_dir=tmp_path / "run", preload=[], sharing="auto", _mps_program=str(fake.program)) as made:
        yield made


def test_lanes_wait_for_a_daemon_that_starts_in_the_background(
    hurried: LocalBackend, fake: Fake, make_drive: Any
) -> None:
    assert not any(watchdog.is_ready for watchdog in watchdogs_of(hurried)) and daemons_of(hurried) == []
    drive = type(make_drive())(hurried)
    hurried.register("t", payload_of(Probe, {}))
    drive.do(StartLane(50, 0), StartTrial("t", (50,), iterations=1))
    assert 50 not in hurried._host._running
    begun = hurried.now()
    eventually(lambda: hurried.now() > begun + 0.2)
    fake.untell("busy")
    ready = drive.until(LaneReady)
    assert ready.at - ready.seconds > begun + 0.2, "the wait does not count as the lane's own start"
    assert drive.of(IterationDone, "t").metrics["CUDA_MPS_PIPE_DIRECTORY"] == daemons_of(hurried)[0].pipe_folder


def test_lanes_take_time_slices_where_the_daemon_does_not_start(fake: Fake, make_drive: Any) -> None:
    fake.tell("refuses")
    drive = make_drive(1, sharing="auto", _mps_program=str(fake.program))
    drive.backend.register("t", payload_of(Probe, {}))
    (lane,) = drive.lanes(0)
    drive.do(StartTrial("t", (lane,), iterations=1))
    assert "CUDA_MPS_PIPE_DIRECTORY" not in drive.of(IterationDone, "t").metrics
    sharing = drive.backend.sharing
    assert sharing.way == "timeslice" and "operation not permitted" in sharing.why


def test_a_session_that_runs_says_that_mps_did_not_start(fake: Fake, tmp_path: Path) -> None:
    fake.tell("busy")
    run = tmp_path / "session"

    def sharing() -> Any:
        return json.loads((run / "session.json").read_text())["sharing"]

    backend = LocalBackend(1, run_dir=tmp_path / "run", preload=[], sharing="auto", _mps_program=str(fake.program))
    with FluidExecutor(backend=backend, run_dir=run, verbose=0) as executor:
        eventually(lambda: (run / "session.json").exists())
        assert sharing() == "mps", "it is starting"
        os.kill(children_of(watchdogs_of(backend)[0])[0], signal.SIGKILL)  # The daemon's supervisor.
        executor.submit_trialgroup(TrialGroup([Trial(Probe, {}, budget=1)])).wait()
        assert sharing() == "timeslice"


def children_of(watchdog: MpsWatchdog) -> list[int]:
    """Processes that the watchdog's thread has started, at least one."""
    children = Path(f"/proc/self/task/{watchdog._thread.native_id}/children")
    return [int(pid) for pid in eventually(lambda: children.read_text().split())]


def test_the_end_cancels_the_start(hurried: LocalBackend, processes: Any) -> None:
    for watchdog in watchdogs_of(hurried):
        processes.watch(*children_of(watchdog))
    hurried.close()
    assert daemons_of(hurried) == []
    assert processes.have_ended(PATIENCE)


@pytest.mark.slow
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
    assert [daemon.restarts for daemon in daemons_of(backend)] == [0, 0]


#: Kills a child process with the help of the control program and the folder that it is given.
_KILLER = """
import os, signal, sys
from fluid.backends.hosts.forkserver import guardian
guardian._PATIENCE_S = float(sys.argv[3])
lane = os.fork()
if not lane:
    os.setpgid(0, 0)
    signal.pause()
killer = guardian.LaneKiller()
killer.kill(lane, guardian.MpsControl(*sys.argv[1:3]))
first, _ = os.wait()
killer.reaped(first)
_, status = os.wait()
print(lane, first != lane, os.WTERMSIG(status))
"""


def test_the_work_of_a_client_is_ended_before_it_is_killed(backend: LocalBackend, fake: Fake) -> None:
    daemon = daemons_of(backend)[0]
    (server,) = daemon.servers()
    arguments = [str(fake.program), daemon.pipe_folder, str(PATIENCE)]
    done = subprocess.run([sys.executable, "-c", _KILLER, *arguments], capture_output=True, text=True, check=True)
    pid, is_helper_first, status = done.stdout.split()
    assert (is_helper_first, int(status)) == ("True", signal.SIGKILL)
    assert fake.heard("terminate_client") == f"{server} {pid} alive\n"


@pytest.mark.slow
def test_a_client_is_killed_though_the_daemon_does_not_end_its_work(
    backend: LocalBackend, fake: Fake, make_drive: Any
) -> None:
    fake.tell("no_termination")
    drive = type(make_drive())(backend)
    (lane,) = drive.lanes(0)
    backend.register("t", payload_of(Probe, {}))
    drive.do(StartTrial("t", (lane,), iterations=1))
    pid = drive.of(IterationDone, "t").metrics["pid"]
    drive.do(KillLane(lane, "was killed in a test", at=0.0))
    assert drive.until(LaneLost).reason == "was killed in a test"
    eventually(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.slow
def test_a_daemon_that_dies_is_noticed_though_no_lane_says_so(
    fake: Fake, make_drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluid.backends.hosts.gpu.mps_watchdog._CHECK_S", 0.05)
    drive = make_drive(sharing="mps", _mps_program=str(fake.program))
    lanes = drive.lanes(0, 0)
    daemon, _ = daemons_of(drive.backend)
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


def test_answers_that_stay_out_for_a_while_end_no_lane(
    fake: Fake, make_drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluid.backends.hosts.gpu.mps_watchdog._CHECK_S", 0.3)
    drive = make_drive(1, sharing="mps", _mps_program=str(fake.program))
    (lane,) = drive.lanes(0)
    (watchdog,) = watchdogs_of(drive.backend)
    fake.tell("busy")
    eventually(lambda: watchdog._unanswered > 0)
    fake.untell("busy")
    eventually(lambda: watchdog._unanswered == 0)
    assert drive.backend.poll(0.0) == [] and lane in drive.backend._host._running
    assert [daemon.restarts for daemon in daemons_of(drive.backend)] == [0]


def starts(fake: Fake) -> Callable[[Callable[[], bool]], MpsDaemon]:
    return lambda is_cancelled: MpsDaemon(
        ["GPU-0"], program=str(fake.program), start_timeout=PATIENCE, is_cancelled=is_cancelled
    )


@pytest.fixture
def watchdog(fake: Fake) -> Iterator[MpsWatchdog]:
    """One that checks only when it is told to, of a daemon that runs and does not answer."""
    made = MpsWatchdog(["GPU-0"], starts(fake))
    assert made.await_start() == ""
    fake.tell("busy")
    yield made
    made.close()


@pytest.mark.slow
def test_a_daemon_that_does_not_answer_has_failed_after_a_minute(
    watchdog: MpsWatchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        watchdog._check(lane_died=False)
    assert watchdog.problem == ""
    monkeypatch.setattr("fluid.backends.hosts.gpu.mps_watchdog._PATIENCE_S", 0.0)
    watchdog._check(lane_died=False)
    assert "temporarily unavailable" in watchdog.problem


@pytest.mark.slow
def test_a_daemon_that_does_not_answer_has_failed_at_the_third_check_if_a_lane_died(watchdog: MpsWatchdog) -> None:
    for _ in range(2):
        watchdog._check(lane_died=True)
        assert watchdog.problem == ""
    watchdog._check(lane_died=True)
    assert "temporarily unavailable" in watchdog.problem


def test_the_daemon_is_watched_after_an_error(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = MpsWatchdog(["GPU-0"], starts(fake))
    assert made.await_start() == ""
    errors, check = [ZeroDivisionError("unforeseen")], made._check

    def fail_once(*, lane_died: bool) -> None:
        if errors:
            raise errors.pop()
        check(lane_died=lane_died)

    monkeypatch.setattr(made, "_check", fail_once)
    made.request_check()
    eventually(lambda: not made.is_checking)
    assert not errors and made.is_ready and made.given_up == ""
    made.close()
    assert caplog.messages == ["the thread fluid-mps-watchdog has ended on an error, and goes on"]


def test_mps_is_given_up_if_its_watch_fails_again_and_again(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, processes: Any
) -> None:
    monkeypatch.setattr("fluid.waiting.waits._PAUSE_S", 0.001)
    made = MpsWatchdog(["GPU-0"], starts(fake))
    assert made.await_start() == ""
    assert isinstance(made._daemon, MpsDaemon) and made._daemon.pid is not None
    processes.watch(made._daemon.pid)

    def fail(*, lane_died: bool) -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(made, "_check", fail)
    made.request_check()
    eventually(lambda: made.given_up)
    assert made.given_up == "its watch has failed: unforeseen"
    assert made.is_ready and not made.is_checking and made.lane_environment("GPU-0") == ()
    assert processes.have_ended(PATIENCE), "the daemon has no clients any more"
    made.close()


@pytest.mark.slow
def test_an_answer_renews_the_patience(watchdog: MpsWatchdog, fake: Fake) -> None:
    for _ in range(2):
        watchdog._check(lane_died=True)
    fake.untell("busy")
    watchdog._check(lane_died=True)
    fake.tell("busy")
    watchdog._check(lane_died=True)
    assert watchdog.problem == ""


@pytest.mark.slow
def test_lanes_share_by_time_slices_once_it_cannot_be_started_again(
    fake: Fake, make_drive: Any, monkeypatch: pytest.MonkeyPatch, processes: Any
) -> None:
    monkeypatch.setattr("fluid.backends.hosts.gpu.mps_watchdog._CHECK_S", 0.05)
    drive = make_drive(sharing="mps", _mps_program=str(fake.program))
    drive.lanes(0, 0)
    daemon, other = daemons_of(drive.backend)
    watch(processes, daemon)
    fake.tell("refuses")
    os.kill(daemon.pid or 0, signal.SIGKILL)
    drive.until(LaneLost)
    drive.until(LaneLost)
    (lane,) = drive.lanes(0)
    drive.backend.register("t", payload_of(Probe, {}))
    drive.do(StartTrial("t", (lane,), iterations=1))
    assert "CUDA_MPS_PIPE_DIRECTORY" not in drive.of(IterationDone, "t").metrics
    sharing = drive.backend.sharing
    assert sharing.way == "timeslice" and sharing.why.startswith("GPU-0: ") and "not permitted" in sharing.why
    assert other.problem() == "", "MPS is given up on the GPU where it failed only"
    assert processes.have_ended(PATIENCE)


def test_a_daemon_that_fails_time_and_again_is_given_up(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.backends.hosts.gpu.mps_watchdog._MOST_RESTARTS", 0)
    watchdog = MpsWatchdog(["GPU-0"], starts(fake))
    assert watchdog.await_start() == ""
    watchdog.recover()
    watchdog._thread.join(PATIENCE)
    assert watchdog.is_ready and watchdog.given_up == "it failed 1 times"
    assert watchdog.lane_environment("GPU-0") == ()
    watchdog.close()


# --- The end


def test_nothing_is_left_when_the_backend_is_closed(backend: LocalBackend, processes: Any) -> None:
    daemons = daemons_of(backend)
    watch(processes, *daemons)
    backend.close()
    assert processes.have_ended()
    assert len(daemons) == 2
    assert not any(os.path.exists(daemon.pipe_folder) for daemon in daemons)


def test_nothing_is_left_when_the_driver_is_killed(fake: Fake, processes: Any) -> None:
    code = """
        import os, sys
        from fluid.backends.local import LocalBackend
        backend = LocalBackend(1, preload=[], sharing="mps", _mps_program=sys.argv[1])
        daemon = backend._host._sharing.watchdogs[0]._daemon
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
