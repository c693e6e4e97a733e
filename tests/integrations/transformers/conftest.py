"""Fixtures for the tests of Hugging Face's Trainer on Fluid."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.executor import FluidExecutor

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)


@pytest.fixture(scope="module")
def tasks() -> Iterator[Any]:
    """The trainers, which train on one thread here, as in a lane: they are small."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import digit_tasks

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield digit_tasks
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """One device, on which trials take turns."""
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=1, packing="off", keep="best:1", run_dir=folder, verbose=0) as made:
        yield made
