"""Trials that are paused and resumed by hand, through a handle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE, eventually

from fluid import Result, TrialListener, load
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.resources import Device
from fluid.session.handle import TrialGroupHandle
from fluid.trialgroup import Trial, TrialGroup


def count_up(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Cannot be saved."""
    for step in range(1, 1000):
        time.sleep(config.get("seconds", 0.0))
        yield {"step": step, "pid": os.getpid()}


class Savable:
    """Never run: the backend is simulated."""

    def step(self) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, folder: str) -> None:
        """Never called."""

    def load_checkpoint(self, folder: str) -> None:
        """Never called."""


def trial(name: str, budget: int, seconds: float = 0.0) -> Trial:
    return Trial(count_up, {"seconds": seconds}, budget=budget, trial_id=name)


def counts(executor: FluidExecutor) -> dict[str, int]:
    return executor.status().groups[0].trials


def await_counts(executor: FluidExecutor, **expected: int) -> None:
    wanted = {name.replace("_", " "): number for name, number in expected.items()}
    eventually(lambda: counts(executor) == wanted)


def steps_of(handle: TrialGroupHandle, trial_id: str) -> list[int]:
    return [result.metrics["step"] for result in handle.results() if result.trial_id == trial_id]


@pytest.mark.slow
def test_a_paused_trial_leaves_its_device_and_goes_on_in_its_process() -> None:
    with FluidExecutor(backend="local", devices=1, packing="off", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([trial("a", 40, 0.01), trial("b", 2)]))
        handle.pause("a")
        handle.pause("a")
        await_counts(executor, PAUSED_BY_THE_USER=1, DONE=1)
        assert not handle.wait(0.0) and not handle.done
        handle.resume("a")
        assert handle.wait(PATIENCE)
        assert steps_of(handle, "a") == list(range(1, 41)), "it cannot be saved, and repeats nothing"
        handle.resume("a")
        with pytest.raises(InvalidFieldError, match="trial_id='a': is DONE and cannot be paused"):
            handle.pause("a")
        for change in (handle.pause, handle.resume):
            with pytest.raises(InvalidFieldError, match="trial_id='x': is unknown in group"):
                change("x")


@pytest.mark.slow
def test_waiting_goes_on_until_a_paused_trial_is_resumed() -> None:
    with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([trial("a", 3)]))
        handle.pause("a")
        handle.extend("a", by=2)
        waiting = threading.Thread(target=handle.wait)
        waiting.start()
        await_counts(executor, PAUSED_BY_THE_USER=1)
        assert waiting.is_alive()
        handle.resume("a")
        waiting.join(PATIENCE)
        assert not waiting.is_alive() and steps_of(handle, "a") == [1, 2, 3, 4, 5]


def test_a_paused_trial_can_be_stopped() -> None:
    with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([trial("a", 1000, 0.01)]))
        handle.pause("a")
        await_counts(executor, PAUSED_BY_THE_USER=1)
        handle.stop("a")
        assert handle.wait(PATIENCE) and handle.states == {"a": "STOPPED"}


def simulated() -> SimulatedBackend:
    return SimulatedBackend(lambda name, config: Truth(config["seconds"]), [Device(0)], saves=True)


class PausesAtOnce(TrialListener):
    """Pauses trial "a" at its first result: the simulated clock would have it done before another thread did."""

    def __init__(self, executor: FluidExecutor) -> None:
        self._executor = executor

    def on_result(self, result: Result) -> None:
        if result.trial_id == "a" and result.iteration == 1:
            (handle,) = self._executor.handles
            handle.pause("a")


def test_a_session_that_is_resumed_leaves_it_paused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with FluidExecutor(simulated(), run_dir=folder, verbose=0) as executor:
        trials = [
            Trial(Savable, {"seconds": 1.0}, budget=budget, trial_id=name) for name, budget in (("a", 6), ("b", 2))
        ]
        handle = executor.submit_trialgroup(TrialGroup(trials, "first"), PausesAtOnce(executor))
        await_counts(executor, PAUSED_BY_THE_USER=1, DONE=1)
        (left, _) = handle.trials
        assert left.state == "PAUSED BY THE USER" and handle.states == {"a": "PAUSED", "b": "DONE"}
    assert [found.state for found in handle.trials] == ["PAUSED BY THE USER", "DONE"]
    assert {found.trial_id: found.state for found in load(folder).trials} == {"a": "PAUSED BY THE USER", "b": "DONE"}
    assert load(folder).state == "UNFINISHED"
    with FluidExecutor.resume(folder, backend=simulated(), verbose=0) as executor:
        (handle,) = executor.handles
        assert counts(executor) == {"PAUSED BY THE USER": 1, "DONE": 1}
        assert not handle.wait(0.0)
        handle.resume("a")
        assert handle.wait(PATIENCE)
        assert handle.states == {"a": "DONE", "b": "DONE"}
    assert [found.state for found in load(folder).trials] == ["DONE", "DONE"]
