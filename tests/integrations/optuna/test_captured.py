"""Objects of the driver that an objective refers to: the study, choices, what callbacks refer to as well."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.integrations.optuna import optimize

optuna = pytest.importorskip("optuna")

pytestmark = pytest.mark.usefixtures("executor")


def random_study(**options: Any) -> Any:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), **options)


# -- the study


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_study_that_an_objective_knows_by_name_is_the_study(kind: str, tmp_path: Path) -> None:
    def run(way: Any) -> Any:
        name = f"sqlite:///{tmp_path}/{way.__name__}.db" if kind == "sqlite" else None
        study = random_study(storage=name)

        def objective(trial: Any) -> float:
            x = float(trial.suggest_int("x", 0, 3))
            if trial.number == 6:
                study.stop()
            study.set_user_attr("last", trial.number)
            finished = [one for one in study.trials if one.state.is_finished()]
            trial.set_user_attr("seen", len(finished))
            for one in finished:
                if one.params == trial.params:
                    return float(one.value)
            trial.set_user_attr("computed", True)
            return x

        way(study, objective, n_trials=20, n_jobs=1)
        return study

    expected, got = run(optuna.Study.optimize), run(optimize)
    assert len(got.trials) == 7 and got.user_attrs == {"last": 6}
    assert [trial.user_attrs for trial in got.trials] == [trial.user_attrs for trial in expected.trials]


@pytest.mark.slow
def test_the_study_in_a_lane_is_a_study_as_optunas_functions_take_it() -> None:
    storage = optuna.storages.InMemoryStorage()
    study = random_study(storage=storage, study_name="known")

    def objective(trial: Any) -> float:
        assert isinstance(study, optuna.Study) and study is trial.study and storage is trial.storage
        for one in (study, trial.study, copy.deepcopy(study), pickle.loads(pickle.dumps(study))):
            assert one.get_trials(states=(optuna.trial.TrialState.RUNNING,))[0].number == trial.number
        assert len(optuna.load_study(study_name="known", storage=storage).trials) == trial.number + 1
        with pytest.raises(RuntimeError, match="Nested invocation"):
            study.optimize(lambda _: 0.0, n_trials=1)
        if trial.number == 3:
            importances = optuna.importance.get_param_importances(
                study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
            )
            assert list(importances) == ["x"]
        return trial.suggest_float("x", 0.0, 1.0)

    optimize(study, objective, n_trials=4, n_jobs=1)


@pytest.mark.slow
def test_a_trainable_may_know_the_study_too() -> None:
    study = random_study()

    def train(config: dict[str, Any]) -> Any:
        yield {"loss": float(len(study.trials))}

    space = {"x": optuna.distributions.FloatDistribution(0.0, 1.0)}
    optimize(study, train, n_trials=3, n_jobs=1, space=space, metric="loss", budget=1)
    assert [trial.value for trial in study.trials] == [1.0, 2.0, 3.0]


# -- choices


class Plain:
    pass


class Colour(Enum):
    RED = 1
    BLUE = 2


def one() -> int:
    return 1


def two() -> int:
    return 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choices", "kept_by_stock"),
    [
        ([Plain(), Plain()], False),  # Optuna gives copies of parameters.
        ([Plain, int], True),
        ([one, two], True),
        ([lambda: 1, lambda: 2], True),
        ([Colour.RED, Colour.BLUE], True),
        ([(0,), (1, 2)], False),
        ([{"a": 1}, {"a": 2}], False),
        ([None, True, 1.5, "s"], True),
    ],
    ids=["instances", "classes", "functions", "lambdas", "enum", "tuples", "dicts", "atoms"],
)
def test_a_choice_is_one_of_the_objectives_own(choices: list[Any], kept_by_stock: bool) -> None:
    def objective(trial: Any) -> float:
        chosen = trial.suggest_categorical("choice", choices)
        assert any(chosen is one for one in choices)
        assert trial.suggest_categorical(name="choice", choices=choices) is chosen
        if kept_by_stock:
            assert trial.params["choice"] is chosen
        return float(next(number for number, one in enumerate(choices) if one is chosen))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That not all types are for every storage.
        expected, got = random_study(), random_study()
        expected.optimize(objective, n_trials=5)
        optimize(got, objective, n_trials=5, n_jobs=1)
        optimize(got, objective, n_trials=1, n_jobs=1)
    assert [trial.value for trial in got.trials[:5]] == [trial.value for trial in expected.trials]
    assert any(got.best_params["choice"] is one for one in choices) == kept_by_stock


def test_bad_choices_raise_as_they_do_there() -> None:
    def objective(trial: Any) -> float:
        with pytest.raises(ValueError, match="must contain one or more"):
            trial.suggest_categorical("none", [])
        trial.suggest_categorical("some", [(1,), (2,)])
        with pytest.raises(ValueError, match="dynamic value space"):
            trial.suggest_categorical("some", [(1,), (3,)])
        return 0.0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimize(random_study(), objective, n_trials=1)


# -- objects shared with callbacks


class Keeper:
    """The objective and the callback of one object."""

    def __init__(self) -> None:
        self.model: Any = None

    def __call__(self, trial: Any) -> float:
        self.model = trial.suggest_float("x", 0.0, 1.0)
        return float(self.model)

    def keep(self, study: Any, trial: Any) -> None:
        self.best = self.model


def test_an_object_that_a_callback_shares_with_the_objective_is_told_of() -> None:
    keeper = Keeper()
    with pytest.warns(UserWarning, match="share the Keeper itself: trials run in other processes") as told:
        optimize(random_study(), keeper, n_trials=2, callbacks=[keeper.keep, keeper.keep])
    assert len(told) == 1 and told[0].filename == __file__
    losses: list[float] = []
    limit, study = 3.0, random_study()

    def objective(trial: Any) -> float:
        losses.append(trial.suggest_float("x", 0.0, limit))
        return float(len(study.trials))

    with pytest.warns(UserWarning, match="share losses: "):
        optimize(study, objective, n_trials=1, callbacks=[lambda study, trial: losses.clear()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimize(study, objective, n_trials=1, callbacks=[lambda _, trial: study.set_user_attr("limit", limit)])


# -- what is refused


def test_an_objective_that_cannot_be_pickled_is_named_with_its_part() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, trial: Any) -> float:
            return 0.0

    reason = r"^trainable=<.*Locked object at .*>: cannot be pickled because of lock: "
    with pytest.raises(InvalidFieldError, match=reason):
        optimize(random_study(), Locked(), n_trials=1)


@pytest.mark.parametrize("catch", [None, 1, (1,)])
def test_what_is_no_exception_class_is_a_type_error_as_it_is_there(catch: Any) -> None:
    with pytest.raises(TypeError, match=r"^catch="):
        optimize(random_study(), lambda trial: 0.0, n_trials=1, catch=catch)


# -- exceptions


class TwoArguments(Exception):
    """Pickle alone cannot make it again."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.code = code


def test_an_exception_that_pickle_cannot_make_again_is_caught_and_raised() -> None:
    def objective(trial: Any) -> float:
        if trial.number == 1:
            try:
                raise KeyError("data")
            except KeyError as error:
                raise TwoArguments(3, "loader") from error
        return 0.0

    study = random_study()
    optimize(study, objective, n_trials=3, n_jobs=1, catch=TwoArguments)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    with pytest.raises(TwoArguments, match="code 3 at loader") as caught:
        optimize(random_study(), objective, n_trials=3, n_jobs=1)
    assert caught.value.code == 3 and repr(caught.value.__cause__) == "KeyError('data')"
    assert "in objective" in str(caught.value.__cause__.__cause__), "the traceback in the lane"
