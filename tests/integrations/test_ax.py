"""fluid.run with Ax's Client as its searcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepResult

#: Ax warns of PyTorch's functions that it uses, and of what its models make of a few points.
pytestmark = [pytest.mark.frameworks("ax"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, run_dir=folder, max_failures=0, verbose=0) as made:
        yield made


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(1, 100):
        if config["x"] > 0.9:
            raise ValueError("too much")
        yield {"loss": config["x"] + 1.0 / step, "accuracy": 1.0 - config["x"], "size": {"mb": 2.0}}


def make_client(objective: str | None = None, *, high: float = 1.0, **options: Any) -> Any:
    from ax.api.client import Client
    from ax.api.configs import RangeParameterConfig

    client = Client(random_seed=0)
    client.configure_experiment([RangeParameterConfig(name="x", parameter_type="float", bounds=(0.0, high))])
    if objective is not None:
        client.configure_optimization(objective=objective, **options)
    client.configure_generation_strategy(method="random_search")
    return client


def run(client: Any, executor: FluidExecutor, **options: Any) -> SweepResult:
    from fluid.integrations.ax import AxSearcher

    arguments = {"metric": "loss", "budget": 9, "samples": 6, "algorithm": "full", **options}
    return fluid.run(train, searcher=AxSearcher(client), executor=executor, **arguments)


def statuses(client: Any) -> list[str]:
    return list(client.summarize()["trial_status"])


@pytest.mark.parametrize(("metric", "objective"), [("loss", "-loss"), ("accuracy", "accuracy")])
def test_ax_knows_the_best_trial(metric: str, objective: str, executor: FluidExecutor) -> None:
    client = make_client(high=0.9)
    result = run(client, executor, metric=metric)
    assert statuses(client) == ["COMPLETED"] * 6
    best, values, index, _ = client.get_best_parameterization(use_model_predictions=False)
    assert best == result.best.config
    assert values[metric] == pytest.approx(result.best.value) or values[metric][0] == pytest.approx(result.best.value)
    assert str(client._experiment.optimization_config.objective.expression) == objective
    assert result.trials[index].config == best


def test_failed_and_stopped_trials_are_marked(executor: FluidExecutor) -> None:
    client = make_client("-loss")
    result = run(client, executor, algorithm="asha", samples=16)
    by_config = {tuple(trial.config.items()): trial for trial in result.trials}
    expected = {"DONE": "COMPLETED", "STOPPED": "EARLY_STOPPED", "FAILED": "FAILED"}
    table = client.summarize()
    assert len(table) == 16
    assert set(table["trial_status"]) == set(expected.values())
    for row in table.to_dict("records"):
        trial = by_config[(("x", row["x"]),)]
        assert row["trial_status"] == expected[trial.state]
        if trial.state != "FAILED":
            assert row["loss"] == pytest.approx(trial.metrics["loss"])


def test_metrics_of_constraints_are_told_too(executor: FluidExecutor) -> None:
    client = make_client("-loss", outcome_constraints=["accuracy >= 0.5"], high=0.9)
    run(client, executor, samples=4)
    table = client.summarize()
    assert list(table["accuracy"]) == pytest.approx([1.0 - x for x in table["x"]])


def test_several_objectives(executor: FluidExecutor) -> None:
    client = make_client(high=0.9)
    result = run(client, executor, metric=("loss", "accuracy"), mode=("min", "max"), samples=4)
    assert len(client.get_pareto_frontier(use_model_predictions=False)) == len(result.pareto) == 1


def test_the_sweep_waits_where_ax_needs_results_first(executor: FluidExecutor) -> None:
    client = make_client("-loss", high=0.9)
    client.configure_generation_strategy(
        method="fast", initialization_budget=2, allow_exceeding_initialization_budget=False
    )
    assert len(run(client, executor, samples=2, max_concurrent=8).trials) == 2
    client = make_client("-loss", high=0.9)
    client.configure_generation_strategy(
        method="fast", initialization_budget=2, allow_exceeding_initialization_budget=False
    )
    result = run(client, executor, samples=3, max_concurrent=3, budget=1)
    assert statuses(client) == ["COMPLETED"] * len(result.trials) == ["COMPLETED"] * 3


def test_an_exhausted_space_ends_the_sweep(executor: FluidExecutor) -> None:
    from ax.adapter.registry import Generators
    from ax.api.client import Client
    from ax.api.configs import ChoiceParameterConfig
    from ax.generation_strategy.generation_node import GenerationNode
    from ax.generation_strategy.generation_strategy import GenerationStrategy
    from ax.generation_strategy.generator_spec import GeneratorSpec

    client = Client(random_seed=0)
    client.configure_experiment(
        [ChoiceParameterConfig(name="x", parameter_type="float", values=[0.0, 0.5], is_ordered=True)]
    )
    client.configure_optimization(objective="-loss")
    # By default Ax draws 10,000 times before it gives up, which takes minutes.
    draws = {"model_gen_options": {"max_rs_draws": 50}}
    sobol = GeneratorSpec(generator_enum=Generators.SOBOL, generator_gen_kwargs=draws)
    client.set_generation_strategy(GenerationStrategy(nodes=[GenerationNode("Sobol", generator_specs=[sobol])]))
    result = run(client, executor, samples=20)
    assert sorted(trial.config["x"] for trial in result.trials) == [0.0, 0.5]


def test_a_config_that_never_ran_is_abandoned(executor: FluidExecutor) -> None:
    client = make_client("-loss")
    from fluid.integrations.ax import AxSearcher
    from fluid.search import SearchOutcome

    searcher = AxSearcher(client)
    searcher.begin(["loss"], ["min"])
    asked = searcher.ask()
    assert asked is not None
    searcher.tell(SearchOutcome(token=asked.token, config={}, values=None, state="STOPPED", iteration=0))
    assert statuses(client) == ["ABANDONED"]


@pytest.mark.parametrize(
    ("objective", "options", "problem"),
    [
        ("loss", {}, "is not what the client optimizes"),
        ("-loss", {"metric": "accuracy"}, r"metric=\['loss'\] and mode=\['min'\]"),
        (None, {"metric": "size/mb", "mode": "min"}, "cannot be in an objective of Ax"),
    ],
)
def test_objectives_that_differ_are_refused(
    objective: str | None, options: dict[str, Any], problem: str, executor: FluidExecutor
) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        run(make_client(objective), executor, **options)


def test_other_objects_are_refused() -> None:
    from fluid.integrations.ax import AxSearcher

    with pytest.raises(InvalidFieldError, match="client"):
        AxSearcher(Path())
