"""Samplers: what they suggest, in which order, and what they refuse."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.search import Sampler, choice, make_sampler, make_space, randint, uniform

needs_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="needs Optuna")

SPACE = {"lr": uniform(0, 1), "n": randint(0, 100), "o": {"m": [1, 2, 3]}}


def make(algorithm: str, space: Any = SPACE, **options: Any) -> Sampler:
    return make_sampler(algorithm, make_space(space), **options)


def ask(sampler: Sampler, count: int) -> list[dict[str, Any]]:
    suggestions = [sampler.ask() for _ in range(count)]
    return [suggestion.config for suggestion in suggestions if suggestion is not None]


@pytest.mark.parametrize("algorithm", ["random", pytest.param("tpe", marks=needs_optuna)])
class TestSampling:
    def test_the_seed_decides(self, algorithm: str) -> None:
        assert ask(make(algorithm, seed=3), 10) == ask(make(algorithm, seed=3), 10)
        assert ask(make(algorithm, seed=3), 10) != ask(make(algorithm, seed=4), 10)
        assert ask(make(algorithm, seed=None), 10) != ask(make(algorithm, seed=None), 10)

    def test_tokens_are_numbers_from_zero(self, algorithm: str) -> None:
        sampler = make(algorithm)
        assert [sampler.ask().token for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
        assert sampler.size is None

    def test_points_come_first_and_are_completed(self, algorithm: str) -> None:
        points = [{"lr": 0.25}, {"n": 7, "o": {"m": 2}, "lr": 0.5}]
        first, second, third = ask(make(algorithm, points=points), 3)
        assert first["lr"] == 0.25 and first["n"] in range(100) and first["o"]["m"] in (1, 2, 3)
        assert second == {"lr": 0.5, "n": 7, "o": {"m": 2}}
        assert third["lr"] not in (0.25, 0.5)

    def test_an_unknown_name_of_a_point_is_refused(self, algorithm: str) -> None:
        with pytest.raises(InvalidFieldError, match=r"points\[1\]\['rate'\]"):
            make(algorithm, points=[{}, {"rate": 0.1}])

    def test_what_is_told_must_fit(self, algorithm: str) -> None:
        sampler = make(algorithm, modes=("min", "max"))
        sampler.ask()
        with pytest.raises(InvalidFieldError, match="one value for each of 2 metrics"):
            sampler.tell(0, 1.0)
        with pytest.raises(InvalidFieldError, match="must be a number"):
            sampler.tell(0, (1.0, "low"))  # type: ignore[arg-type]
        with pytest.raises(InvalidFieldError, match="no suggestion that waits"):
            sampler.tell(1, (1.0, 2.0))
        sampler.tell(0, (1.0, 2.0))
        with pytest.raises(InvalidFieldError, match="no suggestion that waits"):
            sampler.tell(0, (1.0, 2.0))

    def test_a_trial_may_fail_or_have_no_value(self, algorithm: str) -> None:
        sampler = make(algorithm)
        ask(sampler, 4)
        sampler.tell(0, None, failed=True)
        sampler.tell(1, float("nan"))
        sampler.tell(2, None)
        sampler.tell(3, float("inf"))
        assert len(ask(sampler, 20)) == 20

    def test_constants_only(self, algorithm: str) -> None:
        assert ask(make(algorithm, {"k": 1}), 2) == [{"k": 1}, {"k": 1}]


@given(told=st.lists(st.tuples(st.floats(), st.booleans()), max_size=12), data=st.data())
def test_random_does_not_depend_on_what_it_is_told(told: list[tuple[float, bool]], data: st.DataObject) -> None:
    """Neither on the values nor on the order in which trials end."""
    sampler = make("random", seed=5)
    configs, waiting = ask(sampler, 1), [0]
    for value, failed in told:
        if waiting:
            sampler.tell(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))), value, failed=failed)
        suggestion = sampler.ask()
        assert suggestion is not None
        configs.append(suggestion.config)
        waiting.append(suggestion.token)
    assert configs == ask(make("random", seed=5), len(configs))


class TestGrid:
    def test_the_last_name_changes_first(self) -> None:
        space = {
            "a": [1, 2],
            "b": {"c": randint(0, 3)},
            "k": 7,
            "d": {"grid_search": ["x", "y"]},
            "e": uniform(0, 1, step=0.5),
        }
        sampler = make("grid", space)
        expected = [
            {"a": a, "b": {"c": c}, "k": 7, "d": d, "e": e}
            for a, c, d, e in itertools.product([1, 2], range(3), ["x", "y"], [0.0, 0.5, 1.0])
        ]
        assert sampler.size == len(expected) == 36
        assert ask(sampler, 40) == expected
        assert sampler.ask() is None

    def test_a_continuous_hyperparameter_is_refused_by_name(self) -> None:
        with pytest.raises(InvalidFieldError, match="is continuous") as refused:
            make("grid", {"a": [1], "b": {"lr": uniform(0, 1)}})
        assert refused.value.field == "space['b']['lr']"

    @given(
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        data=st.data(),
    )
    def test_points_come_first_and_every_combination_once(self, sizes: list[int], data: st.DataObject) -> None:
        names = [f"p{index}" for index in range(len(sizes))]
        space = {name: list(range(size)) for name, size in zip(names, sizes, strict=True)}
        point = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in space.items()})
        points = data.draw(st.lists(point, max_size=5))
        sampler = make("grid", space, points=points, seed=1)
        configs = ask(sampler, 1000)
        every = [dict(zip(names, values, strict=True)) for values in itertools.product(*space.values())]
        assert sorted(configs, key=str) == sorted(every, key=str)
        assert sampler.size == len(configs)
        if points:
            assert points[0].items() <= configs[0].items()

    def test_a_grid_larger_than_memory_is_enumerated_as_it_is_asked(self) -> None:
        sampler = make("grid", {name: randint(0, 10**9) for name in "abc"})
        assert sampler.size == 10**27
        assert ask(sampler, 2) == [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 1}]

    def test_several_values_may_be_told(self) -> None:
        sampler = make("grid", {"a": [1]}, modes=("min", "max"))
        sampler.ask()
        sampler.tell(0, (1.0, 2.0))


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"algorithm": "bayes"}, "algorithm"),
            ({"seed": -1}, "seed"),
            ({"seed": 0.5}, "seed"),
            ({"seed": 2**32}, "seed"),
            ({"modes": ()}, "modes"),
            ({"modes": "min"}, "modes"),
            ({"modes": ("least",)}, "mode"),
            ({"points": {"lr": 1}}, "points"),
            ({"points": 3}, "points"),
            ({"points": [3]}, "points[0]"),
        ],
    )
    def test_bad_arguments(self, options: dict[str, Any], field: str) -> None:
        with pytest.raises(InvalidFieldError) as refused:
            make(**{"algorithm": "random", **options})
        assert refused.value.field == field


@needs_optuna
class TestTpe:
    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_it_finds_better_values_than_chance(self, mode: str) -> None:
        def mean_of_last(algorithm: str) -> float:
            sampler, values = make(algorithm, {"x": uniform(-1, 1)}, modes=(mode,), seed=1), []
            for _ in range(60):
                suggestion = sampler.ask()
                assert suggestion is not None
                values.append(suggestion.config["x"] ** 2 * (1 if mode == "min" else -1))
                sampler.tell(suggestion.token, values[-1])
            return sum(abs(value) for value in values[-20:]) / 20

        assert mean_of_last("tpe") < mean_of_last("random") / 4

    def test_concurrent_suggestions_differ(self) -> None:
        sampler = make("tpe", {"x": choice([1, 2, 3, 4]), "y": uniform(0, 1)}, seed=1)
        for index, config in enumerate(ask(sampler, 30)):
            sampler.tell(index, config["y"])
        assert len({config["y"] for config in ask(sampler, 8)}) == 8

    def test_choices_of_any_type(self) -> None:
        values = [True, 1, (1, 2), {"a": 1}, None, print]
        configs = ask(make("tpe", {"x": values}, points=[{"x": True}, {"x": 1}]), 60)
        assert configs[0]["x"] is True and configs[1]["x"] == 1 and configs[1]["x"] is not True
        assert all(any(config["x"] is value for config in configs) for value in values)

    def test_an_upper_bound_between_two_steps_is_no_concern_of_the_user(self) -> None:
        space = {"x": uniform(0, 0.35, step=0.1), "n": randint(1, 13, 4)}
        configs = ask(make("tpe", space, points=[{"x": 0.2, "n": 9}]), 100)
        assert configs[0] == {"x": 0.2, "n": 9}
        assert sorted({config["x"] for config in configs}) == [pytest.approx(0.1 * step) for step in range(4)]
        assert {config["n"] for config in configs} == {1, 5, 9}

    def test_optuna_says_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        sampler = make("tpe")
        for index, config in enumerate(ask(sampler, 20)):
            sampler.tell(index, config["lr"])
        ask(sampler, 5)
        assert capfd.readouterr() == ("", "")


def conditional(trial: Any) -> dict[str, Any] | None:
    if trial.suggest_categorical("optimizer", ["adam", "sgd"]) == "adam":
        trial.suggest_float("beta", 0.5, 1.0)
        return None
    return {"optimizer": "sgd", "inner": {"momentum": trial.suggest_float("momentum", 0.0, 1.0)}}


@needs_optuna
@pytest.mark.parametrize("algorithm", ["random", "tpe"])
class TestConditional:
    def test_the_function_decides_which_names_there_are(self, algorithm: str) -> None:
        sampler = make(algorithm, conditional, seed=2)
        configs = []
        for _ in range(40):
            suggestion = sampler.ask()
            assert suggestion is not None
            configs.append(suggestion.config)
            sampler.tell(suggestion.token, suggestion.config.get("beta", 2.0))
        assert {tuple(config) for config in configs} == {("optimizer", "beta"), ("optimizer", "inner")}

    def test_the_seed_decides(self, algorithm: str) -> None:
        assert ask(make(algorithm, conditional, seed=2), 8) == ask(make(algorithm, conditional, seed=2), 8)

    def test_points(self, algorithm: str) -> None:
        points = [{"optimizer": "sgd", "momentum": 0.25}, {"optimizer": "adam"}, {"optimizer": "adam", "momentum": 0.5}]
        sampler = make(algorithm, conditional, points=points)
        first, second = ask(sampler, 2)
        assert first == {"optimizer": "sgd", "inner": {"momentum": 0.25}}
        assert second["optimizer"] == "adam" and 0.5 <= second["beta"] <= 1.0
        with pytest.raises(InvalidFieldError, match=r"points\[2\]\['momentum'\].*was not suggested"):
            sampler.ask()

    @pytest.mark.parametrize("returned", [3, [1], {1: 2}])
    def test_the_function_returns_a_config(self, algorithm: str, returned: object) -> None:
        with pytest.raises(InvalidFieldError, match="must return a dict"):
            make(algorithm, lambda trial: returned).ask()

    def test_an_error_of_the_function_is_the_users(self, algorithm: str) -> None:
        def broken(trial: Any) -> None:
            raise KeyError("lr")

        with pytest.raises(KeyError, match="lr"):
            make(algorithm, broken).ask()


def test_a_function_has_no_grid() -> None:
    with pytest.raises(InvalidFieldError, match="cannot enumerate a function"):
        make("grid", conditional)
