"""scikit-learn's own searches and ensembles on lanes: the same results as without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fluid import FluidExecutor

pytestmark = pytest.mark.frameworks("joblib", "sklearn")
joblib = pytest.importorskip("joblib")
pytest.importorskip("sklearn")

from sklearn.base import BaseEstimator, ClassifierMixin  # noqa: E402
from sklearn.datasets import load_breast_cancer, load_digits  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.svm import SVC  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def executor() -> Iterator[FluidExecutor]:
    import fluid.integrations.joblib  # noqa: F401

    with FluidExecutor(backend="local", devices=2, verbose=0) as made:
        yield made


def found(search: Any) -> Any:
    """All that a search found but how long it took."""
    results = {name: list(map(str, values)) for name, values in search.cv_results_.items() if "time" not in name}
    return search.best_params_, search.best_score_, results


def test_a_grid_search_finds_the_same() -> None:
    x, y = load_digits(return_X_y=True)
    x, y = x[:300], y[:300]
    grid = {"C": [0.1, 1.0, 10.0], "gamma": [1e-4, 1e-3]}
    alone = GridSearchCV(SVC(), grid, cv=3).fit(x, y)
    with joblib.parallel_config("fluid", n_jobs=2):
        on_lanes = GridSearchCV(SVC(), grid, cv=3).fit(x, y)
    assert found(on_lanes) == found(alone)
    assert (on_lanes.predict(x) == alone.predict(x)).all()


def test_scores_and_forests_are_the_same() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    forest = RandomForestClassifier(12, random_state=0)
    alone = cross_val_score(DecisionTreeClassifier(random_state=0), x, y), forest.fit(x, y).predict_proba(x)
    with joblib.parallel_config("fluid", n_jobs=2):
        on_lanes = cross_val_score(DecisionTreeClassifier(random_state=0), x, y), forest.fit(x, y).predict_proba(x)
    assert (alone[0] == on_lanes[0]).all()
    assert (alone[1] == on_lanes[1]).all()


class Broken(ClassifierMixin, BaseEstimator):
    """An estimator of a test's module, which lanes cannot import by name."""

    def fit(self, x: Any, y: Any) -> Broken:
        raise ArithmeticError("it never fits")


def test_an_estimator_that_fails_raises() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    with joblib.parallel_config("fluid", n_jobs=2), pytest.raises(ArithmeticError, match="it never fits"):
        cross_val_score(Broken(), x, y, error_score="raise")
