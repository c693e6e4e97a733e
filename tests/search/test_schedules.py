"""Schedules: values by iteration, as parts of spaces, and what of them a shared run knows."""

from __future__ import annotations

import copy
import functools
import math
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError, PrefixEndedError, WrongCallError
from fluid.search import Schedule, choice, loguniform, make_sampler, make_space, prefix_end, schedule, uniform, when
from fluid.search.prefix_end import asked_beyond, enter_trial
from fluid.search.schedules import with_schedules
from fluid.trial_fields import own_config
from fluid.user_values import is_same_value


@pytest.fixture(autouse=True, scope="module")
def outside_of_lanes() -> Iterator[None]:
    """No trial's code runs in this process, although tests of lanes may have run some in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_end, "_pipe", None)
        patch.setattr(prefix_end, "_current", ("", {}))
        yield


def cosine(iteration: int, lr: float, total: int = 40) -> float:
    return lr * (1 + math.cos(math.pi * iteration / total)) / 2


def test_values_hold_until_the_next_start() -> None:
    rate = schedule({20: 0.01, 0: 0.1})
    assert [rate.at(iteration) for iteration in (0, 19, 20, 10**9)] == [0.1, 0.1, 0.01, 0.01]
    assert schedule("adam").at(7) == "adam"
    assert rate.at(np.int64(20)) == 0.01


def test_values_between_two_starts_lie_on_a_line() -> None:
    rate = schedule({0: 0, 10: 1, 20: 1, 30: 0.5}, between="linear")
    assert [rate.at(iteration) for iteration in (0, 5, 10, 15, 25, 30, 99)] == [0.0, 0.5, 1.0, 1.0, 0.75, 0.5, 0.5]
    third = schedule({0: 0.1, 3: 0.1}, between="linear")
    assert {third.at(iteration) for iteration in range(5)} == {0.1}


def test_a_function_is_called_with_its_arguments() -> None:
    assert schedule(cosine, lr=0.1, total=10).at(10) == 0.0
    assert schedule(functools.partial(cosine, total=10), lr=0.1).at(10) == 0.0
    assert schedule(math.exp).at(0) == 1.0


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: schedule({}), r"values=\{\}: has no value for iteration 0"),
        (lambda: schedule({5: 1}), "has no value for iteration 0: give one"),
        (lambda: schedule({0: 1, -1: 2}), "values=-1: starts at no iteration"),
        (lambda: schedule({0: 1, 1.0: 2}), "values=1.0: starts at no iteration"),
        (lambda: schedule({0: 1, "5": 2}), "values='5': starts at no iteration"),
        (lambda: schedule({True: 1}), "values=True: starts at no iteration"),
        (lambda: schedule({0: 1, math.nan: 2}), "values=nan: starts at no iteration"),
        (lambda: schedule({0: 1, 5: math.nan}), r"values\[5\]=nan: must be a value, not NaN"),
        (lambda: schedule({0: 1, 5: "a"}, between="linear"), r"values\[5\]='a': must be a number"),
        (lambda: schedule({0: 1, 5: [2, "a"]}, between="linear"), r"values\[5\]='a': must be a number"),
        (lambda: schedule({0: 1, 5: choice([2, None])}, between="linear"), r"values\[5\]=None: must be a number"),
        (lambda: schedule({0: 1, 5: when("a", 1, "b")}, between="linear"), r"values\[5\]='b': must be a number"),
        (lambda: schedule({0: 1, 5: math.inf}, between="linear"), r"values\[5\]=inf: must be finite"),
        (lambda: schedule({0: 1}, between="cubic"), "between='cubic': must be one of"),
        (lambda: schedule({0: (1, 2)}), "a tuple may mean choices"),
        (lambda: schedule({0: {"a": 1}}), "is a dict: give each of its names a schedule of its own"),
        (lambda: schedule(schedule(1)), "is a schedule itself"),
        (lambda: schedule({0: []}), "must have at least one value"),
        (lambda: schedule({0: print}), "a function is not a value"),
        (lambda: schedule({0: when("a", 1, 2)}), r"put when\(...\) around the schedule"),
        (lambda: schedule(1, lr=3), "lr=3: is for a function only"),
        (lambda: schedule(cosine), "missing a required argument: 'lr'"),
        (lambda: schedule(cosine, lr=1, rate=2), "unexpected keyword argument 'rate'"),
        (lambda: schedule(cosine, lr=math.nan), "lr=nan: must be a value"),
        (lambda: schedule(cosine, lr=when("a", 1, 2)), r"put when\(...\) around the schedule"),
        (lambda: schedule(cosine, lr=1, between="linear"), "between='linear': is for values by their starts"),
    ],
)
def test_what_is_no_schedule_is_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        make()


def test_a_schedule_of_nothing_is_a_wrong_call() -> None:
    with pytest.raises(WrongCallError, match="values"):
        schedule()  # type: ignore[call-arg]


@pytest.mark.parametrize("iteration", [-1, 1.0, True, None, "1", math.nan])
def test_what_is_no_iteration_is_refused(iteration: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"iteration=.*is no iteration"):
        schedule(1).at(iteration)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (schedule({0: 0.1, 20: 0.01}), "schedule({0: 0.1, 20: 0.01})"),
        (schedule(0.1), "schedule(0.1)"),
        (schedule({0: np.float64(0.5), 1: "adam"}), "schedule({0: 0.5, 1: 'adam'})"),
        (schedule({0: 0, 9: 1}, between="linear"), "schedule({0: 0.0, 9: 1.0}, between='linear')"),
        (schedule(cosine, lr=0.1, total=40), "schedule(cosine, lr=0.1, total=40)"),
        (schedule(functools.partial(cosine, total=9), lr=0.1), "schedule(partial(cosine, total=9), lr=0.1)"),
        (schedule({0: 0.1, 20: [1, 2]}), "schedule({0: 0.1, 20: [1, 2]})"),
    ],
)
def test_a_schedule_is_shown_as_its_call(made: Any, text: str) -> None:
    assert repr(made) == text


def test_a_long_schedule_is_shown_short_and_unlike_others() -> None:
    one, other = (schedule({**dict.fromkeys(range(1000), 0.1), 999: last}) for last in (0.2, 0.3))
    assert len(repr(one)) <= 1000
    assert repr(one) != repr(other)
    assert repr(one) == repr(copy.deepcopy(one))


def test_schedules_are_compared_by_value() -> None:
    assert schedule({0: 0.1, 20: 0.01}) == schedule({20: 0.01, 0: 0.1})
    assert schedule(cosine, lr=0.1, total=4) == schedule(cosine, total=4, lr=0.1)
    assert hash(schedule(cosine, lr=0.1, total=4)) == hash(schedule(cosine, total=4, lr=0.1))
    others = [schedule(1), schedule(1.0), schedule(True), schedule({0: 1, 1: 2}), schedule({0: 1, 2: 2}), 1]
    others += [schedule({0: 1, 1: 2}, between="linear"), schedule(cosine, lr=1), schedule(cosine, lr=2)]
    assert all((one == other) == (one is other) for one in others for other in others if type(one) is not int)


def test_a_function_that_was_pickled_by_value_is_the_same_function() -> None:
    factor = 3

    def made(iteration: int) -> int:
        return iteration * factor

    one = schedule(made)
    again = cloudpickle.loads(cloudpickle.dumps({"lr": one}))["lr"]
    assert again == one
    assert hash(again) == hash(one)
    assert again.at(2) == 6
    factor = 4
    assert again != schedule(made)


@pytest.mark.parametrize("made", [schedule({0: 0.1, 20: [1, 2]}), schedule(cosine, lr=uniform(0, 1))])
def test_a_schedule_whose_values_are_drawn_has_none_itself(made: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"each config of fluid\.run draws its own"):
        made.at(0)


def test_a_config_with_schedules_is_plain_data() -> None:
    config = {"lr": schedule({0: 0.1, 5: 0.2}), "nested": {"wd": [schedule(cosine, lr=1.0)]}}
    assert own_config(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert is_same_value(config, pickle.loads(pickle.dumps(config)))
    assert with_schedules(config, repr) == {
        "lr": "schedule({0: 0.1, 5: 0.2})",
        "nested": {"wd": ["schedule(cosine, lr=1.0)"]},
    }


# -- spaces --------------------------------------------------------------------------------------

SPACE = {
    "optimizer": ["adam", "sgd"],
    "lr": schedule({0: 0.1, 10: [0.1, 0.2], 20: when("optimizer", "sgd", [0.3, 0.4])}),
    "nested": {"wd": schedule(cosine, lr=[1.0, 2.0], total=20)},
}


def asked(algorithm: str, space: Any, count: int = 100, **options: Any) -> list[dict[str, Any]]:
    sampler = make_sampler(algorithm, make_space(space), **options)
    found = []
    while len(found) < count and (suggestion := sampler.ask()) is not None:
        found.append(suggestion.config)
        sampler.tell(suggestion.token, float(suggestion.config["lr"].at(10)))
    return found


def test_a_grid_has_each_schedule_once_and_the_last_start_changes_first() -> None:
    configs = asked("grid", {"lr": schedule({0: 0.1, 20: [1, 2], 10: [3, 4]})})
    assert [repr(config["lr"]) for config in configs] == [
        f"schedule({{0: 0.1, 10: {ten}, 20: {twenty}}})" for ten in (3, 4) for twenty in (1, 2)
    ]
    assert len(asked("grid", SPACE)) == make_sampler("grid", make_space(SPACE)).size == 2 * 2 + 2 * 2 * 2


@pytest.mark.parametrize("algorithm", ["random", "tpe", "grid"])
def test_each_config_has_schedules_of_plain_values(algorithm: str) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    space = make_space(SPACE)
    for config in asked(algorithm, SPACE, 12):
        assert list(config) == list(SPACE)
        rate, decay = config["lr"], config["nested"]["wd"]
        assert isinstance(rate, Schedule)
        assert rate.at(0) == 0.1
        assert rate.at(10) in (0.1, 0.2)
        assert rate.at(20) in ((0.3, 0.4) if config["optimizer"] == "sgd" else (rate.at(10),))
        assert decay.at(0) in (1.0, 2.0)
        assert space.config(space.values_in(config) | {"lr/20": 0.3} | space.values_in(config)) == config
        # As the files of other drivers have it.
        assert space.values_in(with_schedules(config, repr)) == space.values_in(config)


def test_a_schedule_may_depend_on_another_hyperparameter() -> None:
    space = {"warm": [True, False], "lr": when("warm", True, schedule({0: 0.1, 5: [1, 2]}))}
    found = [
        (config["warm"], config.get("lr")) for config in (sample.config for sample in iter(_grid(space).ask, None))
    ]
    assert found == [(True, schedule({0: 0.1, 5: 1})), (True, schedule({0: 0.1, 5: 2})), (False, None)]


def _grid(space: Any) -> Any:
    return make_sampler("grid", make_space(space))


def test_drawn_values_are_on_a_line_and_arguments_may_be_distributions() -> None:
    space = {"lr": schedule({0: 0, 4: uniform(1, 2)}, between="linear"), "wd": schedule(cosine, lr=loguniform(1, 2))}
    for config in asked_random(space, 5):
        assert 0.25 <= config["lr"].at(1) < 0.5
        assert 1 <= config["wd"].at(0) < 2


def asked_random(space: Any, count: int) -> list[dict[str, Any]]:
    sampler = make_sampler("random", make_space(space), seed=1)
    return [sampler.ask().config for _ in range(count)]  # type: ignore[union-attr]


def test_a_schedule_of_plain_values_is_a_constant_or_a_choice() -> None:
    one, other = schedule({0: 0.1}), schedule({0: 0.2, 5: 0.1})
    assert asked("grid", {"lr": one, "layers": [1, 2]}) == [{"lr": one, "layers": number} for number in (1, 2)]
    assert asked("grid", {"lr": [one, other]}) == [{"lr": one}, {"lr": other}]
    with pytest.raises(InvalidFieldError, match="a choice holds a distribution"):
        make_space({"lr": [one, schedule({0: [1, 2]})]})


@pytest.mark.parametrize("is_text", [False, True])
def test_points_give_whole_schedules(is_text: bool) -> None:
    space = {**SPACE, "c": [schedule(1), schedule({0: 1, 5: 2})], "d": schedule({0: 3, 4: 5})}
    point = {
        "optimizer": "sgd",
        "lr": schedule({0: 0.1, 10: 0.2, 20: 0.3}),
        "nested": {"wd": schedule(cosine, lr=2.0, total=20)},
        "c": schedule({0: 1, 5: 2}),
        "d": schedule({0: 3, 4: 5}),
    }
    given_point = with_schedules(point, repr) if is_text else point
    assert asked("grid", space, 1, points=[given_point]) == [point]


def test_a_schedule_of_a_lambda_is_read_from_its_text() -> None:
    space = make_space({"lr": schedule(lambda iteration, low: low, low=[1, 2])})
    config = space.config({"lr/low": 2})
    assert space.read({"lr": "schedule(<lambda>, low=2)"}) == config
    with pytest.raises(InvalidFieldError, match="must be a schedule as in the space"):
        space.read({"lr": "schedule(<lambda>, low=2"})


def test_points_give_parts_of_schedules() -> None:
    first = asked("grid", SPACE, 1, points=[{"optimizer": "sgd", "lr": {10: 0.2, "20": 0.4}}])[0]
    assert first["lr"] == schedule({0: 0.1, 10: 0.2, 20: 0.4})


@pytest.mark.parametrize(
    ("lr", "problem"),
    [
        (schedule({0: 0.1}), "has another form than the one of the space"),
        (schedule({0: 0.1, 10: 0.1, 15: 0.1}), "has another form"),
        (schedule({0: 0.1, 10: 0.1}, between="linear"), "has another form"),
        (schedule(cosine, lr=1), "has another form"),
        (schedule({0: 0.2, 10: 0.1}), r"\['lr'\]\['0'\]=0.2"),
        (schedule({0: 0.1, 10: 0.7}), r"\['lr'\]\['10'\]=0.7: is not one of"),
        ({5: 0.1}, r"\['5'\]=0.1: is not in the space"),
        ({20: 0.3}, "is in a config only if optimizer is 'sgd'"),
        (0.1, "must be a schedule as in the space"),
        ("schedule(", "must be a schedule as in the space"),
        ("schedule(__import__('os').getcwd())", "has another form"),
    ],
)
def test_points_of_other_schedules_are_refused(lr: Any, problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        make_sampler("random", make_space(SPACE), points=[{"lr": lr}])


# -- what a shared run knows ---------------------------------------------------------------------

SECRET = 0.777123
WHOLE = [
    schedule({0: 0.5, 4: 0.25, 10: SECRET}),
    schedule({0: 0.5, 4: 0.25, 12: SECRET}, between="linear"),
    schedule({0: 0.5, 4: 0.25, 8: 0.125, 12: SECRET}, between="linear"),
    schedule(lambda iteration, low: 0.5 if iteration < 4 else low, low=SECRET),
    schedule(cosine, lr=0.5, total=777123),
]


@pytest.mark.parametrize("number", range(len(WHOLE)))
@pytest.mark.parametrize("known", [1, 2, 4])
def test_a_shared_run_knows_the_common_values_only(number: int, known: int) -> None:
    whole, run = WHOLE[number], f"run {number} until {known}"
    part = whole.until(known, run)
    assert isinstance(part, Schedule)
    assert [part.at(place) for place in range(known)] == [whole.at(place) for place in range(known)]
    assert "777123" not in repr(part) + repr(vars(part))
    assert repr(SECRET).encode() not in pickle.dumps(part, 0)
    assert part == whole.until(known)
    assert asked_beyond(run) is None
    with pytest.raises(PrefixEndedError, match=f"the value of iteration {known} .*agree on {known} iterations"):
        part.at(known)
    assert f"iteration {known} " in (asked_beyond(run) or "")


@given(
    starts=st.lists(st.integers(1, 30), unique=True, max_size=5),
    values=st.lists(st.floats(-1e3, 1e3), min_size=6, max_size=6),
    known=st.integers(1, 40),
    between=st.sampled_from(["step", "linear"]),
)
def test_common_values_are_exactly_those_of_the_whole(
    starts: list[int], values: list[float], known: int, between: str
) -> None:
    whole = schedule(dict(zip([0, *starts], values, strict=False)), between=between)
    part = whole.until(known).until(known)
    assert [part.at(number) for number in range(known)] == [whole.at(number) for number in range(known)]


def ways_to_ask(part: Schedule) -> dict[str, Callable[[], Any]]:
    return {
        "thread": lambda: ThreadPoolExecutor(1).submit(part.at, 5).result(),
        "copy": lambda: copy.copy(part).at(5),
        "deepcopy": lambda: copy.deepcopy({"lr": part})["lr"].at(5),
        "pickle": lambda: pickle.loads(pickle.dumps(part)).at(5),
        "cloudpickle": lambda: cloudpickle.loads(cloudpickle.dumps(part)).at(5),
        "more": lambda: part.until(5),
        "equality": lambda: part == schedule({0: 1, 4: 2}),
        "hash": lambda: {part: 1},
    }


@pytest.mark.parametrize("way", list(ways_to_ask(schedule(1))))
def test_whoever_asks_further_is_known_though_the_error_is_caught(way: str) -> None:
    ask = ways_to_ask(schedule({0: 1, 3: 2}).until(3, f"asked by {way}"))[way]
    value = None
    try:
        value = ask()
    except Exception as error:  # As careless code does.
        assert type(error) is PrefixEndedError
        assert not isinstance(error, LookupError | AttributeError | StopIteration | ValueError | TypeError)
    assert value is None
    assert "several trials share" in (asked_beyond(f"asked by {way}") or "")
    assert asked_beyond(f"not asked by {way}") is None


def test_a_process_that_the_lane_forked_is_heard_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_end, "_pipe", None)  # This process is a lane's here, and is none afterwards.
    monkeypatch.setattr(prefix_end, "_current", prefix_end._current)
    enter_trial("forked", {})
    part = pickle.loads(pickle.dumps(schedule(1).until(2, "forked")))
    assert asked_beyond("forked") is None
    child = os.fork()
    if child == 0:
        try:
            part.at(2)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert "iteration 2" in (asked_beyond("forked") or "")


def test_what_differs_before_the_end_is_told() -> None:
    part = schedule({0: 1, 3: 2}).until(3, "compared")
    assert part != schedule(2)
    assert asked_beyond("compared") is None


def test_the_error_survives_pickling_and_being_made_of_its_message() -> None:
    with pytest.raises(PrefixEndedError) as caught:
        schedule(1).until(1).at(1)
    error = caught.value
    for again in (pickle.loads(pickle.dumps(error)), type(error)(str(error))):
        assert type(again) is PrefixEndedError
        assert str(again) == str(error)
