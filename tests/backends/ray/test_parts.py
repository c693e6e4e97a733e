"""The parts of the Ray backend that need no Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from fluid._imports import try_import
from fluid.backends.ray.process_handles import ProcessHandles
from fluid.errors import MissingDependencyError
from fluid.processes.children import process_start_time

PATIENCE = 60.0


def test_processes_are_waited_for_and_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.backends.ray.process_handles._END_S", 0.1)
    watched = ProcessHandles()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        watched.watch(child.pid, process_start_time(child.pid))
        watched.end()
        assert child.wait(PATIENCE) == -signal.SIGKILL
    watched.close()


def test_a_process_of_another_container_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has the same number and began at another time is not the one that was meant."""
    monkeypatch.setattr("fluid.backends.ray.process_handles._END_S", 0.1)
    watched = ProcessHandles()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        watched.watch(child.pid, process_start_time(child.pid) + 1)
        watched.end()
        assert child.poll() is None
    watched.close()


def test_without_ray_the_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from fluid.backends.ray import RayBackend, connection

    missing: Any = try_import("Ray", extra="ray")
    with missing:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    monkeypatch.setattr(connection, "ray_imports", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fluid-tune\[ray\]'"):
        RayBackend(1)
