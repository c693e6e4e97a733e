"""Trials of several bundles, which Ray runs: where the session's devices are Ray's, they have them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray

from fluid import FluidExecutor, InvalidFieldError, Trial, TrialGroup, tune

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

TWO = tune.PlacementGroupFactory([{"CPU": 0.5}, {"CPU": 1.0}])


@pytest.fixture
def run(cluster: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Runs a sweep on all CPUs of the cluster, which are two; ``executor`` is the one that has them."""
    with FluidExecutor(backend="ray", run_dir=tmp_path / "run", verbose=0) as executor:
        options = {"executor": executor, "storage_path": str(tmp_path), "verbose": 0, "time_budget_s": 120}

        def run(trainable: Any, **more: Any) -> Any:
            return tune.run(trainable, **{**options, **more})

        run.executor = executor  # type: ignore[attr-defined]
        yield run


def train(config: dict[str, Any]) -> None:
    """Computes in a task of Ray if there is a bundle for it."""

    @ray.remote(num_cpus=1)
    def square(x: int) -> int:
        return x * x

    x = config["x"]
    tune.report({"n": ray.get(square.remote(x)) if config["bundles"] > 1 else x * x})


def train_by_config(config: dict[str, Any]) -> None:
    """The same; requests are kept with a function."""
    train(config)


def by_config(config: dict[str, Any]) -> tune.PlacementGroupFactory:
    return TWO if config["bundles"] > 1 else tune.PlacementGroupFactory([{"CPU": 1}])


def count(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for n in range(3):
        yield {"n": n}


def test_trials_of_several_bundles_have_the_devices_of_the_session_meanwhile(run: Any) -> None:
    done = run(train, config={"x": tune.grid_search([2, 3]), "bundles": 2}, resources_per_trial=TWO)
    assert [(trial.status, trial.last_result["n"]) for trial in done.trials] == [("TERMINATED", 4), ("TERMINATED", 9)]
    assert run.executor.max_devices == 2
    group = TrialGroup([Trial(count, {}, budget=3) for _ in range(2)])
    assert len(list(run.executor.submit_trialgroup(group).results())) == 6
    from waiting import eventually  # Ray's workers import this module, and do not find that one.

    eventually(lambda: len(run.executor.devices) == 2)


def test_they_take_turns_with_other_trials(run: Any) -> None:
    other = run.executor.submit_trialgroup(TrialGroup([Trial(count, {}, budget=3) for _ in range(4)]))
    config = {"x": tune.grid_search([2, 3]), "bundles": tune.grid_search([1, 2])}
    done = run(tune.with_resources(train_by_config, by_config), config=config)
    assert [trial.status for trial in done.trials] == ["TERMINATED"] * 4
    assert sorted(trial.last_result["n"] for trial in done.trials) == [4, 4, 9, 9]
    assert len(list(other.results())) == 12


@pytest.mark.parametrize(
    ("bundles", "reason"),
    [
        ([{"CPU": 1}, {"CPU": 2}], "its 2 bundles need 3 CPU in all, and Ray's cluster has 2"),
        ([{"CPU": 1}, {"licence": 1}], "its 2 bundles need 1 licence in all, and Ray's cluster has 0"),
    ],
)
def test_what_ray_can_never_give_is_refused(run: Any, bundles: list[dict[str, float]], reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason):
        run(train, config={"x": 1, "bundles": 2}, resources_per_trial=tune.PlacementGroupFactory(bundles))
