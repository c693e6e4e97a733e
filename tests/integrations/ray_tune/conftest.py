"""Fixtures for the tests of Ray Tune on Fluid: a small cluster and one executor per module."""

from __future__ import annotations

import gc
import io
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)


def _drop_open_files() -> None:
    """Closes the logs that Tune leaves open of trials that did not end, before they are collected in another test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(autouse=True)
def open_files() -> Iterator[None]:
    yield
    _drop_open_files()


@pytest.fixture(scope="module", autouse=True)
def open_files_of_the_module() -> Iterator[None]:
    # What Ray and PyTorch have loaded is not looked through after each test: that took a quarter of all tests' time.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    # References to an interrupted sweep may remain: its files would be closed in another module's test.
    for found in gc.get_objects():
        if type(found) is io.TextIOWrapper and "driver_artifacts" in str(getattr(found, "name", "")):
            found.close()
    _drop_open_files()


@pytest.fixture(scope="module")
def cluster(ray_cluster: str) -> Iterator[str]:
    """The address of a cluster of two cores, to which this process is connected."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
        ray.init(ray_cluster, log_to_driver=False, logging_level="ERROR")
        yield ray_cluster
        ray.shutdown()


@pytest.fixture(scope="module")
def executor(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two devices of this machine, whose lanes stay warm from sweep to sweep."""
    from fluid import FluidExecutor

    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, run_dir=folder, verbose=0) as made:
        yield made


@pytest.fixture
def both(executor: Any, tmp_path: Path) -> Any:
    """Runs a sweep without and with Fluid, from the same random numbers.

    ``stock`` are options of the one without, which the sweep's own override.
    """
    import numpy as np
    from tune_sweeps import Climber, ReusableClimber, Sweep, sweep

    def run(
        trainable: Any, make: Callable[[], dict[str, Any]], stock: Mapping[str, Any] | None = None
    ) -> tuple[Sweep, Sweep]:
        sweeps = []
        for name, chosen in (("stock", None), ("fluid", executor)):
            random.seed(11)
            np.random.seed(11)
            if stock and chosen is None:
                reusable = ReusableClimber if trainable is Climber else trainable
                sweeps.append(sweep(reusable, tmp_path / name, chosen, {**stock, **make()}))
            else:
                sweeps.append(sweep(trainable, tmp_path / name, chosen, make()))
        return sweeps[0], sweeps[1]

    return run
