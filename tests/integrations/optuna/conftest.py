"""Fixtures for the tests of Optuna on Fluid: one executor of two devices per module, and quiet logs."""

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
    """Two devices of this machine, whose lanes stay warm from study to study."""
    with FluidExecutor(backend="local", devices=2, run_dir=tmp_path_factory.mktemp("fluid"), verbose=0) as made:
        yield made


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keeps Optuna's log records, without its lines on stderr."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    yield
    optuna.logging.disable_propagation()
    optuna.logging.enable_default_handler()
