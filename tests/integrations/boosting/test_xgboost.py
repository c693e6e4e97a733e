"""XGBoost on Fluid: what a sweep trains is what XGBoost trains alone, also where a trial goes on from a checkpoint."""

from __future__ import annotations

import os
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

import fluid
from fluid.errors import InvalidFieldError
from fluid.search import loguniform, randint, uniform

pytestmark = pytest.mark.frameworks("xgboost", "sklearn")
xgboost = pytest.importorskip("xgboost", reason="needs XGBoost: make integrations")
pytest.importorskip("sklearn", reason="needs scikit-learn: make integrations")

from sklearn.datasets import load_breast_cancer, load_digits  # noqa: E402

from fluid.integrations.boosting import Rounds, goals_among  # noqa: E402
from fluid.integrations.xgboost import ReportCallback, fit, remaining, train  # noqa: E402
from fluid.integrations.xgboost.estimators import _fit  # noqa: E402
from fluid.integrations.xgboost.matrices import Sets  # noqa: E402
from fluid.integrations.xgboost.sweeps import _Said  # noqa: E402
from fluid.integrations.xgboost.training import train_rounds  # noqa: E402

BINARY = {"objective": "binary:logistic", "eval_metric": ["auc", "logloss"], "max_depth": 3, "nthread": 1}
DIGITS = {"objective": "multi:softprob", "num_class": 10, "max_depth": 3, "nthread": 1}
SAMPLED = {"subsample": 0.5, "colsample_bytree": 0.7, "colsample_bylevel": 0.7, "colsample_bynode": 0.7, "seed": 3}
LINEAR = {"objective": "binary:logistic", "booster": "gblinear", "updater": "coord_descent", "nthread": 1}


def parts(load: Any = load_breast_cancer) -> tuple[Any, Any, Any, Any]:
    data, target = load(return_X_y=True)
    held_out = np.arange(len(data)) % 4 == 0
    return data[~held_out], target[~held_out], data[held_out], target[held_out]


def matrices(load: Any = load_breast_cancer) -> tuple[Any, Any]:
    x, y, x_valid, y_valid = parts(load)
    return xgboost.DMatrix(x, y, nthread=1), xgboost.DMatrix(x_valid, y_valid, nthread=1)


def sets(load: Any = load_breast_cancer) -> Sets:
    matrix, valid = matrices(load)
    return Sets(matrix, [(matrix, "train"), (valid, "valid")])


def trial(config: dict[str, Any], state: Any = None, load: Any = load_breast_cancer, **options: Any) -> Any:
    """What a lane runs for a trial, with data of its own."""
    rounds = Rounds(most=options.pop("rounds", 12), per_iteration=options.pop("per_iteration", 1), **options)
    more: dict[str, Any] = {"obj": None, "custom_metric": None, "maximize": None, "begin": None}
    return train_rounds(config, state, sets=sets(load), rounds=rounds, **more)


def all_of(iterations: Any) -> tuple[list[dict[str, float]], Any]:
    found = [(metrics, state) for metrics, state in iterations]
    return [metrics for metrics, _ in found], found[-1][1]


@pytest.mark.parametrize(
    ("config", "load"),
    [
        pytest.param(BINARY, load_breast_cancer, id="binary"),
        pytest.param({**BINARY, **SAMPLED}, load_breast_cancer, id="sampled"),
        pytest.param({**BINARY, **SAMPLED, "tree_method": "approx"}, load_breast_cancer, id="approx"),
        pytest.param(
            {**BINARY, **SAMPLED, "tree_method": "exact", "colsample_bynode": 1}, load_breast_cancer, id="exact"
        ),
        pytest.param({**BINARY, **SAMPLED, "grow_policy": "lossguide", "num_parallel_tree": 2}, load_breast_cancer),
        pytest.param({**BINARY, **SAMPLED, "booster": "dart", "rate_drop": 0.3}, load_breast_cancer, id="dart"),
        pytest.param({**BINARY, "booster": "dart", "rate_drop": 0.3}, load_breast_cancer, id="dart alone"),
        pytest.param({**DIGITS, **SAMPLED}, load_digits, id="digits"),
        pytest.param(LINEAR, load_breast_cancer, id="linear"),
    ],
)
def test_a_trial_that_goes_on_is_the_undisturbed_one(config: dict[str, Any], load: Any) -> None:
    expected, model = all_of(trial(config, load=load))
    disturbed, other = trial(config, load=load), trial({**config, "seed": 9}, load=load)
    found = []
    for _ in range(5):
        metrics, state = next(disturbed)
        found.append(metrics)
        next(other)  # Trials of a lane take turns.
    further, resumed = all_of(trial(config, pickle.loads(cloudpickle.dumps(state)), load=load))
    assert found + further == expected
    assert resumed.save_raw() == model.save_raw()


