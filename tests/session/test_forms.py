"""Functions as trainables in sessions: what is killed, drained or resumed goes on from their state."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.executor import FluidExecutor
from fluid.lane.protocol import LaneOptions
from fluid.session.handle import TrialGroupHandle
from fluid.trialgroup import Trial, TrialGroup

PATIENCE = 90.0
LENGTH = 8


def value_at(step: int) -> int:
    return pow(31, step, 1_000_003)


def die_once(config: dict[str, Any], step: int) -> None:
    """Ends the process in the step that the config names, the first time."""
    note = Path(config["folder"], f"death-{config['x']}")
    if step == config.get("dies_at") and not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def with_state(config: dict[str, Any], state: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each value follows from the one before."""
    state = state or {"value": 1, "step": 0}
    while True:
        time.sleep(config.get("seconds", 0.01))
        state["step"] += 1
        die_once(config, state["step"])
        state["value"] = state["value"] * 31 % 1_000_003
        if state["step"] == config.get("lock_at"):
            state["lock"] = threading.Lock()
        yield {"value": state["value"], "step": state["step"], "pid": os.getpid()}, state


def for_ray(config: dict[str, Any]) -> None:
    """As above, as a function for Ray Tune that reports a checkpoint every few iterations."""
    from ray import tune

    value, step = 1, 0
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            value, step = json.loads((Path(folder) / "state.json").read_text())
    while True:
        time.sleep(config.get("seconds", 0.01))
        step += 1
        die_once(config, step)
        value = value * 31 % 1_000_003
        metrics = {"value": value, "step": step, "pid": os.getpid()}
        if step % config.get("every", 1):
            tune.report(metrics)
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text(json.dumps([value, step]))
            tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


in_both_forms = pytest.mark.parametrize("train", [with_state, pytest.param(for_ray, marks=pytest.mark.ray)])


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FluidExecutor]]:
    made: list[FluidExecutor] = []
    always = functools.partial(LaneOptions, save_after=0.0, save_ratio=0.0)
    monkeypatch.setattr("fluid.backends.hosts.host.LaneOptions", always)  # Every state is saved.

    def begin(*, resumed: bool = False, devices: int = 1) -> FluidExecutor:
        options: Any = {"backend": "local", "devices": devices, "verbose": 0}
        folder = tmp_path / "run"
        made.append(FluidExecutor.resume(folder, **options) if resumed else FluidExecutor(run_dir=folder, **options))
        return made[-1]

    yield begin
    for executor in made:
        executor.close()


def submit(executor: FluidExecutor, train: Any, folder: Path, count: int = 1, **config: Any) -> TrialGroupHandle:
    configs = [{"x": x, "folder": str(folder), **config} for x in range(count)]
    trials = [Trial(train, one, budget=LENGTH, trial_id=f"t{x}") for x, one in enumerate(configs)]
    return executor.submit_trialgroup(TrialGroup(trials))


def rows(handle: TrialGroupHandle, trial_id: str = "t0") -> list[Any]:
    """What a trial reported, after a check that each iteration came once and follows from the one before."""
    found = [result for result in handle.results() if result.trial_id == trial_id]
    assert [result.iteration for result in found] == list(range(1, len(found) + 1))
    assert [result.metrics["step"] for result in found] == [result.iteration for result in found]
    assert [result.metrics["value"] for result in found] == [value_at(result.iteration) for result in found]
    return [result.metrics for result in found]


@pytest.mark.slow
@in_both_forms
@pytest.mark.parametrize("every", [1, 3])
def test_a_trial_whose_process_dies_goes_on_from_its_state(
    start: Callable[..., FluidExecutor], tmp_path: Path, train: Any, every: int
) -> None:
    handle = submit(start(), train, tmp_path, dies_at=6, every=every)
    assert len({row["pid"] for row in rows(handle)}) == 2
    assert handle.states["t0"] == "DONE"
    assert (tmp_path / "death-0").exists()


