"""Functions that report by fluid.report: one iteration at a time, saved only when asked, unwound at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, Trial, TrialGroup
from fluid.errors import FluidError
from fluid.trainables.loading import load_saved
from fluid.trainables.reporting_resident import ReportingResident
from fluid.trainables.resident import NotSavableError, Step
from fluid.trainables.trainable import can_save, kind_of, make_resident
from fluid.trainables.trial_code import TrialEnded, inherit_trials


def writing(value: int) -> Callable[[Path], object]:
    return lambda to: (to / "value").write_text(str(value))


def chain(config: dict[str, Any]) -> None:
    """Each value follows from the one before."""
    folder = fluid.get_checkpoint()
    value = config.get("first", 1) if folder is None else int((folder / "value").read_text())
    for _ in range(config.get("count", 9)):
        value = value * 31 % 1_000_003
        fluid.report({"value": value}, save=writing(value))


class Function:
    """Makes a resident, and cleans it up at the end."""

    def __init__(self) -> None:
        self._made: list[ReportingResident] = []

    def __call__(self, function: Callable[..., Any], **config: Any) -> ReportingResident:
        made = make_resident(function, trial_id="t", folder="unused")
        assert isinstance(made, ReportingResident)
        made.setup(config)
        self._made.append(made)
        return made

    def clean_up(self) -> None:
        for resident in self._made:
            resident.cleanup()


@pytest.fixture
def resident() -> Iterator[Function]:
    function = Function()
    yield function
    function.clean_up()


def values(trial: ReportingResident, count: int) -> list[Any]:
    steps = [trial.step() for _ in range(count)]
    assert not any(step.finished for step in steps)
    return [step.metrics["value"] for step in steps if step.metrics is not None]


def saved(trial: ReportingResident, folder: Path) -> str:
    folder.mkdir()
    trial.save(str(folder))
    return str(folder)


def test_an_iteration_ends_with_each_report(resident: Function) -> None:
    begun: list[int] = []

    def train(config: dict[str, Any]) -> None:
        for number in range(2):
            begun.append(number)
            fluid.report({"value": number})

    trial = resident(train)
    assert kind_of(train) == "function" and begun == []
    assert trial.step() == Step({"value": 0}, False) and begun == [0]
    assert trial.step() == Step({"value": 1}, False) and begun == [0, 1]
    assert trial.step() == Step(None, True)


def test_a_returned_dict_is_a_last_iteration(resident: Function) -> None:
    def train(config: dict[str, Any]) -> dict[str, int]:
        fluid.report({"value": 1}, save=lambda to: None)
        return {"value": 2}

    trial = resident(train)
    assert [trial.step(), trial.step()] == [Step({"value": 1}, False), Step({"value": 2}, True)]
    assert trial.unsaved_iterations() is None


def test_a_metric_named_done_ends_the_trial(resident: Function) -> None:
    assert resident(lambda config: fluid.report({"done": True})).step() == Step({"done": True}, True)


def test_residents_take_turns(resident: Function) -> None:
    ours, theirs = resident(chain, first=1), resident(chain, first=2)
    alone = values(resident(chain, first=1), 3)
    found = []
    for _ in range(3):
        found += values(ours, 1)
        values(theirs, 1)
    assert found == alone


def test_a_restored_function_goes_on(resident: Function, tmp_path: Path) -> None:
    undisturbed = values(resident(chain), 7)
    trial = resident(chain)
    assert trial.unsaved_iterations() is None
    before = values(trial, 3)
    assert trial.unsaved_iterations() == 0
    restored = resident(chain)
    restored.restore(saved(trial, tmp_path / "first"))
    assert restored.unsaved_iterations() == 0
    again = resident(chain)  # Of what was restored and has not run since.
    again.restore(saved(restored, tmp_path / "second"))
    assert before + values(restored, 4) == undisturbed == before + values(again, 4)
    assert values(trial, 4) == undisturbed[3:]  # Saving disturbs nothing.


def test_the_state_is_saved_in_the_function_s_thread_and_only_when_asked(resident: Function, tmp_path: Path) -> None:
    seen = []

    def train(config: dict[str, Any]) -> None:
        here = threading.current_thread()
        while True:
            fluid.report({}, save=lambda to: seen.append((to.name, threading.current_thread() is here)))

    trial = resident(train)
    trial.step()
    trial.step()
    assert seen == []
    saved(trial, tmp_path / "checkpoint")
    assert seen == [("state", True)]


def test_a_function_that_has_returned_can_be_saved(resident: Function, tmp_path: Path) -> None:
    trial = resident(chain, count=2)
    before = values(trial, 2)
    assert trial.step() == Step(None, True)
    restored = resident(chain)
    restored.restore(saved(trial, tmp_path / "checkpoint"))
    assert before + values(restored, 1) == values(resident(chain), 3)


def test_a_restored_function_may_find_that_nothing_is_left(resident: Function, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        if fluid.get_checkpoint() is None:
            fluid.report({}, save=lambda to: None)

    trial = resident(train)
    trial.step()
    restored = resident(train)
    restored.restore(saved(trial, tmp_path / "checkpoint"))
    assert restored.step() == Step(None, True)


def test_a_report_without_save_cannot_be_saved(resident: Function, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        fluid.report({}, save=lambda to: None)
        fluid.report({})

    trial = resident(train)
    assert not can_save(train)
    found = []
    for _ in range(2):
        trial.step()
        found.append(trial.unsaved_iterations())
    assert found == [0, None]
    with pytest.raises(NotSavableError, match=r"train\(\) has not reported a state"):
        saved(trial, tmp_path / "checkpoint")


def test_an_error_in_save_is_raised_and_the_trial_goes_on(resident: Function, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        def save(to: Path) -> None:
            raise OSError("full")

        for value in range(3):
            fluid.report({"value": value}, save=save)

    trial = resident(train)
    trial.step()
    with pytest.raises(OSError, match="full"):
        saved(trial, tmp_path / "checkpoint")
    assert values(trial, 2) == [1, 2]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_what_the_function_raises_is_raised(resident: Function, error: BaseException) -> None:
    def train(config: dict[str, Any]) -> None:
        fluid.report({})
        raise error

    trial = resident(train)
    trial.step()
    with pytest.raises(type(error)) as raised:
        trial.step()
    assert raised.value is error


def test_a_stray_stop_iteration_is_an_error(resident: Function) -> None:
    def train(config: dict[str, Any]) -> None:
        next(iter(()))

    with pytest.raises(RuntimeError, match=r"train\(\) raised StopIteration"):
        resident(train).step()


def test_the_end_unwinds_the_function() -> None:
    seen: list[str] = []

    def train(config: dict[str, Any]) -> None:
        try:
            while True:
                try:
                    fluid.report({})
                except Exception:  # As training code has it that survives bad batches.
                    seen.append("swallowed")
        except TrialEnded:
            seen.append("ended")
            try:
                fluid.report({})  # As a callback at the end of a fit may do.
            finally:
                seen.append("unwound")

    trial = make_resident(train, trial_id="t", folder="unused")
    trial.setup({})
    trial.step()
    trial.cleanup()
    assert seen == ["ended", "unwound"]


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads belong to the trial that starts them, as in a lane."""
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    inherit_trials()


