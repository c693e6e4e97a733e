"""TensorBoard, read back with its own EventAccumulator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.executor import FluidExecutor
from fluid.loggers import LoggedSession, LoggedTrial, TensorBoard
from fluid.loggers.export import export
from fluid.results.records import Result
from fluid.trialgroup import Trial, TrialGroup

pytestmark = pytest.mark.frameworks("tensorboard")
PATIENCE = 90.0


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1, 100):
        if step == config.get("fails_at"):
            raise ValueError("no such luck")
        yield {"loss": config["lr"] / step, "deep": {"nan": math.nan}, "text": f"at {step}", "on": True, "n": None}


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()


def steps(folder: Path, tag: str = "loss") -> list[int]:
    return [event.step for event in events(folder).Scalars(tag)]


def texts(folder: Path, tag: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in events(folder).Tensors(tag)]


def hyperparameters(folder: Path) -> tuple[dict[str, Any], int | None]:
    """The config and the status on the HParams page; no status if the trial has not ended."""
    from tensorboard.plugins.hparams import metadata

    found = events(folder).PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(found["_hparams_/session_start_info"])
    kinds = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    end = found.get("_hparams_/session_end_info")
    return kinds, None if end is None else metadata.parse_session_end_info_plugin_data(end).status


def test_a_run_per_trial(tmp_path: Path) -> None:
    trials = [
        Trial(train, {"lr": 0.5, "net": {"width": 8, "bias": True, "name": "x", "inf": math.inf}}, 3, trial_id="a/b"),
        Trial(train, {"lr": 1.0, "fails_at": 2}, 3, trial_id="fails"),
    ]
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "verbose": 0, "max_failures": 0}
    with FluidExecutor("local", 1, loggers=[TensorBoard(tmp_path / "tb"), TensorBoard()], **options) as executor:
        assert executor.submit_trialgroup(TrialGroup(trials, "my sweep")).wait(PATIENCE)
    run, failed = tmp_path / "tb" / "my sweep" / "a%2Fb", tmp_path / "tb" / "my sweep" / "fails"
    seen = events(run)
    assert [(event.step, event.value) for event in seen.Scalars("loss")] == [
        (step, pytest.approx(0.5 / step)) for step in (1, 2, 3)
    ]
    assert all(math.isnan(event.value) for event in seen.Scalars("deep/nan"))
    assert [event.value for event in seen.Scalars("on")] == [1.0, 1.0, 1.0]
    assert texts(run, "text") == ["at 1", "at 2", "at 3"]
    assert set(seen.Tags()["scalars"]) == {"loss", "deep/nan", "on"}
    success, failure = 1, 2
    config = {"lr": 0.5, "net/width": 8.0, "net/bias": True, "net/name": "x", "net/inf": "Infinity"}
    assert hyperparameters(run) == (config, success)
    assert hyperparameters(failed)[1] == failure
    assert texts(failed, "fluid/state") == ["FAILED"] and texts(run, "fluid/state") == ["DONE"]
    assert "raise ValueError" in texts(failed, "fluid/failure")[0]
    assert steps(tmp_path / "run" / "tensorboard" / "my sweep" / "fails") == [1], "the default is the run folder"


def result(iteration: int) -> Result:
    metrics = {"loss": 1.0 / iteration}
    return Result(
        trial_id="a", iteration=iteration, metrics=metrics, seconds=1.0, width=1.0, device_ids=(0,), config={}
    )


def begun(folder: Path, session_id: str, config: Any = None) -> TensorBoard:
    logger = TensorBoard(folder)
    logger.on_session(LoggedSession(session_id=session_id, run_dir=folder))
    logger.on_trial(LoggedTrial(trial_id="a", group="g", config={"lr": 0.5} if config is None else config, uid="u"))
    logger.on_start("a")
    return logger


def test_a_resumed_session_goes_on_with_the_run(tmp_path: Path) -> None:
    first = begun(tmp_path, "one")
    for iteration in (1, 2, 3):
        first.on_result(result(iteration))
    first.flush()
    with next((tmp_path / "g" / "a").glob("events*")).open("ab") as file:
        file.write(b"torn by a kill")
    again = begun(tmp_path, "one")
    for iteration in (3, 4):  # That it had 3 was not noted.
        again.on_result(result(iteration))
    again.on_end("a", "DONE", None)
    again.on_broken(Exception())
    assert steps(tmp_path / "g" / "a") == [1, 2, 3, 4]


def test_sessions_share_a_folder_but_no_runs(tmp_path: Path) -> None:
    for session_id in ("one", "two", "one"):
        logger = begun(tmp_path, session_id)
        logger.on_result(result(1))
        logger.on_broken(Exception())
    assert steps(tmp_path / "g" / "a") == steps(tmp_path / "g-2" / "a") == [1]
    assert not (tmp_path / "g-3").exists()


def test_a_trial_that_is_extended_goes_on_and_a_config_may_come_late(tmp_path: Path) -> None:
    logger = begun(tmp_path, "one", config={})
    logger.on_result(result(1))
    logger.on_end("a", "PAUSED", None)
    logger.flush()
    logger.on_start("a")
    logger.on_result(result(2))
    logger.on_end("a", "DONE", None)
    logger.flush()
    logger.on_trial(LoggedTrial(trial_id="a", group="g", config={"lr": 0.5}, uid="u"))
    logger.flush()
    logger.on_trial(LoggedTrial(trial_id="a", group="g", config={"lr": 0.5}, uid="u"))
    logger.on_start("a")
    logger.on_result(result(3))
    logger.on_broken(Exception())
    assert steps(tmp_path / "g" / "a") == [1, 2, 3]
    assert hyperparameters(tmp_path / "g" / "a") == ({"lr": 0.5}, 1)


def test_an_export_goes_on_with_runs(tmp_path: Path) -> None:
    with FluidExecutor("local", 1, run_dir=tmp_path / "run", verbose=0) as executor:
        trials = [Trial(train, {"lr": 0.5}, 2, trial_id="a")]
        assert executor.submit_trialgroup(TrialGroup(trials, "g")).wait(PATIENCE)
    for _ in range(2):
        assert export(tmp_path / "run", [TensorBoard(tmp_path / "tb")]) == (1, 2)
    assert steps(tmp_path / "tb" / "g" / "a") == [1, 2]
