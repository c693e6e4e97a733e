"""Ray's tasks in a session that has every CPU of the cluster from Ray: on a trial's own device, and elsewhere."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import eventually

from fluid.executor import FluidExecutor
from fluid.trialgroup import Trial, TrialGroup

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def starts_a_task(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from fluid.backends.ray.nodes import bundles_of_lane

    (bundle,) = bundles_of_lane()

    def node() -> str:
        return str(ray.get_runtime_context().get_node_id())

    group = pickle.loads(bundle.group)
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle.number)
    there = ray.get(ray.remote(node).options(num_cpus=1, scheduling_strategy=where).remote(), timeout=60)
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"][bundle.number]
    yield {"number": bundle.number, "is_there": there == placed}


def test_each_lane_knows_its_bundle(cluster: Any) -> None:
    trials = [Trial(starts_a_task, {}, budget=1) for _ in range(6)]
    with FluidExecutor(backend="ray", packing="off", verbose=0) as executor:
        assert len(executor.devices) == 6
        results = list(executor.submit_trialgroup(TrialGroup(trials)).results())
    assert [result.metrics["is_there"] for result in results] == [True] * 6
    assert {result.metrics["number"] for result in results} <= set(range(6))


def test_a_task_that_waits_for_what_the_session_holds_is_warned_of(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fluid.backends.ray.other_jobs.LOOK_S", 0.1)
    with FluidExecutor(backend="ray", verbose=0):
        waiting = ray.remote(lambda: None).remote()
        (record,) = eventually(lambda: [one for one in caplog.records if "tasks or actors" in one.getMessage()])
        assert "wait for {'CPU': 1.0}, while this session holds 6 CPUs" in record.getMessage()
        ray.cancel(waiting)
