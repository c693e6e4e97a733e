"""Devices of two models, one of which is slowed artificially: real lanes, and the profile that they leave."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fluid import Device, FluidExecutor, Trial, TrialGroup
from fluid.planning.profile import Profile
from fluid.reports.loader import load_run

SLOW_S, FAST_S = 0.06, 0.01


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Sleeps longer in the lane that asks first; a lane stays on its device."""
    folder = Path(config["folder"])
    role = folder / f"lane-{os.getpid()}"
    if not role.exists():
        try:
            (folder / "slow").touch(exist_ok=False)
            role.write_text("slow")
        except FileExistsError:
            role.write_text("fast")
    seconds = SLOW_S if role.read_text() == "slow" else FAST_S
    while True:
        time.sleep(seconds)
        yield {"slow": float(seconds == SLOW_S)}


def test_speeds_are_measured_saved_and_reported(tmp_path: Path) -> None:
    devices = [Device(0, model="model A"), Device(1, model="model B")]
    with FluidExecutor(
        backend="local", devices=devices, max_packing=1, max_width=1, run_dir=tmp_path / "run"
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
