"""A seeded program fits the same models in each run, where estimators draw from NumPy's global generator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.seeded_programs import two_runs

pytest.importorskip("sklearn")

pytestmark = pytest.mark.slow

PROGRAM = """
import numpy as np
from fluid.integrations.sklearn import FluidSearchCV
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier

if __name__ == "__main__":
    np.random.seed(0)
    X, y = make_classification(200, random_state=0)
    search = FluidSearchCV(RandomForestClassifier(3), {"max_depth": [1, 2, 2]}, algorithm="grid", cv=3)
    search.fit(X, y)
    for row in zip(*(search.cv_results_[f"split{fold}_test_score"] for fold in range(3))):
        print(*map(float, row))
"""


def test_two_runs_have_the_same_scores(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    first, second = two_runs(program)
    assert first == second
    assert len(set(first)) > 1