def test_rounds_are_those_of_xgboost_itself() -> None:
    matrix, valid = matrices()
    told: dict[str, Any] = {}
    watched = {"evals": [(matrix, "train"), (valid, "valid")], "evals_result": told, "verbose_eval": False}
    expected = xgboost.train(BINARY, matrix, 12, **watched)
    metrics, model = all_of(trial(BINARY))
    assert model.save_raw() == expected.save_raw()
    assert [each["valid-logloss"] for each in metrics] == told["valid"]["logloss"]
    assert [each["train-auc"] for each in metrics] == told["train"]["auc"]


def test_iterations_of_several_rounds() -> None:
    each, model = all_of(trial(BINARY))
    several, same = all_of(trial(BINARY, per_iteration=5))
    assert several == [each[4], each[9], each[11]]
    assert same.save_raw() == model.save_raw()


EARLY = {**BINARY, "eta": 0.9, "max_depth": 6, "subsample": 0.8}


@pytest.mark.parametrize("cut", [3, 9])
@pytest.mark.parametrize("per_iteration", [1, 3])
def test_early_stopping_goes_on_too(cut: int, per_iteration: int) -> None:
    options = {"rounds": 60, "patience": 4, "per_iteration": per_iteration}
    expected, model = all_of(trial(EARLY, **options))
    assert len(expected) * per_iteration < 60
    first = trial(EARLY, **options)
    begun = [next(first) for _ in range(cut // per_iteration)]
    further, resumed = all_of(trial(EARLY, pickle.loads(cloudpickle.dumps(begun[-1][1])), **options))
    assert [metrics for metrics, _ in begun] + further == expected
    assert resumed.attributes() == model.attributes()
    assert list(trial(EARLY, model, **options)) == [], "it has ended"


def test_early_stopping_is_that_of_xgboost() -> None:
    matrix, valid = matrices()
    params = {**EARLY, "subsample": 1.0}
    expected = xgboost.train(
        params, matrix, 60, evals=[(matrix, "train"), (valid, "valid")], early_stopping_rounds=4, verbose_eval=False
    )
    metrics, model = all_of(trial(params, rounds=60, patience=4))
    assert len(metrics) == expected.num_boosted_rounds() < 60
    assert (model.best_iteration, model.best_score) == (expected.best_iteration, expected.best_score)


def squared(predicted: Any, matrix: Any) -> tuple[Any, Any]:
    return predicted - matrix.get_label(), np.ones_like(predicted)


def threads(predicted: Any, matrix: Any) -> list[tuple[str, float]]:
    """Metrics that say how a lane is: its threads, and which process it is."""
    return [("threads", float(len(os.listdir("/proc/self/task")))), ("process", float(os.getpid()))]


def test_a_sweep(executor: Any) -> None:
    matrix, valid = matrices()
    params = {"objective": "binary:logistic", "max_depth": randint(2, 6), "eta": loguniform(0.01, 0.5)}
    params |= {"eval_metric": ["logloss", "auc"], "subsample": uniform(0.5, 1.0)}
    evals = [(matrix, "train"), (valid, "valid")]
    result = train(params, matrix, 18, evals=evals, metric="valid-auc", samples=12, verbose_eval=False)
    assert (result.mode, len(result.trials), result.failures) == ("max", 12, {})
    assert set(result.best.metrics) == {"train-logloss", "train-auc", "valid-logloss", "valid-auc"}
    best = result.best.load_checkpoint()
    assert best.num_boosted_rounds() == result.best.iteration == result.best.checkpoint_iteration
    expected = f"valid-auc:{result.best.value:.5f}"
    assert expected in best.eval_set([(valid, "valid")]).replace(f"{result.best.value:.17f}", expected[10:])
    assert result.best.config["eval_metric"] == ["logloss", "auc"]


def test_trials_keep_to_their_cores(executor: Any) -> None:
    matrix, valid = matrices()
    params = {"objective": "binary:logistic", "max_depth": [2, 3, 4, 5]}
    shared = {"algorithm": "grid", "custom_metric": threads, "metric": "valid-logloss"}
    result = train(params, matrix, 9, evals=[(valid, "valid")], **shared)
    alone = train({**params, "nthread": 2}, matrix, 9, evals=[(valid, "valid")], **shared)
    assert len({trial.metrics["valid-process"] for trial in result.trials}) == 2
    most = max(trial.metrics["valid-threads"] for trial in result.trials)
    assert all(trial.metrics["valid-threads"] > most for trial in alone.trials), "a number of one's own counts"


def test_objectives_functions_and_models_to_begin_with(executor: Any) -> None:
    matrix, valid = matrices()
    begun = xgboost.train({"max_depth": 2}, matrix, 3)
    x, y, _, _ = parts()
    result = train(
        {"max_depth": [2, 3]},
        lambda: xgboost.QuantileDMatrix(x, y),
        6,
        evals=[(valid, "valid")],
        metric="valid-rmse",
        algorithm="grid",
        obj=squared,
        xgb_model=begun,
    )
    assert result.failures == {}
    assert result.best.load_checkpoint().num_boosted_rounds() == 3 + result.best.iteration


def test_arguments_that_cannot_be_used() -> None:
    matrix, valid = matrices()
    shared = {"metric": "valid-logloss", "evals": [(valid, "valid")]}
    with pytest.raises(InvalidFieldError, match=r"dtrain=.*cannot be sent to other processes; give a DMatrix"):
        train(BINARY, xgboost.QuantileDMatrix(*parts()[:2]), **shared)
    with pytest.raises(InvalidFieldError, match=r"evals\[0\]=.*must be a DMatrix"):
        train(BINARY, matrix, metric="valid-logloss", evals=[(3, "valid")])
    with pytest.raises(InvalidFieldError, match=r"evals=.*a list of pairs"):
        train(BINARY, matrix, metric="valid-logloss", evals=[valid])
    with pytest.raises(InvalidFieldError, match=r"evals=.*must name a set"):
        train(BINARY, matrix, metric="valid-logloss")
    with pytest.raises(InvalidFieldError, match="budget=9: follows from num_boost_round"):
        train(BINARY, matrix, budget=9, **shared)
    with pytest.raises(InvalidFieldError, match="rounds_per_iteration=11"):
        train(BINARY, matrix, 10, rounds_per_iteration=11, **shared)
    with pytest.raises(InvalidFieldError, match="params=3: must be a dict"):
        train(3, matrix, **shared)
    with pytest.raises(InvalidFieldError, match=r"estimator\.objective=.*train\(\) takes obj="):
        fit(xgboost.XGBRegressor(objective=squared), *parts()[:2], eval_set=[parts()[2:]], metric="validation_0-rmse")
    with pytest.raises(InvalidFieldError, match=r"y=.*must have the classes 0, 1"):
        fit(xgboost.XGBClassifier(), np.ones((2, 1)), [3, 4], eval_set=[], metric="validation_0-logloss")


def test_long_trials_have_a_hundred_iterations() -> None:
    from fluid.integrations.boosting import rounds_of

    assert [rounds_of(most, None, None).per_iteration for most in (1, 100, 101, 1000)] == [1, 1, 2, 10]


def test_estimators(executor: Any) -> None:
    x, y, x_valid, y_valid = parts(load_digits)
    model = xgboost.XGBClassifier(n_estimators=6, max_depth=[2, 3], learning_rate=0.5, subsample=0.8, random_state=1)
    found = fit(model, x, y, eval_set=[(x_valid, y_valid)], metric="validation_0-mlogloss", algorithm="grid")
    best = found.best.load_checkpoint()
    assert type(best) is xgboost.XGBClassifier
    assert best.max_depth == found.best.config["max_depth"]
    assert best.score(x_valid, y_valid) > 0.85
    assert (best.predict_proba(x_valid).shape, best.n_classes_) == ((len(x_valid), 10), 10)


def test_an_estimator_takes_lists_and_one_pair(executor: Any) -> None:
    x = np.random.default_rng(0).normal(size=(120, 3))
    y = (x.sum(axis=1) > 0).astype(int)
    rows, labels, weights = x.tolist(), y.tolist(), [1.0] * len(y)
    model = xgboost.XGBClassifier(n_estimators=3, max_depth=[2, 4])

    def metrics_of(x: Any, y: Any, **arguments: Any) -> Any:
        return fit(model, x, y, metric="validation_0-logloss", algorithm="grid", **arguments).best.metrics

    expected = metrics_of(x, y, eval_set=[(x, y)])
    assert metrics_of(x, y, eval_set=(x, y)) == expected
    lists = {"eval_set": [(rows, labels)], "sample_weight": weights, "sample_weight_eval_set": [weights]}
    assert metrics_of(rows, labels, **lists) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eval_metric": "auc"}, "eval_metric='auc': is a parameter of the estimator"),
        ({"early_stopping_rounds": 3}, "early_stopping_rounds=3: is a parameter of the estimator"),
        ({"eval_set": 3}, "eval_set=3: must be a list of pairs"),
        ({"sample_weight_eval_set": []}, "sample_weight_eval_set=.*: must have the weights of each of the 1 sets"),
        ({"verbose": False}, "verbose=False: is no argument of this function, nor of fluid.run"),
    ],
)
def test_an_argument_that_an_estimator_s_fit_cannot_use_is_named(arguments: dict[str, Any], message: str) -> None:
    x, y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])
    model = xgboost.XGBClassifier(n_estimators=3)
    with pytest.raises(InvalidFieldError, match=message):
        fit(model, x, y, **{"eval_set": [(x, y)], "metric": "validation_0-logloss", **arguments})


