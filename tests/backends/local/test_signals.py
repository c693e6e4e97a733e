"""Signals that schedulers send to every process of a job: only the driver acts on them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fluid.engine.commands import RunIteration, StartTrial
from fluid.engine.events import IterationDone
from fluid.trainables.payload import payload_of

SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT]


class Handling:
    """Handles SIGTERM itself, and reports what it has heard."""

    def setup(self, config: dict[str, Any]) -> None:
        self.heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: self.heard.append(number))

    def step(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "heard": self.heard}


class Forking:
    """Reports its processes, and how its sub-processes react to signals."""

    def setup(self, config: dict[str, Any]) -> None:
        pass

    def step(self) -> dict[str, Any]:
        server = os.getppid()
        guardian = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
        show = "import signal; print(*(signal.getsignal(n) == signal.SIG_DFL for n in (15, 10, 1)))"
        executed = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        forked.start()
        forked.terminate()
        forked.join()
        pids = [os.getpid(), server, guardian]
        return {"pids": pids, "executed": executed.stdout.split(), "forked": forked.exitcode}


def start(drive: Any, trainable: type) -> Any:
    drive.lanes(0)
    drive.backend.register("a", payload_of(trainable, {}))
    drive.do(StartTrial("a", (0,), iterations=1))
    return drive.of(IterationDone, "a").metrics


@pytest.mark.parametrize("number", SIGNALS)
def test_only_the_driver_acts_on_signals_to_all_processes(drive: Any, number: int) -> None:
    first = start(drive, Forking)
    for pid in first["pids"]:
        os.kill(pid, number)
    drive.do(RunIteration("a", (0,), 1))
    assert drive.of(IterationDone, "a").metrics["pids"] == first["pids"]


def test_sub_processes_of_trials_end_by_signals(drive: Any) -> None:
    metrics = start(drive, Forking)
    assert metrics["executed"] == ["True"] * 3
    assert metrics["forked"] == -signal.SIGTERM


def test_a_trial_may_handle_signals(drive: Any) -> None:
    os.kill(start(drive, Handling)["pid"], signal.SIGTERM)
    drive.do(RunIteration("a", (0,), 1))
    assert drive.of(IterationDone, "a").metrics["heard"] == [signal.SIGTERM]
