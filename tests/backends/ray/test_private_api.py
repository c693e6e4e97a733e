"""The private names of Ray that the backend uses: each in the installed release, and what happens without it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from fluid.backends.ray import api as private_api

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(("module", "name"), private_api.NAMES)
def test_the_installed_release_has_it(module: str, name: str) -> None:
    assert callable(private_api.find(module, name)), f"ray has no {module}.{name} any more"


def test_no_other_module_uses_a_private_name() -> None:
    modules = sorted(Path(private_api.__file__).parent.glob("*.py"))
    using = [path.name for path in modules if re.search(r"\bray(\.\w+)*\._[a-z]", path.read_text(encoding="utf-8"))]
    assert using == ["api.py"]


def test_a_release_without_them_is_used_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for constant in ("AVAILABLE_PER_NODE", "DRAINING_NODES", "RESOURCE_STATE"):
        module, name = getattr(private_api, constant)
        monkeypatch.setattr(private_api, constant, (module, f"{name}_of_another_release"))
    assert private_api.free_resources() is None
    assert private_api.draining_nodes() == {}
    assert private_api.pending_requests("127.0.0.1:1") == []
    assert private_api.find("ray._private.gone", "state") is None


def test_deadlines_are_seconds_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"a": 1_000_030_000, "b": 0, "c": 999_000_000}
    found: dict[tuple[str, str], Any] = {private_api.DRAINING_NODES: lambda: answer}
    monkeypatch.setattr(private_api, "find", lambda *name: found[name])
    monkeypatch.setattr(private_api, "wall_seconds", lambda: 1_000_000.0)
    assert private_api.draining_nodes() == {"a": 30.0, "b": None, "c": 0.0}
