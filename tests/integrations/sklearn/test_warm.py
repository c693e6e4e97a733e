"""The executor that fits share if they are given none: kept warm, and closed after a while."""

# ruff: noqa: E402  (scikit-learn is optional)

from __future__ import annotations

import pytest

pytestmark = pytest.mark.frameworks("sklearn")
pytest.importorskip("sklearn")

from sklearn.datasets import load_iris
from sklearn.tree import DecisionTreeClassifier
from waiting import eventually

from fluid.integrations.sklearn import FluidSearchCV
from fluid.integrations.sklearn.warm import WARM

X, Y = load_iris(return_X_y=True)


def test_the_executor_of_a_fit_stays_warm_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    search = FluidSearchCV(DecisionTreeClassifier(), {"max_depth": [1, 2]}, algorithm="grid", cv=2, n_jobs=1)
    search.fit(X, Y)
    kept = WARM._idle
    assert kept is not None and not kept.executor.closed
    monkeypatch.setattr("fluid.integrations.sklearn.warm.IDLE_S", 0.01)
    search.fit(X, Y)
    assert kept.fits == 2
    eventually(lambda: not kept.folder.exists())
    assert kept.executor.closed and WARM._idle is None


def test_an_executor_whose_search_was_broken_off_is_closed() -> None:
    with pytest.raises(ZeroDivisionError), WARM.lend(1) as executor:
        1 / 0  # noqa: B018
    assert executor.closed and WARM._idle is None
