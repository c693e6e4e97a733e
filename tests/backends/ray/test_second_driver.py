"""A second driver on a cluster: it takes what is free, and where nothing is, it says who holds it and waits."""

from __future__ import annotations

import getpass
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ray_drive import PATIENCE, ROOT
from waiting import eventually

pytest.importorskip("ray")

from fluid import FluidExecutor, Trial, TrialGroup
from fluid.backends.ray import RayBackend
from fluid.backends.ray.other_jobs import holders_in
from fluid.errors import InvalidFieldError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: Runs a trial until it is told to end by a line on stdin; its own lines tell how far it is.
DRIVER = """
import sys
from fluid import FluidExecutor, Trial, TrialGroup
def train(config):
    yield {"x": 1}
if __name__ == "__main__":
    devices = int(sys.argv[2]) or None
    with FluidExecutor("ray", devices, run_dir=sys.argv[1], verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, {}, budget=1)]))
        print("result", [result.metrics["x"] for result in handle.results()], len(executor.devices), flush=True)
        sys.stdin.readline()
"""


class Driver:
    """A driver in a process of its own. ``said()`` is its next line."""

    def __init__(self, folder: Path, address: str, devices: int) -> None:
        folder.mkdir()
        (folder / "driver.py").write_text(DRIVER, encoding="utf-8")
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(folder / "driver.py"), str(folder / "run"), str(devices)],
                env={**os.environ, "PYTHONPATH": ROOT, "RAY_ADDRESS": address},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def warned_of(self, text: str) -> bool:
        return text in self.errors.read_text(encoding="utf-8")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.communicate("\n", timeout=PATIENCE)


@pytest.fixture
def drivers(cluster: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[Driver] = []

    def start(devices: int) -> Driver:
        made.append(Driver(tmp_path / f"driver{len(made)}", cluster.address, devices))
        return made[-1]

    yield start
    for driver in made:
        if driver.process.poll() is None:
            driver.process.send_signal(signal.SIGKILL)
        driver.process.communicate()


def test_a_second_driver_takes_what_is_free_and_a_third_waits_until_one_ends(drivers: Any) -> None:
    first = drivers(4)
    assert first.said() == "result [1] 4"
    second = drivers(0)  # Of all six; two are free.
    assert second.said() == "result [1] 2"
    assert second.warned_of(
        f"takes 2 of the Ray cluster's 6 CPUs, as others hold the rest: 4 by {getpass.getuser()}'s Fluid session"
    )
    third = drivers(0)
    eventually(lambda: third.warned_of("this session begins as soon as one is given back"))
    assert third.warned_of("the Ray cluster has 6 CPUs, 0 of them free (held: 4 by ")
    assert third.warned_of(f"(process {first.process.pid} on ") and third.warned_of(
        f"(process {second.process.pid} on "
    )
    assert third.process.poll() is None
    second.end()
    assert third.said() == "result [1] 2"
    third.end()
    first.end()


def test_a_session_that_is_not_to_wait_longer_is_told_who_holds_the_devices(cluster: Any, tmp_path: Path) -> None:
    with RayBackend(6, preload=[], run_dir=tmp_path / "lanes"):
        for devices in (None, 2):
            with pytest.raises(
                InvalidFieldError, match="0 of them free \\(held: 6 by another session of this process\\)"
            ):
                RayBackend(devices, preload=[], timeout=0.5)


def test_alone_on_the_cluster_nothing_is_said(cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(config: Mapping[str, Any]) -> Any:
        yield {"x": 1}

    with caplog.at_level(logging.WARNING, "fluid"), FluidExecutor("ray", run_dir=tmp_path, verbose=0) as executor:
        assert executor.submit_trialgroup(TrialGroup([Trial(train, {}, budget=1)])).wait(timeout=PATIENCE)
        assert len(executor.devices) == 6
    assert not [record for record in caplog.records if "holds" in record.message or "hold the" in record.message]


def test_holders_are_named_once_and_placement_groups_of_others_by_their_name() -> None:
    fluid = "fluid/ann/node-1/4711/"
    groups = [
        {"placement_group_id": "a", "name": fluid + "01", "state": "CREATED", "bundles": {0: {"GPU": 1.0}}},
        {"placement_group_id": "b", "name": fluid + "02", "state": "CREATED", "bundles": {0: {"GPU": 1.0}}},
        {"placement_group_id": "c", "name": fluid + "03", "state": "REMOVED", "bundles": {0: {"GPU": 1.0}}},
        {"placement_group_id": "d", "name": "", "state": "CREATED", "bundles": {0: {"CPU": 4.0}, 1: {"GPU": 1.0}}},
        {"placement_group_id": "e", "name": "", "state": "PENDING", "bundles": {0: {"GPU": 8.0}}},
    ]
    assert holders_in(groups, "gpu") == ["2 by ann's Fluid session (process 4711 on node-1)", "1 by placement group d"]
    assert holders_in(groups, "cpu") == ["4 by placement group d"]
    many = [{**groups[3], "placement_group_id": str(index)} for index in range(8)]
    assert len(holders_in(many, "gpu")) == 6 and holders_in(many, "gpu")[-1] == "and 3 more holders"
