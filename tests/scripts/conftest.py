"""Fixtures for the tests of scripts as trainables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluid.executor import FluidExecutor

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)

from script_sweeps import ScriptSweeps


@pytest.fixture(scope="module")
def script_executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """Two devices of this machine, for all sweeps of a module."""
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, run_dir=folder, max_failures=1, verbose=0) as made:
        yield made


@pytest.fixture
def sweeps(script_executor: FluidExecutor, tmp_path: Path) -> ScriptSweeps:
    """Runs sweeps over scripts that it writes."""
    return ScriptSweeps(tmp_path)
