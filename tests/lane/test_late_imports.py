"""Finders that leave the finding to others, and wait for one module both."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from fluid import random_state
from fluid.lane.late_imports import LateImports


@pytest.mark.parametrize("seeds_first", [False, True])
def test_two_finders_that_wait_for_one_module_both_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds_first: bool
) -> None:
    (tmp_path / "fluid_tried_module.py").write_text("value = 1\n", encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seeded: list[str] = []
    monkeypatch.setattr(random_state, "_MODULES", ("fluid_tried_module",))
    monkeypatch.setattr(random_state, "_seed", seeded.append)
    late, seeding, heard = LateImports(), random_state._SeededImports(), []
    if seeds_first:
        sys.meta_path.insert(0, seeding)
    late.when_loaded("fluid_tried_module", lambda: heard.append(sys.modules["fluid_tried_module"].value))
    if not seeds_first:
        sys.meta_path.insert(0, seeding)
    importlib.import_module("fluid_tried_module")
    del sys.modules["fluid_tried_module"]
    assert heard == [1] and seeded == ["fluid_tried_module"]
