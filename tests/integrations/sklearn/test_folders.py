"""The folders of searches: what is announced is there, and a search whose driver was killed goes on."""

# ruff: noqa: E402  (scikit-learn is optional)

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.frameworks("sklearn")
pytest.importorskip("sklearn")

from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

import fluid
from fluid import FluidExecutor, InvalidFieldError
from fluid.integrations.sklearn import FluidSearchCV

X, Y = load_iris(return_X_y=True)
GRID = {"max_depth": [1, 2, 3]}
TREE = DecisionTreeClassifier(random_state=0)
ROOT = Path(__file__).resolve().parents[3]

#: Fits wait for a file, once so many of them have begun.
PROGRAM = """
    import os, sys, time
    from pathlib import Path
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.datasets import load_iris
    from sklearn.tree import DecisionTreeClassifier
    from fluid.integrations.sklearn import FluidSearchCV

    class Slow(DecisionTreeClassifier):
        def fit(self, X, y, **params):
            here = Path(sys.argv[1])
            with open(here / "fits", "a") as file:
                print(self.max_depth, self.min_samples_leaf, file=file)
            while len((here / "fits").read_text().splitlines()) > 6 and not (here / "go").exists():
                time.sleep(0.01)
            return super().fit(X, y, **params)

    X, y = load_iris(return_X_y=True)
    space = {"max_depth": [1, 2, 3, 4, 5, 6], "min_samples_leaf": [1, 20]}
    search = FluidSearchCV(
        Slow(random_state=0), space, algorithm=sys.argv[2], samples=int(sys.argv[3]), cv=2, n_jobs=1, resource=None,
        random_state=0, refit=False, run_dir=Path(sys.argv[1]) / "run", resume=True,
    ).fit(X, y)
    for row in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"]):
        print(row)
"""


@pytest.mark.parametrize(("algorithm", "samples"), [("grid", 5), ("tpe", 8)])
def test_a_search_whose_driver_was_killed_goes_on(algorithm: str, samples: int, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(program), str(tmp_path), algorithm, str(samples)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    fits = tmp_path / "fits"
    killed = subprocess.Popen(command, env=environment)
    try:
        until = time.monotonic() + 120
        while not fits.exists() or len(fits.read_text().splitlines()) < 7:
            assert killed.poll() is None and time.monotonic() < until
            time.sleep(0.05)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    (tmp_path / "go").touch()
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    begun = fits.read_text().splitlines()
    assert 2 * samples < len(begun) <= 2 * samples + 2  # Those of the trial that ran are begun again.
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    assert again.stdout == run.stdout and fits.read_text().splitlines() == begun
    assert len(run.stdout.splitlines()) == samples
    if algorithm == "grid":
        space = {"max_depth": [1, 2, 3, 4, 5, 6], "min_samples_leaf": [1, 20]}
        results = GridSearchCV(TREE, space, cv=2).fit(X, Y).cv_results_
        rows = list(zip(results["params"], results["mean_test_score"], strict=True))[:samples]
        assert run.stdout.splitlines() == [str(row) for row in rows]


def test_a_search_goes_on_only_with_the_same_data_and_folds(tmp_path: Path) -> None:
    options: dict[str, Any] = {"algorithm": "grid", "n_jobs": 1, "run_dir": tmp_path / "run", "resume": True}
    search = FluidSearchCV(TREE, GRID, cv=2, **options).fit(X, Y)
    theirs = GridSearchCV(TREE, GRID, cv=2).fit(X, Y)
    np.testing.assert_array_equal(search.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"])
    again = FluidSearchCV(TREE, GRID, cv=2, **options).fit(X, Y)
    np.testing.assert_array_equal(again.cv_results_["mean_test_score"], search.cv_results_["mean_test_score"])
    for changed in (
        lambda: FluidSearchCV(TREE, GRID, cv=2, **options).fit(X[::-1], Y[::-1]),
        lambda: FluidSearchCV(TREE, GRID, cv=3, **options).fit(X, Y),
        lambda: FluidSearchCV(DecisionTreeClassifier(random_state=1), GRID, cv=2, **options).fit(X, Y),
    ):
        with pytest.raises(InvalidFieldError, match="has other data, folds or another estimator"):
            changed()
    with pytest.raises(InvalidFieldError, match="does not follow from these arguments"):
        FluidSearchCV(TREE, {"max_depth": [4, 2, 3]}, cv=2, **options).fit(X, Y)
    with pytest.raises(InvalidFieldError, match="run_dir"):
        FluidSearchCV(TREE, GRID, cv=2, **{**options, "resume": False}).fit(X, Y)


def test_arguments_of_folders_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="needs run_dir"):
        FluidSearchCV(TREE, GRID, algorithm="grid", resume=True).fit(X, Y)
    with pytest.raises(InvalidFieldError, match="random_state=None: must be a number with resume=True"):
        FluidSearchCV(TREE, GRID, run_dir=tmp_path / "run", resume=True).fit(X, Y)
    with (
        FluidExecutor("local", devices=1, run_dir=tmp_path / "other", verbose=0) as executor,
        pytest.raises(InvalidFieldError, match="pass it to the executor instead"),
    ):
        FluidSearchCV(TREE, GRID, run_dir=tmp_path / "run", executor=executor).fit(X, Y)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_announced_is_kept(tmp_path: Path) -> None:
    program = """
        from test_folders import GRID, TREE, X, Y
        from fluid.integrations.sklearn import FluidSearchCV
        FluidSearchCV(TREE, GRID, algorithm="grid", cv=3, n_jobs=1, verbose=3).fit(X, Y)
    """
    environment = {**os.environ, "FLUID_RUNS": str(tmp_path / "runs"), "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    command = [sys.executable, "-c", textwrap.dedent(program)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    told = run.stdout + run.stderr
    for named in re.findall(rf"{re.escape(str(tmp_path))}[^\s;,]*", told):
        assert Path(named).exists(), told
    assert len(re.findall(r"\[CV \d/3\] END .*score=", told)) == 9
    (folder,) = (tmp_path / "runs").iterdir()
    found = fluid.load(folder)
    assert len(found.trials) == 9


def test_a_folder_that_a_warning_names_is_kept(tmp_path: Path) -> None:
    program = """
        import os
        from sklearn.tree import DecisionTreeClassifier
        from test_folders import X, Y
        from fluid.integrations.sklearn import FluidSearchCV
        class Dies(DecisionTreeClassifier):
            def fit(self, X, y):
                if self.max_depth == 2:
                    print('about to die', flush=True)
                    os._exit(3)
                return super().fit(X, y)
        FluidSearchCV(Dies(), {"max_depth": [1, 2]}, algorithm="grid", cv=2, n_jobs=1).fit(X, Y)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    command = [sys.executable, "-c", textwrap.dedent(program)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    named = re.findall(rf"{re.escape(str(tmp_path))}[^\s;,]*output.log", run.stderr)
    assert named and all(Path(each).exists() for each in named), run.stderr


def test_the_best_that_is_shown_is_a_candidates_mean_not_a_fold(tmp_path: Path) -> None:
    with FluidExecutor("local", devices=2, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        search = FluidSearchCV(SVC(), {"C": [0.01, 1.0, 100.0]}, algorithm="grid", cv=3, executor=executor).fit(X, Y)
        (handle,) = executor.handles
        best = handle.best()
    folds = [score for fold in range(3) for score in search.cv_results_[f"split{fold}_test_score"]]
    assert best.value == pytest.approx(search.best_score_) and max(folds) > search.best_score_
    assert best.config["C"] == search.best_params_["C"]
