"""A session with ``verbose=0`` prints nothing in its ordinary ends, and still says what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, signal, sys, threading, time
import fluid
from fluid import FluidExecutor, Output, Trial, TrialGroup

def train(config, state=None):
    done = state or 0
    while True:
        if config.get("fails"):
            raise ValueError("no such thing")
        time.sleep(0.02)
        done += 1
        yield {"loss": 1.0 / done}, done

def interrupt(number):
    os.kill(os.getpid(), number)

def sweep(how, verbose, **options):
    output = Output(verbose=verbose, run_dir="run")
    fluid.run(train, {}, samples=2, budget=10**6, metric="loss", mode="min", devices=1, output=output, **options)

def session(how, verbose):
    options = {"max_failures": 0, **({"deadline": 0.5} if how == "deadline" else {})}
    with FluidExecutor("local", 1, run_dir="run", verbose=verbose, **options) as executor:
        config = {"fails": how == "failure"}
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, config, budget=10**6, trial_id="t")]))
        if how in ("failure", "deadline"):
            handle.wait()
            return
        next(iter(handle.results()))
        if how == "stop":
            handle.stop("t")
        elif how == "drain":
            executor.drain_all(5.0)
        elif how in ("SIGINT", "SIGTERM"):
            interrupt(getattr(signal, how))
            handle.wait()

if __name__ == "__main__":
    how, verbose = sys.argv[1], int(sys.argv[2])
    try:
        if how == "sweep's time":
            sweep(how, verbose, time_budget_s=0.5)
        elif how == "sweep's Ctrl-C":
            threading.Timer(1.0, interrupt, [signal.SIGINT]).start()
            sweep(how, verbose)
        else:
            session(how, verbose)
    except (KeyboardInterrupt, fluid.FluidError):
        pass
"""


def printed(tmp_path: Path, how: str, verbose: int) -> str:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    environment = {**os.environ, "FLUID_RUNS": str(tmp_path / "runs")}
    command = [sys.executable, str(program), how, str(verbose)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == {"SIGTERM": 143, "sweep's Ctrl-C": 130}.get(how, 0), done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("close", "1 trial that had not ended was dropped"),
        pytest.param("SIGTERM", "are saved", marks=pytest.mark.slow),
    ],
)
def test_what_a_session_comes_to_is_told_unless_it_is_quiet(tmp_path: Path, how: str, told: str) -> None:
    (tmp_path / "0").mkdir()
    assert told in printed(tmp_path, how, 1)
    assert printed(tmp_path / "0", how, 0) == ""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "stop", "drain", "sweep's time", "sweep's Ctrl-C"])
def test_a_quiet_session_prints_nothing(tmp_path: Path, how: str) -> None:
    assert printed(tmp_path, how, 0) == ""


@pytest.mark.slow
def test_a_quiet_session_does_not_say_that_its_deadline_has_come(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    assert "has come" in printed(tmp_path, "deadline", 1)
    assert "has come" not in printed(tmp_path / "0", "deadline", 0)


def test_a_quiet_session_says_what_has_failed(tmp_path: Path) -> None:
    assert "trial 't' failed: ValueError: no such thing" in printed(tmp_path, "failure", 0)
