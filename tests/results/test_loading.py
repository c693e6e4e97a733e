from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError


def train(config: dict[str, Any]) -> Any:
    for step in range(1, 4):
        yield {"loss": abs(step - 2) + config["lr"], "eval": {"f1": config["lr"] * step}, "name": "x"}


def broken(config: dict[str, Any]) -> Any:
    yield {"loss": -1.0}
    raise ValueError("too small")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    trials = [fluid.Trial(train, {"lr": lr, "net": {"width": 8}}, budget=3, trial_id=f"lr{lr}") for lr in (0.5, 0.25)]
    with fluid.FluidExecutor(backend="local", devices=1, run_dir=folder, max_failures=0, verbose=0) as executor:
        assert executor.submit_trialgroup(fluid.TrialGroup(trials, name="one")).wait()
        group = fluid.TrialGroup([fluid.Trial(broken, {"lr": 9}, budget=3, trial_id="bad")], name="two")
        assert executor.submit_trialgroup(group).wait()
    return folder


def test_a_finished_session_is_read_whole(finished: Path) -> None:
    result = fluid.load(finished)
    assert (result.state, result.metric, result.mode, result.run_dir) == ("DONE", None, None, finished)
    assert [(t.trial_id, t.group, t.state, t.iteration) for t in result.trials] == [
        ("lr0.5", "one", "DONE", 3),
        ("lr0.25", "one", "DONE", 3),
        ("bad", "two", "FAILED", 1),
    ]
    first = result.trials[0]
    assert first.config == {"lr": 0.5, "net": {"width": 8}}
    assert first.metrics == {"loss": 1.5, "eval": {"f1": 1.5}, "name": "x"}
    assert [r.iteration for r in first.results] == [1, 2, 3]
    assert first.seconds == pytest.approx(sum(r.seconds for r in first.results))
    assert result.failures["bad"].message == "ValueError: too small"
    assert "ValueError: too small" in result.trials[2].log.read_text()  # type: ignore[union-attr]


def test_the_best_is_of_any_iteration_and_not_of_a_failed_trial(finished: Path) -> None:
    best = fluid.load(finished, metric="loss", mode="min").best
    assert (best.trial_id, best.value, best.iteration, best.config["lr"]) == ("lr0.25", 0.25, 2, 0.25)
    assert best.checkpoint is None and best.checkpoint_iteration is None
    nested = fluid.load(finished).best_by("eval/f1", "max")
    assert (nested.trial_id, nested.value, nested.iteration) == ("lr0.5", 1.5, 3)


def test_a_table_has_a_row_per_trial_or_iteration(finished: Path) -> None:
    pytest.importorskip("pandas")
    result = fluid.load(finished)
    table = result.dataframe()
    assert list(table.columns) == [
        *("trial", "group", "state", "iteration", "seconds", "device_seconds", "config/lr", "config/net/width"),
        *("metrics/loss", "metrics/eval/f1", "metrics/name", "checkpoint", "error"),
    ]
    assert list(table["error"].fillna("")) == ["", "", "ValueError: too small"]
    known = fluid.load(finished, metric="loss").dataframe()
    assert list(known.columns)[-4:] == ["best/loss", "best/iteration", "checkpoint", "error"]
    assert list(known["best/loss"]) == [0.5, 0.25, -1.0] and list(known["best/iteration"]) == [2, 2, 1]
    assert list(result.dataframe("iteration")["iteration"]) == [1, 2, 3, 1, 2, 3, 1]


def test_what_is_not_known_is_said(finished: Path) -> None:
    result = fluid.load(finished)
    with pytest.raises(InvalidFieldError, match="metric=None: name one, as no search does; there are loss, eval/f1"):
        _ = result.best
    with pytest.raises(FluidError, match=r"no trial has reported a number as 'accuracy'; there are loss, eval/f1"):
        result.best_by("accuracy")
    with pytest.raises(InvalidFieldError, match="mode="):
        result.best_by("loss", "least")


def test_a_table_without_pandas_names_what_to_install(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match=r"needs pandas.* to install it: pip install .*pandas"):
        fluid.load(finished).dataframe()


def test_a_table_of_nothing_has_its_columns(finished: Path) -> None:
    pytest.importorskip("pandas")
    empty = replace(fluid.load(finished), trials=())
    assert list(empty.dataframe().columns) == [
        "trial",
        "state",
        "iteration",
        "seconds",
        "device_seconds",
        "checkpoint",
        "error",
    ]
    assert len(empty.dataframe("iteration")) == 0
    with pytest.raises(InvalidFieldError, match="every="):
        empty.dataframe("step")
