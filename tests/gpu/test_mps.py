"""The MPS daemon's life, with a control program that is real in all but the GPU (tests/fake_mps.py)."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mps_program import Fake

from fluid import mps
from fluid._clock import MonotonicClock
from fluid.errors import InvalidFieldError
from fluid.gpu.mps_control import MpsError
from fluid.mps import MpsDaemon

ROOT = Path(__file__).resolve().parents[2]
A, B = "GPU-aaaa", "GPU-bbbb"
#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


@pytest.fixture
def start(fake: Fake) -> Iterator[Callable[..., MpsDaemon]]:
    daemons: list[MpsDaemon] = []

    def make(*devices: str, **options: Any) -> MpsDaemon:
        options = {"start_timeout": PATIENCE, "answer_timeout": PATIENCE, "quit_timeout": PATIENCE, **options}
        daemons.append(MpsDaemon(devices or (A,), program=str(fake.program), **options))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def supervisor_of(daemon: MpsDaemon) -> int:
    assert daemon.pid is not None
    return int(Path(f"/proc/{daemon.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


# --- Starting


def test_a_daemon_runs_with_a_server_and_private_folders(start: Callable[..., MpsDaemon], fake: Fake) -> None:
    daemon = start(A, B)
    assert daemon.pid is not None
    assert list(daemon.servers().values()) == ["ACTIVE"]
    assert daemon.clients() == [daemon.pid]
    assert daemon.problem() == ""
    for folder in (daemon.pipe_folder, daemon.log_folder):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert daemon.pipe_folder != "/tmp/nvidia-mps"
    assert len(f"{daemon.pipe_folder}/control_privileged") < 108
    environment = fake.environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == f"{A},{B}"
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == daemon.pipe_folder
    assert environment["CUDA_MPS_LOG_DIRECTORY"] == daemon.log_folder


def test_the_driver_and_its_limits_stay_out_of_it(
    start: Callable[..., MpsDaemon], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    before = dict(os.environ)
    start()
    assert dict(os.environ) == before
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in fake.environment()


def test_two_daemons_know_nothing_of_each_other(start: Callable[..., MpsDaemon]) -> None:
    one, other = start(A), start(B)
    assert one.pipe_folder != other.pipe_folder
    one.close()
    assert other.problem() == ""


def test_a_long_temporary_folder_is_not_used(
    start: Callable[..., MpsDaemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert not start().pipe_folder.startswith(str(long))
    assert list(long.iterdir()) == []


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary folder that no other process on this machine uses; its path is short, as a socket's has to be.

    Asking for ``tmp_path`` has pytest make its folders before, elsewhere.
    """
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield


def failure(start: Callable[..., MpsDaemon], *devices: str, **options: Any) -> str:
    """The error of a daemon that cannot be started; nothing of it may be left."""
    before, temporary = children_of(os.getpid()), set(Path(tempfile.gettempdir()).glob("fluid-mps-*"))
    with pytest.raises(MpsError) as caught:
        start(*devices, **options)
    assert children_of(os.getpid()) == before
    assert set(Path(tempfile.gettempdir()).glob("fluid-mps-*")) <= temporary
    return str(caught.value)


def test_a_daemon_that_refuses_says_why(start: Callable[..., MpsDaemon], fake: Fake) -> None:
    fake.tell("refuses")
    said = failure(start)
    assert "the MPS control daemon exited with status 1" in said
    assert "operation not permitted" in said, "its log tells"


def test_a_daemon_that_never_answers(start: Callable[..., MpsDaemon], fake: Fake) -> None:
    fake.tell("never_answers")
    assert "did not answer within 0.01 s (the MPS control daemon refused" in failure(start, start_timeout=0.01)


@pytest.mark.slow
def test_a_daemon_that_hangs(start: Callable[..., MpsDaemon], fake: Fake) -> None:
    fake.tell("hangs")
    said = failure(start, start_timeout=1.0, answer_timeout=1.0, quit_timeout=1.0)
    assert "did not answer within 1 s (" in said


