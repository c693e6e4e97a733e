"""Studies of LightGBM's models on scikit-learn's own data, as Optuna's examples have them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

optuna = pytest.importorskip("optuna")
pytest.importorskip("sklearn", reason="needs scikit-learn: make examples")
lightgbm = pytest.importorskip("lightgbm", reason="needs LightGBM: make examples")

from same_study import assert_same  # noqa: E402
from sklearn.datasets import load_breast_cancer  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402


def maximizing() -> Any:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=5), pruner=pruner)


def options_of(trial: Any) -> dict[str, Any]:
    return {
        "objective": "binary",
        "metric": "auc",
        "verbosity": -1,
        "num_threads": 1,
        "deterministic": True,
        "seed": 0,
        "num_leaves": trial.suggest_int("num_leaves", 2, 64, log=True),
        "lambda_l1": trial.suggest_float("lambda_l1", 1e-8, 10.0, log=True),
        "feature_fraction": trial.suggest_float("feature_fraction", 0.4, 1.0),
        "bagging_freq": trial.suggest_int("bagging_freq", 1, 7),
    }


def parts() -> tuple[Any, Any, Any, Any]:
    data, target = load_breast_cancer(return_X_y=True)
    train_x, valid_x, train_y, valid_y = train_test_split(data, target, test_size=0.25, random_state=0)
    return lightgbm.Dataset(train_x, train_y), lightgbm.Dataset(valid_x, valid_y), valid_x, valid_y


def test_boosted_trees() -> None:
    def objective(trial: Any) -> float:
        train, _, valid_x, valid_y = parts()
        model = lightgbm.train(options_of(trial), train, num_boost_round=6)
        return float(((model.predict(valid_x) > 0.5) == valid_y).mean())

    assert assert_same(maximizing, objective, 8).best_value > 0.85


def test_a_callback_that_prunes() -> None:
    def objective(trial: Any) -> float:
        train, valid, _, _ = parts()
        latest = [0.0]

        def report(state: Any) -> None:
            latest[0] = state.evaluation_result_list[0][2]
            trial.report(latest[0], state.iteration)
            if trial.should_prune():
                raise optuna.TrialPruned

        lightgbm.train(options_of(trial), train, num_boost_round=8, valid_sets=[valid], callbacks=[report])
        return latest[0]

    assert "PRUNED" in {trial.state.name for trial in assert_same(maximizing, objective, 10).trials}
