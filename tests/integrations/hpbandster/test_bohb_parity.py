"""Fluid's BOHB suggests what HpBandSter's own config generator does, with the same results and random numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fluid.search import BOHB, choice, make_space, when
from fluid.search.bohb import BohbSearcher
from fluid.search.brackets import Brackets
from fluid.search.domains import FloatRange, IntRange
from fluid.search.rungs import BracketShape, RungBudget
from fluid.search.searchers import SearchOutcome
from fluid.search.suggestion import Suggestion

ConfigSpace = pytest.importorskip("ConfigSpace")
pytest.importorskip("hpbandster")

BUDGETS = (1, 3, 9)


class NumpyRandom:
    """Numpy's global generator with the methods that Fluid calls of a generator of its own; HpBandSter uses it."""

    def random(self) -> float:
        return float(np.random.rand())

    def integers(self, high: int) -> int:
        return int(np.random.randint(high))


class SameNumbers(BohbSearcher):
    """Fluid's searcher with numpy's global random numbers."""

    def _random(self, *which: int) -> Any:
        return NumpyRandom()


def floats() -> dict[str, Any]:
    return {"lr": FloatRange(1e-5, 1e-1, log=True), "momentum": FloatRange(-0.5, 0.99)}


def numbers() -> dict[str, Any]:
    return {"layers": IntRange(1, 8), "lr": FloatRange(1e-4, 1.0, log=True), "units": IntRange(4, 512, log=True)}


def choices() -> dict[str, Any]:
    return {
        "act": choice(["relu", "tanh", "elu", "gelu"]),
        "lr": FloatRange(1e-4, 1.0, log=True),
        "norm": choice(["a", "b"]),
    }


def conditional() -> dict[str, Any]:
    return {
        "lr": FloatRange(1e-4, 1.0, log=True),
        "opt": choice(["adam", "rmsprop", "sgd"]),
        "beta": when("opt", "adam", FloatRange(0.5, 0.999)),
        "momentum": when("opt", "sgd", FloatRange(0.0, 0.99)),
        "nesterov": when("opt", "sgd", choice(["no", "yes"])),
    }


def mixed() -> dict[str, Any]:
    return {
        "batch": IntRange(8, 256, log=True),
        "kind": choice(["cnn", "mlp"]),
        "lr": FloatRange(1e-4, 1.0, log=True),
        "wd": FloatRange(0.0, 0.1),
        "depth": when("kind", "mlp", IntRange(1, 6)),
        "filters": when("kind", "cnn", IntRange(8, 64)),
    }


def loss_of(config: Mapping[str, Any], budget: int) -> float:
    """Any function with a best place in each space."""
    terms = [
        (math.log10(config["lr"]) + 2.0) ** 2,
        abs(config.get("momentum", 0.4) - 0.9),
        abs(config.get("units", 64) - 100) / 100,
        abs(config.get("layers", 3) - 5) / 4,
        abs(config.get("depth", 2) - 3) / 3,
        abs(config.get("filters", 32) - 20) / 20,
        {"relu": 0.0, "tanh": 0.5, "elu": 0.2, "gelu": 0.1}[config.get("act", "relu")],
        {"adam": 0.1, "rmsprop": 0.6, "sgd": 0.0}[config.get("opt", "sgd")],
        10 * config.get("wd", 0.0),
    ]
    return sum(terms) + 1.0 / budget


def configspace_of(space: Any) -> Any:
    """The space of Fluid as one of ConfigSpace."""
    made = ConfigSpace.ConfigurationSpace()
    for name, domain in space.domains.items():
        if isinstance(domain, FloatRange):
            made.add(ConfigSpace.UniformFloatHyperparameter(name, domain.low, domain.high, log=domain.log))
        elif isinstance(domain, IntRange):
            made.add(ConfigSpace.UniformIntegerHyperparameter(name, domain.low, domain.high, log=domain.log))
        else:
            made.add(ConfigSpace.CategoricalHyperparameter(name, list(domain.choices)))
    for one in space.conditions:
        made.add(ConfigSpace.EqualsCondition(made[one.child], made[one.parent], one.values[0]))
    assert tuple(made) == space.parents_first  # The order decides which number is drawn for which.
    return made


class HpBandSter:
    """HpBandSter's generator, whose random configs are Fluid's, as ConfigSpace has a random generator of its own."""

    def __init__(self, space: Any, **options: Any) -> None:
        from fluid.integrations.hpbandster.optimizers import Job, quiet

        with quiet():
            from hpbandster.optimizers.config_generators.bohb import BOHB as Generator

        self._quiet, self._job = quiet, Job
        self.space = configspace_of(space)

        def sample() -> Any:
            return ConfigSpace.Configuration(self.space, values=space.sample(NumpyRandom()))

        self.space.sample_configuration = sample
        with quiet():
            self.generator = Generator(self.space, **options)

    def suggest(self) -> tuple[dict[str, Any], bool]:
        with self._quiet():
            config, info = self.generator.get_config(1)
        return dict(config), bool(info["model_based_pick"])

    def take(self, config: Mapping[str, Any], budget: int, loss: float | None) -> None:
        job = self._job((0, 0, 0), config=dict(config), budget=budget)
        job.result = None if loss is None else {"loss": loss}
        with self._quiet():
            self.generator.new_result(job)


