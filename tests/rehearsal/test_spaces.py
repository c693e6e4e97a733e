"""Spaces of benchmarks in the terms of other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.rehearsal import ReplayedIteration
from fluid.rehearsal.benchmark import Benchmark, Curve
from fluid.rehearsal.spaces import read_configspace
from fluid.search.conditions import Condition
from fluid.search.domains import Choice, Domain, FloatRange, IntRange
from tests.rehearsal.small_scenario import SPACE

DOMAINS: dict[str, Domain] = {
    "rate": FloatRange(0.0, 1.0),
    "lr": FloatRange(1e-4, 1e-1, log=True),
    "depth": IntRange(1, 16, log=True),
    "width": IntRange(8, 32, step=8),
    "share": FloatRange(0.0, 1.0, step=0.25),
    "kind": Choice(("tree", "linear", "none")),
}
#: The rate counts with a depth that counts, and that with trees.
CONDITIONS = (Condition("rate", "depth", (1, 2, 3)), Condition("depth", "kind", ("tree",)))


class Quadratic(Benchmark):
    """The nearer the rate to a half, the better; no value where it is small."""

    def replay_many(self, curves: Sequence[Curve]) -> list[Sequence[ReplayedIteration]]:
        return [[self.one(curve.config, iteration) for iteration in curve.iterations] for curve in curves]

    def one(self, config: Mapping[str, Any], iteration: int) -> ReplayedIteration:
        value = (config["rate"] - 0.5) ** 2 / iteration
        return ReplayedIteration({"loss": float("nan") if config["rate"] < 0.01 else value}, 1.0)


@pytest.fixture
def benchmark() -> Benchmark:
    return Quadratic("quadratic", DOMAINS, "loss", "min", 4, CONDITIONS)


def test_the_json_of_configspace() -> None:
    domains, constants, conditions = read_configspace(SPACE)
    assert domains["depth"] == IntRange(1, 16, log=True) and domains["rate_drop"] == FloatRange(0.0, 1.0)
    assert domains["booster"] == Choice(("gblinear", "gbtree", "dart")) and constants == {"fixed": 5}
    assert conditions == (
        Condition("rate_drop", "booster", ("dart",)),
        Condition("depth", "booster", ("dart", "gbtree")),
    )


def test_conditions_of_conditions_come_after_them() -> None:
    chain = [
        {"child": "c", "parent": "b", "type": "EQ", "value": 1},
        {
            "type": "AND",
            "conditions": [
                {"child": "b", "parent": "a", "type": "EQ", "value": 2},
                {"child": "b", "parent": "d", "type": "IN", "values": [3]},
            ],
        },
    ]
    _, _, conditions = read_configspace({"hyperparameters": [], "conditions": chain})
    assert [each.child for each in conditions] == ["b", "b", "c"]
    round_about = [{"child": one, "parent": other, "type": "EQ", "value": 1} for one, other in ("ab", "ba")]
    with pytest.raises(InvalidFieldError, match="depend on each other"):
        read_configspace({"hyperparameters": [], "conditions": round_about})


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"hyperparameters": [{"name": "x", "type": "normal_float"}]},
        {"hyperparameters": [], "conditions": [{"child": "a", "parent": "b", "type": "GT", "value": 1}]},
    ],
)
def test_spaces_that_are_not_known(content: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError):
        read_configspace(content)


def test_what_counts(benchmark: Benchmark) -> None:
    config = {"rate": 0.5, "lr": 0.1, "depth": 2, "width": 8, "share": 0.25, "kind": "tree"}
    assert benchmark.active(config) == config
    assert "rate" not in benchmark.active({**config, "depth": 9})
    linear = benchmark.active({**config, "kind": "linear"})
    assert list(linear) == ["lr", "width", "share", "kind"]
    with pytest.raises(InvalidFieldError, match="depth"):
        benchmark.active({"rate": 0.5, "lr": 0.1, "width": 8, "share": 0.25, "kind": "tree"})


def test_optuna(benchmark: Benchmark) -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    seen = set()
    for _ in range(60):
        config = benchmark.suggest(study.ask())
        assert benchmark.active(config) == config
        seen.add(frozenset(config))
        for name, value in config.items():
            DOMAINS[name].check(name, value)
    assert len(seen) == 3  # With a rate, without it, and without a depth.


def test_configspace(benchmark: Benchmark) -> None:
    pytest.importorskip("ConfigSpace")
    space = benchmark.configspace(seed=3)
    sampled = [dict(one) for one in space.sample_configuration(60)]
    for config in sampled:
        assert set(benchmark.active(config)) == set(config)
        for name, value in config.items():
            DOMAINS[name].check(name, getattr(value, "item", lambda value=value: value)())
    assert {len(config) for config in sampled} == {4, 5, 6}
    assert sampled == [dict(one) for one in benchmark.configspace(seed=3).sample_configuration(60)]


@pytest.mark.ray
def test_tune(benchmark: Benchmark) -> None:
    pytest.importorskip("ray.tune")
    space = benchmark.tune_space()
    drawn = [{name: domain.sample() for name, domain in space.items()} for _ in range(200)]
    for config in drawn:
        for name, value in config.items():
            DOMAINS[name].check(name, value)
    assert max(config["depth"] for config in drawn) > 8 and {config["width"] for config in drawn} == {8, 16, 24, 32}


#: As one's own run has it: nested, with constants, and with lists to choose from.
NESTED: dict[str, Any] = {
    "optimizer": {"lr": FloatRange(0.1, 1.0, log=True), "name": "adam"},
    "layers": Choice(([32], [64, 64], None)),
    "data": "small",
}


@pytest.mark.filterwarnings("ignore:Choices for a categorical")  # Optuna says so of lists.
def test_nested_spaces_with_constants() -> None:
    optuna = pytest.importorskip("optuna")
    nested = Benchmark("nested", NESTED, "loss", "min", 4)
    trial = optuna.trial.FixedTrial({"optimizer.lr": 0.5, "layers": [32]})
    assert nested.suggest(trial) == {"optimizer": {"lr": 0.5, "name": "adam"}, "layers": [32], "data": "small"}


def test_nested_spaces_for_configspace() -> None:
    pytest.importorskip("ConfigSpace")
    nested = Benchmark("nested", NESTED, "loss", "min", 4)
    sampled = [dict(one) for one in nested.configspace(seed=1).sample_configuration(30)]
    assert all(set(config) == {"optimizer.lr", "layers"} for config in sampled)
    assert {config["layers"] for config in sampled} == {(32,), (64, 64), None}
    odd = Benchmark("odd", {"model": Choice(({"depth": 1}, None))}, "loss", "min", 4)
    with pytest.raises(InvalidFieldError, match="cannot be a choice of ConfigSpace"):
        odd.configspace()


@pytest.mark.ray
def test_nested_spaces_for_tune() -> None:
    pytest.importorskip("ray.tune")
    space = Benchmark("nested", NESTED, "loss", "min", 4).tune_space()
    assert 0.1 <= space["optimizer"]["lr"].sample() <= 1.0
    assert (space["optimizer"]["name"], space["data"]) == ("adam", "small")
    assert space["layers"].categories == [[32], [64, 64], None]


@pytest.mark.ray
def test_what_pbt_may_change(benchmark: Benchmark) -> None:
    pytest.importorskip("ray.tune")
    nested = Benchmark("nested", {**NESTED, "run": {"name": "a"}}, "loss", "min", 4).tune_mutations()
    assert set(nested) == {"optimizer", "layers"} and set(nested["optimizer"]) == {"lr"}
    found = benchmark.tune_mutations()
    assert (found["kind"], found["width"]) == (["tree", "linear", "none"], [8, 16, 24, 32])
    assert found["share"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert 1 <= found["depth"].sample() <= 16 and 0.0 <= found["rate"].sample() <= 1.0


def test_the_values_known(benchmark: Benchmark) -> None:
    assert 0.0 <= benchmark.best_known < 1e-6
    assert 0.05 < benchmark.worst_known <= 0.0625  # Those without a value do not count.
    assert benchmark.regret(benchmark.value_at(0.2)) == pytest.approx(0.2)
    again = Quadratic("quadratic", DOMAINS, "loss", "min", 4, CONDITIONS)
    assert again.known == benchmark.known
    nothing = Quadratic("nothing", {**DOMAINS, "rate": FloatRange(0.0, 0.005)}, "loss", "min", 4)
    with pytest.raises(InvalidFieldError, match="loss"):
        nothing.best_known  # noqa: B018
