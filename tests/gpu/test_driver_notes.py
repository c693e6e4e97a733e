"""Notes about the GPU driver in the user's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluid.gpu.driver_notes import delete_note, read_note, write_note


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the program runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fluid.gpu.driver_notes.driver_version", lambda: "580.82")
    return tmp_path


def test_notes_are_in_the_users_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    write_note("kind", "text", "GPU/1")
    assert [path.name for path in (folder / "cache" / "fluid").iterdir()] == ["kind-580.82-GPU-1"]
    assert read_note("kind", "GPU/1") == "text"
    delete_note("kind", "GPU/1")
    assert read_note("kind", "GPU/1") == ""


@pytest.mark.parametrize("cache", [None, "cache"])
def test_a_user_without_a_home_gets_no_notes(folder: Path, monkeypatch: pytest.MonkeyPatch, cache: str | None) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)  # Must be absolute, says its specification.
    monkeypatch.setattr("fluid.gpu.driver_notes.os.path.expanduser", lambda path: path)
    write_note("kind", "text")
    assert read_note("kind") == ""
    assert list(folder.iterdir()) == [], "it would be a folder of that name where the program runs"
