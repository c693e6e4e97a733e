"""Clusters of real processes on this machine, and backends on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cluster(two_nodes: Any) -> Iterator[Any]:
    """The shared cluster of two nodes, to which this process is connected: its tests leave the nodes alone.

    The driver's has four CPUs, the other one, which has the address of another machine, two.
    """
    import ray

    ray.init(address=two_nodes.address, log_to_driver=False, logging_level="ERROR")
    yield two_nodes
    assert ray.is_initialized(), "a backend has ended Ray, which it had not started"
    ray.shutdown()


@pytest.fixture
def make(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes backends on the module's cluster, and closes them."""
    from ray_drive import Drive

    from fluid.backends.ray import RayBackend

    made: list[RayBackend] = []

    def make(devices: Any = 2, **options: Any) -> Drive:
        made.append(RayBackend(devices, **{"run_dir": tmp_path / "run", "preload": [], "grace": 1.0, **options}))
        return Drive(made[-1])

    yield make
    for backend in made:
        backend.close()
