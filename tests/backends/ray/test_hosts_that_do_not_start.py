"""Nodes on which no host can be started, as Fluid or what it needs is not there: on a real cluster."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_drive import OTHER_MACHINE

from fluid import FluidExecutor, Trial, TrialGroup
from fluid.resources import Device

ray = pytest.importorskip("ray")

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def one(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"loss": config["x"]}


def test_its_devices_are_given_up_and_the_reason_is_told(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fluid.backends.ray import host_actor as host_actors

    monkeypatch.setattr(host_actors, "run_host", operator.index)  # It raises TypeError there.
    caplog.set_level(logging.WARNING)
    with FluidExecutor("ray", [Device(0, host=OTHER_MACHINE)], run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(one, {"x": 1}, trial_id="t")]))
        handle.wait(timeout=120.0)
        failure = handle.failures["t"]
    assert "no lane could be started on any device" in failure.message and "TypeError" in failure.message
    assert "device 0 is given up: " in caplog.text
