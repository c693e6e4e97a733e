"""What a trial has computed to the end of an iteration is reported and can be the best, in whatever way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweep_trainables import fail_behind_zero, noting
from waiting import eventually

import fluid
from fluid import FluidExecutor, LimitReachedError, Result, Trial, TrialGroup, TrialListener
from fluid.search import Target, TrialPlateau, uniform
from fluid.session.handle import TrialGroupHandle

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0
#: Seconds of an iteration.
PACE = 0.25


def noted(folder: Path) -> list[tuple[str, int]]:
    """The iterations that trials have computed to the end, by trial, as they noted it themselves."""
    return sorted(
        (path.stem, int(line))
        for path in (folder / "notes").glob("*.txt")
        for line in path.read_text(encoding="utf-8").splitlines()
    )


def reported(run_dir: Path) -> list[tuple[str, int]]:
    return sorted(
        (str(trial.config["name"]), one.iteration) for trial in fluid.load(run_dir).trials for one in trial.results
    )


def group(folder: Path, count: int = 2) -> TrialGroup:
    (folder / "notes").mkdir()
    config = {"folder": str(folder / "notes"), "pace": PACE}
    return TrialGroup(
        [Trial(noting, {**config, "name": f"t{x}"}, budget=10**6, trial_id=f"t{x}") for x in range(count)]
    )


def stop(handle: TrialGroupHandle, executor: FluidExecutor) -> None:
    for trial_id in ("t0", "t1"):
        handle.stop(trial_id)
    assert handle.wait(timeout=PATIENCE) and set(handle.states.values()) == {"STOPPED"}


def stop_from_a_listener(handle: TrialGroupHandle, executor: FluidExecutor) -> None:
    class Stops(TrialListener):
        def on_result(self, result: Result) -> None:
            late.stop(result.trial_id)

    config = handle.trials[0].config
    trial = Trial(noting, {**config, "name": "late"}, budget=10**6, trial_id="late")
    stop(handle, executor)
    late = executor.submit_trialgroup(TrialGroup([trial]), Stops())
    assert late.wait(timeout=PATIENCE) and late.states == {"late": "STOPPED"}


def drain(handle: TrialGroupHandle, executor: FluidExecutor) -> None:
    assert executor.drain_all(PATIENCE)


def drain_devices(handle: TrialGroupHandle, executor: FluidExecutor) -> None:
    for device in executor.devices:
        assert executor.drain(device, PATIENCE)


def close(handle: TrialGroupHandle, executor: FluidExecutor) -> None:
    executor.close()


def close_from_a_listener(handle: TrialGroupHandle, executor: FluidExecutor) -> None:
    class Closes(TrialListener):
        def on_result(self, result: Result) -> None:
            executor.close()

    trial = Trial(noting, {**handle.trials[0].config, "name": "late"}, budget=10**6, trial_id="late")
    stop(handle, executor)
    executor.submit_trialgroup(TrialGroup([trial]), Closes())
    eventually(lambda: executor.session.has_ended)


@pytest.mark.parametrize("end", [stop, stop_from_a_listener, drain, drain_devices, close, close_from_a_listener])
def test_what_a_group_has_computed_is_reported(
    end: Callable[[TrialGroupHandle, FluidExecutor], None], tmp_path: Path
) -> None:
    with FluidExecutor("local", 2, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(group(tmp_path))
        eventually(lambda: {("t0", 2), ("t1", 2)} <= set(noted(tmp_path)))
        end(handle, executor)
    assert reported(tmp_path / "run") == noted(tmp_path)


def test_of_a_trial_that_is_killed_counts_what_it_had_reported(tmp_path: Path) -> None:
    with FluidExecutor("local", 2, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(group(tmp_path))
        eventually(lambda: len(handle.trials[0].results) >= 2)
        handle.stop("t0", now=True)
        eventually(lambda: handle.states["t0"] == "STOPPED")
        assert len(handle.trials[0].results) >= 2
        handle.stop("t1")
        assert handle.wait(timeout=PATIENCE)
    assert set(reported(tmp_path / "run")) <= set(noted(tmp_path))


@pytest.mark.slow
def test_at_its_deadline_a_session_has_reported_and_saved_what_was_computed(tmp_path: Path) -> None:
    with FluidExecutor("local", 2, packing="off", deadline=6.0, run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(group(tmp_path))
        with pytest.raises(LimitReachedError) as caught:
            handle.wait(timeout=PATIENCE)
    assert caught.value.unsaved == ()
    assert reported(tmp_path / "run") == noted(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"time_budget_s": 3.0},
        {"deadline": 3.0},
        {"stop": Target(3.0), "samples": 4},
        {"stop": {"count": 2}, "samples": 4},
        {"stop": TrialPlateau(iterations=1, min_delta=1e9), "samples": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_sweep_has_computed_is_in_its_result(options: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    space = {"folder": str(tmp_path / "notes"), "pace": PACE, "name": uniform(0.0, 1.0)}
    with FluidExecutor("local", 2, packing="off", run_dir=tmp_path / "run", verbose=0):
        result = fluid.run(noting, space, metric="count", mode="max", algorithm="random", budget=10**6, **options)  # type: ignore[arg-type]
    counted = [(str(trial.config["name"]), one.iteration) for trial in result.trials for one in trial.results]
    assert sorted(counted) == noted(tmp_path) == reported(tmp_path / "run")
    assert result.best.value == max(count for _, count in counted)
    states = {trial.state for trial in result.trials}
    if "stop" in options:
        assert result.state == "DONE" and states <= {"DONE", "STOPPED"}
    else:  # Until the sweep is resumed.
        assert result.state == "UNFINISHED" and states == {"UNFINISHED"}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [{"loss": 0.0}, Target(0.0)])
def test_what_a_trial_does_after_it_was_stopped_does_not_count(stop: Any, tmp_path: Path) -> None:
    with FluidExecutor("local", 2, run_dir=tmp_path / "run", max_failures=0, verbose=0) as executor:
        options: dict[str, Any] = {"metric": "loss", "algorithm": "random", "budget": 9, "samples": 8, "stop": stop}
        result = fluid.run(fail_behind_zero, {"x": uniform(0.0, 1.0)}, **options)
        (handle,) = executor.handles
        states = [(trial.trial_id, trial.state, trial.failure) for trial in result.trials]
        best = (result.best.trial_id, result.best.iteration)
        assert best == (handle.best().trial_id, handle.best().iteration)
    loaded = fluid.load(tmp_path / "run")
    assert [(trial.trial_id, trial.state, trial.failure) for trial in loaded.trials] == states
    assert (loaded.best.trial_id, loaded.best.iteration) == best
    if stop == {"loss": 0.0}:
        assert {state for _, state, _ in states} == {"DONE"}, "it had reached what was asked for"


@pytest.mark.parametrize("algorithm", ["sha", "asha", "random"])
def test_an_interrupted_sweep_stands_as_its_folder_says(algorithm: str, tmp_path: Path) -> None:
    class Interrupts(TrialListener):
        def __init__(self) -> None:
            self.started = 0

        def on_start(self, trial_id: str) -> None:
            self.started += 1
            if self.started == 2:
                signal.raise_signal(signal.SIGINT)

    executor = FluidExecutor("local", 1, packing="off", run_dir=tmp_path / "run", verbose=0)
    (tmp_path / "notes").mkdir()
    space = {"folder": str(tmp_path / "notes"), "pace": PACE, "name": uniform(0.0, 1.0)}
    options: dict[str, Any] = {"metric": "count", "mode": "max", "samples": 9, "budget": 4, "callbacks": [Interrupts()]}
    with pytest.raises(fluid.SweepInterrupted) as caught:
        fluid.run(noting, space, algorithm=algorithm, executor=executor, **options)
    result, loaded = caught.value.result, fluid.load(tmp_path / "run")
    assert [(one.trial_id, one.state, one.iteration) for one in result.trials] == [
        (one.trial_id, one.state, one.iteration) for one in loaded.trials
    ]
    states = {trial.state for trial in result.trials}
    assert "UNFINISHED" in states and ("PAUSED" in states) == (algorithm != "random")


DRIVER = """
import sys
import fluid
from fluid.search import uniform
from sweep_trainables import noting

