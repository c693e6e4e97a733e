"""Candidates that train step by step: what an iteration does, who goes on, and what the best one is refitted with."""

# ruff: noqa: E402  (scikit-learn is optional)

from __future__ import annotations

import functools
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.frameworks("sklearn")
pytest.importorskip("sklearn")

from scipy.stats import loguniform
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.metrics import check_scoring, get_scorer
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from fluid import FluidExecutor, InvalidFieldError
from fluid.integrations.sklearn import FluidSearchCV
from fluid.integrations.sklearn.evaluation import SearchTask, train
from fluid.integrations.sklearn.resources import make_ladder, resource_of

X, Y = load_breast_cancer(return_X_y=True)
X = StandardScaler().fit_transform(X)
SGD = SGDClassifier(random_state=0)
ALPHAS = {"alpha": [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]}


def passes(estimator: Any, x: Any, y: Any, number: int) -> Any:
    for _ in range(number):
        estimator.partial_fit(x, y, classes=np.unique(Y))
    return estimator


@pytest.mark.parametrize(
    ("estimator", "resource"),
    [
        (SGD, "partial_fit"),
        (make_pipeline(StandardScaler(), GaussianNB()), "partial_fit"),
        (RandomForestClassifier(), "n_estimators"),
        (HistGradientBoostingClassifier(), "max_iter"),
        (LogisticRegression(), "max_iter"),
        (SVC(), "n_samples"),
    ],
)
def test_the_resource_follows_from_the_estimator(estimator: Any, resource: str) -> None:
    assert resource_of([estimator], "auto") == resource


@pytest.mark.parametrize("resource", ["partial_fit", "n_estimators", "max_leaf_nodes"])
def test_a_resource_that_the_estimator_lacks_is_refused(resource: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"resource='{resource}': SVC has no"):
        FluidSearchCV(SVC(), {"C": [1]}, resource=resource).fit(X, Y)


def test_passes_are_iterations_and_rungs_are_theirs() -> None:
    ladder = make_ladder("partial_fit", budget=9, eta=3, min_budget=1, least_share=1.0, seed=0)
    assert (len(ladder.shares), ladder.rungs) == (9, (1, 3, 9))
    ladder = make_ladder("n_estimators", budget=9, eta=3, min_budget=1, least_share=1.0, seed=0)
    assert (ladder.shares, ladder.rungs) == ((1 / 9, 1 / 3, 1.0), (1, 2, 3))
    ladder = make_ladder("n_samples", budget=9, eta=3, min_budget=1, least_share=0.3, seed=0)
    assert (ladder.shares, ladder.rungs) == ((1 / 3, 1.0), (1, 2))


@pytest.mark.parametrize("algorithm", ["asha", "sha", "hyperband"])
def test_those_that_fall_behind_stop_and_the_best_one_has_the_whole_budget(
    algorithm: str, executor: FluidExecutor
) -> None:
    search = FluidSearchCV(SGD, ALPHAS, algorithm=algorithm, budget=9, cv=3, random_state=0).fit(X, Y)
    results = search.cv_results_
    used = results["n_resources"]
    assert set(used) <= {1, 3, 9} and used[search.best_index_] == 9 and (used < 9).sum() >= 3
    furthest = results["mean_test_score"][used == 9]
    assert search.best_score_ == furthest.max()
    assert len(results["params"]) == 6
    # The scores are those of so many passes over the training part of each fold.
    params, scores = results["params"][search.best_index_], []
    for rows, test in StratifiedKFold(3).split(X, Y):
        scores.append(passes(clone(SGD).set_params(**params), X[rows], Y[rows], 9).score(X[test], Y[test]))
    assert [results[f"split{fold}_test_score"][search.best_index_] for fold in range(3)] == scores
    # So is the best estimator, on all data.
    again = passes(clone(SGD).set_params(**params), X, Y, 9)
    np.testing.assert_array_equal(search.best_estimator_.coef_, again.coef_)


@pytest.mark.parametrize(
    "estimator",
    [
        RandomForestClassifier(n_estimators=9, random_state=0),
        HistGradientBoostingClassifier(max_iter=9, random_state=0),
    ],
)
def test_a_candidate_that_was_raised_to_the_end_is_that_of_a_fit_at_once(
    estimator: Any, executor: FluidExecutor
) -> None:
    name = resource_of([estimator], "auto")
    space = {"max_leaf_nodes": [2, 8]}
    search = FluidSearchCV(estimator, space, algorithm="sha", budget=9, cv=2).fit(X, Y)
    theirs = GridSearchCV(estimator, space, cv=2).fit(X, Y)
    assert list(search.cv_results_["n_resources"]).count(9) == 1 and search.best_params_ in search.cv_results_["params"]
    row = theirs.cv_results_["params"].index(search.best_params_)
    assert search.best_score_ == pytest.approx(theirs.cv_results_["mean_test_score"][row])
    assert search.best_estimator_.get_params()[name] == 9 and not search.best_estimator_.warm_start


