"""Sessions whose checkpoints are damaged, gone or refused: every iteration is reported once, with the right value."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.executor import FluidExecutor
from fluid.lane.protocol import LaneOptions
from fluid.session.handle import TrialGroupHandle
from fluid.trialgroup import Trial, TrialGroup

pytestmark = pytest.mark.slow

PATIENCE = 90.0


class Chain:
    """Each value follows from the one before: a lost or repeated iteration gives a wrong one."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.value = config, 1

    def step(self) -> dict[str, Any]:
        time.sleep(self.config.get("pause", 0.0))
        self.value = self.value * 31 % 1_000_003
        return {"value": self.value, "pid": os.getpid()}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "value").write_text(str(self.value), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        if self.config.get("cannot_load"):
            raise LookupError("a layer has another name now")
        self.value = int(Path(folder, "value").read_text(encoding="utf-8"))


def values(count: int) -> list[int]:
    return [pow(31, number + 1, 1_000_003) for number in range(count)]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FluidExecutor]]:
    made: list[FluidExecutor] = []
    always = functools.partial(LaneOptions, save_after=0.0, save_ratio=0.0)
    monkeypatch.setattr("fluid.backends.hosts.host.LaneOptions", always)  # Every iteration is saved.

    def begin(resumed: bool = False) -> FluidExecutor:
        options: Any = {"backend": "local", "devices": 1, "verbose": 0}
        folder = tmp_path / "run"
        made.append(FluidExecutor.resume(folder, **options) if resumed else FluidExecutor(run_dir=folder, **options))
        return made[-1]

    yield begin
    for executor in made:
        executor.close()


def begun(executor: FluidExecutor, **config: Any) -> TrialGroupHandle:
    """A trial that is done after 4 iterations."""
    handle = executor.submit_trialgroup(TrialGroup([Trial(Chain, config, budget=4, trial_id="a")]))
    assert handle.wait(PATIENCE)
    return handle


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in memory or on disk, by iteration."""
    return {int(path.name.partition("-")[0]): path for path in folder.glob("[0-9]*")}


def in_memory(executor: FluidExecutor) -> Path:
    """The folder of the trial's checkpoints in host memory, once the last is there."""
    journal = executor.run_dir / "journal.jsonl"
    for _ in range(int(PATIENCE * 100)):
        saved = [json.loads(line) for line in journal.read_text().splitlines() if '"TrialSaved"' in line]
        if saved and saved[-1]["checkpoint"]["iteration"] >= 4:
            return Path(saved[-1]["checkpoint"]["path"]).parent
        time.sleep(0.01)
    raise AssertionError(saved)


