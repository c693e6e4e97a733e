"""Reading a search space: what it may hold, what is refused, and the configs that come of it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.search import ConditionalSpace, Space, choice, lograndint, loguniform, make_space, randint, uniform


def mapping_space(space: dict[Any, Any]) -> Space:
    made = make_space(space)
    assert isinstance(made, Space)
    return made


def sample(space: dict[Any, Any], seed: int = 0) -> dict[str, Any]:
    return mapping_space(space).sample(np.random.default_rng(seed))


def test_lists_are_choices_and_other_values_constants() -> None:
    model = object()
    space = mapping_space({"a": [1, 2], "b": 3, "c": None, "d": "text", "e": model, "f": np.float64(2.0)})
    assert space.names == ("a",)
    config = space.config({"a": 2})
    assert config == {"a": 2, "b": 3, "c": None, "d": "text", "e": model, "f": 2.0}


def test_nested_dicts_keep_their_shape_and_order() -> None:
    space = mapping_space({"z": [1], "inner": {"deep": {"x": [2]}, "k": 3}, "empty": {}, "a": [4]})
    assert space.names == ("z", "inner/deep/x", "a")
    config = space.config({"z": 1, "inner/deep/x": 2, "a": 4})
    assert config == {"z": 1, "inner": {"deep": {"x": 2}, "k": 3}, "empty": {}, "a": 4}
    assert list(config) == ["z", "inner", "empty", "a"]


def test_configs_do_not_share_their_dicts() -> None:
    space = mapping_space({"inner": {"x": 1}, "empty": {}})
    first, second = space.config({}), space.config({})
    first["inner"]["x"] = first["empty"]["y"] = 5
    assert second == {"inner": {"x": 1}, "empty": {}}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "at least one value"),
        ((1, 2), "a tuple may mean choices, a range or one value"),
        ({1, 2}, "a set may mean"),
        (range(3), "a range may mean"),
        (np.logspace(-3, 0, 4), "an array may mean"),
        (lambda: 3, "a function is not a value"),
        (iter([1, 2]), "an iterator is not a value"),
        ([uniform(0, 1)], "a choice holds a distribution"),
        ([{"x": [{"y": uniform(0, 1)}]}], "a choice holds a distribution"),
        ({"grid_search": 3}, "must be a list of values"),
        ({"grid_search": []}, "at least one value"),
    ],
)
def test_what_means_nothing_is_refused_by_name(value: object, reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as refused:
        make_space({"k": 1, "outer": {"x": value}})
    assert refused.value.field == "space['outer']['x']"
    assert refused.value.value is value


def test_a_distribution_of_another_package_is_refused() -> None:
    stats = pytest.importorskip("scipy.stats")
    with pytest.raises(InvalidFieldError, match=r"space\['x'\].*is not a distribution that Fluid knows"):
        make_space({"x": stats.uniform(0, 1)})


@pytest.mark.parametrize("space", [3, None, "lr", [1, 2], dict, {"grid_search": [1, 2]}])
def test_a_space_is_a_dict_or_a_function(space: object) -> None:
    with pytest.raises(InvalidFieldError, match="must be a dict of names and values, or a function"):
        make_space(space)


@pytest.mark.parametrize("key", [1, None, "", ("a",)])
def test_names_are_strings(key: object) -> None:
    with pytest.raises(InvalidFieldError, match=r"key of space\['a'\].*must be a non-empty string"):
        make_space({"a": {key: [1]}})


def test_two_hyperparameters_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="has the same name as"):
        make_space({"a/b": 1, "a": {"b": [1]}})


@pytest.mark.parametrize(
    "make",
    [
        lambda: uniform(1, 1),
        lambda: uniform(float("nan"), 1),
        lambda: uniform(0, float("inf")),
        lambda: uniform(0, 1, step=0),
        lambda: uniform(0, 1, step=float("nan")),
        lambda: uniform("0", 1),  # type: ignore[arg-type]
        lambda: loguniform(0, 1),
        lambda: loguniform(2, 1),
        lambda: randint(3, 3),
        lambda: randint(0.5, 3),  # type: ignore[arg-type]
        lambda: randint(0, 2**63),
        lambda: randint(0, 5, 0),
        lambda: lograndint(0, 5),
        lambda: choice([]),
        lambda: choice("adam"),
        lambda: choice(3),  # type: ignore[arg-type]
    ],
)
def test_bad_bounds_are_refused(make: Any) -> None:
    with pytest.raises(InvalidFieldError):
        make()


def test_a_function_takes_one_argument() -> None:
    with pytest.raises(InvalidFieldError, match="must take one argument"):
        make_space(lambda: {})
    with pytest.raises(InvalidFieldError, match="must take one argument"):
        make_space(lambda a, b: {})
    assert isinstance(make_space(functools.partial(lambda a, trial: {}, 1)), ConditionalSpace)


class TestPoints:
    SPACE = mapping_space({"lr": uniform(0, 1), "n": randint(1, 9, 2), "o": {"m": [0.5, 0.9], "k": 3}, "d": [{"x": 1}]})

    def test_a_part_of_a_config_becomes_values_by_name(self) -> None:
        assert self.SPACE.check_point("p", {"lr": 1, "o": {"m": 0.9}}) == {"lr": pytest.approx(1.0), "o/m": 0.9}
        assert self.SPACE.check_point("p", {"o": {"m": 0.9, "k": 3}, "d": {"x": 1}}) == {"o/m": 0.9, "d": {"x": 1}}

    @pytest.mark.parametrize(
        ("point", "field"),
        [
            ({"lR": 0.5}, "p['lR']"),
            ({"o": {"q": 1}}, "p['o']['q']"),
            ({"o": 3}, "p['o']"),
            ({"lr": 2.0}, "p['lr']"),
            ({"lr": "0.5"}, "p['lr']"),
            ({"lr": float("nan")}, "p['lr']"),
            ({"n": 2}, "p['n']"),
            ({"n": 9}, "p['n']"),
            ({"n": 3.5}, "p['n']"),
            ({"n": True}, "p['n']"),
            ({"o": {"m": 0.7}}, "p['o']['m']"),
            ({"o": {"k": 4}}, "p['o']['k']"),
            ({"d": {"x": 2}}, "p['d']"),
            (3, "p"),
        ],
    )
    def test_what_the_space_does_not_allow_is_refused_by_name(self, point: object, field: str) -> None:
        with pytest.raises(InvalidFieldError) as refused:
            self.SPACE.check_point("p", point)
        assert refused.value.field == field

    def test_the_choice_of_the_same_type_is_taken(self) -> None:
        space = mapping_space({"x": [True, 1, 1.0, "1"]})
        for value in (True, 1, 1.0, "1"):
            found = space.check_point("p", {"x": value})["x"]
            assert found == value and type(found) is type(value)

    def test_choices_may_be_arrays(self) -> None:
        first, second = np.zeros(3), np.ones(3)
        assert mapping_space({"x": [first, second]}).check_point("p", {"x": second})["x"] is second


LIMIT = 2**61
BOUNDS = st.tuples(st.integers(-LIMIT, LIMIT), st.integers(-LIMIT, LIMIT)).filter(lambda b: b[0] < b[1])
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@given(bounds=BOUNDS, step=st.integers(1, LIMIT), seed=st.integers(0, 1000))
def test_a_sampled_integer_is_one_of_its_range(bounds: tuple[int, int], step: int, seed: int) -> None:
    value = sample({"x": randint(*bounds, step)}, seed)["x"]
    assert type(value) is int and value in range(*bounds, step)


@given(low=st.integers(1, LIMIT), size=st.integers(1, LIMIT), seed=st.integers(0, 1000))
def test_a_sampled_integer_of_a_logarithmic_range_is_within_it(low: int, size: int, seed: int) -> None:
    assert low <= sample({"x": lograndint(low, low + size)}, seed)["x"] < low + size


@given(low=FLOATS, high=FLOATS, seed=st.integers(0, 1000))
def test_a_sampled_float_is_below_its_upper_bound(low: float, high: float, seed: int) -> None:
    low, high = sorted((low, high))
    if low < high:
        assert low <= sample({"x": uniform(low, high)}, seed)["x"] < high
        if low > 0:
            assert low <= sample({"x": loguniform(low, high)}, seed)["x"] < high


@given(
    low=st.integers(-100, 100),
    steps=st.integers(0, 50),
    step=st.sampled_from([0.1, 0.25, 1, 3]),
    seed=st.integers(0, 99),
)
def test_a_stepped_range_includes_its_upper_bound(low: int, steps: int, step: float, seed: int) -> None:
    domain = uniform(low, low + (steps + 0.5) * step, step=step)
    assert domain.size == steps + 1
    assert domain.at(steps) == pytest.approx(low + steps * step)
    value = domain.sample(np.random.default_rng(seed))
    assert domain.check("x", value) == value
    assert domain.at(domain.index(value)) == value


def test_a_space_that_holds_itself_is_refused_by_its_entry() -> None:
    space: dict[str, Any] = {"lr": [0.1, 0.2], "inner": {}}
    space["inner"]["more"] = space
    with pytest.raises(InvalidFieldError, match=r"^space\['inner'\]\['more'\]=.*holds itself"):
        make_space(space)