@pytest.mark.usefixtures("inherited")
def test_a_report_may_come_from_another_thread(resident: Function) -> None:
    def train(config: dict[str, Any]) -> None:
        other = threading.Thread(target=fluid.report, args=({"value": 1},), daemon=True)
        other.start()
        other.join()

    trial = resident(train)
    assert trial.step() == Step({"value": 1}, False)
    assert trial.step() == Step(None, True)


def test_a_forked_process_cannot_report(resident: Function) -> None:
    def train(config: dict[str, Any]) -> dict[str, int]:
        child = os.fork()
        if not child:
            status = 1
            try:
                fluid.report({})
            except FluidError:
                status = 7
            finally:
                os._exit(status)
        return {"status": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}

    assert resident(train).step() == Step({"status": 7}, True)


def test_outside_a_trial_it_does_nothing() -> None:
    fluid.report({"loss": 1.0}, save=lambda to: None)
    assert fluid.get_checkpoint() is None


@pytest.mark.parametrize(("metrics", "save"), [(1.0, None), ([("loss", 1.0)], None), ({}, "folder")])
def test_what_cannot_be_reported(metrics: Any, save: Any) -> None:
    with pytest.raises(TypeError, match=r"fluid\.report\(\) takes"):
        fluid.report(metrics, save)


class Stepped:
    def setup(self, config: dict[str, Any]) -> None:
        pass

    def step(self) -> dict[str, int]:
        fluid.report({"value": 1})
        return {"value": 2}


def test_a_class_does_not_report() -> None:
    with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(Stepped, {}, budget=1, trial_id="a")]))
        handle.wait()
    assert "step() of a class returns them" in handle.failures["a"].message


@pytest.mark.slow
def test_in_lanes_it_is_paused_killed_kept_and_extended(tmp_path: Path) -> None:
    """The state comes back in other processes, whatever happens in between."""
    marker = tmp_path / "died"

    def train(config: dict[str, Any]) -> None:
        folder = fluid.get_checkpoint()
        value = 1 if folder is None else int((folder / "value").read_text())
        while True:
            if value > 1_000 and not marker.exists():
                marker.touch()
                os._exit(1)
            value = value * 31 % 1_000_003
            fluid.report({"value": value}, save=writing(value))

    with FluidExecutor(backend="local", devices=1, verbose=0, keep="last", run_dir=tmp_path / "run") as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, {}, budget=6, trial_id="a")]))
        assert handle.wait(60)
        handle.extend("a", by=3)
        assert handle.wait(60)
        found = [result.metrics["value"] for result in handle.results()]
    expected = [1]
    for _ in range(9):
        expected.append(expected[-1] * 31 % 1_000_003)
    assert marker.exists() and found == expected[1:]
    folder = fluid.load(tmp_path / "run").trials[0].load_checkpoint()
    assert isinstance(folder, Path) and (folder / "value").read_text() == str(expected[-1])


def test_a_checkpoint_is_loaded_as_a_folder_whatever_is_in_it(resident: Function, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        fluid.report({}, save=lambda to: (to / "state.pkl").write_text("no pickle"))

    trial = resident(train)
    trial.step()
    path = saved(trial, tmp_path / "checkpoint")
    loaded = load_saved(path, lambda: (train, {}), trial_id="t", folder="unused")
    assert (loaded / "state.pkl").read_text() == "no pickle"


@pytest.mark.ray
@pytest.mark.slow
def test_under_ray_tune_alone_it_reports_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import fluid, ray
from ray import tune

def train(config):
    folder = fluid.get_checkpoint()
    value = 0 if folder is None else int((folder / "value").read_text())
    for count in range(value + 1, value + 3):
        fluid.report({{"value": count}}, save=lambda to: (to / "value").write_text(str(count)))

# A Ray of its own: the GCS of one that has lost many drivers may not reach this one, and then drops its actors.
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
run_config = tune.RunConfig(storage_path={str(tmp_path)!r}, verbose=0)
result = tune.Tuner(train, run_config=run_config).fit()[0]
with result.checkpoint.as_directory() as folder:
    print("found", result.metrics["value"], open(folder + "/value").read())
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert "found 2 2" in done.stdout, done.stderr
