"""Whose state stays on a device, with real processes: a CPU whose memory has an end stands in for a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.backends.hosts import memory as host_memory
from fluid.backends.local import LocalBackend
from fluid.executor import FluidExecutor
from fluid.resources import Device
from fluid.session.handle import TrialGroupHandle
from fluid.trialgroup import Trial, TrialGroup

pytestmark = pytest.mark.slow

PATIENCE = 90.0
MIB = 1 << 20
#: Of the device; nine tenths may be filled.
CAPACITY = 220 * MIB


class Holder:
    """Holds memory between iterations, takes more within one, and says how it came to be where it is."""

    def setup(self, config: dict[str, Any]) -> None:
        self.count = 0
        self.kept = b"k" * (config["holds"] * MIB)
        self.takes = config["takes"]
        self.came_from = ""

    def step(self) -> dict[str, Any]:
        scratch = b"s" * (self.takes * MIB)
        self.count += 1
        return {"count": self.count, "from": self.came_from, "pid": os.getpid(), "scratch": len(scratch)}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "state").write_bytes(b"%d\n" % self.count + self.kept)

    def load_checkpoint(self, folder: str) -> None:
        self.count = int(Path(folder, "state").read_bytes().split(b"\n")[0])
        self.came_from = folder


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FluidExecutor]]:
    made: list[FluidExecutor] = []

    def build(memory: str | None = None) -> FluidExecutor:
        device = Device(0, kind="cpu", memory_bytes=CAPACITY)
        folder = tmp_path / f"session-{len(made)}"
        backend = LocalBackend([device], run_dir=folder, checkpoint_memory_bytes=memory)
        made.append(FluidExecutor(backend, max_packing=1, run_dir=folder, profile=None, verbose=0))
        return made[-1]

    yield build
    for executor in made:
        executor.close()


def run(executor: FluidExecutor, handle: TrialGroupHandle | None, name: str) -> TrialGroupHandle:
    """Runs a new trial of 40 MiB, and 20 more while it runs, for one iteration."""
    config = {"holds": 40, "takes": 20}
    trial = Trial(Holder, config, budget=1, trial_id=name, isolation="lane")
    if handle is None:
        handle = executor.submit_trialgroup(TrialGroup([trial]))
    else:
        handle.add(trial)
    assert handle.wait(PATIENCE), "it hangs"
    handle.raise_failures()
    return handle


def go_on(handle: TrialGroupHandle, name: str) -> dict[str, Any]:
    """Has a trial run one iteration more; returns what it said."""
    handle.extend(name, 1)
    assert handle.wait(PATIENCE), "it hangs"
    handle.raise_failures()
    last = [result for result in handle.results() if result.trial_id == name][-1]
    return dict(last.metrics)


def test_what_a_trial_takes_of_a_cpu_is_measured(make: Callable[..., FluidExecutor]) -> None:
    executor = make()
    run(executor, None, "a")
    (key,) = executor.profile.keys()
    need = executor.profile.memory(key)
    assert need is not None
    assert 38 * MIB < need.persistent_bytes < 60 * MIB
    assert 18 * MIB < need.ephemeral_bytes < 60 * MIB


def test_states_stay_while_they_fit_and_come_back_from_host_memory_or_disk(
    make: Callable[..., FluidExecutor],
) -> None:
    """198 MiB usable: four states of 40, if the one that runs takes 20 more; not five."""
    # In host memory there is room for two: of the third that leaves the first goes to disk.
    executor = make("100MiB")
    handle = run(executor, None, "a")
    for name in "bcdefg":
        run(executor, handle, name)
    stays = go_on(handle, "f")
    assert (stays["count"], stays["from"]) == (2, ""), "its state never left the device"
    memory, disk = (go_on(handle, name) for name in "ca")
    assert memory["count"] == disk["count"] == 2
    assert memory["from"].startswith(f"{host_memory.RAM_DISK}/fluid-")
    assert disk["from"].startswith(str(executor.run_dir))
    assert len({result.metrics["pid"] for result in handle.results()}) == 1, "all in one lane"
