"""CSV and Parquet, read back with pandas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid._clock import VirtualClock
from fluid.cli import main
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.loggers import CSV, LoggedSession, LoggedTrial, Parquet, TrialLogger
from fluid.loggers.export import export
from fluid.results.records import Result
from fluid.trialgroup import Trial, TrialGroup

pandas = pytest.importorskip("pandas")
PATIENCE = 90.0
#: Parquet needs a package, which Ray brings too.
KINDS = [CSV, pytest.param(Parquet, marks=pytest.mark.frameworks("pyarrow"))]


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1, 100):
        metrics = {
            "loss": config["lr"] / step,
            "deep": {"step": step},
            "nan": math.nan,
            "text": 'a, "b"\nc',
            "on": True,
        }
        yield {**metrics, "list": [step, 2]} if step > 2 else metrics
        if step == config.get("fails_at"):
            raise ValueError("no such luck")


def read(folder: Path, name: str) -> Any:
    if (folder / f"{name}.csv").exists():
        return pandas.read_csv(folder / f"{name}.csv")
    return pandas.read_parquet(folder / f"{name}.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_a_session(kind: Callable[..., TrialLogger], tmp_path: Path) -> None:
    trials = [
        Trial(train, {"lr": 0.5, "net": {"width": [8, 8]}}, 3, trial_id="a"),
        Trial(train, {"lr": 1.0, "net": {"width": [4]}, "fails_at": 2}, 3, trial_id="b"),
    ]
    folder = tmp_path / "tables"
    options: dict[str, Any] = {"run_dir": tmp_path / "run", "verbose": 0, "max_failures": 0}
    with FluidExecutor("local", 1, loggers=[kind(folder)], **options) as executor:
        for one in (TrialGroup(trials, "first"), TrialGroup([Trial(train, {"lr": 2}, 1, trial_id="c")], "second")):
            assert executor.submit_trialgroup(one).wait(PATIENCE)
    own = read(folder, "trials").set_index("trial")
    assert own["state"].to_dict() == {"a": "DONE", "b": "FAILED", "c": "DONE"}
    assert own["group"].to_dict() == {"a": "first", "b": "first", "c": "second"}
    assert own["iteration"].to_dict() == {"a": 3, "b": 2, "c": 1}
    assert own["config/lr"].to_dict() == {"a": 0.5, "b": 1.0, "c": 2.0}
    assert own.loc["a", "config/net/width"] == "[8, 8]"
    assert own.loc["a", "metrics/loss"] == pytest.approx(0.5 / 3)
    assert own.loc["b", "error"] == "ValueError: no such luck" and own.loc[["a", "c"], "error"].isna().all()
    rows = read(folder, "iterations")
    assert [*rows.columns[:4]] == ["trial", "group", "iteration", "seconds"]
    assert rows.groupby("trial")["iteration"].apply(list).to_dict() == {"a": [1, 2, 3], "b": [1, 2], "c": [1]}
    a = rows[rows["trial"] == "a"]
    assert a["metrics/deep/step"].tolist() == [1, 2, 3]
    assert a["metrics/list"].tolist()[2:] == ["[3, 2]"] and a["metrics/list"].isna().tolist() == [True, True, False]
    assert a["metrics/nan"].isna().all()
    assert set(a["metrics/text"]) == {'a, "b"\nc'} and a["metrics/on"].astype(bool).all()
    whole = fluid.load(tmp_path / "run").dataframe("iteration")
    assert set(rows.columns) == set(whole.columns) - {"state"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_session_makes_its_tables_anew(kind: Callable[..., TrialLogger], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with FluidExecutor("local", 1, loggers=[kind()], run_dir=run_dir, verbose=0) as executor:
        trials = [Trial(train, {"lr": 0.5}, 2, trial_id="a"), Trial(train, {"lr": 1.0}, 1, trial_id="b")]
        assert executor.submit_trialgroup(TrialGroup(trials)).wait(PATIENCE)
    folder = run_dir / kind().__class__.__name__.lower()
    with next(folder.glob("iterations.*")).open("ab") as file:
        file.write(b"torn")
    resumed = FluidExecutor.resume(run_dir, backend="local", devices=1, verbose=0, loggers=[kind()])
    with resumed as executor:
        executor.handles[0].add(Trial(train, {"lr": 2.0}, 1, trial_id="c"))
        assert executor.handles[0].wait(PATIENCE)
    rows = read(folder, "iterations")
    assert rows.groupby("trial")["iteration"].apply(list).to_dict() == {"a": [1, 2], "b": [1], "c": [1]}
    assert read(folder, "trials").set_index("trial")["state"].to_dict() == {"a": "DONE", "b": "DONE", "c": "DONE"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_of_one_session(kind: Callable[..., TrialLogger], tmp_path: Path) -> None:
    kind(tmp_path).on_session(LoggedSession(session_id="one", run_dir=tmp_path))
    kind(tmp_path).on_session(LoggedSession(session_id="one", run_dir=tmp_path))
    with pytest.raises(InvalidFieldError, match="tables of another session"):
        kind(tmp_path).on_session(LoggedSession(session_id="two", run_dir=tmp_path))


@pytest.mark.frameworks("pyarrow")
def test_a_column_of_several_kinds_is_text(tmp_path: Path) -> None:
    logger = Parquet(tmp_path)
    logger.on_session(LoggedSession(session_id="one", run_dir=tmp_path))
    logger.on_trial(LoggedTrial(trial_id="a", group="g", uid="u"))
    values: list[Any] = [1, 2.5, None, "text", 1 << 70, True]
    for iteration, value in enumerate(values, 1):
        metrics = {"x": value, "late": iteration} if iteration > 3 else {"x": value}
        logger.on_result(
            Result(trial_id="a", iteration=iteration, metrics=metrics, seconds=1, width=1.0, device_ids=(0,), config={})
        )
        logger.on_broken(Exception())  # Writes.
    rows = read(tmp_path, "iterations")
    assert rows["metrics/x"].tolist()[3:] == ["text", str(1 << 70), "True"]
    assert [float(value) for value in rows["metrics/x"][:2]] == [1.0, 2.5]
    assert rows["metrics/late"].isna().tolist() == [True] * 3 + [False] * 3


def test_tables_are_written_now_and_then(tmp_path: Path) -> None:
    clock = VirtualClock()
    logger = CSV(tmp_path)
    logger._clock = clock
    logger.on_session(LoggedSession(session_id="one", run_dir=tmp_path))
    logger.on_trial(LoggedTrial(trial_id="a", group="g", uid="u"))
    assert logger.flush()
    logger.on_end("a", "DONE", None)
    assert not logger.flush(), "a moment ago it was written"
    assert read(tmp_path, "trials")["state"].tolist() == ["UNFINISHED"]
    clock.advance_to(1.0)
    assert logger.flush()
    assert read(tmp_path, "trials")["state"].tolist() == ["DONE"]


@pytest.mark.slow
def test_a_run_without_loggers_can_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FluidExecutor("local", 1, run_dir=tmp_path / "run", verbose=0, max_failures=0) as executor:
        trials = [Trial(train, {"lr": 0.5}, 2, trial_id="a"), Trial(train, {"lr": 1, "fails_at": 1}, 2, trial_id="b")]
        assert executor.submit_trialgroup(TrialGroup(trials)).wait(PATIENCE)
    assert export(tmp_path / "run", [CSV(tmp_path / "tables")]) == (2, 3)
    assert main(["export", str(tmp_path / "run"), "--csv", str(tmp_path / "tables")]) == 0
    assert capsys.readouterr().out == "logged 2 trials and 3 results to CSV\n"
    assert main(["export", str(tmp_path / "run")]) == 2
    assert "give --tensorboard" in capsys.readouterr().err
    own = read(tmp_path / "tables", "trials").set_index("trial")
    assert own["state"].to_dict() == {"a": "DONE", "b": "FAILED"}
    assert len(read(tmp_path / "tables", "iterations")) == 3