def test_an_estimator_that_goes_on_is_the_undisturbed_one() -> None:
    x, y, x_valid, y_valid = parts()
    model = xgboost.XGBRegressor(n_estimators=8, subsample=0.7, n_jobs=1, early_stopping_rounds=5)
    data = Sets(xgboost.DMatrix(x, y), [(xgboost.DMatrix(x_valid, y_valid), "validation_0")])
    rounds = Rounds(most=8, per_iteration=1, patience=5)
    config = {name: value for name, value in model.get_xgb_params().items() if value is not None}
    expected, whole = all_of(_fit(config, None, estimator=model, sets=data, rounds=rounds))
    first = _fit(config, None, estimator=model, sets=data, rounds=rounds)
    begun = [next(first) for _ in range(3)]
    state = pickle.loads(cloudpickle.dumps(begun[-1][1]))
    further, resumed = all_of(_fit(config, state, estimator=model, sets=data, rounds=rounds))
    assert [metrics for metrics, _ in begun] + further == expected
    whole, resumed = (pickle.loads(cloudpickle.dumps(each)) for each in (whole, resumed))
    np.testing.assert_array_equal(whole.predict(x_valid), resumed.predict(x_valid))
    assert whole.best_iteration == resumed.best_iteration


def test_functions_of_ones_own(executor: Any) -> None:
    x, y, x_valid, y_valid = parts()

    def native(config: dict[str, Any]) -> None:
        matrix, valid = xgboost.DMatrix(x, y), xgboost.DMatrix(x_valid, y_valid)
        watched = {"evals": [(valid, "valid")], "callbacks": [ReportCallback()], "verbose_eval": False}
        xgboost.train({**BINARY, **config}, matrix, **remaining(6), **watched)

    def estimator(config: dict[str, Any]) -> None:
        model = xgboost.XGBClassifier(n_estimators=6, callbacks=[ReportCallback(2)], **config)
        model.fit(x, y, eval_set=[(x_valid, y_valid)], verbose=False)

    space = {"max_depth": [2, 3], "eta": [0.3, 0.9]}
    first = fluid.run(native, space, metric="valid-logloss", mode="min", algorithm="grid", budget=6)
    model = xgboost.Booster(model_file=first.best.load_checkpoint() / "model.ubj")
    assert first.failures == {}
    assert model.num_boosted_rounds() == first.best.iteration
    second = fluid.run(estimator, space, metric="validation_0-logloss", algorithm="grid", budget=3)
    assert [trial.iteration for trial in second.trials] == [3] * 4


