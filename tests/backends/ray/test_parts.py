"""The parts of the Ray backend that need no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluid._imports import try_import
from fluid.errors import FluidError, MissingDependencyError


def test_without_ray_the_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from fluid.backends.ray import RayBackend
    from fluid.backends.ray import api as connection

    missing: Any = try_import("Ray", extra="ray")
    with missing:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    monkeypatch.setattr(connection, "ray_imports", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'ray\[tune\]"):
        RayBackend(1)


@pytest.mark.parametrize(("has_token", "mode"), [(True, ""), (True, "token"), (False, "")])
def test_where_ray_may_want_a_token_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_token: bool, mode: str
) -> None:
    ray = pytest.importorskip("ray")
    from fluid.backends.ray import api as connection

    def refuse(**options: Any) -> None:
        raise ConnectionError("Failed to connect")

    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.9:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(FluidError, match=r"'192\.0\.2\.9:6379' cannot be reached: Failed to connect") as caught:
        connection.connect(1)
    assert ("set RAY_AUTH_MODE=token" in str(caught.value)) == (has_token and not mode)
