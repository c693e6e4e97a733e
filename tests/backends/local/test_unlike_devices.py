"""Devices of two models, one of which is slowed artificially: real lanes, and the profile that they leave."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import Device, FluidExecutor, Trial, TrialGroup
from fluid.cli import main
from fluid.measure.profile import Profile
from fluid.reports.run.loader import load_run

pytestmark = pytest.mark.slow

SLOW_S, FAST_S = 0.1, 0.01


def is_slow(folder: Path) -> bool:
    """Whether this lane is the one that asked first; it stays on its device, and its process runs all its trials."""
    role = folder / f"lane-{os.getpid()}"
    if not role.exists():
        try:
            (folder / "slow").touch(exist_ok=False)
            role.write_text("slow")
        except FileExistsError:
            role.write_text("fast")
    return role.read_text() == "slow"


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    slow = is_slow(Path(config["folder"]))
    while True:
        time.sleep(SLOW_S if slow else FAST_S)
        yield {"slow": float(slow)}


def train_long(config: dict[str, Any], state: int | None) -> Iterator[tuple[dict[str, float], int]]:
    """Takes a minute in the slow lane; its state is the number of its iterations."""
    slow, done = is_slow(Path(config["folder"])), state or 0
    while True:
        time.sleep(0.5 if slow else FAST_S)
        done += 1
        yield {"slow": float(slow), "count": float(done)}, done


def test_speeds_are_measured_saved_and_reported(tmp_path: Path) -> None:
    devices = [Device(0, model="model A"), Device(1, model="model B")]
    with FluidExecutor(
        "local", devices, max_packing=1, max_width=1, isolation="lane", run_dir=tmp_path / "run"
    ) as executor:
        trials = [Trial(train, {"folder": str(tmp_path)}, budget=8, profile_key="net") for _ in range(4)]
        results = list(executor.submit_trialgroup(TrialGroup(trials)).results())
    slow_on = {result.device_ids[0] for result in results if result.metrics["slow"]}
    assert len(slow_on) == 1, "one device is slow"
    slow, fast = ("model A", "model B") if slow_on == {0} else ("model B", "model A")
    profile = Profile.load(tmp_path / "run" / "profile.json")
    assert profile.speeds("net", [slow, fast])[fast] > 1.5
    measured = {key.model: key for key in load_run(tmp_path / "run").keys}
    assert measured[fast].speed > 1.5 * measured[slow].speed


def test_a_trial_goes_on_on_the_faster_device_once_that_is_idle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = [Device(0, model="model A"), Device(1, model="model B")]
    with FluidExecutor(
        "local", devices, max_packing=1, max_width=1, isolation="lane", run_dir=tmp_path / "run"
    ) as executor:
        trials = [Trial(train_long, {"folder": str(tmp_path)}, budget=120, profile_key="net") for _ in range(2)]
        results = list(executor.submit_trialgroup(TrialGroup(trials)).results())
    by_trial = {trial.id: [result for result in results if result.trial_id == trial.id] for trial in trials}
    (moved,) = (trial_id for trial_id, its in by_trial.items() if any(result.metrics["slow"] for result in its))
    for its in by_trial.values():
        assert [result.metrics["count"] for result in its] == list(range(1, 121)), "no iteration is lost or repeated"
    slow = [result.metrics["slow"] for result in by_trial[moved]]
    assert slow == sorted(slow, reverse=True), "it does not go back"
    assert slow[-1] == 0.0
    devices_of = {bool(result.metrics["slow"]): result.device_ids for result in by_trial[moved]}
    assert sorted(devices_of.values()) == [(0,), (1,)]
    assert main(["why", str(tmp_path / "run"), moved, "--json"]) == 0
    told = [
        line["text"] for line in json.loads(capsys.readouterr().out)["trials"][0]["story"] if line["what"] == "resized"
    ]
    assert [text.split(",")[0] for text in told] == [f"moved to cpu {devices_of[False][0]}"]
