"""The torture benchmark: a short run of it, and that its checks find what they look for."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

import torture
import torture_machine
import torture_strangers
from torture_checks import Found, check, implausible_times, thrown_away
from torture_files import tear
from torture_io import IO_FAULTS, WriteFaults, compile_library
from torture_nasty import GARBAGE, Message
from torture_plan import FAULTS, OWN_MACHINE, STARTS, draw
from torture_trials import Chain, chain

import fluid

ROOT = Path(__file__).resolve().parents[1]
#: Seconds after which the run is given up. Far more than it takes, as the machine may be busy.
PATIENCE = 900.0


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    """Its faults are the same every time, but for the instants at which they hit."""
    command = [sys.executable, "benchmarks/torture.py", "--seed", "ci", "--faults", "20", "--sessions", "local"]
    command += ["--state", str(tmp_path / "state.jsonl"), "--folder", str(tmp_path / "sessions")]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    sessions = [json.loads(line) for line in (tmp_path / "state.jsonl").read_text().splitlines()]
    assert sum(sum(session["faults"].values()) for session in sessions) >= 20
    assert all(session["iterations"] > 0 for session in sessions)
    assert sum(session["drivers"] for session in sessions) > len(sessions), "a session was resumed"


def test_a_session_is_drawn_from_its_seed() -> None:
    def drawn(seed: str) -> Any:
        return draw(seed, faults=None, kinds=set(), skipped=set(), sessions=set()).to_json()

    assert drawn("a/1") == drawn("a/1") != drawn("a/2")


def test_a_session_has_only_the_faults_that_are_wanted() -> None:
    plan = draw("a/1", faults=7, kinds={"kill_lane", "exit"}, skipped={"exit"}, sessions={"local"})
    nasty = [trial["config"]["nasty"] for trials in plan.groups.values() for trial in trials]
    assert (plan.kind, plan.faults, list(plan.fault_weights), any(nasty)) == ("local", 7, ["kill_lane"], False)


def test_every_kind_of_fault_is_drawn_for_some_session_and_those_of_a_machine_only_where_it_is_the_session_s() -> None:
    plans = [draw(f"many/{n}", faults=None, kinds=set(), skipped=set(), sessions=set()) for n in range(300)]
    assert {kind for plan in plans for kind in plan.fault_weights} == set(FAULTS)
    assert {kind for plan in plans for kind in plan.start_shares} == set(STARTS)
    nasty = [(plan, kind) for plan in plans for trials in plan.groups.values() for trial in trials
             for kind in trial["config"]["nasty"].values()]  # fmt: skip
    assert {plan.kind for plan, kind in nasty if kind == "garbage"} == {"local"}
    for plan in plans:
        if plan.kind not in ("local", "elastic"):
            assert not (plan.fault_weights.keys() | plan.start_shares.keys()) & set(OWN_MACHINE)


def test_what_the_machine_does_not_permit_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped: list[str] = []

    def run(seed: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        skipped.extend(options["skipped"])
        return Sessions().run(seed, folder, options)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torture, "can_change_clocks", lambda: False)
    monkeypatch.setattr(torture, "run_session", run)
    torture.main(["--faults", "1", "--skip", "kill_lane", "--folder", str(tmp_path / "sessions")])
    shown = capsys.readouterr().out
    assert "left out: eio, short_write, enospc: no C compiler (cc)\n" in shown
    assert "left out: clock_forward, clock_back: time namespaces are not permitted\n" in shown
    assert {"kill_lane", "eio", "short_write", "enospc", "clock_forward", "clock_back"} <= set(skipped)


# --- Runs that go on


class Sessions:
    """Stands for the sessions of a run: each has five faults, and the third is not right."""

    def __init__(self) -> None:
        self.seeds: list[str] = []

    def run(self, seed: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        self.seeds.append(seed)
        folder.mkdir(parents=True)
        lost = ["t0 1 of 1"] if seed.endswith("/2") else []
        return {"seed": seed, "kind": "local", "drivers": 2, "iterations": 9, "faults": {"eio": 5}, "lost": lost}


def test_a_run_goes_on_after_the_sessions_in_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions, state = Sessions(), tmp_path / "state.jsonl"
    monkeypatch.setattr(torture, "run_session", sessions.run)

    def run(faults: int, seed: str = "s") -> int:
        folder = str(tmp_path / "sessions")
        return torture.main(["--seed", seed, "--faults", str(faults), "--state", str(state), "--folder", folder])

    assert run(10) == 0
    assert run(20) == 1
    assert run(20) == 0, "there were enough faults"
    assert run(25, "other") == 0
    assert sessions.seeds == ["s/0", "s/1", "s/2", "s/3", "other/0"]
    shown = capsys.readouterr().out
    assert "25 faults in 5 sessions (local 5) of 10 drivers; 45 iterations checked" in shown
    assert "25 eio" in shown
    assert "1 iterations lost" in shown
    assert "failed: s/2" in shown
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    assert {(line["version"], line["code"]) for line in lines} == {(fluid.__version__, torture.code_of(ROOT / "fluid"))}


def test_sessions_of_other_code_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions, state = Sessions(), tmp_path / "state.jsonl"
    monkeypatch.setattr(torture, "run_session", sessions.run)
    for code in ("older", "newer"):
        monkeypatch.setattr(torture, "code_of", lambda package, code=code: code)
        torture.main(["--faults", "5", "--state", str(state), "--folder", str(tmp_path / code)])
    assert sessions.seeds == ["0/0", "0/0"]
    assert f"1 sessions of other code in {state} are not counted" in capsys.readouterr().out


def test_the_digest_of_code_changes_with_a_module(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    before = torture.code_of(tmp_path)
    (tmp_path / "notes.txt").write_text("x = 1")
    assert torture.code_of(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2")
    assert torture.code_of(tmp_path) != before


# --- What the checks find


class Ended:
    """A session of one trial that has ended; a test changes what was written of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = {"seed": "s/g0-t0", "nasty": {}}
        self.fields = {"id": "g0-t0", "budget": 4, "form": "class", "doomed": False, "config": config}
        self.requests: list[dict[str, Any]] = [{"what": "submit", "group": "g0"}]
        self.requests.append({"what": "submit", "group": "g0", "done": True})
        self.state = "DONE"
        self.results = [self.result(number) for number in range(1, 5)]
        self.told = [self.result(number) for number in range(1, 5)]

    def result(self, number: int) -> dict[str, Any]:
        value = chain("s/g0-t0", number)[-1]
        return {"trial": "g0-t0", "iteration": number, "metrics": {"value": value}, "width": 1.0}

    def check(self) -> Found:
        (self.folder / "disk" / "run").mkdir(parents=True)
        plan = {"kind": "local", "groups": {"g0": [self.fields]}}
        (self.folder / "plan.json").write_text(json.dumps(plan))
        told = [{**told, "value": told["metrics"]["value"], "way": "results"} for told in self.told]
        told.append({"group": "g0", "states": {"g0-t0": self.state}})
        for name, entries in (
            ("requests.jsonl", self.requests),
            ("disk/run/results.jsonl", self.results),
            ("told-0.jsonl", told),
        ):
            (self.folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return check(self.folder)


def extended(ended: Ended) -> None:
    ended.requests += [{"what": "extend", "trial": "g0-t0", "by": 2}] * 2
    ended.requests[-1] = {**ended.requests[-1], "done": True}


def replace_value(entry: dict[str, Any]) -> None:
    entry["metrics"] = {"value": "0" * 16}


CHANGES: dict[str, tuple[str, Callable[[Ended], Any]]] = {
    "an iteration that results.jsonl lacks": ("lost", lambda ended: ended.results.pop(1)),
    "an iteration that no driver was told": ("lost", lambda ended: ended.told.pop(1)),
    "an iteration that is nowhere": ("lost", lambda ended: (ended.results.pop(), ended.told.pop())),
    "an extension that was accepted and not run": ("lost", extended),
    "an iteration that is written twice": ("repeated", lambda ended: ended.results.append(ended.results[2])),
    "an iteration that is told twice": ("repeated", lambda ended: ended.told.append(ended.told[2])),
    "a value that was told wrongly": ("wrong", lambda ended: replace_value(ended.told[2])),
    "a value that was written wrongly": ("wrong", lambda ended: replace_value(ended.results[2])),
    "too many iterations": (
        "others",
        lambda ended: (ended.results.append(ended.result(5)), ended.told.append(ended.result(5))),
    ),
    "a trial that failed": ("others", lambda ended: setattr(ended, "state", "FAILED")),
    "a trial that did not end": ("others", lambda ended: setattr(ended, "state", None)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_amiss_is_found(change: str, tmp_path: Path) -> None:
    kind, make = CHANGES[change]
    ended = Ended(tmp_path)
    make(ended)
    found = ended.check()
    assert getattr(found, kind)


def test_what_is_right_is_found_right(tmp_path: Path) -> None:
    found = Ended(tmp_path).check()
    assert found == Found(iterations=4)


def test_half_a_line_of_what_a_driver_was_told_is_passed_over(tmp_path: Path) -> None:
    ended = Ended(tmp_path)
    ended.check()
    with (tmp_path / "told-1.jsonl").open("w") as told:
        told.write('{"trial": "g0-t0", "iter')
    (tmp_path / "told-0.jsonl").rename(tmp_path / "told-2.jsonl")
    assert check(tmp_path) == Found(iterations=4)


def test_a_request_that_was_cut_off_may_have_been_heard_or_not(tmp_path: Path) -> None:
    for heard in (False, True):
        ended = Ended(tmp_path / str(heard))
        ended.requests.append({"what": "extend", "trial": "g0-t0", "by": 1})
        if heard:
            ended.results.append(ended.result(5))
            ended.told.append(ended.result(5))
        found = ended.check()
        assert (found.lost, found.others) == ([], [])


def test_a_state_that_was_restored_wrongly_shows_in_every_later_value(tmp_path: Path) -> None:
    trial = Chain()
    trial.setup({"seed": "s", "seconds": 0.0, "padding": 0, "nasty": {}})
    assert [trial.step()["value"] for _ in range(3)] == list(chain("s", 3))
    trial.save_checkpoint(str(tmp_path))
    file = tmp_path / "state.json"
    file.write_text(file.read_text().replace(trial.value, "0" * 16))
    trial.load_checkpoint(str(tmp_path))
    assert [trial.step()["value"] for _ in range(2)] != list(chain("s", 5)[3:])


@pytest.mark.parametrize("kind", ["torn_results", "torn_journal", "torn_trials", "torn_payloads"])
def test_a_torn_file_keeps_all_but_its_last_entry(kind: str, tmp_path: Path) -> None:
    lines = b"".join(b'{"what": "IterationReported", "trial_id": "t", "iteration": %d}\n' % n for n in range(1, 9))
    names = ("results.jsonl", "journal.jsonl", "trials.jsonl", "payloads.pkl")
    for seed in range(30):
        for name in names:
            (tmp_path / name).write_bytes(lines)
        assert tear(kind, random.Random(seed), tmp_path)
        (changed,) = [name for name in names if (tmp_path / name).read_bytes() != lines]
        assert (tmp_path / changed).read_bytes().startswith(lines), "no result is known, so no entry may be lost"


class Timed:
    """What two drivers told, and what Fluid says of the times of their session; a test changes that.

    The first driver ran from 100 to 110, the second from 120 to 130, and each told an iteration a second for 8 s.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.makespan: Any = 28.0
        self.report: dict[str, Any] = {"makespan": 28.0, "wall": 30.0, "held": 50.0, "busy": 12.0, "utilisation": 0.3}
        self.report["device_seconds"] = 56.0
        self.seconds = 17.0

    def found(self) -> list[str]:
        fields = {"id": "t", "form": "class", "config": {"seconds": 1.0}}
        for number, began in enumerate((100.0, 120.0)):
            told = [{"trial": "t", "iteration": 8 * number + n, "way": "results"} for n in range(1, 9)]
            told = [{**entry, "at": began + n} for n, entry in enumerate(told, start=1)]
            told.append({**told[-1], "iteration": 17, "way": "results at the end", "at": began + 9.9})
            ended = [{"group": "g", "states": {"t": "DONE"}, "makespan": self.makespan, "at": began + 9.0}]
            ended.append({"report": self.report, "iterations": {"t": [16, self.seconds]}, "at": began + 9.0})
            write_lines(self.folder / f"told-{number}.jsonl", told + ended * number)
        drivers = [{"driver": 0, "began": 100.0, "ended": 110.0}, {"driver": 1, "began": 120.0, "ended": 130.0}]
        write_lines(self.folder / "drivers.jsonl", drivers)
        return implausible_times({"devices": 2, "groups": {"g": [fields]}}, self.folder)


def write_lines(path: Path, entries: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_possible_times_are_found_right(tmp_path: Path) -> None:
    assert Timed(tmp_path).found() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("makespan", 864_016.0), ("makespan", -3.0), ("makespan", 9.0), ("makespan", None), ("wall", 76.0),
        ("held", 1_728_032.0), ("held", 0.0), ("busy", -1.0), ("busy", 70.0), ("utilisation", 1.35),
        ("utilisation", float("nan")), ("device_seconds", 9.0),
    ],
)  # fmt: skip
def test_an_impossible_time_of_a_session_is_found(name: str, value: Any, tmp_path: Path) -> None:
    timed = Timed(tmp_path)
    timed.report[name] = value
    (found,) = timed.found()
    assert found.startswith(f"{name}: {value}")


@pytest.mark.parametrize("makespan", [None, 9.0, 500_000.0, -1.0])
def test_an_impossible_makespan_of_a_group_is_found(makespan: Any, tmp_path: Path) -> None:
    timed = Timed(tmp_path)
    timed.makespan = makespan
    (found,) = timed.found()
    assert found.startswith(f"makespan of g: {makespan}")


@pytest.mark.parametrize("seconds", [3.0, 40.0])
def test_impossible_times_of_iterations_are_found(seconds: float, tmp_path: Path) -> None:
    timed = Timed(tmp_path)
    timed.seconds = seconds
    (found,) = timed.found()
    assert found.startswith(f"seconds of t: {seconds}")


@pytest.mark.parametrize(
    ("begun", "fault", "amiss"),
    [(30, None, False), (31, None, False), (0, None, True), (29, None, True), (0, "lose_memory", False)],
)
def test_a_checkpoint_that_is_thrown_away_at_a_full_disk_is_found(
    begun: int, fault: str | None, amiss: bool, tmp_path: Path
) -> None:
    run = tmp_path / "disk" / "run"
    run.mkdir(parents=True)
    journal = [
        {"what": "TrialSaved", "trial_id": "t", "checkpoint": {"iteration": 20, "in_memory": True}},
        {"what": "TrialSaved", "trial_id": "t", "checkpoint": {"iteration": 30, "in_memory": True}},
        {"what": "TrialStarted", "trial_id": "t", "iteration": begun},
        {"what": "TrialStarted", "trial_id": "t", "iteration": 0},
    ]
    write_lines(run / "journal.jsonl", journal)
    write_lines(tmp_path / "drivers.jsonl", [{"driver": 0, "journal": 2}, {"driver": 1, "journal": 4}])
    faults = [{"driver": 0, "kind": "full_at_close"}] + [{"driver": 1, "kind": fault}] * (fault is not None)
    write_lines(tmp_path / "faults.jsonl", faults)
    assert bool(thrown_away(tmp_path)) == amiss


def test_a_module_of_the_working_directory_that_was_executed_is_found(tmp_path: Path) -> None:
    ended, folder = Ended(tmp_path), tmp_path / "cwd"
    torture_machine.write_hostile_modules(folder, tmp_path / "imported.txt")
    for options in ([], ["-P"]):
        subprocess.run([sys.executable, *options, "-c", "import fluid"], cwd=folder, check=False, capture_output=True)
    assert len(ended.check().imported) == 1


@pytest.mark.parametrize("name", torture_machine.HOSTILE)
def test_each_hostile_module_notes_that_it_is_executed(name: str, tmp_path: Path) -> None:
    torture_machine.write_hostile_modules(tmp_path / "cwd", tmp_path / "note")
    program = f"import runpy; runpy.run_path({str(tmp_path / 'cwd' / name)!r} + '.py')"
    assert not (tmp_path / "note").exists()
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert (tmp_path / "note").read_text().startswith(f"{name} in {sys.executable} -c")


# --- Faults of the machine


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = compile_library(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("no C compiler")
    return library


#: Writes 100 bytes four times; shows what each write returns, or the number of its error.
_FOUR_WRITES = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range(4):
    try:
        print(os.write(file, b"x" * 100))
    except OSError as error:
        print(-error.errno)
"""


def four_writes(writes: WriteFaults, library: Path, file: Path) -> list[int]:
    command = [sys.executable, "-c", _FOUR_WRITES, str(file)]
    ran = subprocess.run(
        command, env={**os.environ, **writes.environment(library)}, capture_output=True, text=True, check=True
    )
    return [int(line) for line in ran.stdout.split()]


@pytest.mark.parametrize(
    ("fault", "half", "returned", "size"),
    [
        ("eio", False, [100, -errno.EIO, 100, 100], 300), ("eio", True, [100, -errno.EIO, 100, 100], 350),
        ("short_write", False, [100, 34, 100, 100], 334),
        ("enospc", False, [100, -errno.ENOSPC, 100, 100], 300),
        ("enospc", True, [100, 50, -errno.ENOSPC, 100], 250),
    ],
)  # fmt: skip
def test_a_write_fails_once_as_it_was_armed_to(
    fault: str, half: bool, returned: list[int], size: int, library: Path, tmp_path: Path
) -> None:
    (tmp_path / "below").mkdir()
    writes = WriteFaults(tmp_path / "page", tmp_path / "below")
    file = tmp_path / "below" / "results.jsonl"
    writes.arm(fault, "results", skip=1, half=half)
    assert four_writes(writes, library, tmp_path / "results.jsonl") == [100] * 4, "another folder"
    assert four_writes(writes, library, tmp_path / "below" / "other") == [100] * 4
    assert writes.is_armed
    assert writes.new_hits() == []
    assert four_writes(writes, library, file) == returned
    assert file.stat().st_size == size
    assert (writes.new_hits(), writes.new_hits(), writes.is_armed) == ([fault], [], False)
    assert four_writes(writes, library, file) == [100] * 4


def test_a_copy_by_the_kernel_fails_too(library: Path, tmp_path: Path) -> None:
    writes = WriteFaults(tmp_path / "page", tmp_path)
    (tmp_path / "from").write_bytes(b"x" * 1000)
    for fault in IO_FAULTS:
        writes.arm(fault, "/to", skip=0, half=False)
        program = "import shutil, sys; shutil.copyfile(*sys.argv[1:])"
        command = [sys.executable, "-c", program, str(tmp_path / "from"), str(tmp_path / "to")]
        environment = {**os.environ, **writes.environment(library)}
        ran = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert (ran.returncode != 0) == (fault == "enospc"), "Python copies in another way after other errors"
        assert writes.new_hits() == [fault]


@pytest.mark.skipif(not torture_machine.can_change_clocks(), reason="time namespaces are not permitted")
@pytest.mark.parametrize("seconds", [500_000.0, -5.0])
def test_a_driver_has_another_clock(seconds: float) -> None:
    program = "import time; print(time.monotonic(), time.time())"
    command = torture_machine.with_clock(seconds, [sys.executable, "-c", program])
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    monotonic, wall = map(float, ran.stdout.split())
    assert monotonic - time.monotonic() == pytest.approx(seconds, abs=2.0)
    assert wall == pytest.approx(time.time(), abs=2.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_session_has_another_boot_and_memory_of_its_own(tmp_path: Path) -> None:
    program = f"""
import pathlib, sys
sys.path.insert(0, {_BENCHMARKS!r})
from torture_machine import boot_anew, owns_memory, take_own_memory
take_own_memory(2)
boots = [pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()]
for _ in range(2):
    assert boot_anew(pathlib.Path({str(tmp_path)!r}))
    boots.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text())
print(owns_memory(), len(set(boots)), len(list(pathlib.Path("/dev/shm").iterdir())))
"""
    before = Path("/proc/sys/kernel/random/boot_id").read_text()
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["True", "3", "0"], ran.stderr
    assert Path("/proc/sys/kernel/random/boot_id").read_text() == before


@pytest.mark.parametrize("way", torture_strangers.WAYS)
def test_strangers_come_to_every_port_of_a_process(way: str) -> None:
    servers = [socket.create_server(("127.0.0.1", 0), backlog=1024)]
    servers.append(socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=1024))
    ports = torture_strangers.ports([os.getpid()])
    mine = [(server.getsockname()[0], server.getsockname()[1]) for server in servers]
    assert set(mine) <= set(ports)
    program = [sys.executable, "-SE", torture_strangers.__file__, way, "0.5", "seed"]
    strangers = subprocess.Popen([*program, *(f"{ip}:{port}" for ip, port in mine)])
    came = [False, False]

    def accept(index: int) -> None:
        servers[index].settimeout(10.0)
        servers[index].accept()[0].close()
        came[index] = True

    threads = [threading.Thread(target=accept, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert came == [True, True]
    assert strangers.wait(timeout=30.0) == 0
    for server in servers:
        server.close()


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_drawn_and_is_bytes_or_a_message(kind: str) -> None:
    for seed in range(20):
        made, again = (GARBAGE[kind](random.Random(seed)) for _ in range(2))
        if isinstance(made, Message):
            assert made.body == again.body != b""
        else:
            assert made == again != b""


def test_garbage_is_written_on_the_sockets_of_the_process() -> None:
    """With a seed whose garbage is bytes: the same ones each time."""
    program = f"""
import socket, sys
sys.path.insert(0, {_BENCHMARKS!r})
from torture_nasty import NASTY
here, there = socket.socketpair()
NASTY["garbage"]({{"seed": "s/t4", "nasty": {{"3": "garbage"}}}})
print(there.recv(100_000).hex())
"""
    written = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert written[0] == written[1] != ""
