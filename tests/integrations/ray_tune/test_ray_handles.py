"""Handles of Ray's actors and references to its objects in configs and closures, in processes new to Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
import ray
from ray.util import ActorPool
from ray.util.queue import Queue

from fluid import FluidExecutor, Trial, TrialGroup, tune
from fluid.integrations.ray_tune.logs.log_records import LoggedResult
from fluid.integrations.ray_tune.serialization import pickle_arguments

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


@ray.remote(num_cpus=0)
class Counter:
    """Counts across trials."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int) -> int:
        self.total += amount
        return self.total


@pytest.fixture
def counter(cluster: str) -> Iterator[Any]:
    made = Counter.options(name="counter").remote()  # type: ignore[attr-defined]
    yield made
    ray.kill(made)


@pytest.fixture(params=["local", "ray"])
def fresh(request: pytest.FixtureRequest, cluster: str, tmp_path: Path) -> Iterator[FluidExecutor]:
    """Two devices whose processes have run nothing."""
    with FluidExecutor(backend=request.param, devices=2, run_dir=tmp_path / "run", verbose=0) as executor:
        yield executor


@pytest.mark.slow
def test_each_trial_of_a_sweep_reaches_the_actor(counter: Any, fresh: FluidExecutor, tmp_path: Path) -> None:
    """By its config, a closure, a pool, a queue or its name: each trial in a process that is new to Ray."""
    pool, queue = ActorPool([counter]), Queue(actor_options={"num_cpus": 0})
    queue.put(counter)

    def train(config: dict[str, Any]) -> None:
        if config["how"] == "config":
            ray.get(config["counter"].add.remote(1))
        elif config["how"] == "closure":
            ray.get(counter.add.remote(1))
        elif config["how"] == "pool":
            assert list(ActorPool.map(pool, lambda actor, amount: actor.add.remote(amount), [1]))
        elif config["how"] == "queue":
            ray.get(config["queue"].get(timeout=60).add.remote(1))
        else:
            ray.get(ray.get_actor("counter").add.remote(1))
        tune.report({"done": True})

    hows = ["config", "closure", "pool", "queue", "name"]
    config = {"how": tune.grid_search(hows), "counter": counter, "queue": queue}
    done = tune.run(train, config=config, executor=fresh, storage_path=str(tmp_path / "tune"), verbose=0)
    assert [trial.status for trial in done.trials] == ["TERMINATED"] * len(hows)
    assert ray.get(counter.add.remote(0)) == len(hows)


@pytest.mark.slow
def test_trials_without_tune_reach_actors_and_objects(counter: Any, fresh: FluidExecutor) -> None:
    amount = ray.put(3)

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"total": ray.get(config["counter"].add.remote(ray.get(amount)))}

    handle = fresh.submit_trialgroup(TrialGroup([Trial(train, {"counter": counter}, budget=1) for _ in range(2)]))
    assert sorted(result.metrics["total"] for result in handle.results()) == [3, 6]


@pytest.mark.slow
def test_handles_are_known_where_they_must_not_be_sent(counter: Any) -> None:
    assert pickle_arguments({"counter": [counter]}).needs_ray
    assert pickle_arguments({"reference": ray.put(1)}).needs_ray
    assert not pickle_arguments({"class": Counter, "number": 1}).needs_ray


@pytest.mark.frameworks("pyarrow")
def test_data_sets_are_known_where_there_is_no_ray(cluster: str) -> None:
    """Ray computes what a data set holds, and in older releases its text: the process of the loggers gets the text."""
    import ray.data

    lazy = ray.data.range(3).map(lambda row: row)
    sent = LoggedResult.of({"data": [lazy], "loss": 1.0}, None)
    assert sent.pickled is None
    shown = sent.unpickle(SimpleNamespace())  # type: ignore[arg-type]
    assert shown["loss"] == 1.0 and str(shown["data"]) == str([lazy])
