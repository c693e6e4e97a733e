"""The live view on real terminals: sizes, a change of the size, Ctrl-C and SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_TESTS := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(_TESTS)
from terminal_screen import TerminalProcess

pytestmark = pytest.mark.slow

_SCRIPT = """
import logging, pathlib, sys, time
from fluid import FluidExecutor, Search, Trial, TrialGroup

def train(config):
    for step in range(1, 10_000):
        time.sleep(0.01)
        if step > 10 and not pathlib.Path("go").exists():
            step = 10
        yield {"loss": config["lr"] / step}

if __name__ == "__main__":
    logging.basicConfig()
    budget, groups = int(sys.argv[1]), int(sys.argv[2])
    with FluidExecutor("local", devices=2, run_dir="run", packing="off") as executor:
        for number in range(groups):
            trials = [Trial(train, {"lr": rate, "momentum": 0.9}, budget=budget) for rate in (0.1, 0.2, 0.3)]
            search = Search("loss", "min", 3, extends=False)
            name = f"a rather long name of the group number {number}, as users choose them"
            handle = executor.submit_trialgroup(TrialGroup(trials, name=name, search=search))
        logging.warning("a warning of the program")
        print("the program prints")
        handle.wait()
"""
_HEADER = re.compile(r"Fluid +\d:\d\d")


def start(folder: Path, budget: int, groups: int, columns: int, rows: int) -> TerminalProcess:
    (folder / "script.py").write_text(_SCRIPT, encoding="utf-8")
    command = [sys.executable, "script.py", str(budget), str(groups)]
    root = str(Path(__file__).parents[2])
    return TerminalProcess(command, {"PYTHONPATH": root}, columns, rows, cwd=folder)


def is_running(lines: list[str]) -> bool:
    return any(line.startswith("  best loss") or "loss 0" in line for line in lines)


def parts(lines: list[str]) -> tuple[int, int, int]:
    """How many headers, device lines and lines with a best result are on a screen."""
    headers = sum(bool(_HEADER.match(line)) for line in lines)
    return headers, sum(line.startswith("cpu ") for line in lines), sum("best loss" in line for line in lines)


@pytest.mark.parametrize(("columns", "rows", "groups"), [(80, 24, 1), (80, 24, 5), (120, 40, 5), (52, 12, 2)])
def test_a_session_on_a_terminal(tmp_path: Path, columns: int, rows: int, groups: int) -> None:
    (tmp_path / "go").touch()
    process = start(tmp_path, 40, groups, columns, rows)
    # What is read may end within a drawing, so until its last line is there.
    process.read_until(lambda lines: is_running(lines) and parts(lines)[1] == 2)
    shown = process.screen.text()
    assert parts(shown)[0] == 1, shown
    assert shown.index("the program prints") < next(at for at, line in enumerate(shown) if _HEADER.match(line))
    assert process.finish() == 0
    left = [line for line in process.screen.text() if line]
    assert left[:2] == ["WARNING:root:a warning of the program", "the program prints"]
    assert parts(left)[:2] == (0, 0), left
    summary = left[2:]
    assert sum(" trials: 3 done" in line for line in summary) == groups
    assert all(len(line) <= columns for line in summary)
    if columns > 60:
        assert sum("loss 0.0025" in line for line in summary) == groups
    assert summary[-3] == "results in run"
    assert [line.split()[1] for line in summary[-2:]] == ["report", "view"]


def test_a_change_of_the_size_leaves_no_copies(tmp_path: Path) -> None:
    process = start(tmp_path, 9_000, 2, 120, 40)
    process.read_until(is_running)
    for columns, rows in ((70, 40), (45, 24), (100, 20), (33, 12), (120, 40)):
        process.resize(columns, rows)
        before = len(process.seen)
        # A copy that stayed would never go.
        process.read_until(
            lambda lines, before=before: len(process.seen) > before + 2 and parts(lines)[:2] == (1, 2)  # type: ignore[misc]
        )
        assert sum("WARNING:root" in line for line in process.screen.text()) == 1
    process.type("\x03")
    assert process.finish() != 0
    assert parts(process.screen.text())[:2] == (0, 0)


def test_ctrl_c_leaves_no_stale_lines(tmp_path: Path) -> None:
    process = start(tmp_path, 9_000, 1, 80, 24)
    process.read_until(is_running)
    process.type("\x03")
    assert process.finish() != 0
    left = process.screen.text()
    assert parts(left) == (0, 0, 0), left
    assert sum("3 trials: 3 interrupted" in line for line in left) == 1
    assert "results in run" in left
    assert not any("^C" in line for line in left)


def test_sigterm_leaves_no_stale_lines(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    process = start(tmp_path, 300, 1, 80, 24)
    process.read_until(is_running)
    os.kill(process.pid, signal.SIGTERM)
    assert process.finish() == 143
    left = process.screen.text()
    assert parts(left) == (0, 0, 0), left
    assert "results in run" in left


_SLEEPS = """
import sys, time
from fluid import FluidExecutor, Trial, TrialGroup

def sleep(config):
    while True:
        time.sleep(config["seconds"])
        yield {"loss": 1.0}

if __name__ == "__main__":
    with FluidExecutor("local", devices=2, run_dir="run", packing="off") as executor:
        trials = [Trial(sleep, {"seconds": 0.05 * k}, budget=20) for k in (1, 2, 3)]
        executor.submit_trialgroup(TrialGroup(trials, name="sleepers")).wait()
"""


def test_by_when_a_group_has_ended_stands_beside_its_eta(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SLEEPS, encoding="utf-8")
    root = str(Path(__file__).parents[2])
    process = TerminalProcess([sys.executable, "script.py"], {"PYTHONPATH": root}, 90, 24, cwd=tmp_path)
    while process.read():
        pass
    said = [line for lines in process.seen for line in lines if "sleepers" in line]
    shown = [line for line in said if re.search(r"ETA \d+:\d\d  90 % by \d\d:\d\d:\d\d$", line)]
    assert shown, said
    times = list(dict.fromkeys(line.rsplit(" ", 1)[1] for line in shown))
    assert len(times) <= len(shown) / 3, "the time is not another one in each drawing"
    assert "90 %" not in said[-1]