def test_a_function_of_ones_own_goes_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, _ = matrices()
    assert remaining(9) == {"num_boost_round": 9, "xgb_model": None}
    whole = xgboost.train(BINARY, matrix, 9)
    xgboost.train(BINARY, matrix, 4).save_model(tmp_path / "model.ubj")
    monkeypatch.setattr("fluid.integrations.xgboost.reporting.get_checkpoint", lambda: tmp_path)
    assert xgboost.train(BINARY, matrix, **remaining(9)).save_raw() == whole.save_raw()
    assert remaining(3)["num_boost_round"] == 0


@pytest.mark.parametrize(
    ("name", "options", "mode"),
    [
        ("valid-auc", {}, "max"),
        ("valid-ndcg@5-", {}, "max"),
        ("valid-map-", {}, "max"),
        ("valid-ams@0.15", {}, "max"),
        ("valid-interval-regression-accuracy", {}, "max"),
        ("valid-mape", {}, "min"),
        ("valid-error@0.7", {}, "min"),
        ("valid-tweedie-nloglik@1.5", {}, "min"),
        ("valid-margin", {"custom_metric": print, "maximize": True}, "max"),
        ("valid-margin", {"custom_metric": print, "maximize": False}, "min"),
        ("valid-logloss", {"custom_metric": print, "maximize": True}, "min"),
        ("valid-accuracy", {"custom_metric": print}, "max"),
        ("valid-aft-nloglik", {"maximize": False}, "min"),
        ("valid-logloss", {"maximize": True, "params": {"eval_metric": ["logloss", "auc"]}}, "min"),
        ("valid-auc", {"maximize": True, "params": {"eval_metric": ["logloss", "auc"]}}, "max"),
    ],
)
def test_directions(name: str, options: dict[str, Any], mode: str) -> None:
    (goal,) = goals_among(name, None, ["train", "valid"], _Said(**options).mode_of)
    assert goal.mode == mode
    assert goals_among(name, "min", ["valid"], _Said(**options).mode_of)[0].less, "what the user says counts first"


def test_a_direction_that_nobody_says_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="'valid-margin' may mean either; pass mode="):
        goals_among("valid-margin", None, ["valid"], _Said(custom_metric=print).mode_of)


def test_what_is_to_be_maximized_is_maximized(executor: Any) -> None:
    matrix, valid = matrices()
    params = {"objective": "binary:logistic", "eta": [1e-4, 1e-3, 0.5], "disable_default_eval_metric": True}

    def margin(predicted: Any, data: Any) -> tuple[str, float]:
        return "margin", float(np.mean((predicted - 0.5) * (2.0 * data.get_label() - 1.0)))

    options = {"custom_metric": margin, "early_stopping_rounds": 3, "algorithm": "grid"}
    for said in ({"maximize": True}, {"mode": "max"}):
        result = train(params, matrix, 9, evals=[(valid, "valid")], metric="valid-margin", **options, **said)
        assert result.mode == "max" and result.best.config["eta"] == 0.5
        assert {trial.iteration for trial in result.trials} == {9}, "early stopping maximizes, too"
