"""The importances of hyperparameters."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fluid.reports.analysis.importance import importances
from fluid.reports.run.run import TrialRun
from fluid.results.iterations import StoredIteration
from fluid.results.metrics import Goal

LOSS = Goal("loss", True)


def ran(name: str, config: Mapping[str, Any], loss: float, state: str = "DONE", iterations: int = 1) -> TrialRun:
    finished = tuple(
        StoredIteration("a", k, 1.0, float(k), 1.0, (0,), {"loss": loss}) for k in range(1, iterations + 1)
    )
    return TrialRun(
        trial_id=name, group_id="0", shown_id=name, key="net", config=config, state=state, budget=1, finished=finished
    )


def grid(count: int = 16) -> list[TrialRun]:
    """Trials whose loss depends on the learning rate above all, a little on the activation, and on nothing else."""
    found = []
    for k in range(count):
        lr = 10.0 ** -(k % 4)
        config = {"optimizer": {"lr": lr}, "act": ("relu", "gelu")[k // 4 % 2], "width": 8 << (k // 8 % 2), "data": "x"}
        found.append(ran(f"t{k}", config, math.log10(lr) ** 2 + 0.5 * (config["act"] == "gelu")))
    return found


def test_what_matters_most_comes_first() -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    found = importances(grid(), LOSS)
    assert (found.metric, found.method, found.trials, found.note) == ("loss", "fANOVA", 16, "")
    assert list(found.shares) == ["optimizer/lr", "act", "width"]
    assert found.shares["optimizer/lr"] > 0.9 and found.shares["width"] < 0.01
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert importances(grid(), LOSS) == found
    assert next(iter(importances(grid(), Goal("loss", False)).shares)) == "optimizer/lr"


def test_many_trials_take_the_faster_method() -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    found = importances(grid(480), LOSS)
    assert found.method == "mean decrease in impurity" and next(iter(found.shares)) == "optimizer/lr"


def test_trials_that_ended_early_count_only_if_the_others_are_too_few() -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    whole = [ran(f"w{k}", {"lr": 1.0 + k, "n": k % 3}, float(k), "PAUSED", 4) for k in range(8)]
    early = [ran(f"e{k}", {"lr": 1.0 + k, "n": k % 3}, -9.0 * k, "STOPPED", 2) for k in range(4)]
    assert importances([*whole, *early], LOSS).trials == 8
    found = importances([*whole[1:], *early], LOSS)
    assert (found.trials, found.note) == (11, "some of these trials ended early")


def test_conditional_hyperparameters_are_left_out() -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    trials = [
        ran(f"t{k}", {"lr": 1.0 + k, "n": k % 3, "layers": [8] * k, **({"momentum": 0.9} if k % 2 else {})}, float(k))
        for k in range(40)
    ]
    found = importances(trials, LOSS)
    assert set(found.shares) == {"lr", "n"} and found.note == "left out: layers, momentum"


def test_the_values_of_a_schedule_count_each() -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    trials = [
        ran(f"t{k}", {"lr": f"schedule({{0: 0.1, 10: {k % 6}, 20: {k // 6}}})"}, 10.0 * (k % 6) + k // 6)
        for k in range(36)
    ]
    shares = importances(trials, LOSS).shares
    assert set(shares) == {"lr/10", "lr/20"} and shares["lr/10"] > 0.9


@pytest.mark.parametrize(
    ("trials", "why"),
    [
        (grid()[:7], "needs 8 trials that reported it; there are 7"),
        (
            [ran(f"t{k}", {"lr": 0.1, "n": 1}, float(k)) for k in range(9)],
            "no hyperparameter differs between the trials",
        ),
        ([ran(f"t{k}", {"lr": k, "n": 1}, float(k)) for k in range(9)], "only lr differs between the trials"),
        ([ran(f"t{k}", {"lr": k, "n": -k}, 0.5) for k in range(9)], "all trials have the same loss"),
        (
            [ran(f"t{k}", {"lr": k, "n": -k}, math.nan) for k in range(9)],
            "needs 8 trials that reported it; there are 0",
        ),
    ],
)
def test_it_says_why_there_are_none(trials: list[TrialRun], why: str) -> None:
    found = importances(trials, LOSS)
    assert (found.shares, found.method, found.note) == ({}, "", why)


def test_failed_trials_do_not_count() -> None:
    trials = [ran(f"t{k}", {"lr": k, "n": -k}, float(k), "FAILED" if k > 6 else "DONE") for k in range(12)]
    assert importances(trials, LOSS).note == "needs 8 trials that reported it; there are 7"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("ModuleNotFoundError('no sklearn', name='sklearn')", "is not installed (no sklearn)"),
        ("AttributeError('no such BLAS')", "is installed and cannot be imported (AttributeError: no such BLAS)"),
    ],
)
def test_without_the_packages_it_says_so(error: str, why: str, tmp_path: Path) -> None:
    # A folder before all others on the path, in which the package cannot be imported.
    (tmp_path / "sklearn.py").write_text(f"raise {error}")
    here = Path(__file__).resolve()
    script = (
        f"import sys\nsys.path[:0] = [{str(tmp_path)!r}, {str(here.parent)!r}, {str(here.parents[2])!r}]\n"
        "from test_importance import LOSS, grid, importances\nprint(importances(grid(), LOSS).note)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"needs scikit-learn, which {why}\n"


def test_numbers_beyond_single_precision_are_values_without_an_order() -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("sklearn")
    for huge in (1e39, 10**400):
        trials = [ran(f"t{k}", {"scale": (1, huge)[k % 2], "x": k / 16}, float(k % 2) + k / 99) for k in range(16)]
        assert next(iter(importances(trials, LOSS).shares)) == "scale"
