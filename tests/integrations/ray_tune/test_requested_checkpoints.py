"""Checkpoints that a result asks for are of its iteration, whoever set ``should_checkpoint``."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray.tune
from ray.tune.logger import LoggerCallback

from fluid import tune

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, sweep, write_state

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Seconds after which a sweep gives up. Far longer than needed, as the machine may be busy.
PATIENCE = 60.0
ASKED = (3, 6)
#: Iterations and scores of the checkpoints, by folder.
OF_ASKED = {f"checkpoint_{index:06d}": (steps, float(steps)) for index, steps in enumerate(ASKED)}
OPTIONS = {"config": {"x": 1.0, "ends_at": 12}, "num_samples": 2, "time_budget_s": PATIENCE}


class Asks(Climber):
    def step(self) -> dict[str, Any]:
        return {**super().step(), "should_checkpoint": self.steps in ASKED}


class SetsInResult(tune.Callback):
    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        if result["training_iteration"] in ASKED:
            result["should_checkpoint"] = True


class SetsWhenLogging(LoggerCallback):
    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        if result["training_iteration"] in ASKED:
            result["should_checkpoint"] = True


def saves_now_and_then(config: dict[str, Any]) -> None:
    for steps in range(1, 9):
        if steps % 4:
            ray.tune.report({"score": float(steps)})
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_state(folder, steps, float(steps))
            ray.tune.report({"score": float(steps)}, checkpoint=ray.tune.Checkpoint.from_directory(folder))


def test_a_trainable_that_asks_in_its_result(executor: Any, tmp_path: Path) -> None:
    done = sweep(Asks, tmp_path, executor, OPTIONS)
    assert [trial.checkpoints for trial in done.trials] == [OF_ASKED, OF_ASKED]
    assert [trial.iterations for trial in done.trials] == [list(range(1, 13))] * 2


def test_a_callback_that_asks(executor: Any, tmp_path: Path) -> None:
    done = sweep(Climber, tmp_path, executor, {**OPTIONS, "callbacks": [SetsInResult()]})
    assert [trial.checkpoints for trial in done.trials] == [OF_ASKED, OF_ASKED]
    assert [trial.iterations for trial in done.trials] == [list(range(1, 13))] * 2


def test_a_callback_that_asks_a_function_for_a_checkpoint_gets_none(executor: Any, tmp_path: Path) -> None:
    # The function's own checkpoints stay those of their iterations.
    done = sweep(saves_now_and_then, tmp_path, executor, {**OPTIONS, "callbacks": [SetsInResult()]})
    own = {"checkpoint_000000": (4, 4.0), "checkpoint_000001": (8, 8.0)}
    assert [trial.checkpoints for trial in done.trials] == [own, own]


def test_a_logger_that_asks_is_warned_of_and_obeyed_from_then_on(
    executor: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**OPTIONS, "num_samples": 1, "callbacks": [SetsWhenLogging()]}
    with caplog.at_level(logging.WARNING, "fluid"):
        sweep(Climber, tmp_path / "first", executor, {**options, "config": {"x": 1.0, "ends_at": 5}})
    assert "of a later iteration than the result" in caplog.text


def test_callbacks_that_only_read_let_trials_run_ahead(executor: Any, tmp_path: Path) -> None:
    # A trial that waits for Tune after each iteration is extended each time.
    from fluid.session.handle import TrialGroupHandle

    extended: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        extend = TrialGroupHandle.extend
        patch.setattr(
            TrialGroupHandle,
            "extend",
            lambda self, trial_id, *args, **options: (
                extended.append(trial_id) or extend(self, trial_id, *args, **options)
            ),
        )
        sweep(Climber, tmp_path / "logged", executor, OPTIONS)
        assert not extended
        sweep(Climber, tmp_path / "watched", executor, {**OPTIONS, "callbacks": [SetsInResult()]})
        assert len(extended) == 2 * 11
