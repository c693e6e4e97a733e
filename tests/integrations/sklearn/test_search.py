"""FluidSearchCV beside scikit-learn's searches: the same candidates, scores, errors and metadata."""

# ruff: noqa: E402  (scikit-learn is optional)

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.frameworks("sklearn")
pytest.importorskip("sklearn")

from scipy.stats import loguniform
from sklearn import config_context
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.datasets import load_iris, make_classification
from sklearn.exceptions import FitFailedWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, make_scorer
from sklearn.model_selection import GridSearchCV, GroupKFold, RandomizedSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from fluid import FluidExecutor, InvalidFieldError
from fluid.engine import tuning
from fluid.integrations.sklearn import FluidSearchCV
from fluid.search import choice, randint, uniform

X, Y = load_iris(return_X_y=True)
GRID = {"max_depth": [1, 2, 4], "criterion": ["gini", "entropy"]}
TREE = DecisionTreeClassifier(random_state=0)


def assert_same_results(ours: Any, theirs: Any) -> None:
    """All but the times are equal, in keys, types and values."""
    assert list(ours) == list(theirs)
    for key, expected in theirs.items():
        assert type(ours[key]) is type(expected), key
        if key == "params":
            assert ours[key] == expected
            continue
        assert ours[key].dtype == expected.dtype, key
        if "time" not in key:
            np.testing.assert_array_equal(ours[key], expected, err_msg=key)


def assert_same_best(ours: Any, theirs: Any) -> None:
    assert (ours.best_index_, ours.best_params_, ours.best_score_) == (
        theirs.best_index_,
        theirs.best_params_,
        theirs.best_score_,
    )
    assert ours.multimetric_ == theirs.multimetric_ and ours.n_splits_ == theirs.n_splits_
    np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))
    assert ours.score(X, Y) == theirs.score(X, Y)


@pytest.mark.parametrize("space", [GRID, [{"max_depth": [1, 3]}, {"min_samples_leaf": np.array([5, 10])}]])
def test_a_grid_gives_what_grid_search_cv_gives(space: Any, executor: FluidExecutor) -> None:
    ours = FluidSearchCV(TREE, space, algorithm="grid", cv=4, return_train_score=True).fit(X, Y)
    theirs = GridSearchCV(TREE, space, cv=4, return_train_score=True).fit(X, Y)
    assert_same_results(ours.cv_results_, theirs.cv_results_)
    assert_same_best(ours, theirs)


@pytest.mark.parametrize("samples", [5, 20])  # A trial for each fold, and one for each candidate.
def test_a_random_search_gives_what_randomized_search_cv_gives(samples: int, executor: FluidExecutor) -> None:
    estimator = make_pipeline(StandardScaler(), LogisticRegression())
    space = {"logisticregression__C": loguniform(1e-3, 10), "standardscaler__with_mean": [True, False]}
    ours = FluidSearchCV(estimator, space, samples=samples, cv=2, random_state=3).fit(X, Y)
    theirs = RandomizedSearchCV(estimator, space, n_iter=samples, cv=2, random_state=3).fit(X, Y)
    assert_same_results(ours.cv_results_, theirs.cv_results_)
    assert_same_best(ours, theirs)


def _first(results: dict[str, Any]) -> int:
    return int(np.argmax(results["mean_test_recall_macro"]))


def _both(estimator: Any, x: Any, y: Any) -> dict[str, float]:
    return {"accuracy": float((estimator.predict(x) == y).mean()), "depth": float(estimator.get_depth())}


