"""The parts of the Ray backend that need no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from fluid._imports import try_import
from fluid.errors import MissingDependencyError


def test_without_ray_the_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from fluid.backends.ray import RayBackend, connection

    missing: Any = try_import("Ray", extra="ray")
    with missing:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    monkeypatch.setattr(connection, "ray_imports", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fluid-tune\[ray\]'"):
        RayBackend(1)
