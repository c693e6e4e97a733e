"""Which GPUs tests see: all if pytest was asked for the tests marked ``gpu``, and none otherwise."""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fluid.gpu.nvml import Gpu


@pytest.fixture
def conftest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The conftest of all tests, on a machine of one GPU."""
    (found,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if isinstance(plugin, ModuleType) and getattr(plugin, "_require_gpus", None)
    )
    monkeypatch.setattr(found, "find_gpus", lambda: [Gpu("GPU-1", 1e9)])
    return found


def session(conftest: ModuleType, chosen: str) -> Any:
    """The config of a pytest with ``-m chosen``."""
    return SimpleNamespace(
        getoption=lambda name: {"markexpr": chosen}[name], option=None, add_cleanup=lambda call: None
    )


def test_a_test_without_the_mark_sees_no_gpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("chosen", "seen"), [("gpu", "0"), ("gpu and not slow", "0"), ("", ""), ("slow", ""), ("slow and not gpu", "")]
)
def test_gpus_are_seen_if_they_are_to_be_tested(
    conftest: ModuleType, monkeypatch: pytest.MonkeyPatch, chosen: str, seen: str
) -> None:
    for name in ("RAY_TMPDIR", "XDG_RUNTIME_DIR", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(conftest.tempfile, "mkdtemp", lambda **options: "/nowhere")
    conftest.pytest_configure(session(conftest, chosen))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize("mark", [pytest.mark.gpu, pytest.mark.gpu(1)])
def test_a_marked_test_runs_only_if_it_is_asked_for(conftest: ModuleType, mark: pytest.MarkDecorator) -> None:
    conftest._require_gpus(SimpleNamespace(config=session(conftest, "gpu")), mark.mark)
    with pytest.raises(pytest.skip.Exception, match="pytest -m gpu runs it"):
        conftest._require_gpus(SimpleNamespace(config=session(conftest, "not slow")), mark.mark)


def test_a_test_that_needs_more_gpus_than_there_are_is_skipped_or_fails_if_they_are_required(
    conftest: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = SimpleNamespace(config=session(conftest, "gpu"))
    monkeypatch.delenv("FLUID_REQUIRE_GPU", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs 2 GPUs, and there are 1"):
        conftest._require_gpus(item, pytest.mark.gpu(2).mark)
    monkeypatch.setenv("FLUID_REQUIRE_GPU", "1")
    with pytest.raises(pytest.fail.Exception):
        conftest._require_gpus(item, pytest.mark.gpu(2).mark)
