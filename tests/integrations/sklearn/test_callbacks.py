"""scikit-learn's callbacks are called in a search as in GridSearchCV: by the driver, and by lanes in the fits."""

# ruff: noqa: E402  (scikit-learn is optional)

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.frameworks("sklearn")
pytest.importorskip("sklearn.callback", reason="scikit-learn 1.9 has callbacks")

from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.callback import CallbackSupportMixin
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV

from fluid import FluidExecutor
from fluid.integrations.sklearn import FluidSearchCV

X, Y = load_iris(return_X_y=True)


class Notes:
    """A callback that writes a line to a file at each call, in whatever process.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def _note(self, what: str, estimator: Any, context: Any) -> None:
        with self.path.open("a") as file:
            root = context.estimator_name.replace("FluidSearchCV", "GridSearchCV")
            print(what, root, context.task_name, context.task_id, sep=";", file=file)

    def setup(self, estimator: Any, context: Any) -> None:
        self._note("setup", estimator, context)

    def on_fit_task_begin(self, estimator: Any, context: Any, *, X: Any = None, metadata: Any = None) -> None:
        rows = "" if X is None else len(X)
        self._note(f"begin {rows} {sorted(metadata or ())}", estimator, context)

    def on_fit_task_end(self, estimator: Any, context: Any, *, y: Any = None) -> None:
        self._note(f"end {'' if y is None else len(y)}", estimator, context)

    def teardown(self, estimator: Any, context: Any) -> None:
        self._note("teardown", estimator, context)


class HandedOn(Notes):
    """One that estimators in the search get, too."""

    max_propagation_depth = None


class Epochs(CallbackSupportMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Calls callbacks in each epoch."""

    def __init__(self, epochs: int = 1, fails: bool = False) -> None:
        self.epochs = epochs
        self.fails = fails

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Epochs:
        root = self._init_callback_context(max_subtasks=self.epochs).call_on_fit_task_begin(estimator=self, X=X)
        self.classes_ = np.unique(y)
        for _ in range(self.epochs):
            task = root.subcontext(task_name="epoch").call_on_fit_task_begin(estimator=self)
            if self.fails:
                raise ZeroDivisionError("fails")
            task.call_on_fit_task_end(estimator=self)
        root.call_on_fit_task_end(estimator=self, y=y)
        return self

    def predict(self, X: Any) -> Any:
        return np.full(len(X), self.classes_[0])


@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("kind", [Notes, HandedOn])
@pytest.mark.filterwarnings("ignore")
def test_callbacks_hear_what_they_hear_in_grid_search_cv(
    kind: Any, refit: bool, tmp_path: Path, executor: FluidExecutor
) -> None:
    space = {"epochs": [1, 3], "fails": [False, True]}
    weights = np.ones(len(Y))
    heard = []
    for name, search in (
        ("ours", FluidSearchCV(Epochs(), space, algorithm="grid", cv=2, refit=refit)),
        ("theirs", GridSearchCV(Epochs(), space, cv=2, refit=refit)),
    ):
        search.set_callbacks(kind(tmp_path / name)).fit(X, Y, sample_weight=weights)
        heard.append(Counter((tmp_path / name).read_text().splitlines()))
    assert heard[0] == heard[1]
    assert sum(line.startswith("begin") for line in heard[0].elements()) >= 10