def outcome_of(suggestion: Suggestion, budget: int, loss: float | None) -> SearchOutcome:
    """What a sweep tells of a trial at a rung, or of one that failed on its way there."""
    failed = loss is None
    return SearchOutcome(
        token=suggestion.token,
        config=suggestion.config,
        values=None if loss is None or math.isnan(loss) else (loss,),
        state="FAILED" if failed else "PAUSED",
        iteration=budget - failed,
        budget=budget,
    )


def require_same(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        # ConfigSpace rounds numbers to 13 digits.
        assert theirs[name] == (pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value)


def play(space: Any, options: Mapping[str, Any], seed: int, suggestions: int, *, staying: float = 0.5) -> int:
    """Has both suggest configs; returns how many a model has suggested.

    Args:
        space, options: of the search.
        seed: of all random numbers.
        suggestions: how many.
        staying: the share of the configs at a budget that do not come to the next one.
    """
    made = make_space(space)
    ours = SameNumbers(made, BOHB(**options), mode="min", seed=0, points=())
    theirs = HpBandSter(made, **options)
    script = np.random.default_rng(seed)
    np.random.seed(seed)
    modelled, waiting = 0, list[tuple[Suggestion, int]]()
    for _ in range(suggestions):
        before = np.random.get_state()
        config, by_model = theirs.suggest()
        after = np.random.get_state()
        np.random.set_state(before)
        suggestion = ours.ask()
        assert str(np.random.get_state()) == str(after)  # They have drawn the same numbers.
        require_same(suggestion.config, config)
        modelled += by_model
        waiting.append((suggestion, 0))
        # Results come late, and in another order.
        while len(waiting) > 4:
            known, rung = waiting.pop(int(script.integers(len(waiting))))
            loss: float | None = loss_of(known.config, BUDGETS[rung])
            if (chance := script.random()) < 0.15:
                loss = (None, math.inf, math.nan)[int(script.integers(3))]
            # What HpBandSter is told is what it has suggested, but for the 13th digit.
            before = np.random.get_state()
            theirs.take(known.config, BUDGETS[rung], loss)
            after = np.random.get_state()
            np.random.set_state(before)
            (ours.tell if loss is None else ours.observe)(outcome_of(known, BUDGETS[rung], loss))
            assert str(np.random.get_state()) == str(after)
            if chance > staying and rung + 1 < len(BUDGETS):
                waiting.append((known, rung + 1))
    return modelled


@pytest.mark.parametrize("space", [floats, numbers, choices, conditional, mixed], ids=lambda space: space.__name__)
def test_it_suggests_what_hpbandster_does(space: Any) -> None:
    assert play(space(), {}, seed=1, suggestions=65) > 20


@pytest.mark.parametrize(
    ("space", "staying", "options"),
    [
        (
            mixed,
            0.5,
            {"min_points_in_model": 8, "random_fraction": 0.1, "bandwidth_factor": 2.0, "min_bandwidth": 0.05},
        ),
        (numbers, 1.0, {"top_n_percent": 40, "num_samples": 16}),
    ],
    ids=["widths", "shares"],
)
def test_it_suggests_what_hpbandster_does_with_other_options(
    space: Any, staying: float, options: dict[str, Any]
) -> None:
    assert play(space(), options, seed=2, suggestions=65, staying=staying) > 20


@pytest.mark.parametrize("seed", range(5))
def test_the_same_configs_go_on(seed: int) -> None:
    """Of a bracket in which some crash: the others move up, and where too few are left, all of them go on."""
    from fluid.integrations.hpbandster.optimizers import Job, quiet

    with quiet():
        from hpbandster.optimizers.iterations import SuccessiveHalving

    script, shape = np.random.default_rng(seed), BracketShape((1, 3, 9), (9, 3, 1))
    ours, theirs = (
        Brackets([shape]),
        SuccessiveHalving(0, list(shape.sizes), list(shape.rungs), lambda budget: ({}, {})),
    )
    under_way = {start.trial: start.budget for start in iter(ours.start, None)}
    while under_way:
        runs = {config_id: budget for config_id, _, budget in iter(theirs.get_next_run, None)}
        assert {config_id[2]: budget for config_id, budget in runs.items()} == under_way
        promoted = list[RungBudget]()
        for config_id, budget in runs.items():
            trial, job = config_id[2], Job(config_id, config={}, budget=budget)
            job.result = {"loss": float(script.random())} if script.random() > 0.3 else None
            theirs.register_result(job)
            decision = ours.reached(trial, job.result["loss"]) if job.result else ours.ended(trial)
            promoted += decision.promoted
        under_way = {one.trial: one.budget for one in promoted}
    assert theirs.get_next_run() is None


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("space", [conditional, mixed], ids=lambda space: space.__name__)
def test_it_suggests_what_hpbandster_does_in_long_runs(space: Any) -> None:
    assert sum(play(space(), {}, seed=seed, suggestions=250) for seed in range(3, 6)) > 400