@pytest.mark.parametrize(
    ("scoring", "refit"),
    [
        (["accuracy", "recall_macro"], "accuracy"),
        (["accuracy", "recall_macro"], _first),
        (["accuracy", "recall_macro"], False),
        (_both, "depth"),
        ("balanced_accuracy", True),
    ],
)
def test_scorers_and_refit_work_as_in_scikit_learn(scoring: Any, refit: Any, executor: FluidExecutor) -> None:
    ours = FluidSearchCV(TREE, GRID, algorithm="grid", cv=3, scoring=scoring, refit=refit).fit(X, Y)
    theirs = GridSearchCV(TREE, GRID, cv=3, scoring=scoring, refit=refit).fit(X, Y)
    assert_same_results(ours.cv_results_, theirs.cv_results_)
    names = ("best_index_", "best_params_", "best_score_", "best_estimator_", "multimetric_")
    assert [hasattr(ours, name) for name in names] == [hasattr(theirs, name) for name in names]
    if refit:
        assert ours.best_index_ == theirs.best_index_
    if isinstance(refit, str):
        assert ours.score(X, Y) == theirs.score(X, Y)


def test_several_metrics_need_the_name_of_one(executor: FluidExecutor) -> None:
    with pytest.raises(ValueError, match="the parameter refit must be set to a scorer key"):
        FluidSearchCV(TREE, GRID, scoring=["accuracy", "f1_macro"]).fit(X, Y)
    with pytest.raises(InvalidFieldError, match=r"'asha' compares candidates while they train, by one metric"):
        FluidSearchCV(TREE, GRID, scoring=["accuracy", "f1_macro"], refit=False, algorithm="asha").fit(X, Y)


def test_weights_and_groups_reach_estimator_scorer_and_splitter(executor: FluidExecutor) -> None:
    weights = np.random.default_rng(0).integers(0, 3, len(Y)).astype(float)
    groups = np.arange(len(Y)) % 7
    ours = FluidSearchCV(TREE, GRID, algorithm="grid", cv=GroupKFold(3))
    theirs = GridSearchCV(TREE, GRID, cv=GroupKFold(3))
    ours.fit(X, Y, sample_weight=weights, groups=groups)
    theirs.fit(X, Y, sample_weight=weights, groups=groups)
    assert_same_results(ours.cv_results_, theirs.cv_results_)
    with config_context(enable_metadata_routing=True):
        estimator = DecisionTreeClassifier(random_state=0).set_fit_request(sample_weight=True)
        scorer = make_scorer(accuracy_score).set_score_request(sample_weight=True)
        ours = FluidSearchCV(estimator, GRID, algorithm="grid", cv=GroupKFold(3), scoring=scorer)
        theirs = GridSearchCV(estimator, GRID, cv=GroupKFold(3), scoring=scorer)
        ours.fit(X, Y, sample_weight=weights, groups=groups)
        theirs.fit(X, Y, sample_weight=weights, groups=groups)
        assert_same_results(ours.cv_results_, theirs.cv_results_)
        assert str(ours.get_metadata_routing()).replace("FluidSearchCV", "GridSearchCV") == str(
            theirs.get_metadata_routing()
        )


class UnfitError(ZeroDivisionError):
    """Pickle cannot make it again."""

    def __init__(self, value: int, lock: Any) -> None:
        super().__init__(f"value {value}")
        self.lock = lock


