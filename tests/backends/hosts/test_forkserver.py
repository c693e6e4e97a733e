"""The fork server on its own."""

from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from fluid.backends.hosts.forkserver import Exited, ForkServerProcess
from fluid.errors import FluidError
from fluid.lane.messages import LaneOptions, LaneWarm, Shutdown

PATIENCE_MS = 90_000


class Exits:
    """Ends its process."""

    def __init__(self, config: dict[str, Any]) -> None:
        pass

    def step(self) -> dict[str, Any]:
        os._exit(7)


def exits_of(server: ForkServerProcess) -> list[Exited]:
    """Waits for lanes that have ended."""
    found: list[Exited] = []
    poller = select.poll()
    poller.register(server.fileno(), select.POLLIN)
    while not found:
        assert poller.poll(PATIENCE_MS)
        found = server.poll()
    return found


def write_module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)


def test_a_lane_is_a_process_of_its_own(make_server: Any, fork: Any) -> None:
    server = make_server()
    lane = fork(server, 3)
    assert lane.receive(LaneWarm).pid not in (os.getpid(), server.pid)
    facts = lane.ask(
        main="sys.modules['__main__'].__name__, sys.modules['__main__'].__spec__.name",
        parent="os.getppid()",
        group="os.getpgrp() == os.getpid()",
        cuda="os.environ['CUDA_VISIBLE_DEVICES']",
        threads="os.environ['OMP_NUM_THREADS']",
        state="'FLUID_FORK_SERVER' in os.environ",
        python_path="os.environ.get('PYTHONPATH')",
        cwd="os.getcwd()",
    )
    assert facts == {
        "main": ("__main__", "fluid.backends.hosts.forkserver_main"),  # Never the driver's.
        "parent": server.pid,
        "group": True,
        "cuda": "",
        "threads": "1",
        "state": False,
        "python_path": os.environ.get("PYTHONPATH"),
        "cwd": os.getcwd(),
    }


def test_modules_are_loaded_before_the_fork(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(monkeypatch, tmp_path, "early_module", "import os; PID = os.getpid()")
    write_module(monkeypatch, tmp_path, "late_module", "import os; PID = os.getpid()")
    server = make_server(preload=["early_module", "no_such_module"])
    first = fork(server, 0)
    first.receive(LaneWarm)
    server.preload(["late_module", "late_module", "early_module"])
    second = fork(server, 1)
    name = "getattr(sys.modules.get('{}'), 'PID', None)"
    expressions = {"early": name.format("early_module"), "late": name.format("late_module")}
    assert first.ask(**expressions) == {"early": server.pid, "late": None}
    assert second.ask(**expressions) == {"early": server.pid, "late": server.pid}


def test_what_is_to_be_loaded_comes_before_lanes_that_wait(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "import os, time; time.sleep(1); PID = os.getpid()"
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    for name, text in (("slow_module", slow), ("threaded_module", thread), ("next_module", slow)):
        write_module(monkeypatch, tmp_path, name, text)
    server = make_server(preload=["slow_module"])
    lanes = [fork(server, number) for number in range(2)]
    server.preload(["threaded_module", "next_module"])  # It becomes another program, and still owes two lanes.
    wanted = {name: f"sys.modules['{name}'].PID" for name in ("slow_module", "next_module")}
    for lane in lanes:
        assert lane.ask(**wanted) == dict.fromkeys(wanted, server.pid)
        assert lane.ask(threaded="'threaded_module' in sys.modules") == {"threaded": False}
    lanes[0].wire.close()
    assert [exited.lane_id for exited in exits_of(server)] == [0], "no other process held its connection"


@pytest.mark.parametrize("text", ["raise SystemExit(1)", "raise KeyboardInterrupt", "1/0", "syntax error"])
def test_a_module_that_cannot_be_loaded_does_no_harm(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    write_module(monkeypatch, tmp_path, "bad_module", text)
    server = make_server(preload=["bad_module"])
    fork(server, 0).receive(LaneWarm)


def test_a_module_that_starts_a_thread_is_left_to_the_lanes(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Any
) -> None:
    write_module(
        monkeypatch,
        tmp_path,
        "threaded_module",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    )
    write_module(monkeypatch, tmp_path, "good_module", "")
    server = make_server(preload=["good_module"])
    before = fork(server, 0)
    pid = before.receive(LaneWarm).pid
    server.preload(["threaded_module"])
    after = fork(server, 1)
    modules = {"good": "'good_module' in sys.modules", "threaded": "'threaded_module' in sys.modules"}
    assert after.ask(**modules) == {"good": True, "threaded": False}
    assert after.ask(parent="os.getppid()") == before.ask(parent="os.getppid()") == {"parent": server.pid}
    # It is another program now, and still knows its children.
    os.kill(pid, signal.SIGKILL)
    assert exits_of(server) == [Exited(0, "was killed by SIGKILL")]
    after.wire.send([Shutdown()])
    assert exits_of(server) == [Exited(1, "exited with status 0")]


def test_it_tells_how_lanes_end(make_server: Any, fork: Any) -> None:
    server = make_server()
    lane = fork(server, 5)
    pid = lane.receive(LaneWarm).pid
    os.kill(pid, signal.SIGINT)  # Means nothing to a lane.
    assert lane.ask(alive="1") == {"alive": 1}
    server.kill(5)
    assert exits_of(server) == [Exited(5, "was killed by SIGKILL")]
    server.kill(5)
    other = fork(server, 6)
    other.start("end", Exits, {}, 1)
    assert exits_of(server) == [Exited(6, "exited with status 7")]


def test_what_a_lane_prints_itself_is_in_files_of_its_own(make_server: Any, fork: Any, tmp_path: Path) -> None:
    server = make_server()
    lane = fork(server, 0)
    lane.ask(written="os.write(1, b'low level')", failed="os.write(2, b'an error')")
    assert (tmp_path / "logs/lane-0.out").read_text(encoding="utf-8") == "low level"
    assert (tmp_path / "logs/lane-0.log").read_text(encoding="utf-8") == "an error"


def test_it_starts_again_after_its_death(make_server: Any, fork: Any, processes: Any) -> None:
    server = make_server(preload=["colorsys"])
    lane = fork(server, 0)
    lane_pid, server_pid = lane.receive(LaneWarm).pid, server.pid
    processes.watch(lane_pid, server_pid, server.guardian)
    os.kill(server_pid, signal.SIGKILL)
    (lost,) = exits_of(server)
    assert lost.lane_id == 0
    assert lost.reason.startswith("lost the fork server it came from, which was killed by SIGKILL")
    assert processes.have_ended(within=30.0)
    assert server.fileno() == -1
    assert fork(server, 1).ask(there="'colorsys' in sys.modules") == {"there": True}


def test_a_closed_server_starts_nothing(make_server: Any, processes: Any) -> None:
    server = make_server()
    processes.watch(server.guardian)
    server.close()
    assert processes.have_ended()
    server.close()
    server.preload(["colorsys"])
    assert server.poll() == []
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(FluidError, match="closed"):
        server.fork(LaneOptions(0), theirs)
    assert theirs.fileno() == -1, "it is closed"
