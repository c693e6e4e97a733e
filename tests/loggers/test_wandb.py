"""Weights & Biases in offline mode, read back from its files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb_file import offline_runs

from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.loggers import LoggedSession, LoggedTrial, WandB
from fluid.results.records import Result
from fluid.trialgroup import Trial, TrialGroup

pytestmark = pytest.mark.frameworks("wandb")
PATIENCE = 90.0


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in itertools.count(1):
        if step == config.get("fails_at"):
            raise ValueError("no such luck")
        yield {"loss": config["lr"] / step, "deep": {"nan": math.nan}, "text": f"at {step}"}


def test_a_run_per_trial(tmp_path: Path) -> None:
    logger = WandB("digits", mode="offline", folder=tmp_path / "wb", tags=["red"])
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "verbose": 0, "max_failures": 0}
    with FluidExecutor("local", 1, loggers=[logger], **options) as executor:
        trials = [
            Trial(train, {"lr": 0.5, "net": {"width": 8}}, 3, trial_id="a"),
            Trial(train, {"lr": 1.0, "fails_at": 2}, 3, trial_id="fails"),
        ]
        assert executor.submit_trialgroup(TrialGroup(trials, "sweep")).wait(PATIENCE)
        endless = executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 2.0}, 10**9, trial_id="cut")], "second"))
        assert next(endless.results()).iteration == 1
    runs = offline_runs(tmp_path / "wb")
    assert {name: len(parts) for name, parts in runs.items()} == {"a": 1, "fails": 1, "cut": 1}
    (a,), (failed,), (cut,) = runs["a"], runs["fails"], runs["cut"]
    assert (a.run.project, a.run.run_group, list(a.run.tags)) == ("digits", "sweep", ["red"])
    assert {"lr": 0.5, "net": {"width": 8}}.items() <= a.config.items()
    assert [a.history[step]["loss"] for step in (1, 2, 3)] == pytest.approx([0.5, 0.25, 0.5 / 3])
    assert a.history[2]["text"] == "at 2" and math.isnan(a.history[2]["deep/nan"])
    assert (a.exit_code, failed.exit_code, cut.exit_code) == (0, 1, 0)
    states = [run.summary["fluid/state"] for run in (a, failed, cut)]
    assert states == ["DONE", "FAILED", "UNFINISHED"]
    assert failed.summary["fluid/error"].startswith("ValueError: no such luck")
    assert cut.run.run_group == "second"


def result(iteration: int) -> Result:
    metrics = {"loss": 1.0 / iteration}
    return Result(
        trial_id="a", iteration=iteration, metrics=metrics, seconds=1.0, width=1.0, device_ids=(0,), config={}
    )


def begun(folder: Path, config: Any = None) -> WandB:
    logger = WandB("digits", mode="offline", folder=folder)
    logger.on_session(LoggedSession(session_id="one", run_dir=folder))
    logger.on_trial(LoggedTrial(trial_id="a", group="g", config={"lr": 0.5} if config is None else config, uid="u"))
    logger.on_start("a")
    return logger


def test_a_paused_trial_goes_on_with_its_run_and_a_config_may_come_late(tmp_path: Path) -> None:
    logger = begun(tmp_path, {})
    logger.on_result(result(1))
    logger.on_end("a", "PAUSED", None)
    logger.on_start("a")
    logger.on_result(result(2))
    logger.on_end("a", "DONE", None)
    logger.on_trial(LoggedTrial(trial_id="a", group="g", config={"lr": 0.5}, uid="u"))
    ((run,),) = offline_runs(tmp_path).values()
    assert set(run.history) == {1, 2} and run.config["lr"] == 0.5 and run.exit_code == 0
    logger.on_broken(Exception())


def test_a_resumed_session_has_runs_of_the_same_id(tmp_path: Path) -> None:
    for iteration in (1, 2):
        logger = begun(tmp_path / str(iteration))
        logger.on_result(result(iteration))
        logger.on_broken(Exception())
    ((first,),), ((second,),) = (offline_runs(tmp_path / str(n)).values() for n in (1, 2))
    assert first.run.run_id == second.run.run_id
    assert set(first.history) == {1} and set(second.history) == {2}


def test_what_the_logger_sets_cannot_be_given() -> None:
    with pytest.raises(InvalidFieldError, match="config"):
        WandB("digits", config={})
    with pytest.raises(InvalidFieldError, match="mode"):
        WandB("digits", mode="off")
