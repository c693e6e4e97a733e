"""MLflow, read back with its client, from an SQLite store."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.loggers import LoggedSession, LoggedTrial, MLflow
from fluid.results.records import Result
from fluid.trialgroup import Trial, TrialGroup

pytestmark = [
    pytest.mark.frameworks("mlflow"),
    # Those of MLflow and of its store.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]
PATIENCE = 90.0


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in itertools.count(1):
        if step == config.get("fails_at"):
            raise ValueError("no such luck")
        yield {"loss": config["lr"] / step, "deep": {"nan": math.nan}, "text": f"at {step}", "f1@10%": 0.5}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new store: to make one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        MLflow(f"sqlite:///{path}").client.search_experiments()
    return path


@pytest.fixture
def uri(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def runs(logger: MLflow, experiment: str) -> dict[str, Any]:
    """The runs of an experiment, by name."""
    found = logger.client.search_runs([logger.client.get_experiment_by_name(experiment).experiment_id])
    assert len({run.info.run_name for run in found}) == len(found)
    return {run.info.run_name: run for run in found}


def steps(logger: MLflow, run: Any, metric: str = "loss") -> list[int]:
    return sorted(point.step for point in logger.client.get_metric_history(run.info.run_id, metric))


def test_a_run_per_trial(uri: str, tmp_path: Path) -> None:
    logger, other = MLflow(uri, tags={"team": "red"}), MLflow(uri, experiment="all")
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "verbose": 0, "max_failures": 0}
    with FluidExecutor("local", 1, loggers=[logger, other], **options) as executor:
        trials = [
            Trial(train, {"lr": 0.5, "net": {"width": [8, 8]}}, 3, trial_id="a"),
            Trial(train, {"lr": 1.0, "fails_at": 2}, 3, trial_id="fails"),
        ]
        assert executor.submit_trialgroup(TrialGroup(trials, "first")).wait(PATIENCE)
        second = executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 2.0}, 10**9, trial_id="b")], "second"))
        assert next(second.results()).iteration == 1
    first = runs(logger, "first")
    a, failed, cut = first["a"], first["fails"], runs(logger, "second")["b"]
    assert a.data.params == {"lr": "0.5", "net/width": "[8, 8]"}
    assert a.data.metrics["loss"] == pytest.approx(0.5 / 3) and a.data.metrics["f1_10_"] == 0.5
    assert steps(logger, a) == [1, 2, 3] and math.isnan(a.data.metrics["deep/nan"])
    tags = {"team": "red", "fluid.group": "first", "fluid.trial": "a", "fluid.state": "DONE", "metrics.text": "at 3"}
    assert tags.items() <= a.data.tags.items()
    assert (a.info.status, failed.info.status, cut.info.status) == ("FINISHED", "FAILED", "KILLED")
    assert failed.data.tags["fluid.error"].startswith("ValueError: no such luck")
    assert cut.data.tags["fluid.state"] == "UNFINISHED"
    assert set(runs(other, "all")) == {"a", "fails", "b"}


def result(iteration: int, **metrics: Any) -> Result:
    found = metrics or {"loss": 1.0 / iteration}
    return Result(trial_id="a", iteration=iteration, metrics=found, seconds=1.0, width=1.0, device_ids=(0,), config={})


def begun(uri: str, config: Any = None) -> MLflow:
    logger = MLflow(uri)
    logger.on_session(LoggedSession(session_id="one", run_dir=Path("run")))
    logger.on_trial(LoggedTrial(trial_id="a", group="g", config={"lr": 0.5} if config is None else config, uid="u"))
    logger.on_start("a")
    return logger


def test_a_resumed_session_goes_on_with_the_run(uri: str) -> None:
    first = begun(uri)
    for iteration in (1, 2, 3):
        first.on_result(result(iteration))
    first.flush()  # Killed here.
    again = begun(uri)
    for iteration in (3, 4):  # That it had 3 was not noted.
        again.on_result(result(iteration))
    assert runs(again, "g")["a"].info.status == "RUNNING"
    again.on_end("a", "STOPPED", None)
    run = runs(again, "g")["a"]
    assert steps(again, run) == [1, 2, 3, 4]
    assert (run.info.status, run.data.tags["fluid.state"]) == ("FINISHED", "STOPPED")
    once_more = begun(uri, {"lr": 0.5, "late": "x" * 7000})
    assert runs(again, "g")["a"].info.status == "RUNNING", "it was extended"
    once_more.on_broken(Exception())
    run = runs(again, "g")["a"]
    assert run.info.status == "KILLED" and len(run.data.params["late"]) == 6000


def test_a_config_that_comes_late(uri: str) -> None:
    logger = begun(uri, {})
    logger.on_result(result(1))
    logger.on_end("a", "DONE", None)
    logger.on_trial(LoggedTrial(trial_id="a", group="g", config={"lr": 0.5}, uid="u"))
    logger.on_broken(Exception())
    run = runs(logger, "g")["a"]
    assert (run.data.params, run.info.status, run.data.tags["fluid.state"]) == ({"lr": "0.5"}, "FINISHED", "DONE")


def test_many_metrics_and_params(uri: str) -> None:
    logger = begun(uri, {f"p{n}": n for n in range(250)})
    logger.on_result(result(1, **{f"m{n}": n for n in range(1500)}, **{f"t{n}": "text" for n in range(150)}))
    logger.on_broken(Exception())
    data = runs(logger, "g")["a"].data
    assert len(data.params) == 250 and len(data.metrics) == 1500
    assert len([tag for tag in data.tags if tag.startswith("metrics.t")]) == 150


def test_what_mlflow_cannot_take_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="experiment"):
        MLflow(experiment="")
    with pytest.raises(InvalidFieldError, match="tags"):
        MLflow(tags="team")  # type: ignore[arg-type]


@pytest.mark.parametrize("isolation", ["trial", "lane"])
def test_a_run_that_a_trial_has_left_active_is_ended_with_it(uri: str, tmp_path: Path, isolation: Any) -> None:
    def start_run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import mlflow

        mlflow.set_tracking_uri(config["uri"])
        mlflow.start_run()
        mlflow.log_param("number", config["number"])
        yield {"loss": 0.0}

    with FluidExecutor("local", 1, run_dir=tmp_path / "run", verbose=0, packing="off", isolation=isolation) as session:
        trials = [Trial(start_run, {"uri": uri, "number": number}) for number in range(2)]
        handle = session.submit_trialgroup(TrialGroup(trials))
        handle.wait(PATIENCE)
        handle.raise_failures()
    runs = MLflow(uri).client.search_runs(["0"])
    assert sorted((run.data.params["number"], run.info.status) for run in runs) == [
        ("0", "FINISHED"),
        ("1", "FINISHED"),
    ]
