"""Fixtures for the tests of XGBoost and LightGBM on Fluid: one executor of two devices per module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fluid.executor import FluidExecutor


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """Two devices of this machine, whose lanes stay warm from sweep to sweep."""
    folder = tmp_path_factory.mktemp("fluid")
    with FluidExecutor(backend="local", devices=2, run_dir=folder, keep="best:1", verbose=0) as made:
        yield made
