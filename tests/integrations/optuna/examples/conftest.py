"""Fixtures of the example studies: an executor of one device, which is in force for a whole file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fluid.executor import FluidExecutor


@pytest.fixture(scope="module", autouse=True)
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """One device, as one trial runs at a time."""
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path_factory.mktemp("fluid"), verbose=0) as made:
        yield made
