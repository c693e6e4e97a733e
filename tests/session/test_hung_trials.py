"""Trials that hang, and processes that are stopped: found, ended, and gone on from the checkpoint."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.session.handle import TrialGroupHandle
from fluid.trialgroup import Trial, TrialGroup

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


class Counter:
    """Counts to its budget, can be saved, and hangs in one iteration: each time, or until a file is there."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.steps = config, 0

    def step(self) -> dict[str, Any]:
        if self.steps + 1 == self.config.get("hangs_at") and not self._hung_before():
            self.never_returns()
        time.sleep(self.config.get("seconds", 0.01))
        self.steps += 1
        return {"step": self.steps, "pid": os.getpid()}

    def _hung_before(self) -> bool:
        marker = self.config.get("once")
        if marker is None:
            return False
        before = Path(marker).exists()
        Path(marker).touch()
        return before

    def never_returns(self) -> None:
        if self.config.get("how") == "c":
            ctypes.PyDLL(None).sleep(100_000)  # It keeps the interpreter lock.
        while True:
            pass

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "steps").write_text(str(self.steps))

    def load_checkpoint(self, folder: str) -> None:
        self.steps = int((Path(folder) / "steps").read_text())


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[FluidExecutor]:
    """One device."""
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        yield executor


def submit(executor: FluidExecutor, budget: int = 4, **configs: dict[str, Any]) -> TrialGroupHandle:
    """Submits a trial per config; ``timeout`` in it is the trial's."""
    return executor.submit_trialgroup(
        TrialGroup(
            [
                Trial(Counter, config, budget, trial_id=name, iteration_timeout_s=config.get("timeout", "auto"))
                for name, config in configs.items()
            ]
        )
    )


def until(holds: Callable[[], Any]) -> Any:
    """What a function returns, once that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def log_of(executor: FluidExecutor, trial_id: str) -> str:
    path = executor.folder.path / "trials" / trial_id / "output.log"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("how", ["python", "c"])
def test_a_trial_that_hangs_once_goes_on_from_its_checkpoint(
    executor: FluidExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="fluid"):
        once = str(tmp_path / "hung")
        handle = submit(executor, a={"hangs_at": 3, "once": once, "how": how, "timeout": 1.0})
        results = [(result.iteration, result.metrics["step"]) for result in handle.results()]
    assert results == [(1, 1), (2, 2), (3, 3), (4, 4)] and handle.states == {"a": "DONE"}
    until(lambda: "never_returns" in log_of(executor, "a"))
    (warning,) = [record.getMessage() for record in caplog.records if "no result" in record.getMessage()]
    assert "'a'" in warning and "output.log" in warning


def test_a_trial_that_hangs_twice_has_failed_and_its_neighbour_has_not(executor: FluidExecutor) -> None:
    handle = submit(executor, a={"hangs_at": 2, "timeout": 0.5}, b={"seconds": 0.1, "timeout": None})
    results = [(result.trial_id, result.iteration) for result in handle.results()]
    assert results.count(("a", 1)) == 1 and [i for name, i in results if name == "b"] == [1, 2, 3, 4]
    assert handle.states == {"a": "FAILED", "b": "DONE"}
    failure = handle.failures["a"]
    assert failure.kind == "timeout" and "no result" in failure.message
    journal = [json.loads(line) for line in (executor.folder.path / "journal.jsonl").read_text().splitlines()]
    killed = [entry for entry in journal if entry["what"] == "NoteHung" and entry["killed"]]
    assert [entry["trial_id"] for entry in killed] == ["a", "a"]


@pytest.mark.parametrize("stops_first", [False, True])
def test_a_trial_that_hangs_can_be_stopped_now(executor: FluidExecutor, stops_first: bool) -> None:
    handle = submit(executor, a={"hangs_at": 1, "how": "c", "timeout": None}, b={})
    until(lambda: any("a" in dict(device.residents) for device in executor.status().devices))
    if stops_first:
        handle.stop("a")
    handle.stop("a", now=True)
    assert handle.wait(PATIENCE) and handle.states == {"a": "STOPPED", "b": "DONE"}
    handle.stop("a", now=True)  # Harmless.


def test_a_trial_that_waits_is_stopped_now_as_at_any_time(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=1, packing="off", run_dir=tmp_path, verbose=0) as executor:
        handle = submit(executor, a={"hangs_at": 1, "timeout": None}, b={})
        handle.stop("b", now=True)
        until(lambda: handle.states == {"b": "STOPPED"})
        handle.stop("a", now=True)
        assert handle.wait(PATIENCE) and handle.states == {"a": "STOPPED", "b": "STOPPED"}
        more = submit(executor, c={})
        assert more.wait(PATIENCE) and more.states == {"c": "DONE"}, "the device is free again"


def test_now_must_be_a_bool(executor: FluidExecutor) -> None:
    handle = submit(executor, a={})
    with pytest.raises(InvalidFieldError, match="now='yes'"):
        handle.stop("a", now="yes")  # type: ignore[arg-type]