class Fussy(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Fails with some parameters."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def fit(self, x: Any, y: Any) -> Fussy:
        if self.value > 1:
            raise UnfitError(self.value, threading.Lock())
        self.classes_ = np.unique(y)
        return self

    def predict(self, x: Any) -> Any:
        return np.full(len(x), self.classes_[self.value])


@pytest.mark.parametrize("error_score", [np.nan, 0.0])
def test_failed_fits_get_the_error_score(error_score: float, executor: FluidExecutor) -> None:
    options = {"cv": 3, "error_score": error_score}
    with pytest.warns(FitFailedWarning, match="6 fits failed out of a total of 12"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "One or more of the test scores are non-finite")
        ours = FluidSearchCV(Fussy(), {"value": [3, 0, 2, 1]}, algorithm="grid", **options).fit(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = GridSearchCV(Fussy(), {"value": [3, 0, 2, 1]}, **options).fit(X, Y)
    assert_same_results(ours.cv_results_, theirs.cv_results_)
    assert_same_best(ours, theirs)


def test_failures_of_all_fits_and_error_score_raise_end_the_search(executor: FluidExecutor) -> None:
    with pytest.raises(ValueError, match=r"(?s)All the 4 fits failed.*UnfitError: value 3"):
        FluidSearchCV(Fussy(), {"value": [2, 3]}, algorithm="grid", cv=2).fit(X, Y)
    with pytest.raises(UnfitError, match="value 2") as caught:
        FluidSearchCV(Fussy(), {"value": [0, 2]}, algorithm="grid", cv=2, error_score="raise").fit(X, Y)
    assert "in fit" in str(caught.value.__cause__)  # The traceback in the lane.
    # The executor is not harmed.
    assert FluidSearchCV(Fussy(), {"value": [0, 1]}, algorithm="grid", cv=2).fit(X, Y).best_params_ == {"value": 0}


def _no_number(estimator: Any, x: Any, y: Any) -> str:
    return "high"


def test_a_scorer_that_returns_no_number_ends_the_search(executor: FluidExecutor) -> None:
    with pytest.raises(ValueError, match="scoring must return a number, got high"):
        FluidSearchCV(TREE, GRID, scoring=_no_number).fit(X, Y)


def test_a_search_is_cloned_pickled_and_nested(executor: FluidExecutor) -> None:
    search = FluidSearchCV(SVC(), {"C": [0.1, 1.0], "gamma": [0.1, 1.0]}, algorithm="grid", cv=2, executor=executor)
    assert clone(search).executor is executor
    assert copy.deepcopy(search).executor is None
    inside = make_pipeline(StandardScaler(), search)
    scores = cross_val_score(inside, X, Y, cv=2)
    theirs = make_pipeline(StandardScaler(), GridSearchCV(SVC(), search.space, cv=2))
    np.testing.assert_array_equal(scores, cross_val_score(theirs, X, Y, cv=2))
    fitted = pickle.loads(pickle.dumps(search.fit(X, Y)))
    assert fitted.executor is None
    np.testing.assert_array_equal(fitted.predict(X), search.predict(X))
    assert not executor.closed


def test_spaces_of_fluid_optuna_and_tune(executor: FluidExecutor) -> None:
    space = {"max_depth": randint(1, 5), "criterion": choice(["gini", "entropy"]), "ccp_alpha": uniform(0, 0.1)}
    space["splitter"] = "best"  # A constant.
    found = FluidSearchCV(TREE, space, samples=6, cv=2, random_state=0).fit(X, Y).cv_results_["params"]
    again = FluidSearchCV(TREE, space, samples=6, cv=2, random_state=0).fit(X, Y).cv_results_["params"]
    assert found == again and len({params["ccp_alpha"] for params in found}) == 6
    assert {params["splitter"] for params in found} == {"best"}
    grid = {"max_depth": randint(1, 4), "criterion": choice(["gini", "entropy"])}
    assert len(FluidSearchCV(TREE, grid, algorithm="grid", cv=2).fit(X, Y).cv_results_["params"]) == 6
    with pytest.raises(InvalidFieldError, match=r"space\['ccp_alpha'\].*is continuous"):
        FluidSearchCV(TREE, space, algorithm="grid").fit(X, Y)
    with pytest.raises(InvalidFieldError, match=r"space\['C'\].*is continuous"):
        FluidSearchCV(SVC(), {"C": loguniform(1, 2)}, algorithm="grid").fit(X, Y)


def test_spaces_of_optuna_and_ray_tune(executor: FluidExecutor) -> None:
    optuna = pytest.importorskip("optuna")
    depths = {"max_depth": optuna.distributions.IntDistribution(1, 3)}
    found = FluidSearchCV(TREE, depths, samples=6, cv=2, random_state=0).fit(X, Y).cv_results_["param_max_depth"]
    assert set(found) <= {1, 2, 3}

    def conditional(trial: Any) -> dict[str, Any]:
        params = {"max_depth": trial.suggest_int("max_depth", 1, 3)}
        if params["max_depth"] > 1:
            params["min_samples_leaf"] = trial.suggest_int("min_samples_leaf", 1, 9)
        return params

    for algorithm in ("random", "tpe"):
        search = FluidSearchCV(TREE, conditional, algorithm=algorithm, samples=6, cv=2, random_state=0).fit(X, Y)
        assert len(search.cv_results_["params"]) == 6
        assert all(
            ("min_samples_leaf" in params) == (params["max_depth"] > 1) for params in search.cv_results_["params"]
        )


def test_tpe_learns_from_the_scores(executor: FluidExecutor) -> None:
    pytest.importorskip("optuna")
    space = {"alpha": loguniform(1e-3, 1e6)}
    x, y = make_classification(80, random_state=0)
    search = FluidSearchCV(Ridge(), space, algorithm="tpe", samples=24, cv=2, random_state=0).fit(x, y * 1.0)
    late = np.sort(search.cv_results_["mean_test_score"][14:])
    early = np.sort(search.cv_results_["mean_test_score"][:10])
    assert np.median(late) >= np.median(early)
    with pytest.raises(InvalidFieldError, match=r"space\['alpha'\].*norm"):
        from scipy.stats import norm

        FluidSearchCV(Ridge(), {"alpha": norm(1, 1)}, algorithm="tpe").fit(x, y)


def test_an_argument_that_cannot_be_pickled_is_named(executor: FluidExecutor) -> None:
    x, y = make_classification(80, random_state=0)
    lock = threading.Lock()

    def scorer(estimator: Any, x: Any, y: Any) -> float:
        return float(lock.locked())

    search = FluidSearchCV(Ridge(), {"alpha": [1.0]}, algorithm="grid", scoring=scorer, executor=executor)
    with pytest.raises(InvalidFieldError, match=r"cannot be pickled because of args\[0\]\.scorer.*\.lock: ") as refused:
        search.fit(x, y)
    assert "array(" not in str(refused.value)


class NoFolds(GroupKFold):  # type: ignore[misc]
    def get_n_splits(self, *data: Any, **params: Any) -> int:
        return 0

    def split(self, *data: Any, **params: Any) -> Any:
        return iter(())


@pytest.mark.parametrize("cv", [[], NoFolds(2)])
@pytest.mark.parametrize("algorithm", ["grid", "asha", "tpe"])
def test_a_splitter_without_folds_is_refused_as_by_grid_search_cv(algorithm: str, cv: Any) -> None:
    space = {"max_depth": [1, 2]}
    with pytest.raises(ValueError, match=r"No fits were performed\. Was the CV iterator empty") as theirs:
        GridSearchCV(TREE, space, cv=iter(cv) if cv == [] else cv).fit(X, Y)
    with pytest.raises(ValueError, match=r"No fits were performed\. Was the CV iterator empty") as ours:
        FluidSearchCV(TREE, space, algorithm=algorithm, cv=iter(cv) if cv == [] else cv).fit(X, Y)
    assert str(ours.value) == str(theirs.value)


class Waits(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Fails with one value, and takes long with others."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def fit(self, x: Any, y: Any) -> Waits:
        if self.value == 1:
            raise ZeroDivisionError("one")
        time.sleep(60)
        return self


def test_a_fit_that_is_to_end_the_search_ends_it_at_once(executor: FluidExecutor) -> None:
    began = time.monotonic()
    search = FluidSearchCV(Waits(), {"value": [1, 2, 3]}, algorithm="grid", cv=2, error_score="raise")
    with pytest.raises(ZeroDivisionError, match="one"):
        search.fit(X, Y)
    assert FluidSearchCV(TREE, GRID, algorithm="grid", cv=2).fit(X, Y).best_score_ > 0.9  # Fits that ran were ended.
    assert time.monotonic() - began < 50


def test_bad_arguments_are_refused_at_fit() -> None:
    bad = {"algorithm": "anneal", "samples": 0, "budget": 0, "eta": 1, "space": 3, "executor": 3, "n_jobs": 0}
    for name, value in bad.items():
        search = FluidSearchCV(TREE, GRID).set_params(**{name: value})
        with pytest.raises(ValueError, match=f"'{name}' parameter of FluidSearchCV"):
            search.fit(X, Y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        FluidSearchCV(TREE, GRID).fit(X, Y[:-1])


def test_data_are_stored_once_for_all_trials(executor: FluidExecutor) -> None:
    stored = executor.run_dir / "payloads.pkl"
    x = np.random.default_rng(0).random((1000, 100))  # 0.8 MB
    before = stored.stat().st_size
    FluidSearchCV(Ridge(), {"alpha": loguniform(1, 9)}, samples=40, cv=2).fit(x, x[:, 0])
    assert 0.8e6 < stored.stat().st_size - before < 1.0e6


def test_a_script_needs_no_guard_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import tempfile
        from sklearn.base import BaseEstimator, ClassifierMixin
        from sklearn.datasets import load_iris
        from sklearn.model_selection import cross_val_score
        from fluid.integrations.sklearn import FluidSearchCV

        class Constant(ClassifierMixin, BaseEstimator):
            def __init__(self, label=0):
                self.label = label
            def fit(self, x, y):
                self.classes_ = sorted(set(y))
                return self
            def predict(self, x):
                return [self.label] * len(x)

        search = FluidSearchCV(Constant(), {"label": [0, 1, 2]}, algorithm="grid", cv=2, n_jobs=1)
        print(len(cross_val_score(search, *load_iris(return_X_y=True), cv=2)))
        """)
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "FLUID_RUNS": str(tmp_path / "runs")}
    command = [sys.executable, str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (run.stdout, run.stderr) == ("2\n", "")
    assert not [path.name for path in temporary.iterdir() if path.name.startswith("fluid-search")]
    assert not (tmp_path / "runs").exists()


def process_of(estimator: Any, X: Any, y: Any) -> float:
    """A scorer that tells where it runs."""
    return float(os.getpid())


def test_fits_run_one_after_another_in_the_processes_of_the_devices(executor: FluidExecutor) -> None:
    processes: set[float] = set()
    for _ in range(2):
        search = FluidSearchCV(TREE, GRID, cv=3, scoring=process_of, refit=False, executor=executor).fit(X, Y)
        processes |= {score for fold in range(3) for score in search.cv_results_[f"split{fold}_test_score"]}
    assert os.getpid() not in processes and len(processes) <= 2


# -- long fits


class Sleeper(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Its fit takes some seconds; of the parts of a ladder, the last one does."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def fit(self, X: Any, y: Any) -> Sleeper:
        time.sleep(self.seconds if len(X) > len(Y) // 2 else 0.0)
        self.classes_ = np.unique(y)
        return self

    def predict(self, X: Any) -> Any:
        return np.zeros(len(X))


SECONDS = {"seconds": [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 9.0]}
ONE_SPLIT = [(np.arange(100), np.arange(100, 150))]


@pytest.mark.parametrize("halving", [False, True])
def test_a_fit_may_take_far_longer_than_the_others(
    halving: bool, executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LEAST_DUMP_S", 1.0)  # A minute.
    monkeypatch.setattr(tuning, "LEAST_KILL_S", 4.0)  # Ten minutes.
    options: dict[str, Any] = {"algorithm": "grid", "resource": "n_samples" if halving else None, "budget": 3}
    search = FluidSearchCV(Sleeper(), SECONDS, cv=ONE_SPLIT, refit=False, **options).fit(X, Y)
    assert len(search.cv_results_["mean_test_score"]) == 7
    assert not np.isnan(search.cv_results_["mean_test_score"]).any()


def test_a_fit_has_the_limit_that_it_is_given(executor: FluidExecutor) -> None:
    search = FluidSearchCV(Sleeper(), SECONDS, algorithm="grid", cv=ONE_SPLIT, refit=False, iteration_timeout_s=1.0)
    with pytest.warns((FitFailedWarning, UserWarning)) as told:
        search.fit(X, Y)
    assert any("iteration_timeout_s=1.0" in str(one.message) for one in told)
    assert list(np.isnan(search.cv_results_["mean_test_score"])) == [False] * 6 + [True]
    with pytest.raises(ValueError, match="iteration_timeout_s"):
        FluidSearchCV(Sleeper(), SECONDS, iteration_timeout_s=0).fit(X, Y)
