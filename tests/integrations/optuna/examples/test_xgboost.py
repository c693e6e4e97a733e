"""Studies of XGBoost's models on scikit-learn's own data, as Optuna's examples have them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

optuna = pytest.importorskip("optuna")
pytest.importorskip("sklearn", reason="needs scikit-learn: make examples")
xgboost = pytest.importorskip("xgboost", reason="needs XGBoost: make examples")

from same_study import assert_same  # noqa: E402
from sklearn.datasets import load_breast_cancer  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402


def maximizing() -> Any:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=5), pruner=pruner)


def options_of(trial: Any) -> dict[str, Any]:
    options = {
        "objective": "binary:logistic",
        "eval_metric": "auc",
        "verbosity": 0,
        "nthread": 1,
        "seed": 0,
        "booster": trial.suggest_categorical("booster", ["gbtree", "gblinear", "dart"]),
        "lambda": trial.suggest_float("lambda", 1e-8, 1.0, log=True),
    }
    if options["booster"] != "gblinear":
        options["max_depth"] = trial.suggest_int("max_depth", 3, 7, step=2)
        options["eta"] = trial.suggest_float("eta", 1e-3, 1.0, log=True)
    else:
        options["updater"] = "coord_descent"  # The default is not deterministic.
    return options


def parts() -> tuple[Any, Any, Any]:
    data, target = load_breast_cancer(return_X_y=True)
    train_x, valid_x, train_y, valid_y = train_test_split(data, target, test_size=0.25, random_state=0)
    return xgboost.DMatrix(train_x, train_y, nthread=1), xgboost.DMatrix(valid_x, valid_y, nthread=1), valid_y


def test_boosted_trees() -> None:
    def objective(trial: Any) -> float:
        train, valid, expected = parts()
        model = xgboost.train(options_of(trial), train, num_boost_round=5)
        return float(((model.predict(valid) > 0.5) == expected).mean())

    assert assert_same(maximizing, objective, 8).best_value > 0.85


def test_cross_validation() -> None:
    def objective(trial: Any) -> float:
        data, target = load_breast_cancer(return_X_y=True)
        matrix = xgboost.DMatrix(data, target, nthread=1)
        history = xgboost.cv(options_of(trial), matrix, num_boost_round=4, nfold=3, seed=0, as_pandas=False)
        trial.set_user_attr("rounds", len(history["test-auc-mean"]))
        return float(history["test-auc-mean"][-1])

    assert_same(maximizing, objective, 6)


class Reporting(xgboost.callback.TrainingCallback):  # type: ignore[misc]
    """Reports each round to a trial, and prunes it."""

    def __init__(self, trial: Any) -> None:
        super().__init__()
        self._trial = trial

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self._trial.report(evals_log["valid"]["auc"][-1], epoch)
        if self._trial.should_prune():
            raise optuna.TrialPruned(f"at round {epoch}")
        return False


def test_a_callback_that_prunes() -> None:
    def objective(trial: Any) -> float:
        train, valid, _ = parts()
        told: dict[str, Any] = {}
        watched = {"evals": [(valid, "valid")], "evals_result": told, "verbose_eval": False}
        xgboost.train(options_of(trial), train, num_boost_round=6, callbacks=[Reporting(trial)], **watched)
        return float(told["valid"]["auc"][-1])

    assert "PRUNED" in {trial.state.name for trial in assert_same(maximizing, objective, 10).trials}
