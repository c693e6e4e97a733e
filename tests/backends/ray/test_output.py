"""What trials print on another node comes to the driver once, with the node's address."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_drive import OTHER_MACHINE

pytest.importorskip("ray")
from fluid import Device, FluidExecutor, Trial, TrialGroup
from fluid.backends.ray import RayBackend

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def speak(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    print("spoken")
    print("an error", file=sys.stderr)
    subprocess.run(["echo", "by a child"], check=True)
    yield {"pid": os.getpid()}


def test_lines_of_another_node(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The cluster's fixture connects with log_to_driver=False.
    monkeypatch.setattr("fluid.display.terminal.ray_hides_output", lambda: False)
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    backend = RayBackend([Device(0, host=OTHER_MACHINE)], run_dir=tmp_path / "backend")
    with FluidExecutor(backend, run_dir=tmp_path / "run", packing="off") as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(speak, {}, budget=1) for _ in range(2)]))
        pids = [result.metrics["pid"] for result in handle.results()]
    captured = capfd.readouterr()
    prefixes = [f"(speak pid={pid}, ip={OTHER_MACHINE})" for pid in pids]
    assert captured.out.splitlines() == [f"{prefix} {text}" for prefix in prefixes for text in ("spoken", "by a child")]
    assert captured.err.splitlines() == [f"{prefix} an error" for prefix in prefixes]
