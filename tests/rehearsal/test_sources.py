"""Benchmarks by name: which there are, and where their files are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluid.errors import InvalidFieldError
from fluid.rehearsal import sources
from fluid.rehearsal.sources import FOLDER_VARIABLE, source_by_name
from fluid.rehearsal.yahpo import folder_of_scenario
from tests.rehearsal.small_scenario import write_scenario


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)


@pytest.mark.parametrize("name", ["", "lcbenches:1", "189866", "yahpo", "yahpo:", "blackbox", "blackbox:"])
def test_names_of_no_benchmark(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        source_by_name(name, tmp_path)
    assert caught.value.field == "benchmark"


def test_the_message_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        source_by_name("nas:1", tmp_path)
    assert all(f"{kind}:" in caught.value.reason for kind in ("lcbench", "yahpo", "blackbox", "run"))


@pytest.mark.parametrize("name", ["lcbench:1", "yahpo:small:7", "blackbox:small:one"])
def test_a_folder_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidFieldError, match=FOLDER_VARIABLE):
        source_by_name(name)
    with pytest.raises(InvalidFieldError, match="not a folder"):
        source_by_name(name, tmp_path / "none")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(InvalidFieldError):
        source_by_name(name)


def test_the_tasks_of_a_folder_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_scenario(tmp_path / "yahpo" / "small")
    (folder / "model.onnx").write_bytes(b"")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(InvalidFieldError, match="7, 12"):
        source_by_name("yahpo:small:13")
    with pytest.raises(InvalidFieldError, match="7, 12"):
        source_by_name("yahpo:small")


def test_a_scenario_is_not_taken_for_the_folder_it_lies_in(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "small"):
        (write_scenario(folder) / "model.onnx").write_bytes(b"")
    assert folder_of_scenario("small", tmp_path) == tmp_path / "small"
    assert folder_of_scenario("other", tmp_path) == tmp_path
    assert sources.folder_of(tmp_path) == tmp_path
