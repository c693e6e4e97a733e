"""Conditions in spaces that are dicts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.search import Sampler, loguniform, make_sampler, make_space, randint, uniform, when

SPACE = {
    "momentum": when("optimizer", "sgd", uniform(0, 0.99)),
    "optimizer": ["adam", "sgd", "rmsprop"],
    "lr": loguniform(1e-4, 1e-1),
    "adam": when(
        "optimizer", ["adam", "rmsprop"], {"beta": uniform(0.8, 1.0), "amsgrad": True, "layers": randint(1, 5)}
    ),
    "nesterov": when("optimizer", "sgd", when("adam/layers", [3], [True, False])),
}


def ask(algorithm: str, space: Any, count: int = 60, **options: Any) -> list[dict[str, Any]]:
    sampler = make_sampler(algorithm, make_space(space), **options)
    found = []
    for _ in range(count):
        if (suggestion := sampler.ask()) is None:
            break
        found.append(suggestion.config)
        sampler.tell(suggestion.token, suggestion.config.get("lr", 1.0))
    return found


@pytest.mark.parametrize("algorithm", ["random", "tpe"])
def test_a_config_has_what_its_conditions_allow(algorithm: str) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    configs = ask(algorithm, SPACE)
    assert {config["optimizer"] for config in configs} == {"adam", "sgd", "rmsprop"}
    for config in configs:
        is_sgd = config["optimizer"] == "sgd"
        assert ("momentum" in config) == is_sgd and ("adam" in config) != is_sgd
        assert "nesterov" not in config, "with sgd there is no adam/layers"
        if not is_sgd:
            assert set(config["adam"]) == {"beta", "amsgrad", "layers"} and config["adam"]["layers"] in range(1, 5)
        assert list(config) == [name for name in SPACE if name in config], "in the order of the space"


def test_values_of_others_do_not_depend_on_conditions() -> None:
    plain = ask("random", {**SPACE, "nesterov": False, "adam": {**SPACE["adam"].then}, "momentum": uniform(0, 0.99)})
    assert [config["lr"] for config in ask("random", SPACE)] == [config["lr"] for config in plain]


def test_a_grid_has_each_combination_once() -> None:
    space = {
        "q": when("momentum", [0.5, 0.9], when("nest/k", 1, ["x", "y"])),
        "momentum": when("optimizer", "sgd", [0.1, 0.5, 0.9]),
        "optimizer": ["adam", "sgd", "rmsprop"],
        "nest": {"k": randint(1, 100), "z": when("k", range(2, 4), {"a": [1, 2], "b": 3})},
    }
    grid = make_sampler("grid", make_space(space))
    configs = ask("grid", space, 10_000)
    expected = set()
    for optimizer, k, momentum, q, a in itertools.product(
        ["adam", "sgd", "rmsprop"], range(1, 100), [0.1, 0.5, 0.9], "xy", [1, 2]
    ):
        found: dict[str, Any] = {"optimizer": optimizer, "k": k}
        if optimizer == "sgd":
            found["momentum"] = momentum
            if momentum > 0.1 and k == 1:
                found["q"] = q
        if k in (2, 3):
            found["a"] = a
        expected.add(str(sorted(found.items())))
    flat = [
        {**{name: config[name] for name in ("optimizer", "momentum", "q") if name in config}, "k": config["nest"]["k"]}
        | ({"a": config["nest"]["z"]["a"]} if "z" in config["nest"] else {})
        for config in configs
    ]
    assert grid.size == len(configs) == len(expected)
    assert {str(sorted(config.items())) for config in flat} == expected


def test_points_come_first_and_once() -> None:
    space = {"optimizer": ["adam", "sgd"], "momentum": when("optimizer", "sgd", [0.5, 0.9])}
    points = [{"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adam"}]
    assert ask("grid", space, points=points) == [
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "adam"},
        {"optimizer": "sgd", "momentum": 0.5},
    ]
    assert ask("random", space, 2, points=points) == [{"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adam"}]
    (completed,) = ask("random", space, 1, points=[{"optimizer": "sgd"}])
    assert completed["momentum"] in (0.5, 0.9)


@pytest.mark.parametrize(
    ("point", "field", "reason"),
    [
        ({"momentum": 0.5}, "points[0]['momentum']", "only if optimizer is 'sgd': give 'optimizer', too"),
        ({"momentum": 0.5, "optimizer": "adam"}, "points[0]['momentum']", "only if optimizer is 'sgd', not 'adam'"),
        ({"adam": {"beta": 0.9}, "optimizer": "sgd"}, "['adam']['beta']", "'adam' or 'rmsprop', not 'sgd'"),
    ],
)
def test_points_that_no_config_has_are_refused(point: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        ask("random", SPACE, points=[point])
    assert refused.value.field.endswith(field) and reason in refused.value.reason


@pytest.mark.parametrize(
    ("space", "field", "reason"),
    [
        ({"a": when("b", 1, [1])}, "space['a']", "depends on 'b', which is not in the space"),
        ({"a": when("b", 1, [1, 2]), "b": when("a", 1, [1, 2])}, "space['a']", "depends on 'b', which depends on it"),
        ({"a": when("a", 1, [1])}, "space['a']", "depends on 'a', which depends on it"),
        ({"a": uniform(0, 1), "b": when("a", 0.5, [1])}, "space['b']", "'a', which is continuous"),
        ({"a": ["x"], "b": {"c": when("a", "y", 1)}}, "space['b']['c']", "is in no config: a='y'"),
        ({"a": ["x", when("b", 1, 2)]}, "space['a']", "give that a name of its own"),
        ({"a": [1, 2], "b": when("a", 1, (1, 2))}, "space['b']", "a tuple may mean choices"),
    ],
)
def test_conditions_that_mean_nothing_are_refused(space: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        make_space(space)
    assert refused.value.field == field and reason in refused.value.reason


def test_bad_arguments_are_refused() -> None:
    for arguments, field in ((("", 1, 2), "parent"), ((3, 1, 2), "parent"), (("a", [], 2), "values")):
        with pytest.raises(InvalidFieldError) as refused:
            when(*arguments)  # type: ignore[arg-type]
        assert refused.value.field == field
    assert repr(when("a", [1, 2], "x")) == "when('a', (1, 2), 'x')" and repr(when("a", 1, 2)) == "when('a', 1, 2)"


def test_the_nearest_name_is_meant() -> None:
    space = {"kind": ["p"], "part": {"kind": ["q", "r"], "x": when("kind", "q", 1), "y": when("part/kind", "r", 2)}}
    parts = [config["part"] for config in ask("grid", space)]
    assert parts == [{"kind": "q", "x": 1}, {"kind": "r", "y": 2}]


def test_a_constant_may_decide() -> None:
    space = {"optimizer": "adam", "momentum": when("optimizer", "sgd", [1, 2]), "beta": when("optimizer", "adam", 0.9)}
    assert ask("grid", space) == [{"optimizer": "adam", "beta": 0.9}]


def test_tpe_learns_where_a_condition_holds() -> None:
    pytest.importorskip("optuna")
    space = {"kind": ["good", "bad"], "x": when("kind", "good", uniform(0, 1)), "y": when("kind", "bad", uniform(0, 1))}
    sampler: Sampler = make_sampler("tpe", make_space(space), seed=0)
    found = []
    for _ in range(60):
        suggestion = sampler.ask()
        assert suggestion is not None
        config = suggestion.config
        loss = abs(config["x"] - 0.3) if config["kind"] == "good" else 2.0 + config["y"]
        found.append(loss)
        sampler.tell(suggestion.token, loss)
    late = found[30:]
    assert sum(loss < 2 for loss in late) > 20 and math.fsum(loss for loss in late if loss < 2) / 20 < 0.3


def test_true_is_not_one_where_a_space_has_both() -> None:
    space = {"m": [1, True, 0], "a": when("m", True, [7]), "b": when("m", 1, [8]), "n": True, "c": when("n", 1, 9)}
    configs = [{"m": 1, "b": 8}, {"m": True, "a": 7}, {"m": 0}]
    found = [{name: one[name] for name in one if name not in "nc"} for one in ask("grid", space)]
    assert [{name: repr(one[name]) for name in one} for one in found] == [
        {name: repr(one[name]) for name in one} for one in configs
    ]
    assert all(one["c"] == 9 for one in ask("grid", space))


def test_a_wrong_call_of_when_says_what_to_write() -> None:
    call: Any = when
    with pytest.raises(TypeError, match=r"write when\(parent, values, then\)"):
        call("optimizer", "sgd")


def test_steps_of_a_float_are_what_people_write() -> None:
    found = ask("grid", {"n": uniform(-0.3, 1.0, step=0.1), "a": when("n", [0.3, 0.7, 0.0], [1])})
    assert [round(one["n"], 9) for one in found if "a" in one] == [0.0, 0.3, 0.7]
    sampler = make_sampler(
        "random", make_space({"n": uniform(0, 1, step=0.1), "a": when("n", 0.3, [1, 2])}), points=[{"n": 0.3, "a": 2}]
    )
    first = sampler.ask()
    assert first is not None and first.config == {"n": 0.3, "a": 2}
