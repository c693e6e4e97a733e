"""Searches whose resource is the number of samples: subsamples have each class, and a fit too small for one goes on."""

# ruff: noqa: E402  (scikit-learn is optional)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.frameworks("sklearn")
pytest.importorskip("sklearn")

from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import make_classification
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import StratifiedKFold
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import Pipeline
from sklearn.svm import SVC

from fluid import FluidExecutor, InvalidFieldError
from fluid.integrations.sklearn import FluidSearchCV
from fluid.integrations.sklearn.evaluation import SearchTask, train
from fluid.integrations.sklearn.resources import Ladder, SteppedFit, make_ladder, resource_of, sample_order

X, Y = make_classification(600, weights=[0.97], flip_y=0, random_state=1)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "labels",
    [
        np.array(["rare"] * 2 + ["common"] * 98),
        np.repeat([0, 1, 2], [1, 9, 90]),
        np.array([None, 1, "a", 2.5] * 5, dtype=object),
        np.array([[1, 0, 0]] * 3 + [[0, 1, 0]] * 60 + [[0, 0, 1]] * 2),
    ],
)
def test_every_prefix_has_each_class_and_then_the_classes_in_proportion(labels: Any, seed: int) -> None:
    order, least = sample_order(labels, len(labels), seed)
    assert sorted(order) == list(range(len(labels)))
    columns = np.asarray(labels).reshape(len(labels), -1)
    for amount in range(least, len(labels) + 1):
        for column in columns.T.astype(str):
            assert set(column[order[:amount]]) == set(column)
    if columns.shape[1] == 1:
        for name in set(columns[:, 0].astype(str)):
            share = (columns[order[: len(labels) // 2], 0].astype(str) == name).sum() - len(labels) // 2 * np.mean(
                columns[:, 0].astype(str) == name
            )
            assert abs(share) <= least


def test_without_classes_the_order_is_random() -> None:
    order, least = sample_order(None, 20, seed=3)
    assert least == 1 and list(order) == list(np.random.default_rng(3).permutation(20))


@pytest.mark.parametrize("seed", range(4))
def test_no_candidate_is_lost_for_a_rare_class(seed: int, executor: FluidExecutor) -> None:
    search = FluidSearchCV(
        SVC(),
        {"C": np.logspace(-2, 2, 9)},
        algorithm="asha",
        samples=9,
        resource="n_samples",
        cv=StratifiedKFold(3),
        random_state=seed,
        error_score="raise",
    ).fit(X, Y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert min(search.cv_results_["n_resources"]) < 20 and max(search.cv_results_["n_resources"]) == 400


def _ladder() -> Ladder:
    return make_ladder("n_samples", budget=27, eta=3, min_budget=1, least_share=0.01, seed=0)


def test_the_estimator_has_all_classes_at_each_rung() -> None:
    fit, ladder = SteppedFit(SVC(), _ladder()), _ladder()
    amounts = []
    for iteration in range(len(ladder.shares)):
        fit.advance(iteration, lambda: (X, Y, {}))
        assert list(fit.estimator.classes_) == [0, 1]
        amounts.append(fit.amount)
    assert amounts == [22, 67, 200, 600]


class NeedsMany(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Cannot be fitted on few rows."""

    def __init__(self, least: int = 0) -> None:
        self.least = least

    def fit(self, x: Any, y: Any) -> NeedsMany:
        if len(x) < self.least:
            raise ValueError(f"{len(x)} rows are too few")
        self.classes_, self.rows_ = np.unique(y), len(x)
        return self

    def predict(self, x: Any) -> Any:
        return np.full(len(x), self.classes_[0])


def test_a_candidate_whose_subsample_is_too_small_goes_on_with_more() -> None:
    def iterations(least: int) -> list[dict[str, Any]]:
        task = SearchTask(
            estimator=NeedsMany(),
            X=X,
            y=Y,
            splits=list(StratifiedKFold(2).split(X, Y)),
            scorer=lambda estimator, x, y: estimator.rows_,
            metric=None,
            fit_params={},
            score_params={},
            return_train_score=False,
            error_score=np.nan,
            verbose=0,
            settings={},
            ladder=_ladder(),
        )
        return [metrics for metrics, _ in train(task, None, {"least": least, "cv_results_ row": 0}, None)]

    assert [metrics["n_resources"] for metrics in iterations(50)] == [100, 100, 100, 300]
    assert [metrics["score"] for metrics in iterations(50)] == [100, 100, 100, 300]
    failed = iterations(301)[0]  # A lane ends it there.
    assert np.isnan(failed["score"]) and failed["done"] and "300 rows are too few" in failed["fits"][0]["fit_error"]


def test_the_resource_is_one_that_all_candidates_have(executor: FluidExecutor) -> None:
    sgd = SGDClassifier(random_state=0)
    assert resource_of([sgd, GaussianNB()], "auto") == "partial_fit"
    assert resource_of([sgd, SVC()], "auto") == "n_samples"
    with pytest.raises(InvalidFieldError, match="SVC has no partial_fit"):
        resource_of([sgd, SVC()], "partial_fit")
    search = FluidSearchCV(
        Pipeline([("m", sgd)]),
        {"m": [sgd, SVC()]},
        algorithm="asha",
        samples=2,
        cv=2,
        random_state=0,
        error_score="raise",
    ).fit(X, Y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert max(search.cv_results_["n_resources"]) == 300
    alone = FluidSearchCV(Pipeline([("m", SVC())]), {"m": [sgd]}, algorithm="asha", samples=1, cv=2, budget=3)
    assert max(alone.fit(X, Y).cv_results_["n_resources"]) == 3  # Passes.
