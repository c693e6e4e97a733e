"""Refusals of MPS are remembered per GPU and driver version, for a day."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fluid.gpu.mps_refusals import forget_refusal, recall_refusal, remember_refusal


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "580.82")
    return tmp_path / "fluid"


def test_a_refusal_is_remembered_until_mps_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recall_refusal("GPU-a") == ""
    remember_refusal(["GPU-a", "GPU-b"], "operation not permitted")
    assert recall_refusal("GPU-a").endswith("operation not permitted")
    assert recall_refusal("GPU-c") == ""
    forget_refusal(["GPU-a"])
    assert recall_refusal("GPU-a") == "" != recall_refusal("GPU-b")
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "595.10")
    assert recall_refusal("GPU-b") == "", "a new driver is tried"


def test_a_refusal_is_forgotten_after_a_day(cache: Path) -> None:
    remember_refusal(["GPU-a"], "it hung")
    (path,) = cache.iterdir()
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 25 * 3600))
    assert recall_refusal("GPU-a") == ""


def test_nothing_is_remembered_where_that_is_impossible(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.touch()  # A file where the folder should be.
    remember_refusal(["GPU-a"], "it hung")
    assert recall_refusal("GPU-a") == ""
    cache.unlink()
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: None)
    remember_refusal(["GPU-a"], "it hung")
    assert not cache.exists()
