"""Talking to a control daemon: what is sent, and how answers are read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fluid.errors import InvalidFieldError
from fluid.gpu.mps_control import (
    OUTPUT_LOG,
    PROGRAM,
    Control,
    MpsError,
    find_program,
    log_tail,
    memory_text,
    percentage_text,
    read_pids,
    search_paths,
    stray_processes,
)


@pytest.fixture
def control(tmp_path: Path) -> Callable[..., Control]:
    """A control program that runs some Python with the commands as ``command``."""

    def make(code: str, timeout: float = 90.0) -> Control:
        program = tmp_path / "program"
        program.write_text(f"#!{sys.executable} -SE\nimport sys\ncommand = sys.stdin.read()\n{code}\n")
        program.chmod(0o755)
        return Control(str(program), {"CUDA_MPS_PIPE_DIRECTORY": "/x"}, timeout)

    return make


def test_a_command_is_a_line_and_the_environment_names_the_daemon(control: Callable[..., Control]) -> None:
    echo = control("import os; print(repr(command), os.environ['CUDA_MPS_PIPE_DIRECTORY'])")
    assert echo.query("get_server_list") == "'get_server_list\\n' /x"


def test_a_status_other_than_0_is_an_error(control: Callable[..., Control]) -> None:
    with pytest.raises(MpsError, match=r"refused 'ps': Cannot find MPS control daemon process$"):
        control("print('Cannot find MPS control daemon process'); sys.exit(1)").query("ps")
    with pytest.raises(MpsError, match=r"refused 'ps': status 3$"):
        control("sys.exit(3)").query("ps")


def test_an_answer_that_does_not_come(control: Callable[..., Control]) -> None:
    with pytest.raises(MpsError, match=r"did not answer 'ps' within 0\.1 s"):
        control("import select; select.select([], [], [])", timeout=0.1).query("ps")
    with pytest.raises(MpsError, match=r"within 0\.2 s"):
        control("import select; select.select([], [], [])").query("ps", timeout=0.2)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(MpsError, match="/nowhere cannot be run"):
        Control("/nowhere", {}, 1.0).query("ps")


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        ("", True),
        ("50.0", True),
        ("Invalid command set_x", False),
        ("Unrecognized command", False),
        ("usage: x", False),
    ],
)
def test_a_refusal_is_read_from_its_words(control: Callable[..., Control], answer: str, taken: bool) -> None:
    assert control(f"print({answer!r})").command("set_x 1") is taken


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("ACTIVE", "ACTIVE"),
        ("Status: Fault", "FAULT"),
        ("MPS_SERVER_STATE_FAULT.", "FAULT"),
        ('{"state": "active", "pid": 12}', "ACTIVE"),
        ("[2026-11-22 Control 41] Active, no faults", "ACTIVE"),
        ("Initialized", "INITIALIZING"),
        ("what?", ""),
        ("INACTIVE", ""),
        ("Default", ""),
    ],
)
def test_servers_and_their_states(control: Callable[..., Control], status: str, state: str) -> None:
    talker = control(f"print('12\\n34' if command == 'get_server_list\\n' else {status!r})")
    assert talker.servers() == {12: state, 34: state}


@pytest.mark.parametrize(
    ("answer", "pids"),
    [
        ("12\n34", [12, 34]),
        ("12 34", [12, 34]),
        ("12, 34", [12, 34]),
        ("[2026-11-22 10:15:02.123 Control    41] Server 12: ACTIVE\nServer 34: ACTIVE", [12, 34]),
        ("PID  DEVICE\n12   0\n34   GPU-1234-5678", [12, 34]),
        ("Server (pid 12)", [12]),
        ("no server for v3 of GPU-1234-5678", []),
        ("0", []),
        ("", []),
    ],
)
def test_process_ids_are_read_from_other_formats(answer: str, pids: list[int]) -> None:
    assert read_pids(answer) == pids


def test_there_may_be_no_server_and_no_client(control: Callable[..., Control]) -> None:
    talker = control("print('' if command == 'get_server_list\\n' else 'No such server')")
    assert talker.servers() == {}
    assert talker.clients(12) == []


def test_percentages() -> None:
    assert [percentage_text(value) for value in (100, 12.5, 1e-3)] == ["100", "12.5", "0.001"]
    for bad in (0, -1, 100.1, float("nan")):
        with pytest.raises(InvalidFieldError, match="active_thread_percentage="):
            percentage_text(bad)


def test_amounts_of_memory_are_rounded_down() -> None:
    mib = 1 << 20
    assert [memory_text(value) for value in (mib, 2 * mib - 1, 141 << 30)] == ["1M", "1M", "144384M"]
    for bad in (0.0, mib - 1, float("inf")):
        with pytest.raises(InvalidFieldError, match="memory_limit_bytes="):
            memory_text(bad)


def installed(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.touch()
    program.chmod(0o755)
    return program


def test_the_program_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, driver = tmp_path / "path", tmp_path / "driver" / "bin"
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr("fluid.gpu.mps_control.FOLDERS", ())
    assert find_program() is None
    program = installed(driver, PROGRAM)
    monkeypatch.setattr("fluid.gpu.mps_control.FOLDERS", (str(driver),))
    program.chmod(0o644)
    assert find_program() is None, "not a program"
    program.chmod(0o755)
    assert find_program() == str(program)
    monkeypatch.setattr("fluid.gpu.mps_control.FOLDERS", ())
    installed(driver, "nvidia-smi")
    path.mkdir()
    (path / "nvidia-smi").symlink_to(driver / "nvidia-smi")
    assert find_program() == str(program), "beside nvidia-smi"
    first = installed(path, PROGRAM)
    assert find_program() == str(first), "PATH comes first"


def test_a_program_outside_path_gets_its_folders(tmp_path: Path) -> None:
    program = str(installed(tmp_path / "bin", PROGRAM))
    path, libraries = f"{tmp_path}/bin", tmp_path / "lib64"
    assert search_paths(program, {"PATH": f"/usr/bin:{path}"}) == {}
    assert search_paths(program, {"PATH": "/usr/bin"}) == {"PATH": f"{path}:/usr/bin"}
    installed(libraries, "libcuda.so.1")
    assert search_paths(program, {"PATH": "/usr/bin"})["LD_LIBRARY_PATH"] == str(libraries)
    assert search_paths(program, {"LD_LIBRARY_PATH": "/x"})["LD_LIBRARY_PATH"] == f"{libraries}:/x"
    installed(libraries, "libc.so.6")
    assert "LD_LIBRARY_PATH" not in search_paths(program, {}), "the root of another system"


def test_the_end_of_the_logs(tmp_path: Path) -> None:
    assert log_tail(str(tmp_path)) == ""
    (tmp_path / "control.log").write_text("one\n\ntwo\nthree\n")
    (tmp_path / OUTPUT_LOG).write_bytes(b"three\nfour \xff\n")
    assert log_tail(str(tmp_path), lines=2) == "two\nthree\nfour \ufffd"


@pytest.fixture
def idle() -> Iterator[Callable[[str], int]]:
    """Starts processes that do nothing, with a pipe folder in their environment."""
    started = []

    def make(folder: str) -> int:
        command = [sys.executable, "-c", "print(flush=True); import select; select.select([], [], [])"]
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": folder}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield make
    for process in started:
        process.kill()
        process.communicate()


def test_a_stray_process_is_known_by_its_folder(idle: Callable[[str], int]) -> None:
    ours, other = idle("/tmp/ours"), idle("/tmp/ours-too")
    unused_pid = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    assert stray_processes([ours, other, unused_pid], "/tmp/ours") == [ours]
