"""One executor for the tests of a module, whose lanes have loaded scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fluid import FluidExecutor


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    """In force while the module's tests run."""
    folder = tmp_path_factory.mktemp("run")
    with FluidExecutor("local", devices=2, packing="off", run_dir=folder, verbose=0) as made:
        yield made