@pytest.mark.slow
@in_both_forms
def test_trials_leave_a_device_that_is_drained_without_a_loss(
    start: Callable[..., FluidExecutor], tmp_path: Path, train: Any
) -> None:
    executor = start(devices=2)
    handle = submit(executor, train, tmp_path, count=2, seconds=0.1)
    for result in handle.results():
        if result.iteration == 2:
            break
    assert executor.drain(1, PATIENCE)
    assert handle.wait(PATIENCE)
    assert all(len(rows(handle, trial_id)) == LENGTH for trial_id in ("t0", "t1"))


@pytest.mark.slow
@in_both_forms
def test_a_trial_that_is_done_is_extended_after_its_process_and_its_session_ended(
    start: Callable[..., FluidExecutor], tmp_path: Path, train: Any
) -> None:
    first = start()
    handle = submit(first, train, tmp_path)
    assert len(rows(handle)) == LENGTH
    os.kill(rows(handle)[-1]["pid"], signal.SIGKILL)
    handle.extend("t0", 2)
    assert handle.wait(PATIENCE) and len(rows(handle)) == LENGTH + 2
    first.close()
    (resumed,) = start(resumed=True).handles
    resumed.extend("t0", 3)
    assert resumed.wait(PATIENCE)
    assert len(rows(resumed)) == LENGTH + 5


_DRIVER = """
import sys
sys.path.insert(0, {tests!r})
import test_forms
from fluid import FluidExecutor

with FluidExecutor(backend="local", devices=2, run_dir={run!r}, verbose=0) as executor:
    handle = test_forms.submit(executor, test_forms.{train}, {run!r}, count=2, seconds=0.4)
    for result in handle.results():
        print(result.iteration, flush=True)
"""


@pytest.mark.slow
@in_both_forms
def test_a_session_whose_driver_was_killed_is_resumed(
    start: Callable[..., FluidExecutor], tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    code = _DRIVER.format(tests=str(Path(__file__).parent), run=str(tmp_path / "run"), train=train.__name__)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    while int(driver.stdout.readline()) < 5:
        pass
    driver.kill()
    driver.wait()
    driver.stdout.close()
    executor = start(resumed=True, devices=2)
    (handle,) = executor.handles
    assert all(len(rows(handle, trial_id)) == LENGTH for trial_id in ("t0", "t1"))
    told = (tmp_path / "run" / "journal.jsonl").read_text()
    starts = [json.loads(line) for line in told.splitlines() if '"TrialStarted"' in line]
    assert max(entry["iteration"] for entry in starts) > 0, "they went on from a state"


@pytest.mark.slow
def test_a_state_that_cannot_be_pickled_is_told_once_and_fails_nothing(
    start: Callable[..., FluidExecutor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fluid"):
        handle = submit(start(), with_state, tmp_path, lock_at=3)
        assert len(rows(handle)) == LENGTH and handle.states["t0"] == "DONE"
    told = [record.getMessage() for record in caplog.records if "t0" in record.getMessage()]
    assert len(told) == 1 and "'t0' cannot be saved: state['lock'] cannot be pickled: cannot pickle" in told[0]


def test_functions_that_return_run_as_one_would_expect(start: Callable[..., FluidExecutor]) -> None:
    group = TrialGroup(
        [
            Trial(lambda config: ({"loss": x} for x in range(5)), {}, budget=3, trial_id="iterator"),
            Trial(lambda config: {"loss": 1}, {}, budget=3, trial_id="metrics"),
            Trial(lambda config: 1.0, {}, trial_id="number", retry_errors=False),
        ]
    )
    handle = start().submit_trialgroup(group)
    found = [(result.trial_id, result.metrics) for result in handle.results()]
    assert [metrics for name, metrics in found if name == "iterator"] == [{"loss": 0}, {"loss": 1}, {"loss": 2}]
    assert [metrics for name, metrics in found if name == "metrics"] == [{"loss": 1}]
    assert handle.states == {"iterator": "DONE", "metrics": "DONE", "number": "FAILED"}
    assert "returned float 1.0; return {'loss': 1.0}, say" in handle.failures["number"].message
