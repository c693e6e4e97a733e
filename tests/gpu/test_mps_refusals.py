"""Refusals of MPS are remembered per GPU and driver version, for a day; a start that took too long, for minutes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fluid.gpu.mps_control import MpsError, MpsTimeoutError
from fluid.gpu.mps_refusals import forget_refusal, recall_refusal, remember_refusal


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "580.82")
    return tmp_path / "fluid"


def age(cache: Path, seconds: float) -> None:
    (path,) = cache.iterdir()
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))


def test_a_refusal_is_remembered_until_mps_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recall_refusal("GPU-a") == ""
    remember_refusal(["GPU-a", "GPU-b"], MpsError("operation not permitted"))
    assert recall_refusal("GPU-a").endswith("operation not permitted")
    assert recall_refusal("GPU-c") == ""
    forget_refusal(["GPU-a"])
    assert recall_refusal("GPU-a") == "" != recall_refusal("GPU-b")
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "595.10")
    assert recall_refusal("GPU-b") == "", "a new driver is tried"


def test_a_refusal_is_forgotten_after_a_day(cache: Path) -> None:
    remember_refusal(["GPU-a"], MpsError("it failed"))
    age(cache, 25 * 3600)
    assert recall_refusal("GPU-a") == ""


def test_a_start_that_took_too_long_is_tried_again_after_minutes(cache: Path) -> None:
    remember_refusal(["GPU-a"], MpsTimeoutError("it did not answer within 10 s"))
    assert "within the last 10 minutes" in recall_refusal("GPU-a")
    age(cache, 601)
    assert recall_refusal("GPU-a") == ""


def test_a_second_start_in_a_row_that_takes_too_long_is_a_refusal(cache: Path) -> None:
    for _ in range(2):
        remember_refusal(["GPU-a"], MpsTimeoutError("it did not answer within 10 s"))
        age(cache, 601)
    assert "within the last day" in recall_refusal("GPU-a")


@pytest.mark.parametrize("between", ["a day", "a start"])
def test_the_row_ends(between: str, cache: Path) -> None:
    remember_refusal(["GPU-a"], MpsTimeoutError("it did not answer within 10 s"))
    if between == "a day":
        age(cache, 25 * 3600)
    else:
        forget_refusal(["GPU-a"])
    remember_refusal(["GPU-a"], MpsTimeoutError("it did not answer within 10 s"))
    assert "within the last 10 minutes" in recall_refusal("GPU-a")


def test_nothing_is_remembered_where_that_is_impossible(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.touch()  # A file where the folder should be.
    remember_refusal(["GPU-a"], MpsError("it failed"))
    assert recall_refusal("GPU-a") == ""
    cache.unlink()
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: None)
    remember_refusal(["GPU-a"], MpsError("it failed"))
    assert not cache.exists()
