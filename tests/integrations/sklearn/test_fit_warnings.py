"""Warnings of fits and scorers in lanes reach the user as those of scikit-learn's searches with n_jobs=1."""

# ruff: noqa: E402  (scikit-learn is optional)

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.frameworks("sklearn")
pytest.importorskip("sklearn")

from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, make_scorer
from sklearn.model_selection import GridSearchCV
from sklearn.tree import DecisionTreeClassifier

from fluid import FluidExecutor
from fluid.integrations.sklearn import FluidSearchCV

X, Y = load_iris(return_X_y=True)
SLOW = LogisticRegression()
GRID = {"max_iter": [2, 500]}


def _search(is_ours: bool, estimator: Any, grid: Any, **options: Any) -> Any:
    if is_ours:
        return FluidSearchCV(estimator, grid, algorithm="grid", cv=2, **options)
    return GridSearchCV(estimator, grid, cv=2, **options)


def _told(search: Any, *filters: Any, **options: Any) -> tuple[list[Any], Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for action, category in filters:
            warnings.filterwarnings(action, category=category)
        search.fit(X, Y)
    told = [(each.category, str(each.message), each.filename, each.lineno) for each in caught]
    return told, search.cv_results_["mean_test_score"]


def test_warnings_of_fits_are_caught_in_the_driver(executor: FluidExecutor) -> None:
    theirs, scores = _told(_search(False, SLOW, GRID, refit=False))
    ours, our_scores = _told(_search(True, SLOW, GRID, refit=False))
    assert {each[0] for each in theirs} == {ConvergenceWarning}
    assert sorted(map(str, set(ours))) == sorted(map(str, set(theirs)))
    assert len(ours) == len(set(ours))  # Each text once.
    np.testing.assert_array_equal(our_scores, scores)


def test_all_are_issued_if_the_filter_says_always(executor: FluidExecutor) -> None:
    ours, _ = _told(_search(True, SLOW, GRID, refit=False), ("always", ConvergenceWarning))
    theirs, _ = _told(_search(False, SLOW, GRID, refit=False), ("always", ConvergenceWarning))
    assert sorted(map(str, ours)) == sorted(map(str, theirs)) and len(ours) == 2


@pytest.mark.parametrize("action", ["error", "ignore"])
def test_filters_hold_in_lanes(action: str, executor: FluidExecutor) -> None:
    quiet = [("ignore", UserWarning), (action, ConvergenceWarning)]
    ours, our_scores = _told(_search(True, SLOW, GRID, refit=False), *quiet)
    theirs, scores = _told(_search(False, SLOW, GRID, refit=False), *quiet)
    np.testing.assert_array_equal(our_scores, scores)
    assert bool(np.isnan(scores[0])) == (action == "error")
    assert [each[0] for each in ours] == [each[0] for each in theirs]


def test_a_filter_by_module_holds_in_the_driver(executor: FluidExecutor) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"sklearn\.linear_model")
        _search(True, SLOW, GRID, refit=False).fit(X, Y)
    assert [each.category for each in caught] == [ConvergenceWarning]


def test_the_reason_of_a_score_that_is_missing_is_told(executor: FluidExecutor) -> None:
    scorer = make_scorer(f1_score)  # Of two classes; there are three.
    told, scores = _told(_search(True, DecisionTreeClassifier(), {"max_depth": [1, 2]}, scoring=scorer, refit=False))
    assert np.isnan(scores).all()
    (reason,) = (text for category, text, *_ in told if text.startswith("Scoring failed"))
    assert "average='binary'" in reason


class OwnWarning(UserWarning):
    """With arguments that its text does not tell."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")


class Warns(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Warns in each fit, with a class of its own."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def fit(self, x: Any, y: Any) -> Warns:
        warnings.warn(OwnWarning(self.code, "fit"), stacklevel=1)
        if self.code == 2:
            raise ZeroDivisionError("two")
        self.classes_ = np.unique(y)
        return self

    def predict(self, x: Any) -> Any:
        return np.full(len(x), self.classes_[0])


def test_a_warning_that_cannot_be_rebuilt_is_told_by_its_text(executor: FluidExecutor) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        _search(True, Warns(), {"code": [0, 1]}, refit=False).fit(X, Y)
    assert sorted(str(each.message) for each in caught) == ["code 0 at fit", "code 1 at fit"]


def test_warnings_are_told_of_a_search_that_fails(executor: FluidExecutor) -> None:
    search = _search(True, Warns(), {"code": [2]}, refit=False, error_score="raise")
    with pytest.warns(UserWarning, match="code 2 at fit"), pytest.raises(ZeroDivisionError, match="two"):
        search.fit(X, Y)


def test_warnings_of_fits_step_by_step_are_told(executor: FluidExecutor) -> None:
    search = FluidSearchCV(
        LogisticRegression(max_iter=2), {"C": [0.1, 1.0, 10.0]}, algorithm="sha", budget=2, cv=2, random_state=0
    )
    told, _ = _told(search.set_params(refit=False))
    assert ConvergenceWarning in {each[0] for each in told}
