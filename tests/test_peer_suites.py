"""The tests of other projects on Fluid: how they are run and compared, and the tables that say what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

TESTS = """
import os
import joblib


def pids(**options):
    return set(joblib.Parallel(n_jobs=2, **options)(joblib.delayed(os.getpid)() for _ in range(4)))


def test_tasks_run_in_other_processes():
    assert os.getpid() not in pids()


def test_loky_runs_them():
    assert "LokyBackend" == type(joblib.parallel.BACKENDS["loky"](nesting_level=0)).__name__


def test_nothing_of_joblib():
    pass


def test_the_process_ends():
    os._exit(1)
"""


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return pytest.importorskip("peer_suites")


@pytest.mark.frameworks("joblib")
def test_tests_run_without_fluid_and_with_it(
    suites: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, outcomes = tmp_path / "place", tmp_path / "outcomes"
    place.mkdir()
    (place / "test_tiny.py").write_text(TESTS)
    suite = suites.Suite("Tiny", "joblib", ("test_tiny.py",), lambda sources, folder, python: place, "loky")
    monkeypatch.setitem(suites.SUITES, "joblib", suite)
    monkeypatch.setattr(suites, "DIFFERENCES", ())
    monkeypatch.setattr(suites, "RESULTS", tmp_path / "results.json")
    assert suites.main(["joblib", "--outcomes", str(outcomes)]) == 1, "a test differs, for no known reason"
    found = json.loads(suites.RESULTS.read_text())["joblib"]
    assert found["stock"] == {"lost": 1, "passed": 3}
    assert found["fluid"] == {"failed": 1, "lost": 1, "passed": 2}
    assert (found["both_passed"], found["on_fluid"]) == (2, 1)
    assert list(found["differences"]) == ["test_tiny.py::test_loky_runs_them"]
    printed = capsys.readouterr()
    assert "test_loky_runs_them" in printed.err
    assert "not looked into" in printed.out

    why = suites.Difference("joblib", ("*::test_loky_*",), "on purpose", "Fluid runs them")
    monkeypatch.setattr(suites, "DIFFERENCES", (why,))
    assert suites.main(["table", "--outcomes", str(outcomes)]) == 0
    assert "| 1 | on purpose | Fluid runs them |" in capsys.readouterr().out


def test_what_ran_again_counts_as_it_ended_last(suites: Any, tmp_path: Path) -> None:
    file = suites.SUITES["joblib"].files[0]
    lines = [{"collected": ["a", "b"]}]
    lines += [{"test": "a", "outcome": each, "on_fluid": True, "text": ""} for each in ("failed", "passed")]
    path = suites.outcomes_of(tmp_path, "joblib", "fluid", file)
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"collected": ["a"]}]))
    ended = suites.read(tmp_path, "joblib", "fluid", [file])
    assert {test: each.outcome for test, each in ended.items()} == {"a": "passed", "b": "lost"}


def test_a_file_that_cannot_be_collected_is_left_out(
    suites: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = suites.SUITES["joblib"].files
    for side in suites.SIDES:
        lines = [{"version": "1.6"}, {"broken": file} if side == "fluid" else {"collected": []}]
        path = suites.outcomes_of(tmp_path, "joblib", side, file)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not suites.files_of_both(tmp_path, "joblib")
    assert "joblib-fluid-test_parallel.log says why" in capsys.readouterr().err


def test_sources_are_asked_for(suites: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no folder optuna"):
        suites.main(["optuna", "--sources", str(tmp_path), "--outcomes", str(tmp_path)])


def test_what_differs_is_explained(suites: Any) -> None:
    results = json.loads(suites.RESULTS.read_text())
    assert set(results) == set(suites.SUITES)
    assert not suites.unexplained(results)