folder, pace = sys.argv[1], float(sys.argv[2])
space = {"folder": folder + "/notes", "pace": pace, "name": uniform(0.0, 1.0)}
try:
    fluid.run(noting, space, metric="count", mode="max", algorithm="random", samples=2, budget=10**6,
              run_dir=folder + "/run")
except fluid.SweepInterrupted as cut:
    for trial in cut.result.trials:
        for one in trial.results:
            print(trial.config["name"], one.iteration)
    raise
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_computed_by_a_signal_is_in_the_result(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    script = tmp_path / "driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""), str(Path(fluid.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(PACE)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        eventually(lambda: len(noted(tmp_path)) >= 4 or process.poll() is not None)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + number and "Traceback" not in err, err
    counted = [line.split() for line in out.splitlines()]
    assert sorted((name, int(count)) for name, count in counted) == noted(tmp_path) == reported(tmp_path / "run")


@pytest.mark.slow
def test_who_waits_for_a_drain_has_heard_all_before_it(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []
    busy = threading.Event()

    class Slow(TrialListener):
        """Takes its time, as writing to a slow disk does."""

        def on_result(self, result: Result) -> None:
            busy.set()
            threading.Event().wait(0.02)
            heard.append((str(result.config["name"]), result.iteration))

    with FluidExecutor("local", 2, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        executor.submit_trialgroup(group(tmp_path), Slow())
        assert busy.wait(PATIENCE)
        executor.drain_all(PATIENCE)
        assert sorted(heard) == noted(tmp_path)
