"""The fork server on its own."""

from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest
from waiting import eventually

from fluid.backends.hosts.forkserver.host_end import Exited, ForkServerProcess
from fluid.engine.events import LaneReady
from fluid.errors import FluidError
from fluid.lane.protocol import LaneOptions

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


#: A module that starts a thread.
THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


def waits_for(path: Path) -> str:
    """A module that is loaded once a file is there."""
    wait = f"while not os.path.exists({str(path)!r}): time.sleep(0.01)"
    return f"import os, time\n{wait}\nPID = os.getpid()\n"


def ready(server: ForkServerProcess, lane: Any) -> None:
    """Waits until a lane is there; the server may first have to hear that modules were loaded."""
    poller = select.poll()
    poller.register(server.fileno(), select.POLLIN)
    poller.register(lane.wire.fileno(), select.POLLIN)
    while True:
        events = poller.poll(PATIENCE_MS)
        assert events
        if any(descriptor == lane.wire.fileno() for descriptor, _ in events):
            lane.receive(LaneReady)
            return
        assert server.poll() == []


def write_module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)


def test_a_lane_is_a_process_of_its_own(make_server: Any, fork: Any) -> None:
    server = make_server()
    lane = fork(server, 3)
    assert lane.ask(pid="os.getpid()")["pid"] not in (os.getpid(), server.pid)
    facts = lane.ask(
        main="sys.modules['__main__'].__name__, sys.modules['__main__'].__spec__.name",
        parent="os.getppid()",
        group="os.getpgrp() == os.getpid()",
        cuda="os.environ['CUDA_VISIBLE_DEVICES']",
        threads="os.environ['OMP_NUM_THREADS']",
        argv="sys.argv",
        python_path="os.environ.get('PYTHONPATH')",
        cwd="os.getcwd()",
        shared="'fluid.shared_data.loading' in sys.modules",
    )
    assert facts == {
        "main": ("__main__", "fluid.backends.hosts.forkserver.main"),  # Never the driver's.
        "parent": server.pid,
        "group": True,
        "cuda": "",
        "threads": "1",
        "argv": [""],
        "python_path": os.environ.get("PYTHONPATH"),
        "cwd": os.getcwd(),
        "shared": True,
    }


#: The process that has loaded a module, in a lane; ``None`` if it is not there.
PID_OF = "getattr(sys.modules.get('{}'), 'PID', None)"


