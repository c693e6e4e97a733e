"""The benchmark of official examples: what it changes in them, and how it compares two runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

EXAMPLE = """
import random

import optuna


def objective(trial):
    x = trial.suggest_float("x", -1.0, 1.0)
    return x**2 + random.random() + {more}


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=3)
"""


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("ray")
    pytest.importorskip("optuna")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return pytest.importorskip("official_examples")


def test_one_line_is_changed(examples: Any) -> None:
    changed = examples.with_fluid(EXAMPLE, "optuna").splitlines()
    differing = [(old, new) for old, new in zip(EXAMPLE.splitlines(), changed, strict=True) if old != new]
    assert [old.strip() for old, _ in differing] == ["study.optimize(objective, n_trials=3)"]
    assert differing[0][1].endswith("optimize(study, objective, n_trials=3)")
    with pytest.raises(ValueError, match="no call"):
        examples.with_fluid("study = None", "optuna")


@pytest.mark.slow
def test_runs_are_compared(examples: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "repeats.py").write_text(EXAMPLE.format(more="0.0"))
    (tmp_path / "differs.py").write_text(EXAMPLE.format(more="random.SystemRandom().random()"))
    listed = tuple(examples.Example("optuna", f"{name}.py") for name in ("repeats", "differs"))
    monkeypatch.setattr(examples, "EXAMPLES", listed)
    found = tmp_path / "found.json"
    options = ["--optuna", str(tmp_path), "--logs", str(tmp_path / "logs"), "--json", str(found)]
    monkeypatch.setattr(sys, "argv", ["official_examples.py", *options])
    examples.main()
    repeats, differs = json.loads(found.read_text())["examples"]
    assert (repeats["compared"], repeats["equal"]) == (3, 3) and "stock_equal" not in repeats
    assert (differs["compared"], differs["equal"], differs["stock_compared"], differs["stock_equal"]) == (3, 0, 3, 0)


def test_all_examples_find_the_same(examples: Any) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "official_examples.json").read_text())["examples"]
    assert all(each["equal"] == each["compared"] > 0 for each in results)
    assert examples.table(results).count("\n") == len(results) + 1
