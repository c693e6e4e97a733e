"""The examples in the docstrings of this package run, with GPUs and without."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

import fluid.gpu.mps_control
import fluid.gpu.nvml
import fluid.mps


@pytest.mark.parametrize(("module", "examples"), [(fluid.mps, 1), (fluid.gpu.mps_control, 2), (fluid.gpu.nvml, 11)])
def test_examples(module: ModuleType, examples: int) -> None:
    found = doctest.testmod(module)
    assert found.failed == 0 and found.attempted >= examples
