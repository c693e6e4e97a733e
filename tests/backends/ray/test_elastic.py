"""An elastic trial on two nodes of a Ray cluster, which have addresses of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_drive import OTHER_MACHINE, PATIENCE

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")

from elastic.sockets import listening  # noqa: E402
from elastic.trainables import Regression  # noqa: E402

from fluid.backends.hosts.folders import HERE  # noqa: E402
from fluid.backends.ray import RayBackend  # noqa: E402
from fluid.executor import FluidExecutor  # noqa: E402
from fluid.resources import Device  # noqa: E402
from fluid.results.records import Result  # noqa: E402
from fluid.trialgroup import Trial, TrialGroup  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MANY = 10**6


class Paced(Regression):
    """Waits for each batch as long as a device would work on its part of it, so that width pays on any machine."""

    def before_batch(self) -> None:
        time.sleep(0.05 / self.size)

    def end_iteration(self, metrics: dict[str, float]) -> Any:
        pids = torch.zeros(self.size, dtype=torch.int64)
        pids[self.rank] = os.getpid()
        self._elastic.group.all_reduce(pids)
        return {**super().end_iteration(metrics), "pids": pids.tolist()}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster that this process is connected to: two nodes with a CPU each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1, node_ip_address=OTHER_MACHINE)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_trial_grows_across_nodes_and_outlives_a_process_and_a_node(cluster: Any, tmp_path: Path) -> None:
    own = ray.util.get_node_ip_address()
    devices = [Device(0, host=own), Device(1, host=OTHER_MACHINE)]
    with (
        RayBackend(devices, run_dir=tmp_path / "run", grace=1.0) as backend,
        FluidExecutor(backend, max_packing=1, verbose=0, run_dir=tmp_path / "run") as executor,
    ):
        assert [device.host for device in executor.devices] == [HERE, OTHER_MACHINE]
        handle = executor.submit_trialgroup(TrialGroup([Trial(Paced, {}, budget=MANY, trial_id="a")]))
        results = handle.results()
        wide = until(results, lambda result: result.width == 2.0)
        for device, pid in zip(wide.device_ids, wide.metrics["pids"], strict=True):
            assert {address for address, _ in listening([pid])} == {own if device == 0 else OTHER_MACHINE}
        # Rank 0 dies, and the process on the other node goes on; then it is widened again.
        os.kill(wide.metrics["pids"][0], signal.SIGKILL)
        alone = until(results, lambda result: result.iteration > wide.iteration and result.width == 1.0)
        assert alone.metrics["pids"] == wide.metrics["pids"][1:]
        again = until(results, lambda result: result.iteration > alone.iteration and result.width == 2.0)
        (node,) = cluster.worker_nodes
        cluster.remove_node(node, allow_graceful=False)
        last = until(results, lambda result: result.iteration > again.iteration and result.width == 1.0)
        assert last.device_ids == (0,)
        handle.stop("a")
        assert handle.wait(PATIENCE)
        assert handle.states == {"a": "STOPPED"}
        as_alone(list(handle.results()))


def until(results: Iterator[Result], wanted: Callable[[Result], bool]) -> Result:
    return next(result for result in results if wanted(result))


def as_alone(results: list[Result]) -> None:
    """Checks that each iteration was reported once, in order, with the loss of a run in a single process."""
    assert [result.iteration for result in results] == list(range(1, len(results) + 1))
    trial = Regression()
    trial.setup({})
    losses = [float(trial.step()["loss"]) for _ in results]
    assert [result.metrics["loss"] for result in results] == pytest.approx(losses, rel=0, abs=1e-5)
