"""Fixtures for the tests of HpBandSter on Fluid: one executor per module, and a space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two devices of this machine, whose lanes stay warm from run to run; a trial that raises is not tried again."""
    from fluid import FluidExecutor

    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, run_dir=folder, verbose=0, max_failures=0) as made:
        yield made


@pytest.fixture
def space() -> Any:
    """A space of one learning rate."""
    configspace = pytest.importorskip("ConfigSpace")
    made = configspace.ConfigurationSpace()
    made.add(configspace.UniformFloatHyperparameter("lr", 1e-3, 1.2, log=True))
    return made