def go_on(executor: FluidExecutor, handle: TrialGroupHandle) -> None:
    """Runs the trial to its 7th iteration, and checks every result that there ever was."""
    handle.extend("a", 3)
    assert handle.wait(PATIENCE)
    handle.raise_failures()
    assert handle.states == {"a": "DONE"}
    executor.close()
    lines = (executor.run_dir / "results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [result["iteration"] for result in results] == list(range(1, 8))
    assert [result["metrics"]["value"] for result in results] == values(7)


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


DAMAGE: dict[str, tuple[int, Callable[[Path], object]]] = {
    "truncated": (3, lambda path: os.truncate(path / "state/value", 1)),
    "flipped": (3, lambda path: flip(path / "state/value")),
    "file deleted": (3, lambda path: (path / "state/value").unlink()),
    "empty": (3, lambda path: (shutil.rmtree(path), path.mkdir())),
    "deleted": (3, shutil.rmtree),
    "all deleted": (0, lambda path: shutil.rmtree(path.parent)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_resumed_session_goes_on_from_what_can_be_used(
    start: Callable[..., FluidExecutor], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    executor = start()
    begun(executor)
    in_memory(executor)
    executor.close()
    folder = executor.run_dir / "trials/a/checkpoints"
    assert sorted(checkpoints(folder)) == [3, 4], "both have moved to disk"
    iteration, do = DAMAGE[damage]
    do(checkpoints(folder)[4])
    resumed = start(resumed=True)
    go_on(resumed, resumed.handles[0])
    journal = [json.loads(line) for line in (folder.parents[2] / "journal.jsonl").read_text().splitlines()]
    starts = [entry["iteration"] for entry in journal if entry["what"] == "TrialStarted"]
    assert starts == [0, iteration]
    said = [record.message for record in caplog.records if "not from iteration 4" in record.message]
    where = f"goes on from iteration {iteration}" if iteration else "begins afresh"
    assert len(said) == 1 and f"trial 'a' {where}" in said[0], "once, by the lane or as it is extended"


@pytest.mark.parametrize("emptied", [False, True])
def test_a_lane_that_dies_costs_what_cannot_be_restored_and_no_failure(
    start: Callable[..., FluidExecutor], emptied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    executor = start()
    handle = begun(executor)
    folder = in_memory(executor)
    if emptied:
        for path in folder.parent.iterdir():
            shutil.rmtree(path, ignore_errors=True)
    else:  # In host memory the lengths of files are compared, and not their sums.
        DAMAGE["truncated"][1](checkpoints(folder)[4])
    os.kill([result.metrics["pid"] for result in handle.results()][-1], signal.SIGKILL)
    go_on(executor, handle)
    where = "begins afresh" if emptied else "goes on from iteration 3"
    assert f"trial 'a' {where}, not from iteration 4: the checkpoint of iteration 4 is" in caplog.text
    assert where in (executor.run_dir / "trials/a/output.log").read_text()


def test_a_load_checkpoint_that_raises_is_named_once_and_the_trial_begins_afresh(
    start: Callable[..., FluidExecutor], caplog: pytest.LogCaptureFixture
) -> None:
    executor = start()
    handle = begun(executor, cannot_load=True)
    in_memory(executor)
    for _ in range(2):
        os.kill([result.metrics["pid"] for result in handle.results()][-1], signal.SIGKILL)
        handle.extend("a", 1)
        assert handle.wait(PATIENCE)
    handle.extend("a", 1)
    assert handle.wait(PATIENCE)
    assert [result.metrics["value"] for result in handle.results()] == values(7)
    warnings = [record.message for record in caplog.records if record.name == "fluid.session.inbox"]
    (warning,) = warnings
    assert (
        "trial 'a' begins afresh, not from iteration 4: loading the checkpoint of iteration 4 raised Lookup" in warning
    )
    assert "Fluid moves it no more" in warning


@pytest.mark.parametrize("emptied", [False, True])
def test_checkpoints_for_which_the_disk_has_no_room_stay_in_memory_for_the_resume(
    start: Callable[..., FluidExecutor], emptied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    executor = start()
    handle = executor.submit_trialgroup(TrialGroup([Trial(Chain, {"pause": 0.05}, budget=40, trial_id="a")]))
    folder = in_memory(executor)
    blocked = executor.run_dir / "trials/a/checkpoints"
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.write_text("takes no checkpoints, as a full disk")
    executor.close()
    newest = max(checkpoints(folder))
    assert "stay in host memory" in caplog.text and f"'a' of iteration {newest}" in caplog.text
    caplog.clear()
    if emptied:
        shutil.rmtree(folder.parent)  # As a reboot does.
        blocked.unlink()
    start(resumed=True).close()
    if emptied:
        assert f"'a' from iteration 0, not {newest}" in caplog.text
    else:
        assert checkpoints(folder), "the disk is as full as before"
        blocked.unlink()
    resumed = start(resumed=True)
    (handle,) = resumed.handles
    assert handle.wait(PATIENCE) and handle.states == {"a": "DONE"}
    resumed.close()
    assert not folder.parent.exists()
    results = [json.loads(line) for line in (executor.run_dir / "results.jsonl").read_text().splitlines()]
    assert [result["metrics"]["value"] for result in results] == values(40)
    journal = [json.loads(line) for line in (executor.run_dir / "journal.jsonl").read_text().splitlines()]
    starts = [entry["iteration"] for entry in journal if entry["what"] == "TrialStarted"]
    assert starts[0] == 0 and (0 in starts[1:] if emptied else min(starts[1:]) >= newest)
    told = [entry for entry in journal if entry["what"] == "ReportSetBack"]
    assert [(entry["lost"], entry["checkpoint"]) for entry in told] == ([(newest, None)] if emptied else [])
