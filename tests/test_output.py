"""What trials print reaches the driver's terminal: real processes, and a real terminal for the live view."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from terminal_screen import TerminalProcess

from fluid import FluidExecutor, Trial, TrialGroup

WIDTH = 100


def talk(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Prints in every way there is."""
    print("by print")
    print("to stderr", file=sys.stderr)
    sys.stdout.buffer.write(b"bytes \xff\n")
    os.write(1, b"by a library\n")
    subprocess.run(["sh", "-c", "echo by a child; echo its error >&2"], check=True)
    if (child := os.fork()) == 0:
        print("by a fork", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print("half a line", end="")
    yield {"pid": os.getpid()}


def whisper(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    print("a whisper")
    yield {"pid": os.getpid()}


def crash(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    print("before the crash")
    yield {"pid": os.getpid()}
    ctypes.string_at(0)


def fail(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    print("before the error")
    raise ValueError("the error itself")
    yield {}


def shout(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for number in range(config["lines"]):
        print("line", number)
    yield {"pid": os.getpid()}


class Ran:
    """A session that has ended: what its driver has written, and what its trials have reported."""

    def __init__(self, captured: Any, executor: FluidExecutor, pids: list[int], failures: Any) -> None:
        self.out, self.err = map(self.of, captured)
        self.folder = executor.run_dir
        self.pids = pids
        self.failures = failures

    @staticmethod
    def of(text: str) -> list[tuple[str, int, str]]:
        """The lines of trials: the trainable's name, the process and the text."""
        found = re.findall(r"^\((\w+) pid=(\d+)\) (.*)$", text, re.MULTILINE)
        return [(name, int(pid), line) for name, pid, line in found]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs trials one after another on one device, and closes the executor."""

    def run(*trainables: Any, config: Any = (), **options: Any) -> Ran:
        pids = []
        with FluidExecutor("local", devices=1, run_dir=tmp_path / "run", max_failures=0, **options) as executor:
            for trainable in trainables:
                handle = executor.submit_trialgroup(TrialGroup([Trial(trainable, dict(config), budget=2)]))
                pids += [result.metrics["pid"] for result in handle.results()]
        return Ran(capsys.readouterr(), executor, pids, handle.failures)

    return run


@pytest.mark.slow
def test_whatever_way_a_trial_prints(run: Callable[..., Ran]) -> None:
    ran = run(talk)
    (pid,) = ran.pids
    out = ["by print", "bytes \ufffd", "by a library", "by a child", "by a fork", "half a line"]
    assert ran.out == [("talk", pid, text) for text in out]
    assert ran.err == [("talk", pid, text) for text in ("to stderr", "its error")]


@pytest.mark.slow
def test_lines_have_the_name_of_the_trainable_that_printed_them(run: Callable[..., Ran]) -> None:
    ran = run(whisper, shout, whisper, config={"lines": 1})
    expected = [("whisper", "a whisper"), ("shout", "line 0"), ("whisper", "a whisper")]
    assert [(name, text) for name, _, text in ran.out] == expected
    assert len(set(ran.pids)) == 3


@pytest.mark.slow
def test_the_message_of_a_crash_is_shown_and_the_failure_names_its_file(run: Callable[..., Ran]) -> None:
    ran = run(crash)
    ((name, pid, text),) = ran.out
    assert (name, text) == ("crash", "before the crash")
    assert ran.err[0] == ("crash", pid, "Fatal Python error: Segmentation fault")
    (failure,) = ran.failures.values()
    log = failure.message.partition("; see ")[2]
    assert "Segmentation fault" in Path(log).read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_traceback_is_in_the_trials_log_and_is_not_shown_at_every_failure(run: Callable[..., Ran]) -> None:
    ran = run(fail)
    assert [text for _, _, text in ran.out] == ["before the error"] and ran.err == []
    (log,) = ran.folder.glob("trials/*/output.log")
    assert "ValueError: the error itself" in log.read_text(encoding="utf-8")


def test_without_the_executors_word_nothing_is_shown(run: Callable[..., Ran]) -> None:
    ran = run(talk, verbose=0)
    assert (ran.out, ran.err) == ([], [])
    # What Python does not print itself is in the lane's own files, and nothing else.
    assert (ran.folder / "logs/lane-0.out").read_bytes() == b"by a library\nby a child\nby a fork\n"
    assert (ran.folder / "logs/lane-0.log").read_bytes() == b"its error\n"


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [0, 1])
def test_the_log_of_a_trial_has_all_that_it_and_its_processes_wrote(run: Callable[..., Ran], verbose: int) -> None:
    ran = run(talk, whisper, talk, verbose=verbose)
    paths = sorted(ran.folder.glob("trials/*/output.log"))
    logs = [path.read_bytes().replace(b"half a line", b"half a line\n").splitlines() for path in paths]
    told = {b"by print", b"to stderr", b"bytes \xff", b"by a library", b"by a child", b"its error", b"by a fork"}
    assert [sorted(lines) for lines in logs] == [
        sorted(told | {b"half a line"}),
        [b"a whisper"],
        sorted(told | {b"half a line"}),
    ]


@pytest.mark.slow
def test_a_flood_is_shown_in_part_and_told(run: Callable[..., Ran]) -> None:
    ran = run(shout, config={"lines": 100_000})
    numbers = [int(text.split()[1]) for _, _, text in ran.out if text.startswith("line ")]
    assert numbers == sorted(numbers) and numbers[-1] == 99_999
    left_out = [text for _, _, text in ran.out if "MB not shown" in text]
    assert bool(left_out) == (len(numbers) < 100_000)
    with next(ran.folder.glob("trials/*/output.log")).open("rb") as log:
        assert sum(1 for _ in log) == 100_000


def test_equal_lines_of_several_processes_are_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def meet(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        print("the same everywhere")
        (config["folder"] / str(os.getpid())).touch()
        while len(list(config["folder"].iterdir())) < 3:
            pass
        yield {}

    (tmp_path / "met").mkdir()
    with FluidExecutor("local", devices=3, run_dir=tmp_path / "run", packing="off") as executor:
        group = TrialGroup([Trial(meet, {"folder": tmp_path / "met"}, budget=1) for _ in range(3)])
        executor.submit_trialgroup(group).wait()
    shown = [text.partition(" (")[0] for _, _, text in Ran.of(capsys.readouterr().out)]
    assert shown == ["the same everywhere", "the same everywhere [repeated 2x across cluster]"]


_SCRIPT = """
import sys, time
from fluid import FluidExecutor, Trial, TrialGroup

def train(config):
    for step in range(20):
        print("step", step, "of", config["trial"], "x" * (150 if step == 7 else 0))
        sys.stderr.write(f"\\r{step} %")
        sys.stderr.flush()
        time.sleep(0.05)
        yield {"loss": 1.0}
    print("\\x1b[2J\\x1b[5Athe end")

if __name__ == "__main__":
    with FluidExecutor("local", devices=2, run_dir=sys.argv[1]) as executor:
        trials = [Trial(train, {"trial": trial}, budget=21) for trial in range(2)]
        handle = executor.submit_trialgroup(TrialGroup(trials, name="group"))
        for result in handle.results():
            if result.iteration == 10:
                print("the program prints, too")
"""


@pytest.mark.slow
def test_the_live_view_is_not_torn(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")]
    process = TerminalProcess(command, {"RAY_DEDUP_LOGS": "0"}, WIDTH, 40)
    assert process.finish() == 0, process.screen.text()
    printed = [line for line in process.screen.text() if line]
    lines, summary = printed[:-5], printed[-5:]
    matched = [(line, re.fullmatch(r"\(train pid=\d+\) +(.*)|x+", line)) for line in lines]
    assert [line for line, found in matched if found is None] == ["the program prints, too"] * 2
    texts = [found[1] or "" for _, found in matched if found is not None]
    for trial in range(2):
        assert [int(text.split()[1]) for text in texts if f" of {trial}" in text] == list(range(20))
    assert texts.count("the end") == 2
    assert summary[0].startswith("best  loss 1 (less is better)  trial-")
    assert summary[1].startswith("group  2 trials: 2 done; 40/40 iterations")
    assert summary[2].startswith("results in ")
