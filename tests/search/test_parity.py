"""Spaces of Optuna and Ray Tune: the values are those that the originals would have drawn."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.search import Space, make_sampler, make_space


def values_of(domain: Any, count: int, algorithm: str = "random", seed: int = 0) -> list[Any]:
    sampler = make_sampler(algorithm, make_space({"x": domain}), seed=seed)
    found = []
    for _ in range(count):
        suggestion = sampler.ask()
        assert suggestion is not None
        found.append(suggestion.config["x"])
    return found


def space_of(**domains: Any) -> Space:
    space = make_space(domains)
    assert isinstance(space, Space)
    return space


class TestTune:
    @pytest.fixture(autouse=True)
    def _ray(self) -> None:
        self.tune = pytest.importorskip("ray.tune")

    def domains(self) -> dict[str, Any]:
        tune = self.tune
        return {
            "uniform": tune.uniform(-1, 2),
            "quniform": tune.quniform(-0.2, 0.5, 0.1),
            "loguniform": tune.loguniform(1e-4, 1e-1),
            "qloguniform": tune.qloguniform(0.1, 1.0, 0.1),
            "randint": tune.randint(3, 8),
            "qrandint": tune.qrandint(2, 11, 3),
            "qrandint of 1": tune.qrandint(2, 6, 1),
            "lograndint": tune.lograndint(1, 9),
            "qlograndint": tune.qlograndint(10, 60, 10),
            "randn": tune.randn(10, 2),
            "qrandn": tune.qrandn(10, 2, 0.5),
            "choice": tune.choice(["a", ("b", 1), None]),
        }

    def test_values_are_drawn_as_ray_tune_draws_them(self) -> None:
        for name, domain in self.domains().items():
            converted = space_of(x=domain).domains["x"]
            ours, theirs = np.random.default_rng(7), np.random.default_rng(7)
            if name == "choice":
                drawn = {converted.sample(ours) for _ in range(100)}
                assert drawn == {domain.sample(random_state=theirs) for _ in range(100)}
            else:
                for _ in range(50):
                    assert converted.sample(ours) == domain.sample(random_state=theirs), name

    @pytest.mark.parametrize("algorithm", ["random", "tpe"])
    def test_finite_domains_have_exactly_ray_tunes_values(self, algorithm: str) -> None:
        if algorithm == "tpe":
            pytest.importorskip("optuna")
        count = 400 if algorithm == "random" else 150
        for name, domain in self.domains().items():
            converted = space_of(x=domain).domains["x"]
            if converted.size is not None:
                rng = np.random.default_rng(1)
                theirs = {domain.sample(random_state=rng) for _ in range(400)}
                ours = {converted.at(index) for index in range(converted.size)}
                assert _close(ours, theirs), name
                assert _close(set(values_of(domain, count, algorithm)), theirs), name
                for value in theirs:
                    assert converted.check("x", value) == value

    def test_tpe_stays_below_an_exclusive_bound(self) -> None:
        pytest.importorskip("optuna")
        sampler = make_sampler("tpe", make_space({"x": self.tune.uniform(0, 1)}), modes=("max",), seed=0)
        for _ in range(60):
            suggestion = sampler.ask()
            assert suggestion is not None and 0 <= suggestion.config["x"] < 1
            sampler.tell(suggestion.token, suggestion.config["x"])

    @settings(max_examples=60, deadline=None)
    @given(low=st.integers(-20, 20), span=st.integers(0, 12), q=st.integers(1, 4))
    def test_quantised_integers_of_any_bounds(self, low: int, span: int, q: int) -> None:
        domain = self.tune.qrandint(low, low + span, q)
        rng = np.random.default_rng(0)
        try:
            theirs = {domain.sample(random_state=rng) for _ in range(300)}
        except ValueError:  # No multiple of q is between the bounds.
            with pytest.raises(InvalidFieldError):
                make_space({"x": domain})
        else:
            converted = space_of(x=domain).domains["x"]
            assert {converted.at(index) for index in range(converted.size or 0)} == theirs

    @settings(max_examples=60, deadline=None)
    @given(low=st.integers(-20, 20), span=st.integers(1, 12), q=st.sampled_from([0.1, 0.25, 0.7, 2.0]))
    def test_quantised_floats_of_any_bounds(self, low: int, span: int, q: float) -> None:
        domain = self.tune.quniform(low * q, (low + span) * q, q)
        rng = np.random.default_rng(0)
        converted = space_of(x=domain).domains["x"]
        theirs = {domain.sample(random_state=rng) for _ in range(500)}
        assert _close({converted.at(index) for index in range(converted.size or 0)}, theirs)

    def test_a_grid_has_ray_tunes_combinations(self) -> None:
        from ray.tune.search.variant_generator import generate_variants

        config = {"a": self.tune.grid_search([1, 2]), "b": {"c": self.tune.grid_search(["x", "y", "z"]), "d": 3}}
        theirs = [spec["config"] for _, spec in generate_variants({"config": config})]
        sampler = make_sampler("grid", make_space(config))
        ours = [suggestion.config for _ in range(7) if (suggestion := sampler.ask()) is not None]
        assert sorted(ours, key=str) == sorted(theirs, key=str)

    @pytest.mark.parametrize("bad", ["uniform(2, 1)", "randint(3, 3)", "uniform(0, float('nan'))", "choice([])"])
    def test_what_ray_tune_would_refuse_late_is_refused_at_once(self, bad: str) -> None:
        with pytest.raises((InvalidFieldError, ValueError)) as refused:
            make_space({"o": {"x": eval(f"tune.{bad}", {"tune": self.tune})}})
        if isinstance(refused.value, InvalidFieldError):
            assert refused.value.field == "space['o']['x']"

    def test_functions_get_the_rest_of_the_config_in_any_order(self) -> None:
        tune = self.tune
        space = space_of(
            twice=tune.sample_from(lambda config: config["o"]["sum"] * 2),
            o={"sum": tune.sample_from(lambda config: config["a"] + config["o"]["b"]), "b": 5},
            a=[3],
            none=tune.sample_from(lambda: "no argument"),
        )
        assert space.names == ("a",)
        config = space.sample(np.random.default_rng(0))
        assert config == {"twice": 16, "o": {"sum": 8, "b": 5}, "a": 3, "none": "no argument"}
        assert list(config) == ["twice", "o", "a", "none"]

    def test_a_function_may_be_replaced_by_a_point(self) -> None:
        space = make_space({"a": [3], "f": self.tune.sample_from(lambda config: config["a"])})
        sampler = make_sampler("random", space, points=[{"f": 7}])
        assert [sampler.ask().config for _ in range(2)] == [{"a": 3, "f": 7}, {"a": 3, "f": 3}]  # type: ignore[union-attr]

    def test_a_function_that_fails_is_named(self) -> None:
        tune = self.tune
        space = space_of(a=tune.sample_from(lambda config: config["b"]), b=tune.sample_from(lambda config: config["a"]))
        with pytest.raises(InvalidFieldError, match="raised KeyError") as refused:
            space.sample(np.random.default_rng(0))
        assert refused.value.field == "space['a']"

    def test_tpe_has_no_normal_distribution(self) -> None:
        pytest.importorskip("optuna")
        with pytest.raises(InvalidFieldError, match="is a normal distribution, which tpe cannot search") as refused:
            make_sampler("tpe", make_space({"o": {"x": self.tune.randn(0, 1)}}))
        assert refused.value.field == "space['o']['x']"

    def test_a_normal_distribution_has_no_grid_but_any_point(self) -> None:
        space = make_space({"x": self.tune.randn(0, 1)})
        with pytest.raises(InvalidFieldError, match="is continuous"):
            make_sampler("grid", space)
        assert make_sampler("random", space, points=[{"x": 99}]).ask().config == {"x": 99.0}  # type: ignore[union-attr]


class TestOptuna:
    @pytest.fixture(autouse=True)
    def _optuna(self) -> None:
        pytest.importorskip("optuna")
        from optuna import distributions

        self.of = distributions

    def test_every_value_is_one_of_optunas(self) -> None:
        kinds = [
            self.of.FloatDistribution(-1.5, 2.5),
            self.of.FloatDistribution(1e-6, 1e-1, log=True),
            self.of.FloatDistribution(0.0, 0.9, step=0.1),
            self.of.FloatDistribution(2.0, 2.0),
            self.of.IntDistribution(-3, 4),
            self.of.IntDistribution(1, 9, step=4),
            self.of.IntDistribution(1, 1000, log=True),
            self.of.CategoricalDistribution(["a", None, 1.5, True]),
        ]
        for distribution in kinds:
            for algorithm in ("random", "tpe"):
                for value in values_of(distribution, 60, algorithm):
                    assert distribution._contains(distribution.to_internal_repr(value)), (distribution, value)

    def test_both_ends_of_a_finite_range_are_included(self) -> None:
        for distribution, expected in [
            (self.of.IntDistribution(-2, 2), {-2, -1, 0, 1, 2}),
            (self.of.IntDistribution(1, 9, step=4), {1, 5, 9}),
            (self.of.IntDistribution(1, 5, log=True), {1, 2, 3, 4, 5}),
            (self.of.FloatDistribution(0.0, 0.3, step=0.1), {0.0, 0.1, 0.2, 0.3}),
        ]:
            assert _close(set(values_of(distribution, 300)), expected)

    @pytest.mark.parametrize(
        ("kind", "arguments"),
        [
            ("IntDistribution", {"low": 1, "high": 8, "log": True}),
            ("IntDistribution", {"low": 0, "high": 20, "step": 4}),
            ("FloatDistribution", {"low": 0.0, "high": 1.0, "step": 0.2}),
            ("CategoricalDistribution", {"choices": ["a", "b", "c"]}),
        ],
    )
    def test_values_are_as_frequent_as_with_optunas_random_sampler(self, kind: str, arguments: dict[str, Any]) -> None:
        import optuna

        distribution = getattr(self.of, kind)(**arguments)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
        count = 2000
        theirs = Counter(
            round(study.ask({"x": distribution}).params["x"], 9)
            if kind != "CategoricalDistribution"
            else study.ask({"x": distribution}).params["x"]
            for _ in range(count)
        )
        ours = Counter(value if isinstance(value, str) else round(value, 9) for value in values_of(distribution, count))
        assert ours.keys() == theirs.keys()
        for value, number in theirs.items():
            # The difference of two counts of about n has a standard deviation of about sqrt(2 n).
            assert abs(ours[value] - number) < 4 * math.sqrt(2 * number)

    def test_a_logarithmic_range_is_uniform_in_its_logarithm(self) -> None:
        values = values_of(self.of.FloatDistribution(1e-4, 1.0, log=True), 2000)
        decades = Counter(math.floor(math.log10(value)) for value in values)
        assert decades.keys() == {-4, -3, -2, -1}
        assert all(abs(number - 500) < 4 * math.sqrt(500) for number in decades.values())

    def test_bounds_that_are_not_numbers_are_refused(self) -> None:
        with pytest.raises(InvalidFieldError, match="low=nan") as refused:
            make_space({"o": {"lr": self.of.FloatDistribution(math.nan, 1.0)}})
        assert refused.value.field == "space['o']['lr']"
        with pytest.raises(InvalidFieldError, match="high=inf"):
            make_space({"lr": self.of.FloatDistribution(0.0, math.inf)})


def _close(ours: set[Any], theirs: set[Any]) -> bool:
    """Whether two sets of values are the same but for the last digits of floats."""

    def rounded(values: set[Any]) -> set[Any]:
        return {round(value, 9) + 0.0 if isinstance(value, float) else value for value in values}

    return rounded(ours) == rounded(theirs)
