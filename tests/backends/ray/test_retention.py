"""Checkpoints of other machines that outlive the session come to the driver's run folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from ray_drive import OTHER_MACHINE, PATIENCE

ray = pytest.importorskip("ray")
from fluid import kept_checkpoints  # noqa: E402
from fluid.backends.hosts.folders import SessionFolders  # noqa: E402
from fluid.backends.ray import RayBackend  # noqa: E402
from fluid.executor import FluidExecutor  # noqa: E402
from fluid.lane.checkpoints.seal import damage_of  # noqa: E402
from fluid.resources import Device  # noqa: E402
from fluid.trialgroup import Search, Trial, TrialGroup  # noqa: E402

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Valley:
    """Its loss falls until iteration ``best``, and rises then."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.done = config, 0

    def step(self) -> dict[str, Any]:
        self.done += 1
        time.sleep(0.01)
        return {"loss": abs(self.done - self.config["best"]) + self.config["floor"]}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "done").write_text(str(self.done) + " " * 100_000)

    def load_checkpoint(self, folder: str) -> None:
        self.done = int(Path(folder, "done").read_text())


def run_on_other_machine(folder: Path, keep: str) -> None:
    trials = [Trial(Valley, {"best": 1 + x, "floor": x / 10}, budget=5, trial_id=f"t{x}") for x in range(4)]
    devices = [Device(0, host=OTHER_MACHINE), Device(1, host=OTHER_MACHINE)]
    with (
        RayBackend(devices, run_dir=folder, grace=1.0, preload=[]) as backend,
        FluidExecutor(backend, max_packing=1, verbose=0, run_dir=folder, keep=keep) as executor,
    ):
        handle = executor.submit_trialgroup(TrialGroup(trials, search=Search("loss", "min")))
        assert handle.wait(PATIENCE)


def kept(folder: Path) -> dict[str, list[int]]:
    """What is kept in the driver's own run folder, apart from those of machines within it."""
    found: dict[str, list[int]] = {}
    for x in range(4):
        here = folder / "trials" / f"t{x}" / "kept"
        of_trial = [one for one in kept_checkpoints(folder, f"t{x}") if here in one.path.parents]
        for one in of_trial:
            assert damage_of(str(one.path.parent)) is None
            assert int((one.path / "done").read_text()) == one.iteration
        found[f"t{x}"] = [one.iteration for one in of_trial]
    return found


@pytest.mark.parametrize("shared", [True, False], ids=["shared disk", "own disk"])
@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("last", {"t0": [5], "t1": [5], "t2": [5], "t3": [5]}),
        ("best:2", {"t0": [1], "t1": [2], "t2": [], "t3": []}),
    ],
)
def test_they_come_to_the_drivers_run_folder(
    cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep: str,
    expected: dict[str, list[int]],
    shared: bool,
) -> None:
    folder = tmp_path / "run"
    if not shared:  # The other machine looks for this file.
        monkeypatch.setattr(SessionFolders, "marker", property(lambda self: str(tmp_path / "elsewhere")))
    run_on_other_machine(folder, keep)
    assert kept(folder) == expected
    assert bool(list(folder.glob("hosts/*/trials"))) is not shared, "the other machine has used a folder of its own"
    assert not list(folder.glob("hosts/*/trials/*/kept/*")), "it has none that it would keep for good"