@pytest.mark.slow
def test_modules_are_loaded_before_the_fork(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(monkeypatch, tmp_path, "early_module", "import os; PID = os.getpid()")
    write_module(monkeypatch, tmp_path, "late_module", "import os; PID = os.getpid()")
    server = make_server(preload=["early_module", "no_such_module"])
    first = fork(server, 0)
    ready(server, first)
    server.preload(["late_module", "late_module", "early_module"])
    second = fork(server, 1)
    ready(server, second)
    expressions = {"early": PID_OF.format("early_module"), "late": PID_OF.format("late_module"), "ours": "os.getpid()"}
    before, after = first.ask(**expressions), second.ask(**expressions)
    assert before["late"] is None
    assert len({before["early"], before["ours"], after["late"], after["ours"], server.pid}) == 5
    assert after["early"] == before["early"], "it was loaded once"


def test_lanes_wait_for_what_they_are_to_have(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(monkeypatch, tmp_path, "slow_module", waits_for(tmp_path / "slow"))
    write_module(monkeypatch, tmp_path, "threaded_module", THREAD)
    write_module(monkeypatch, tmp_path, "next_module", waits_for(tmp_path / "next"))
    server = make_server(preload=["slow_module"])
    lanes = [fork(server, number) for number in range(2)]
    server.preload(["threaded_module", "next_module"])
    killed = fork(server, 2)
    server.kill(2)
    assert server.poll() == [Exited(2, "was killed before it was forked")]
    (tmp_path / "slow").touch()
    (tmp_path / "next").touch()
    for lane in lanes:
        ready(server, lane)
        assert lane.ask(slow=PID_OF.format("slow_module"), next=PID_OF.format("next_module")).keys() == {"slow", "next"}
        loaded = {name: f"'{name}_module' in sys.modules" for name in ("slow", "next", "threaded")}
        assert lane.ask(**loaded) == {"slow": True, "next": True, "threaded": False}
    assert killed.wire.receive() == [] and killed.wire.ended
    lanes[0].wire.close()
    assert [exited.lane_id for exited in exits_of(server)] == [0], "no other process held its connection"


@pytest.mark.slow
def test_no_lane_waits_for_what_is_loaded_late(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(monkeypatch, tmp_path, "slow_module", waits_for(tmp_path / "slow"))
    write_module(monkeypatch, tmp_path, "named_module", "")
    loaded = {name: f"'{name}_module' in sys.modules" for name in ("slow", "named")}
    server = make_server()
    server.preload(["slow_module"], late=True)
    lanes = [fork(server, number) for number in range(3)]  # The first one, and two while it is being loaded.
    for lane in lanes:
        ready(server, lane)
        assert lane.ask(**loaded) == {"slow": False, "named": False}
    server.preload(["named_module"])  # For this one lanes wait. The other one is loaded after it.
    third = fork(server, 3)
    ready(server, third)
    assert third.ask(**loaded) == {"slow": False, "named": True}
    assert server.take_superseded() == [0, 1, 2] and server.take_superseded() == []
    (tmp_path / "slow").touch()

    def has_all() -> bool:
        server.poll()
        lanes.append(fork(server, len(lanes) + 1))
        ready(server, lanes[-1])
        return bool(lanes[-1].ask(**loaded) == {"slow": True, "named": True})

    eventually(has_all)
    assert lanes[0].ask(alive="1") == {"alive": 1}


@pytest.mark.parametrize("text", ["raise SystemExit(1)", "raise KeyboardInterrupt", "1/0", "syntax error"])
def test_a_module_that_cannot_be_loaded_does_no_harm(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    write_module(monkeypatch, tmp_path, "bad_module", text)
    server = make_server(preload=["bad_module"])
    ready(server, fork(server, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "import subprocess, sys; CHILD = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])",
        "import socket; CONNECTION = socket.socketpair()",
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    ],
    ids=["thread", "process", "connection", "exit", "crash"],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_module_that_spoils_the_process_is_left_to_the_lanes(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, late: bool
) -> None:
    write_module(monkeypatch, tmp_path, "bad_module", text)
    for name in ("first_module", "last_module"):
        write_module(monkeypatch, tmp_path, name, "")
    server = make_server()
    before = fork(server, 0)
    pid = before.ask(pid="os.getpid()")["pid"]
    server.preload(["first_module", "bad_module", "last_module"], late=late)
    lanes: list[Any] = []

    def has_others() -> bool:
        server.poll()
        lanes.append(fork(server, len(lanes) + 1))
        ready(server, lanes[-1])
        names = ("first", "bad", "last")
        found = lanes[-1].ask(**{name: f"'{name}_module' in sys.modules" for name in names})
        assert late or found["first"], "it has not waited"
        return found == {"first": True, "bad": False, "last": True}

    eventually(has_others)
    assert before.ask(alive="1") == {"alive": 1}
    os.kill(pid, signal.SIGKILL)
    assert exits_of(server) == [Exited(0, "was killed by SIGKILL")]
    lanes[-1].wire.send([to.shut_down()])
    assert exits_of(server) == [Exited(len(lanes), "exited with status 0")]


def test_nothing_is_left_of_a_late_module_that_cannot_be_loaded(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(monkeypatch, tmp_path, "half_module", "import part_module; 1 / 0")
    for name in ("part_module", "last_module"):
        write_module(monkeypatch, tmp_path, name, "")
    server = make_server()
    server.preload(["half_module", "last_module"], late=True)
    lanes: list[Any] = []

    def has_last() -> bool:
        server.poll()
        lanes.append(fork(server, len(lanes)))
        ready(server, lanes[-1])
        found = lanes[-1].ask(**{name: f"'{name}_module' in sys.modules" for name in ("half", "part", "last")})
        assert not found["half"] and not found["part"]
        return bool(found["last"])

    eventually(has_last)


@pytest.mark.slow
def test_a_server_ends_with_its_last_lane_once_another_has_taken_its_place(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Any
) -> None:
    for number in range(3):
        write_module(monkeypatch, tmp_path, f"module_{number}", "")
    server, lanes, parents = make_server(), [], []
    for number in range(3):
        server.preload([f"module_{number}"])
        lanes.append(fork(server, number))
        ready(server, lanes[-1])
        parents.append(lanes[-1].ask(parent="os.getppid()")["parent"])
    assert len({server.pid, *parents}) == 4
    # A process that a lane of the last one leaves behind, whose parent's parent ends first.
    left = lanes[2].ask(pid="os.posix_spawn('/bin/sleep', ['sleep', '1000'], {}, setsid=True)")["pid"]
    processes.watch(parents[1])
    lanes[1].wire.send([to.shut_down()])
    assert exits_of(server) == [Exited(1, "exited with status 0")]
    assert processes.have_ended(within=30.0)
    assert lanes[0].ask(alive="1") == lanes[2].ask(alive="1") == {"alive": 1}
    processes.watch(left)
    lanes[2].wire.send([to.shut_down()])
    assert exits_of(server) == [Exited(2, "exited with status 0")]
    assert processes.have_ended(within=30.0)
    assert fork(server, 3).ask(there="'module_2' in sys.modules") == {"there": True}
    processes.watch(server.pid, server.guardian, *parents[::2])
    server.close()
    assert processes.have_ended()


@pytest.mark.slow
def test_the_death_of_a_server_costs_its_lanes_and_no_others(
    make_server: Any, fork: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Any
) -> None:
    write_module(monkeypatch, tmp_path, "some_module", "")
    server = make_server()
    first = fork(server, 0)
    first.receive(LaneReady)
    server.preload(["some_module"])
    second = fork(server, 1)
    ready(server, second)
    processes.watch(second.ask(pid="os.getpid()")["pid"])
    os.kill(second.ask(parent="os.getppid()")["parent"], signal.SIGKILL)
    assert exits_of(server) == [Exited(1, "lost the fork server it came from")]
    assert processes.have_ended(within=30.0)
    third = fork(server, 2)
    ready(server, third)
    assert third.ask(there="'some_module' in sys.modules") == {"there": True}
    assert first.ask(alive="1") == {"alive": 1}


def test_it_tells_how_lanes_end(make_server: Any, fork: Any) -> None:
    server = make_server()
    lane = fork(server, 5)
    pid = lane.ask(pid="os.getpid()")["pid"]
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


@pytest.mark.slow
def test_a_lane_that_prints_nothing_leaves_no_files(make_server: Any, fork: Any, tmp_path: Path) -> None:
    server = make_server()
    silent, loud = fork(server, 0), fork(server, 1)
    opened = "[name for name in map(os.path.realpath, os.scandir('/proc/self/fd')) if '/logs/lane' in name]"
    assert len(silent.ask(opened=opened)["opened"]) == 3, "standard output and error, and stacks, once each"
    loud.ask(written="os.write(1, b'low level')")
    for number, lane in enumerate((silent, loud)):
        lane.wire.send([to.shut_down()])
        assert exits_of(server) == [Exited(number, "exited with status 0")]
    assert [path.name for path in (tmp_path / "logs").glob("lane-*")] == ["lane-1.out"]


@pytest.mark.slow
def test_it_starts_again_after_its_death(make_server: Any, fork: Any, processes: Any) -> None:
    server = make_server(preload=["colorsys"])
    lane = fork(server, 0)
    ready(server, lane)
    lane_pid, server_pid = lane.ask(pid="os.getpid()")["pid"], server.pid
    processes.watch(lane_pid, server_pid, server.guardian)
    os.kill(server_pid, signal.SIGKILL)
    (lost,) = exits_of(server)
    assert lost.lane_id == 0
    assert lost.reason.startswith("lost the fork server it came from, which was killed by SIGKILL")
    assert processes.have_ended(within=30.0)
    other = fork(server, 1)
    ready(server, other)
    assert other.ask(there="'colorsys' in sys.modules") == {"there": True}


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