def test_servers_that_cannot_start(
    start: Callable[..., MpsDaemon], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine where another user holds the GPU in exclusive mode."""

    class Impatient(MonotonicClock):
        def now(self) -> float:
            return super().now() + (2 * PATIENCE if (fake.told / "start_server").exists() else 0.0)

    monkeypatch.setattr(mps, "MonotonicClock", Impatient)
    fake.tell("no_server")
    assert f"did not start a server within {PATIENCE:g} s" in failure(start)


@pytest.mark.parametrize("content", [None, "not a program"])
def test_a_program_that_cannot_be_run(
    start: Callable[..., MpsDaemon], fake: Fake, tmp_path: Path, content: str | None
) -> None:
    fake.program.unlink()
    if content is not None:
        fake.program.write_text(content)
    assert "cannot be started" in failure(start)


def test_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("fluid.gpu.mps_control.FOLDERS", ())
    with pytest.raises(MpsError, match="nvidia-cuda-mps-control is not installed"):
        MpsDaemon([A])


@pytest.mark.parametrize("devices", [[], ["0"], [A, A], ["MIG-a"], [f"{A},{B}"]])
def test_bad_devices_are_refused(devices: list[str]) -> None:
    with pytest.raises(InvalidFieldError, match="devices="):
        MpsDaemon(devices, program="/bin/false")


# --- Lanes


def test_the_environment_of_a_lane(start: Callable[..., MpsDaemon]) -> None:
    daemon = start(A, B)
    common = {"CUDA_MPS_PIPE_DIRECTORY": daemon.pipe_folder, "CUDA_MPS_LOG_DIRECTORY": daemon.log_folder}
    assert daemon.lane_environment(B) == {**common, "CUDA_VISIBLE_DEVICES": B}
    limited = daemon.lane_environment(A, active_thread_percentage=100 / 3, memory_limit_bytes=3.9 * (1 << 20))
    assert limited == {
        **common,
        "CUDA_VISIBLE_DEVICES": A,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "33.33333333",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3M",
    }


@pytest.mark.parametrize(
    ("device", "options", "field"),
    [
        ("GPU-cccc", {}, "device"),
        ("0", {}, "device"),
        (A, {"active_thread_percentage": 0.0}, "active_thread_percentage"),
        (A, {"active_thread_percentage": 101}, "active_thread_percentage"),
        (A, {"memory_limit_bytes": 1000}, "memory_limit_bytes"),
    ],
)
def test_bad_limits_are_refused(
    start: Callable[..., MpsDaemon], device: str, options: dict[str, float], field: str
) -> None:
    daemon = start()
    with pytest.raises(InvalidFieldError) as caught:
        daemon.lane_environment(device, **options)
    assert caught.value.field == field


def test_defaults_are_set_where_the_driver_has_them(start: Callable[..., MpsDaemon], fake: Fake) -> None:
    daemon = start(A, B)
    assert daemon.set_default_active_thread_percentage(50)
    assert fake.heard("set_default_active_thread_percentage") == "50"
    assert daemon.set_default_memory_limit(B, 2 << 30)
    assert fake.heard("set_default_device_pinned_mem_limit") == "1 2048M"
    fake.tell("old")
    assert not daemon.set_default_memory_limit(A, 2 << 30)


def test_an_old_driver_does_not_tell_the_state_of_servers(start: Callable[..., MpsDaemon], fake: Fake) -> None:
    fake.tell("old")
    daemon = start()
    assert list(daemon.servers().values()) == [""]
    assert daemon.problem() == ""


def test_a_driver_that_does_not_know_a_limit_for_the_end_is_asked_without(
    start: Callable[..., MpsDaemon], fake: Fake, processes: Any
) -> None:
    fake.tell("old")
    daemon = start(quit_timeout=PATIENCE)
    processes.watch(daemon.pid, *daemon.servers())
    daemon.close()
    assert processes.have_ended()
    assert fake.heard("quit") == "", "it was not killed"


def test_a_driver_that_uses_other_words(start: Callable[..., MpsDaemon], fake: Fake) -> None:
    fake.tell("wordy")
    daemon = start()
    ((server, state),) = daemon.servers().items()
    assert state == "ACTIVE" and Path(f"/proc/{server}").exists()
    assert daemon.problem() == ""
    fake.tell("fault")
    assert f"MPS server {server} is in FAULT" in daemon.problem()


# --- What goes wrong while it runs


def test_a_server_in_fault_is_a_problem_until_the_restart(
    start: Callable[..., MpsDaemon], fake: Fake, processes: Any
) -> None:
    daemon = start()
    lane = daemon.lane_environment(A)
    (server,) = daemon.servers()
    old = daemon.pid
    processes.watch(old, server)
    fake.tell("fault")
    assert f"MPS server {server} is in FAULT" in daemon.problem()
    (fake.told / "fault").unlink()
    daemon.restart()
    assert processes.have_ended(PATIENCE)
    assert daemon.problem() == ""
    assert daemon.pid not in (None, old)
    assert daemon.lane_environment(A) == lane, "lanes find the new one where the old one was"
    assert daemon.restarts == 1


def test_a_daemon_that_dies_takes_its_servers_and_can_be_restarted(
    start: Callable[..., MpsDaemon], processes: Any
) -> None:
    daemon = start()
    (server,) = daemon.servers()
    assert daemon.pid is not None
    processes.watch(daemon.pid, server)
    os.kill(daemon.pid, signal.SIGKILL)
    assert processes.have_ended(PATIENCE), "no other process would have ended the server"
    said = ""
    while not said:
        with suppress(MpsError):  # It may be heard of a moment later.
            said = daemon.problem()
    assert said == "the MPS control daemon was killed by SIGKILL"
    assert daemon.pid is None
    daemon.restart()
    assert daemon.problem() == ""


@pytest.mark.slow
def test_a_daemon_that_does_not_answer_any_more(start: Callable[..., MpsDaemon], fake: Fake, processes: Any) -> None:
    daemon = start(answer_timeout=PATIENCE, quit_timeout=1.0)
    (server,) = daemon.servers()
    processes.watch(daemon.pid, server)
    fake.tell("hangs")
    daemon._control._timeout = 0.2
    with pytest.raises(MpsError, match=r"did not answer 'get_server_list' within 0\.2 s"):
        daemon.problem()
    daemon.close()
    assert processes.have_ended(), "it was killed"


def test_a_restart_that_fails_closes_it(start: Callable[..., MpsDaemon], fake: Fake) -> None:
    daemon = start()
    fake.tell("refuses")
    with pytest.raises(MpsError, match="exited with status 1"):
        daemon.restart()
    assert daemon.problem() == "the MPS daemon was closed"
    assert not os.path.exists(daemon.pipe_folder)
    with pytest.raises(MpsError, match="was closed"):
        daemon.restart()


def test_nothing_is_left_if_the_supervisor_is_killed(start: Callable[..., MpsDaemon], processes: Any) -> None:
    daemon = start()
    (server,) = daemon.servers()
    supervisor = supervisor_of(daemon)
    processes.watch(daemon.pid, supervisor)
    os.kill(supervisor, signal.SIGKILL)
    assert processes.have_ended(PATIENCE), "the daemon dies with its supervisor"
    assert daemon.problem() == "the supervisor of the MPS control daemon has died"
    processes.watch(server)
    daemon.close()
    assert processes.have_ended(PATIENCE)


# --- Ends


def test_closing_leaves_nothing(start: Callable[..., MpsDaemon], fake: Fake, processes: Any) -> None:
    daemon = start(quit_timeout=7.0)
    processes.watch(daemon.pid, supervisor_of(daemon), *daemon.servers())
    daemon.close()
    assert processes.have_ended()
    assert not os.path.exists(daemon.pipe_folder)
    assert fake.heard("quit") == "-t 7", "it was asked first"
    daemon.close()


def test_the_end_of_a_context_also_by_an_error(fake: Fake, processes: Any) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        MpsDaemon([A], program=str(fake.program), start_timeout=PATIENCE, answer_timeout=PATIENCE) as daemon,
    ):
        processes.watch(daemon.pid, supervisor_of(daemon), *daemon.servers())
        raise KeyboardInterrupt
    assert processes.have_ended()


@pytest.mark.slow
def test_a_daemon_that_does_not_quit_is_killed(start: Callable[..., MpsDaemon], fake: Fake, processes: Any) -> None:
    fake.tell("stays")
    daemon = start(quit_timeout=1.0)
    processes.watch(daemon.pid, supervisor_of(daemon), *daemon.servers())
    daemon.close()
    assert processes.have_ended()


def test_logs_are_kept_where_they_are_asked_for(start: Callable[..., MpsDaemon], tmp_path: Path) -> None:
    daemon = start(log_folder=tmp_path / "logs")
    daemon.restart()
    daemon.close()
    assert "starting control daemon" in (tmp_path / "logs" / "output.log").read_text()
    assert (tmp_path / "logs" / "control.log").exists()


DRIVER = """
    import os, select, sys
    from fluid.mps import MpsDaemon
    daemon = MpsDaemon(["GPU-a"], program=sys.argv[1], start_timeout=90.0, answer_timeout=90.0)
    print(daemon.pid, *daemon.servers(), daemon.pipe_folder, flush=True)
    {then}
"""


@pytest.fixture
def driver(fake: Fake) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], list[int], Path]]]:
    """Starts a process that starts a daemon; returns it, the daemon and its server, and the pipe folder."""
    started: list[subprocess.Popen[str]] = []

    def make(then: str) -> tuple[subprocess.Popen[str], list[int], Path]:
        script = textwrap.dedent(DRIVER).format(then=then)
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(fake.program)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        *pids, folder = process.stdout.readline().split()
        return process, [int(pid) for pid in pids], Path(folder)

    yield make
    for process in started:
        process.kill()
        process.communicate()


KEEP_ON = "sys.stdin.read()"
#: A process forked from the driver holds copies of all it has open.
WITH_A_COPY = "pid = os.fork()\nif pid: print(pid, flush=True)\nsys.stdin.read() if pid else select.select([], [], [])"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_driver(
    driver: Callable[[str], tuple[subprocess.Popen[str], list[int], Path]], processes: Any, number: int
) -> None:
    process, pids, folder = driver(KEEP_ON)
    (supervisor,) = children_of(process.pid)
    processes.watch(*pids, supervisor)
    process.send_signal(number)
    assert processes.have_ended(PATIENCE)
    process.wait(PATIENCE)  # One that is interrupted deletes the folder itself.
    assert not folder.exists()


def test_not_even_if_a_copy_of_the_driver_lives_on(
    driver: Callable[[str], tuple[subprocess.Popen[str], list[int], Path]], processes: Any
) -> None:
    process, pids, _ = driver(WITH_A_COPY)
    assert process.stdout is not None
    copy = int(process.stdout.readline())
    try:
        processes.watch(*pids)
        process.kill()
        assert processes.have_ended(PATIENCE)
        assert Path(f"/proc/{copy}").exists()
    finally:
        os.kill(copy, signal.SIGKILL)


@pytest.mark.parametrize("then", ["", "raise SystemExit(3)", "del daemon"])
def test_a_driver_that_ends_by_itself(
    driver: Callable[[str], tuple[subprocess.Popen[str], list[int], Path]], processes: Any, then: str
) -> None:
    process, pids, folder = driver(f"sys.stdin.readline()\n{then}")
    processes.watch(*pids)
    process.communicate("\n", timeout=PATIENCE)
    assert processes.have_ended(PATIENCE)
    assert not folder.exists()


def test_a_process_forked_from_the_driver_ends_nothing(
    driver: Callable[[str], tuple[subprocess.Popen[str], list[int], Path]],
) -> None:
    then = (
        "pid = os.fork()\n"
        "if not pid: daemon.close(); sys.exit()\n"
        "os.waitpid(pid, 0); print(daemon.problem() or 'well', os.path.exists(daemon.pipe_folder))"
    )
    process, _, _ = driver(then)
    out, _ = process.communicate(timeout=PATIENCE)
    assert out == "well True\n"
