"""Autoscaling on a real cluster: devices are asked for while trials wait, come with a node, and are given back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.trialgroup import Trial, TrialGroup

ray = pytest.importorskip("ray")
from fluid.backends.ray import RayBackend  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0
OTHER_MACHINE = "127.0.0.3"
STEPS = 1_000


class Recorder:
    """Counts its steps, and records each in a file; takes its time until a file tells it to hurry."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        if not Path(self.config["hurry"]).exists():
            threading.Event().wait(0.1)
        with open(self.config["record"], "a", encoding="utf-8") as file:
            file.write(f"{self.count}\n")
        return {"count": self.count}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "count").write_text(str(self.count), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        self.count = int((Path(folder) / "count").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster that this process is connected to, with one CPU."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def groups() -> Counter[str]:
    """Placement groups of the cluster by state, but for those that were removed."""
    states = Counter(group["state"] for group in ray.util.placement_group_table().values())
    del states["REMOVED"]
    return states


@pytest.mark.parametrize("devices", [1, None])
def test_devices_come_while_trials_wait_and_go_when_they_are_idle(
    cluster: Any, tmp_path: Path, devices: int | None
) -> None:
    backend = RayBackend(devices, run_dir=tmp_path / "lanes", preload=[], grace=1.0, autoscale=3, idle_timeout_s=2.0)
    hurry, records = tmp_path / "hurry", [tmp_path / f"record-{number}" for number in range(5)]
    trials = [Trial(Recorder, {"record": str(path), "hurry": str(hurry)}, budget=STEPS) for path in records]
    with FluidExecutor(backend, verbose=0, run_dir=tmp_path / "run", packing="off") as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        eventually(lambda: groups() == {"CREATED": 1, "PENDING": 2})
        assert executor.status().asked == 2 and executor.max_devices == 3
        node = cluster.add_node(num_cpus=4, node_ip_address=OTHER_MACHINE)
        try:
            eventually(lambda: len(executor.devices) == 3)
            assert groups() == {"CREATED": 3}, "no more than the session may hold"
            first, *others = [device.index for device in executor.devices]
            assert next(result for result in handle.results() if set(others) & set(result.device_ids))
            hurry.touch()
            assert handle.wait(timeout=PATIENCE)
            eventually(lambda: [device.index for device in executor.devices] == [first])
            eventually(lambda: groups() == {"CREATED": 1})
            eventually(lambda: ray.available_resources().get("CPU") == 4.0)
            # The session can take them again.
            assert executor.submit_trialgroup(TrialGroup([Trial(Recorder, trials[0].config, budget=1)])).wait(PATIENCE)
        finally:
            cluster.remove_node(node)
    assert set(handle.states.values()) == {"DONE"}
    for path in records[1:]:
        steps = [int(line) for line in path.read_text(encoding="utf-8").split()]
        assert steps == list(range(1, STEPS + 1)), "each iteration was run once"


def test_what_was_asked_for_is_withdrawn_with_its_trials(cluster: Any, tmp_path: Path) -> None:
    backend = RayBackend(1, run_dir=tmp_path / "lanes", preload=[], grace=1.0, autoscale=2)
    hurry, records = tmp_path / "hurry", [tmp_path / f"record-{number}" for number in range(2)]
    trials = [Trial(Recorder, {"record": str(path), "hurry": str(hurry)}, budget=STEPS) for path in records]
    with FluidExecutor(backend, verbose=0, run_dir=tmp_path / "run", packing="off") as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        eventually(lambda: groups() == {"CREATED": 1, "PENDING": 1})
        handle.stop(trials[1].id)
        eventually(lambda: groups() == {"CREATED": 1})
        hurry.touch()
        assert handle.wait(timeout=PATIENCE)
    eventually(lambda: not groups())


@pytest.mark.slow
def test_a_deadline_gives_first_devices_back_and_takes_others_for_the_next_group(cluster: Any, tmp_path: Path) -> None:
    hurry, record = tmp_path / "hurry", tmp_path / "record"
    long, short, wide = (
        {"record": str(path), "hurry": str(hurry)} for path in (record, tmp_path / "b", tmp_path / "c")
    )
    node = cluster.add_node(num_cpus=4, node_ip_address=OTHER_MACHINE)
    try:
        backend = RayBackend(3, run_dir=tmp_path / "lanes", preload=[], grace=1.0, releasable=True)
        with FluidExecutor(backend, verbose=0, run_dir=tmp_path / "run", packing="off", deadline="1h") as executor:
            assert groups() == {"CREATED": 3} and all(backend.can_give_back(one.index) for one in executor.devices)
            trials = [Trial(Recorder, long, budget=STEPS), Trial(Recorder, short, budget=1)]
            handle = executor.submit_trialgroup(TrialGroup(trials))
            eventually(lambda: groups() == {"CREATED": 1})
            assert len(executor.devices) == 1 and executor.max_devices == 3
            other = executor.submit_trialgroup(TrialGroup([Trial(Recorder, wide, budget=1, devices=2)]))
            assert other.wait(timeout=PATIENCE), "it needs two devices, which Ray gives again"
            hurry.touch()
            assert handle.wait(timeout=PATIENCE)
        eventually(lambda: not groups())
    finally:
        cluster.remove_node(node)
    steps = [int(line) for line in record.read_text(encoding="utf-8").split()]
    assert steps == list(range(1, STEPS + 1)), "each iteration was run once"


@pytest.mark.parametrize(
    ("options", "field"),
    [({"autoscale": 0}, "autoscale"), ({"idle_timeout_s": -1.0}, "idle_timeout_s"), ({"autoscale": 1}, "autoscale")],
)
def test_limits_that_cannot_be_kept_are_refused(cluster: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        RayBackend(2, **options)
    assert refused.value.field == field and not groups()
