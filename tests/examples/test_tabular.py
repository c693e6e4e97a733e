"""The sweep over networks for tables, at a small scale."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")
import tabular
from models.tables import load

import fluid

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "classes"), [("digits", 10), ("breast_cancer", 2), ("wine", 3)])
def test_a_table_is_split_and_scaled_by_its_training_rows(name: str, classes: int) -> None:
    x_train, y_train, x_test, y_test = load(name)
    assert len(x_test) == len(y_test) == -(-(len(x_train) + len(x_test)) // 4)
    assert set(y_train.tolist()) == set(y_test.tolist()) == set(range(classes))
    assert x_train.mean(0).abs().max() < 1e-5
    assert (x_train.std(0, correction=0) <= 1.001).all()
    assert load(name)[0] is x_train


@pytest.mark.parametrize(("name", "algorithm", "packing"), [("digits", "asha", "auto"), ("wine", "sha", "off")])
def test_it_runs(name: str, algorithm: str, packing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", name, "--algorithm", algorithm, "--packing", packing, "--samples", "9", "--epochs", "3"]
    result = tabular.main([*arguments, "--devices", "2", "--run-dir", str(tmp_path / "run")])
    assert len(result.trials) == 9 and not result.failures
    assert {trial.iteration for trial in result.trials} == {1, 3}
    assert 0.5 < result.best.value <= 1.0
    stored = fluid.load(tmp_path / "run")
    assert stored.best.config == result.best.config
    assert f"right on {result.best.value:.1%} of the rows held out" in capsys.readouterr().out
