"""scikit-learn's own checks of estimators, on the searches that it checks of its own."""

# ruff: noqa: E402  (scikit-learn is optional)

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytestmark = pytest.mark.frameworks("sklearn")
pytest.importorskip("sklearn")

from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.model_selection import RandomizedSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils.estimator_checks import check_estimator

from fluid import FluidExecutor
from fluid.integrations.sklearn import FluidSearchCV

#: What scikit-learn expects RandomizedSearchCV and GridSearchCV to fail.
EXPECTED = {"check_supervised_y_2d", "check_requires_y_none"}
SEARCHED = {
    "regressor": (Ridge(), {"alpha": [0.1, 1.0]}),
    "classifier": (LogisticRegression(), {"C": [0.1, 1.0]}),
    "pipeline of a regressor": (Pipeline([("pca", PCA()), ("ridge", Ridge())]), {"ridge__alpha": [0.1, 1.0]}),
}


def outcomes(search: Any) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(search, on_fail=None, on_skip=None)
    return {result["check_name"]: result["status"] for result in found}


def test_the_checks_have_the_outcomes_of_randomized_search_cv(executor: FluidExecutor) -> None:
    estimator, space = SEARCHED["regressor"]
    theirs = outcomes(RandomizedSearchCV(estimator, space, cv=2, error_score="raise", random_state=0))
    assert outcomes(FluidSearchCV(estimator, space, cv=2, error_score="raise", random_state=0)) == theirs


# Their search takes four times as long with a classifier, whose threads compete, as ours on lanes of one core.
@pytest.mark.parametrize("name", ["classifier", "pipeline of a regressor"])
def test_no_check_fails_but_those_that_scikit_learn_expects(name: str, executor: FluidExecutor) -> None:
    estimator, space = SEARCHED[name]
    found = outcomes(FluidSearchCV(estimator, space, cv=2, error_score="raise", random_state=0))
    assert {check for check, status in found.items() if status == "failed"} <= EXPECTED
    assert list(found.values()).count("passed") > 45


def test_the_checks_pass_of_a_search_that_trains_step_by_step(executor: FluidExecutor) -> None:
    search = FluidSearchCV(
        SGDClassifier(random_state=0), {"alpha": [1e-4, 1e-2]}, algorithm="asha", budget=9, cv=2, random_state=0
    )
    found = outcomes(search)
    assert {check for check, status in found.items() if status == "failed"} <= EXPECTED
    assert list(found.values()).count("passed") > 45
