"""Fixtures for the tests of the examples: data, a small cluster and one executor."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Tests are imported in importlib mode, which leaves sys.path alone.
for _place in (str(ROOT / "examples"), str(Path(__file__).parent)):
    if _place not in sys.path:
        sys.path.append(_place)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of the examples, private to these tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the data of all three sweeps: ``$FLUID_EXAMPLES_DATA``, or one beside the checkout, or made data.

    Made data is noise around one image per class, and sentences of a few words, so that models can learn from it.
    """
    places = [os.environ.get("FLUID_EXAMPLES_DATA"), ROOT.parent / "shared" / "data"]
    files = ("cifar10-10k.npz", "mnist-10k.npz", "wikitext-2/valid.txt")
    for place in filter(None, places):
        if all((Path(place) / name).is_file() for name in files):
            return str(place)
    from example_data import make_data

    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return str(folder)


@pytest.fixture(scope="module")
def cluster(ray_cluster: str) -> Iterator[None]:
    """A cluster of two cores, to which this process is connected."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")
        ray.init(ray_cluster, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
    with warnings.catch_warnings():
        # Tune leaves logs of trials that did not end open.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def executor(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two devices of this machine, whose lanes stay warm from sweep to sweep; trials stay on one of them."""
    from fluid import FluidExecutor

    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, max_width=1, run_dir=folder, verbose=0) as made:
        yield made