def test_a_parameter_in_the_space_is_raised_to_what_the_candidate_has(executor: FluidExecutor) -> None:
    space = {"n_estimators": [9, 18], "max_depth": [1, 3]}
    search = FluidSearchCV(
        RandomForestClassifier(random_state=0), space, algorithm="asha", budget=9, cv=2, random_state=0
    ).fit(X, Y)
    best = search.best_params_["n_estimators"]
    assert search.cv_results_["n_resources"][search.best_index_] == best
    assert len(search.best_estimator_.estimators_) == best


def test_pipelines_train_their_last_step(executor: FluidExecutor) -> None:
    estimator = make_pipeline(StandardScaler(), SGDClassifier(random_state=0))
    weights = np.random.default_rng(0).random(len(Y))
    space = {"sgdclassifier__alpha": ALPHAS["alpha"]}
    search = FluidSearchCV(estimator, space, algorithm="asha", budget=9, cv=2, random_state=0)
    search.fit(X, Y, sgdclassifier__sample_weight=weights)
    model = clone(SGD).set_params(alpha=search.best_params_["sgdclassifier__alpha"])
    scaled = StandardScaler().fit_transform(X)
    for _ in range(9):
        model.partial_fit(scaled, Y, classes=np.unique(Y), sample_weight=weights)
    np.testing.assert_array_equal(search.best_estimator_[-1].coef_, model.coef_)
    assert search.best_score_ > 0.9 and search.predict(X).shape == Y.shape
    with config_context(enable_metadata_routing=True):
        scaler = StandardScaler().set_fit_request(sample_weight=False)
        routed = make_pipeline(scaler, SGDClassifier(random_state=0).set_fit_request(sample_weight=True))
        scorer = get_scorer("accuracy").set_score_request(sample_weight=False)
        search.set_params(estimator=routed, scoring=scorer)
        found = clone(search).fit(X, Y, sample_weight=weights)
        np.testing.assert_array_equal(found.cv_results_["mean_test_score"], search.cv_results_["mean_test_score"])
        scaler.set_fit_request(sample_weight=True)
        with pytest.raises(ValueError, match="step 'standardscaler' takes metadata"):
            clone(search).set_params(error_score="raise").fit(X, Y, sample_weight=weights)


def test_samples_are_the_resource_of_what_can_only_be_fitted(executor: FluidExecutor) -> None:
    space = {"C": loguniform(1e-2, 1e2), "kernel": ["linear", "rbf"]}
    search = FluidSearchCV(SVC(), space, algorithm="asha", samples=9, budget=9, cv=3, random_state=0).fit(X, Y)
    rows = round(len(Y) * 2 / 3)
    assert {round(used / rows, 1) for used in search.cv_results_["n_resources"]} == {0.1, 0.3, 1.0}
    whole = clone(SVC()).set_params(**search.best_params_)
    scores = [whole.fit(X[a], Y[a]).score(X[b], Y[b]) for a, b in StratifiedKFold(3).split(X, Y)]
    assert search.best_score_ == pytest.approx(np.mean(scores))
    assert search.best_estimator_.shape_fit_ == X.shape


def test_a_candidate_whose_fit_fails_stops(executor: FluidExecutor) -> None:
    space = {"alpha": [1e-4, -1.0, 1e-3]}
    search = FluidSearchCV(SGD, space, algorithm="asha", budget=9, cv=2, random_state=0)
    with pytest.warns(match="2 fits failed out of a total of 6"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "One or more of the test scores are non-finite")
        search.fit(X, Y)
    failed = search.cv_results_["params"].index({"alpha": -1.0})
    assert search.cv_results_["n_resources"][failed] == 0 and np.isnan(search.cv_results_["mean_test_score"][failed])
    assert search.best_index_ != failed
    with pytest.raises(ValueError, match="alpha"):
        search.set_params(error_score="raise").fit(X, Y)


@pytest.mark.parametrize(
    ("estimator", "resource"),
    [
        (SGD, "partial_fit"),
        (make_pipeline(StandardScaler(), SGD), "partial_fit"),
        (RandomForestClassifier(n_estimators=9, random_state=0), "n_estimators"),
        (SVC(), "n_samples"),
    ],
)
def test_a_trial_goes_on_from_its_saved_state(estimator: Any, resource: str) -> None:
    ladder = make_ladder(resource, budget=9, eta=3, min_budget=1, least_share=0.1, seed=0)
    task = SearchTask(
        estimator=estimator,
        X=X,
        y=Y,
        splits=list(StratifiedKFold(2).split(X, Y)),
        scorer=check_scoring(estimator),
        metric=None,
        fit_params={},
        score_params={},
        return_train_score=True,
        error_score="raise",
        verbose=0,
        settings={},
        ladder=ladder,
    )
    trial = functools.partial(train, task, None)
    whole = [metrics["score"] for metrics, _ in trial({}, state=None)]
    assert len(whole) == len(ladder.shares) and len(set(whole)) > 1
    scores, state = [], None
    while len(scores) < len(whole):
        metrics, state = next(trial({}, state=state))
        scores.append(metrics["score"])
        saved = pickle.dumps(state)
        assert len(saved) < X.nbytes / 2, "the data are not part of it"
        state = pickle.loads(saved)
    assert scores == whole
