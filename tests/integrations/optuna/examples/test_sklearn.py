"""Studies of scikit-learn's models on its own data, as Optuna's examples have them."""

from __future__ import annotations

from typing import Any

import pytest

optuna = pytest.importorskip("optuna")
pytest.importorskip("sklearn", reason="needs scikit-learn: make examples")

from same_study import assert_same  # noqa: E402
from sklearn.datasets import load_iris  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.linear_model import SGDClassifier  # noqa: E402
from sklearn.model_selection import cross_val_score, train_test_split  # noqa: E402
from sklearn.svm import SVC  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::optuna.exceptions.ExperimentalWarning", "ignore:.*has been deprecated:FutureWarning"
    ),
    pytest.mark.slow,
]


def maximizing(**options: Any) -> Any:
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=5), **options)


def classifier_of(trial: Any) -> Any:
    if trial.suggest_categorical("classifier", ["vectors", "forest"]) == "vectors":
        return SVC(C=trial.suggest_float("c", 1e-5, 1e5, log=True), gamma="auto")
    depth = trial.suggest_int("depth", 2, 16, log=True)
    return RandomForestClassifier(max_depth=depth, n_estimators=5, random_state=0)


def test_a_choice_of_classifiers() -> None:
    def objective(trial: Any) -> float:
        data, target = load_iris(return_X_y=True)
        return float(cross_val_score(classifier_of(trial), data, target, cv=3).mean())

    assert assert_same(maximizing, objective, 12).best_value > 0.9


def test_an_object_that_keeps_its_data() -> None:
    class Objective:
        def __init__(self, data: Any, target: Any) -> None:
            self.data, self.target = data, target

        def __call__(self, trial: Any) -> float:
            return float(cross_val_score(classifier_of(trial), self.data, self.target, cv=3).mean())

    assert_same(maximizing, Objective(*load_iris(return_X_y=True)), 10)


def test_pruning_of_gradient_descent() -> None:
    def objective(trial: Any) -> float:
        data, target = load_iris(return_X_y=True)
        train_x, test_x, train_y, test_y = train_test_split(data, target, test_size=0.25, random_state=0)
        model = SGDClassifier(alpha=trial.suggest_float("alpha", 1e-5, 1e-1, log=True), random_state=0)
        for step in range(30):
            model.partial_fit(train_x, train_y, classes=[0, 1, 2])
            trial.report(1.0 - model.score(test_x, test_y), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return float(1.0 - model.score(test_x, test_y))

    def make() -> Any:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
        return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=5), pruner=pruner)

    study = assert_same(make, objective, 15)
    assert "PRUNED" in {trial.state.name for trial in study.trials}


def test_a_terminator_that_knows_the_folds() -> None:
    from optuna.terminator import TerminatorCallback, report_cross_validation_scores

    def objective(trial: Any) -> float:
        data, target = load_iris(return_X_y=True)
        model = RandomForestClassifier(max_depth=trial.suggest_int("depth", 2, 32), n_estimators=5, random_state=0)
        scores = cross_val_score(model, data, target, cv=3)
        report_cross_validation_scores(trial, scores.tolist())
        return float(scores.mean())

    never = optuna.terminator.StaticErrorEvaluator(0.0)
    terminator = optuna.terminator.Terminator(error_evaluator=never, min_n_trials=6)
    assert_same(maximizing, objective, 8, callbacks=[TerminatorCallback(terminator)])
