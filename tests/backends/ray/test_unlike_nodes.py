"""Nodes of a real cluster whose devices are of unlike models: what is measured is kept, and used, by model."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.engine.events import DeviceAdded
from fluid.executor import FluidExecutor
from fluid.measure.profile import Profile
from fluid.reports.run.loader import load_run
from fluid.resources import Device, Requires
from fluid.trialgroup import Trial, TrialGroup

ray = pytest.importorskip("ray")
from ray_drive import OTHER_MACHINE, PATIENCE, THIRD_MACHINE  # noqa: E402
from waiting import eventually  # noqa: E402

from fluid.backends.hosts.folders import HERE  # noqa: E402
from fluid.backends.ray import RayBackend  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SLOW, FAST = "Turtle", "Hare"
#: Seconds of an iteration alone, by model, and bytes that a trial holds there.
SECONDS = {SLOW: 0.2, FAST: 0.05}
BYTES = {SLOW: 30 << 20, FAST: 90 << 20}
#: Tells a lane which node it is on; the driver's has none.
VARIABLE = "FLUID_TEST_MODEL"


class Paced:
    """Takes as long as its node's model does. On a slow one, trials of a device take turns."""

    def setup(self, config: dict[str, Any]) -> None:
        self.model = os.environ.get(VARIABLE, SLOW)
        self.count, self.lock = 0, Path(config["lock"])
        self.held = b""

    def step(self) -> dict[str, Any]:
        self.held = self.held or b"m" * BYTES[self.model]
        with self.lock.open("w") as file:
            if self.model == SLOW:
                fcntl.flock(file, fcntl.LOCK_EX)
            threading.Event().wait(SECONDS[self.model])
        self.count += 1
        return {"count": self.count, "model": self.model}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "count").write_text(str(self.count), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        self.count = int((Path(folder) / "count").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """The driver's node is slow, another one fast."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, "resources": {f"accelerator_type:{SLOW}": 1}}
    made = Cluster(initialize_head=True, head_node_args=head)
    add_node(made, OTHER_MACHINE, FAST, resources={f"accelerator_type:{FAST}": 1})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


def add_node(cluster: Any, address: str, model: str, **more: Any) -> Any:
    """Adds a node that is as fast as a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, model)  # Ray's processes, and the lanes below them, inherit it.
        return cluster.add_node(num_cpus=1, node_ip_address=address, **more)


def devices(**more: Any) -> list[Device]:
    return [Device(0, host=ray.util.get_node_ip_address(), **more), Device(1, host=OTHER_MACHINE, **more)]


def ran_on(handle: Any) -> dict[str, set[int]]:
    """The devices of each trial."""
    found: dict[str, set[int]] = {}
    for result in handle.results():
        found.setdefault(result.trial_id, set()).update(result.device_ids)
    return found


def test_what_is_measured_is_kept_and_used_by_model(cluster: Any, tmp_path: Path) -> None:
    def trial(name: str, budget: int) -> Trial:
        return Trial(Paced, {"lock": str(tmp_path / "lock")}, budget=budget, trial_id=name, profile_key="net")

    backend = RayBackend(devices(memory_bytes=2e9))
    with FluidExecutor(backend, max_packing=2, max_width=1, run_dir=tmp_path / "first", verbose=0) as executor:
        assert [(device.host, device.model) for device in executor.devices] == [(HERE, SLOW), (OTHER_MACHINE, FAST)]
        handle = executor.submit_trialgroup(TrialGroup([trial(f"t{row}", 50) for row in range(8)]))
        assert handle.wait(PATIENCE) and set(handle.states.values()) == {"DONE"}, handle.failures
        for result in handle.results():
            assert result.metrics["model"] == (SLOW, FAST)[result.device_ids[0]]
    profile = Profile.load(tmp_path / "first" / "profile.json")
    assert profile.to_json() == executor.profile.to_json()
    assert sorted(map(str, profile.models("net"))) == sorted((SLOW, FAST))
    for model, seconds in SECONDS.items():
        assert profile.seconds_per_iteration("net", model) == pytest.approx(seconds, rel=0.4)
        need = profile.memory("net", model)
        assert need is not None and need.peak_bytes == pytest.approx(BYTES[model], rel=0.25)
    assert profile.speeds("net", [SLOW, FAST])[FAST] == pytest.approx(4.0, rel=0.4)
    assert profile.packing_limit("net", 2, SLOW) == 1
    assert profile.packing_limit("net", 2, FAST) == 2
    shown = {key.model: key for key in load_run(tmp_path / "first").keys}
    assert shown[FAST].alpha < 1.5 < shown[SLOW].alpha

    # Another session plans with that from its first trial on.
    backend = RayBackend(devices())
    options: dict[str, Any] = {"max_width": 1, "packing": "off", "run_dir": tmp_path / "second", "verbose": 0}
    with FluidExecutor(backend, profile=profile, **options) as executor:
        lengths = {"short": 5, "long": 40, "shorter": 3}
        handle = executor.submit_trialgroup(TrialGroup([trial(name, budget) for name, budget in lengths.items()]))
        assert handle.wait(PATIENCE)
        assert ran_on(handle) == {"short": {0}, "long": {1}, "shorter": {0}}


def test_a_model_can_be_given_and_holds(cluster: Any) -> None:
    with FluidExecutor(RayBackend(devices(model="Tortoise", tags=("mine",))), verbose=0) as executor:
        assert [device.model for device in executor.devices] == ["Tortoise"] * 2
        assert all("mine" in device.tags for device in executor.devices)


def test_trials_may_require_a_model(cluster: Any, tmp_path: Path) -> None:
    config = {"lock": str(tmp_path / "lock")}
    trials = [
        Trial(Paced, config, budget=2, trial_id=f"{model}{row}", requires=Requires(model=model))
        for model in (SLOW, FAST)
        for row in range(2)
    ]
    with FluidExecutor(RayBackend(devices()), verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup(trials))
        assert handle.wait(PATIENCE)
        assert ran_on(handle) == {f"{SLOW}0": {0}, f"{SLOW}1": {0}, f"{FAST}0": {1}, f"{FAST}1": {1}}


def test_a_node_that_joins_tells_its_model_by_a_label(cluster: Any) -> None:
    backend = RayBackend()
    try:
        node = add_node(cluster, THIRD_MACHINE, FAST, labels={"ray.io/accelerator-type": "Greyhound"})
        try:
            seen: list[Any] = []

            def has_joined() -> bool:
                seen.extend(event for event in backend.poll(0.1) if isinstance(event, DeviceAdded))
                return bool(seen)

            eventually(has_joined)
            assert [(event.device.host, event.device.model) for event in seen] == [(THIRD_MACHINE, "Greyhound")]
        finally:
            cluster.remove_node(node)
    finally:
        backend.close()
