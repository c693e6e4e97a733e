"""LightGBM on Fluid: a sweep trains what LightGBM trains alone, also where a trial goes on from a checkpoint."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest

import fluid
from fluid.errors import InvalidFieldError
from fluid.search import loguniform, randint, uniform

pytestmark = pytest.mark.frameworks("lightgbm", "sklearn")
lightgbm = pytest.importorskip("lightgbm", reason="needs LightGBM: make integrations")
pytest.importorskip("sklearn", reason="needs scikit-learn: make integrations")

from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits  # noqa: E402

from fluid.integrations.boosting import Rounds  # noqa: E402
from fluid.integrations.lightgbm import fit, remaining, report_callback, train  # noqa: E402
from fluid.integrations.lightgbm.datasets import DatasetSources  # noqa: E402
from fluid.integrations.lightgbm.estimators import _fit, _FittedOf  # noqa: E402
from fluid.integrations.lightgbm.training import _draws, train_rounds  # noqa: E402

SAME = {"deterministic": True, "force_col_wise": True, "feature_pre_filter": False, "num_threads": 1, "verbosity": -1}
BINARY = {"objective": "binary", "metric": ["auc", "binary_logloss"], "num_leaves": 7, "seed": 3, **SAME}
DIGITS = {"objective": "multiclass", "num_class": 10, "num_leaves": 4, **SAME}
BAGGED = {"bagging_fraction": 0.5, "bagging_freq": 2, "feature_fraction": 0.6}


def parts(load: Any = load_breast_cancer) -> tuple[Any, Any, Any, Any]:
    data, target = load(return_X_y=True)
    held_out = np.arange(len(data)) % 4 == 0
    return data[~held_out], target[~held_out], data[held_out], target[held_out]


def datasets(load: Any = load_breast_cancer) -> tuple[Any, Any]:
    x, y, x_valid, y_valid = parts(load)
    data = lightgbm.Dataset(x, y)
    return data, lightgbm.Dataset(x_valid, y_valid, reference=data)


def trial(config: dict[str, Any], state: Any = None, load: Any = load_breast_cancer, **options: Any) -> Any:
    """What a lane runs for a trial, with data of its own."""
    rounds = Rounds(most=options.pop("rounds", 12), per_iteration=options.pop("per_iteration", 1), **options)
    data, valid = datasets(load)
    shared: dict[str, Any] = {"names": ["train", "valid"], "obj": None, "feval": None, "begin": None}
    return train_rounds(config, state, sources=DatasetSources(data, [data, valid]), rounds=rounds, **shared)


def all_of(iterations: Any) -> tuple[list[dict[str, float]], Any]:
    found = [(metrics, state) for metrics, state in iterations]
    return [metrics for metrics, _ in found], found[-1][1]


def trees(booster: Any) -> str:
    return str(booster.model_to_string(num_iteration=-1).split("\nfeature_importances")[0].partition("Tree=0")[2])


@pytest.mark.parametrize(
    ("config", "load", "draws"),
    [
        pytest.param(BINARY, load_breast_cancer, False, id="binary"),
        pytest.param({**BINARY, **BAGGED}, load_breast_cancer, True, id="bagged"),
        pytest.param({**BINARY, "extra_trees": True}, load_breast_cancer, True, id="extra trees"),
        pytest.param({**BINARY, "boosting": "dart"}, load_breast_cancer, True, id="dart"),
        pytest.param({**BINARY, "data_sample_strategy": "goss"}, load_breast_cancer, True, id="goss"),
        pytest.param({**BINARY, **BAGGED, "boosting": "rf", "bagging_freq": 1}, load_breast_cancer, True, id="rf"),
        pytest.param(DIGITS, load_digits, False, id="digits"),
        pytest.param({"objective": "regression_l1", "max_bin": 31, **SAME}, load_diabetes, False, id="l1"),
        pytest.param({"objective": "poisson", "lambda_l1": 0.5, **SAME}, load_diabetes, False, id="poisson"),
    ],
)
def test_a_trial_that_goes_on_is_the_undisturbed_one(config: dict[str, Any], load: Any, draws: bool) -> None:
    expected, model = all_of(trial(config, load=load))
    disturbed, other = trial(config, load=load), trial({**config, "seed": 9}, load=load)
    found = []
    for _ in range(5):
        metrics, state = next(disturbed)
        found.append(metrics)
        next(other)  # Trials of a lane take turns.
    saved = pickle.loads(cloudpickle.dumps(state))
    told = dict(line[1:-1].split(": ", 1) for line in saved.model_to_string().splitlines() if line[:1] == "[")
    assert _draws(told) is draws
    further, resumed = all_of(trial(config, saved, load=load))
    assert found + further == expected
    assert trees(resumed) == trees(model)


def test_rounds_are_those_of_lightgbm_itself() -> None:
    data, valid = datasets()
    told: dict[str, Any] = {}
    sets = {"valid_sets": [data, valid], "valid_names": ["train", "valid"]}
    config = {**BINARY, **BAGGED}
    expected = lightgbm.train(config, data, 12, callbacks=[lightgbm.record_evaluation(told)], **sets)
    metrics, model = all_of(trial(config))
    assert trees(model) == trees(expected)
    assert [each["valid-binary_logloss"] for each in metrics] == told["valid"]["binary_logloss"]
    assert [each["train-auc"] for each in metrics] == told["train"]["auc"]


def test_trials_share_sets_that_are_binned_alike() -> None:
    data, valid = datasets()
    sources = pickle.loads(cloudpickle.dumps(DatasetSources(data, [data, valid])))
    first, evaluated = sources.get({**BINARY, "num_leaves": 3})
    assert evaluated[0] is first
    assert sources.get({**BINARY, "num_leaves": 9, "min_data_in_leaf": 2})[0] is first
    assert sources.get({**BINARY, "max_bin": 15})[0] is not first


EARLY = {**BINARY, "learning_rate": 0.9}


@pytest.mark.parametrize("config", [EARLY, {**EARLY, **BAGGED}, {**EARLY, "first_metric_only": True}])
def test_early_stopping_is_that_of_lightgbm_and_goes_on(config: dict[str, Any]) -> None:
    data, valid = datasets()
    sets = {"valid_sets": [data, valid], "valid_names": ["train", "valid"]}
    alone = lightgbm.train({**config, "early_stopping_round": 4}, data, 60, keep_training_booster=True, **sets)
    expected, model = all_of(trial(config, rounds=60, patience=4))
    assert len(expected) == alone.current_iteration() < 60
    assert model.best_iteration == alone.best_iteration
    first = trial(config, rounds=60, patience=4)
    begun = [next(first) for _ in range(4)]
    further, resumed = all_of(trial(config, pickle.loads(cloudpickle.dumps(begun[-1][1])), rounds=60, patience=4))
    assert [metrics for metrics, _ in begun] + further == expected
    assert (resumed.best_iteration, resumed.fluid_progress) == (model.best_iteration, model.fluid_progress)
    assert list(trial(config, pickle.loads(cloudpickle.dumps(model)), rounds=60, patience=4)) == [], "it has ended"


def squared(predicted: Any, dataset: Any) -> tuple[Any, Any]:
    return predicted - dataset.get_label(), np.ones_like(predicted)


def distance(predicted: Any, dataset: Any) -> tuple[str, float, bool]:
    return "distance", float(np.abs(predicted - dataset.get_label()).max()), False


def test_a_sweep(executor: Any) -> None:
    data, valid = datasets()
    params = {"objective": "binary", "metric": ["auc"], "num_leaves": randint(4, 32), "verbosity": -1}
    params |= {"learning_rate": loguniform(0.01, 0.5), "feature_fraction": uniform(0.3, 1.0), "n_estimators": 18}
    result = train(params, data, valid_sets=[valid], metric="valid_0-auc", samples=12, rounds_per_iteration=2)
    assert (result.mode, len(result.trials), result.failures) == ("max", 12, {})
    assert max(trial.iteration for trial in result.trials) == 9
    best = result.best.load_checkpoint()
    assert best.current_iteration() == 2 * result.best.iteration
    from sklearn.metrics import roc_auc_score

    _, _, x_valid, y_valid = parts()
    assert roc_auc_score(y_valid, best.predict(x_valid)) == pytest.approx(result.best.value)
    assert best.params["num_threads"] == 1


def test_objectives_metrics_and_models_to_begin_with(executor: Any) -> None:
    data, valid = datasets()
    begun = lightgbm.train({"objective": squared, "verbosity": -1}, lightgbm.Dataset(*parts()[:2]), 3)
    params = {"objective": squared, "num_leaves": [4, 8], "metric": "None", "early_stopping_rounds": 5}
    names = {"valid_names": ["train", "valid"], "metric": "valid-distance", "algorithm": "grid"}
    result = train(params, data, 6, [data, valid], feval=distance, init_model=begun, **names)
    assert result.failures == {}
    assert set(result.best.metrics) == {"train-distance", "valid-distance"}
    assert result.best.load_checkpoint().current_iteration() == 3 + result.best.iteration


def test_arguments_that_cannot_be_used() -> None:
    data, valid = datasets()
    shared: dict[str, Any] = {"metric": "valid_0-auc", "valid_sets": [valid]}
    freed = lightgbm.Dataset(*parts()[:2]).construct()
    with pytest.raises(InvalidFieldError, match=r"train_set=.*has no raw data any more; make it with free_raw_data"):
        train(BINARY, freed, **shared)
    with pytest.raises(InvalidFieldError, match=r"valid_sets\[0\]=3: must be a Dataset"):
        train(BINARY, data, metric="valid_0-auc", valid_sets=[3])
    with pytest.raises(InvalidFieldError, match=r"valid_sets=\(\): must name a set"):
        train(BINARY, data, metric="valid_0-auc")
    with pytest.raises(InvalidFieldError, match=r"params\['n_estimators'\]=\[3, 4\]: must be a number"):
        train({**BINARY, "n_estimators": [3, 4]}, data, **shared)
    with pytest.raises(
        InvalidFieldError, match=r"params\['lerning_rate'\]=0.1: is no parameter.*; 'learning_rate' is one"
    ):
        train({**BINARY, "lerning_rate": 0.1}, data, **shared)
    with pytest.raises(InvalidFieldError, match=r"valid_names=.*has more names than the 1 sets"):
        train(BINARY, data, valid_names=["a", "b"], **shared)
    with pytest.raises(InvalidFieldError, match=r"estimator=.*must be an LGBMClassifier"):
        fit(3, *parts()[:2], eval_set=[parts()[2:]], metric="valid_0-auc")


def test_estimators(executor: Any) -> None:
    x, y, x_valid, y_valid = parts(load_digits)
    names = np.array(list("abcdefghij"))
    model = lightgbm.LGBMClassifier(n_estimators=5, num_leaves=[4, 8], subsample=0.8, subsample_freq=1, random_state=1)
    model.set_params(class_weight="balanced")
    found = fit(
        model, x, names[y], eval_set=[(x_valid, names[y_valid])], metric="valid_0-multi_logloss", algorithm="grid"
    )
    assert found.failures == {}
    best = found.best.load_checkpoint()
    assert type(best) is lightgbm.LGBMClassifier
    assert (best.num_leaves, best.n_estimators) == (found.best.config["num_leaves"], 5)
    assert best.score(x_valid, names[y_valid]) > 0.8
    from sklearn.metrics import log_loss

    assert log_loss(y_valid, best.predict_proba(x_valid)) == pytest.approx(found.best.value)


@pytest.mark.filterwarnings("ignore:The argument 'eval_set' is deprecated")
def test_data_and_metrics_are_those_that_the_estimator_takes(executor: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    y = (x.sum(axis=1) > 0).astype(int)
    model = lightgbm.LGBMClassifier(n_estimators=3, learning_rate=[0.1, 0.3], verbosity=-1)

    def metrics_of(estimator: Any, x: Any, y: Any, **arguments: Any) -> dict[str, float]:
        result = fit(estimator, x, y, metric="valid_0-auc", mode="max", algorithm="grid", **arguments)
        return dict(result.best.metrics)

    expected = metrics_of(model, x, y, eval_set=[(x[:60], y[:60])], eval_metric="auc")
    alone = lightgbm.LGBMClassifier(n_estimators=3, learning_rate=0.3, verbosity=-1, num_threads=1)
    alone.fit(x, y, eval_set=[(x[:60], y[:60])], eval_metric="auc")
    assert expected == {f"valid_0-{name}": values[-1] for name, values in alone.evals_result_["valid_0"].items()}
    assert expected.keys() == {"valid_0-auc", "valid_0-binary_logloss"}
    assert metrics_of(model, x, y, eval_set=(x[:60], y[:60]), eval_metric=["auc"]) == expected
    rows, labels, weights = x.tolist(), y.tolist(), [1.0] * len(y)
    lists = {"eval_set": [(rows[:60], labels[:60])], "sample_weight": weights, "eval_sample_weight": [weights[:60]]}
    assert metrics_of(model, rows, labels, eval_metric="auc", **lists) == expected
    model.set_params(metric="binary_error")
    names = metrics_of(model, x, y, eval_set=[(x[:60], y[:60])], eval_metric="auc").keys()
    assert names == {"valid_0-auc", "valid_0-binary_error"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eval_metric": max}, "eval_metric=.*: must be the name of a metric; train\\(\\) takes functions, as feval="),
        ({"eval_metric": ["auc", max]}, "eval_metric=<built-in"),
        ({"eval_set": []}, "eval_set=.*: must be a list of pairs"),
        ({"eval_set": [[1.0, 2.0, 3.0]]}, "eval_set=.*: must be a list of pairs"),
        ({"eval_sample_weight": [None, None]}, "eval_sample_weight=.*: must have the weights of each of the 1 sets"),
        ({"feature_name": ["a"]}, "feature_name=.*: is no argument of this function, nor of fluid.run"),
    ],
)
def test_an_argument_that_an_estimator_s_fit_cannot_use_is_named(arguments: dict[str, Any], message: str) -> None:
    x, y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])
    model = lightgbm.LGBMClassifier(n_estimators=3)
    with pytest.raises(InvalidFieldError, match=message):
        fit(model, x, y, **{"eval_set": [(x, y)], "metric": "valid_0-binary_logloss", **arguments})


def test_an_estimator_that_goes_on_is_the_undisturbed_one() -> None:
    x, y, x_valid, y_valid = parts(load_diabetes)
    model = lightgbm.LGBMRegressor()
    data, config = lightgbm.Dataset(x, y), {"objective": "regression", "metric": "l2", **SAME}
    shared: dict[str, Any] = {
        "made_of": _FittedOf(model, x[:2], y[:2]),
        "names": ["valid_0"],
        "rounds": Rounds(most=8, per_iteration=1, patience=5),
    }

    def run(state: Any = None) -> Any:
        return _fit(config, state, sources=DatasetSources(data, [lightgbm.Dataset(x_valid, y_valid)]), **shared)

    expected, whole = all_of(run())
    first = run()
    begun = [next(first) for _ in range(3)]
    further, resumed = all_of(run(pickle.loads(cloudpickle.dumps(begun[-1][1]))))
    assert [metrics for metrics, _ in begun] + further == expected
    whole, resumed = (pickle.loads(cloudpickle.dumps(each)) for each in (whole, resumed))
    np.testing.assert_array_equal(whole.predict(x_valid), resumed.predict(x_valid))


@pytest.mark.filterwarnings("ignore:The argument .eval_set")  # Of newer versions; it reaches the trials, too.
def test_functions_of_ones_own(executor: Any) -> None:
    x, y, x_valid, y_valid = parts()

    def native(config: dict[str, Any]) -> None:
        data = lightgbm.Dataset(x, y)
        valid = lightgbm.Dataset(x_valid, y_valid, reference=data)
        early = lightgbm.early_stopping(50, verbose=False)
        lightgbm.train(
            {**BINARY, **config}, data, **remaining(6), valid_sets=[valid], callbacks=[early, report_callback()]
        )

    def estimator(config: dict[str, Any]) -> None:
        model = lightgbm.LGBMClassifier(n_estimators=6, verbosity=-1, **config)
        model.fit(x, y, eval_set=[(x_valid, y_valid)], callbacks=[report_callback(2)])

    space = {"num_leaves": [4, 8], "learning_rate": [0.1, 0.3]}
    first = fluid.run(native, space, metric="valid_0-binary_logloss", mode="min", algorithm="grid", budget=6)
    model = lightgbm.Booster(model_file=first.best.load_checkpoint() / "model.txt")
    assert first.failures == {}
    assert model.current_iteration() == first.best.iteration
    second = fluid.run(estimator, space, metric="valid_0-binary_logloss", algorithm="grid", budget=3)
    assert [trial.iteration for trial in second.trials] == [3] * 4


def test_a_function_of_ones_own_goes_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remaining(9) == {"num_boost_round": 9, "init_model": None}
    whole = lightgbm.train(BINARY, datasets()[0], 9)
    lightgbm.train(BINARY, datasets()[0], 4).save_model(tmp_path / "model.txt")
    monkeypatch.setattr("fluid.integrations.lightgbm.reporting.get_checkpoint", lambda: tmp_path)
    assert trees(lightgbm.train(BINARY, datasets()[0], **remaining(9))) == trees(whole)
    assert remaining(3)["num_boost_round"] == 0


def margin(predicted: Any, dataset: Any) -> list[tuple[str, float, bool]]:
    return [
        ("margin", float(np.mean(predicted * dataset.get_label())), True),
        ("spread", float(np.std(predicted)), False),
    ]


def broken(predicted: Any, dataset: Any) -> Any:
    raise ValueError("constant")


def test_what_functions_say_of_their_direction() -> None:
    data, valid = datasets()
    sources = DatasetSources(data, [valid])
    assert sources.modes_said(margin, {}) == {"margin": "max", "spread": "min"}
    assert sources.modes_said([broken, distance], {}) == {"distance": "min"}
    ten, held = datasets(load_digits)
    classes = DatasetSources(ten, [held])
    shapes: list[Any] = []
    classes.modes_said(lambda predicted, dataset: shapes.append(predicted.shape), {"num_class": 10})
    assert shapes[0][1] == 10


def test_what_a_function_maximizes_is_maximized(executor: Any) -> None:
    data, valid = datasets()
    params = {"objective": "binary", "metric": "None", "learning_rate": [1e-4, 1e-3, 0.5], "num_leaves": 4}
    options = {"feval": margin, "metric": "valid_0-margin", "algorithm": "grid"}
    result = train(params, data, 6, [valid], **options)
    assert result.mode == "max" and result.best.config["learning_rate"] == 0.5
    with pytest.raises(InvalidFieldError, match="'valid_0-margin' may mean either; pass mode="):
        train(params, data, 6, [valid], **{**options, "feval": broken})
