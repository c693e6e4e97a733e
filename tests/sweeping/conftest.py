"""Fixtures for the tests of native sweeps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluid.executor import FluidExecutor

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """Two devices of this machine, whose lanes stay warm from sweep to sweep."""
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, run_dir=folder, max_failures=0, verbose=0) as made:
        yield made
