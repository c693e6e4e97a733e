"""Folders of sessions that were killed, that still run, or that something else has happened to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fluid
from fluid.errors import FluidError, InvalidFieldError
from fluid.reports.run.loader import load_run
from tests.waiting import eventually

SCRIPT = """
import sys, fluid

def train(config):
    step = 0
    while True:
        step += 1
        yield {"loss": config["lr"] / step, "bad": float("nan"), "worse": float("-inf"), "big": 2**60, "real": 1.0}

with fluid.FluidExecutor(backend="local", devices=1, run_dir=sys.argv[1], verbose=0) as executor:
    trials = [fluid.Trial(train, {"lr": lr}, budget=10**9, trial_id=str(lr)) for lr in (1.0, 0.5)]
    executor.submit_trialgroup(fluid.TrialGroup(trials, search=fluid.Search("loss", "min"))).wait()
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session that was read while it ran, and then killed."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    driver = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)])
    try:
        results = folder / "results.jsonl"
        eventually(lambda: results.is_file() and results.stat().st_size > 5_000)
        running = fluid.load(folder)
        assert running.state == "RUNNING" and running.notes == ()
        assert "UNFINISHED" in {trial.state for trial in running.trials}
        assert running.best.value <= 1.0
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    return folder


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for name in ("results.jsonl", "trials.jsonl", "journal.jsonl", "session.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def test_a_killed_session_is_unfinished(killed: Path) -> None:
    result = eventually(lambda: (found := fluid.load(killed)).state != "RUNNING" and found)
    assert (result.state, result.metric, result.mode) == ("UNFINISHED", "loss", "min")
    assert {trial.state for trial in result.trials} == {"UNFINISHED"}
    last = max(result.trials, key=lambda trial: trial.iteration).metrics
    assert (type(last["big"]), last["big"], type(last["real"])) == (int, 2**60, float)
    for metric in ("bad", "worse"):
        with pytest.raises(FluidError, match=f"a number as '{metric}'(, but NaN)?; there are loss, big, real"):
            result.best_by(metric)


@pytest.mark.parametrize(("name", "what"), [("journal.jsonl", "states"), ("trials.jsonl", "configs")])
def test_what_the_other_files_have_is_missed_in_a_file_that_is_empty(
    killed: Path, tmp_path: Path, name: str, what: str
) -> None:
    folder = copy_of(killed, tmp_path / "run")
    assert fluid.load(folder).notes == ()
    (folder / name).write_bytes(b"")
    (note,) = fluid.load(folder).notes
    assert note.startswith(f"{name} does not have ") and note.endswith(f"their {what} are unknown.")
    assert note in load_run(folder).notes


def test_a_torn_line_is_left_out(killed: Path, tmp_path: Path) -> None:
    folder = copy_of(killed, tmp_path / "run")
    whole = [line for line in (folder / "results.jsonl").read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    (folder / "results.jsonl").write_bytes(b"".join(whole[:20]) + whole[20][:30])
    (folder / "journal.jsonl").unlink()
    result = fluid.load(folder)
    assert sum(trial.iteration for trial in result.trials) == 20
    assert result.notes == ("journal.jsonl is missing: budgets and final states of trials are unknown.",)
    (folder / "results.jsonl").write_bytes(b"".join(whole[:5]) + b"rubbish\n\0\0\n" + b"".join(whole[5:9]))
    result = fluid.load(folder)
    assert sum(trial.iteration for trial in result.trials) == 9 and "2 lines of results.jsonl" in result.notes[-1]


def test_what_is_no_run_folder_is_refused(killed: Path, tmp_path: Path) -> None:
    def reason_of(path: object) -> str:
        with pytest.raises(InvalidFieldError) as refused:
            fluid.load(path)  # type: ignore[arg-type]
        assert refused.value.field == "run_dir"
        return refused.value.reason

    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert "has no results.jsonl" in reason_of(tmp_path / "empty")
    assert "is a file" in reason_of(tmp_path / "file")
    assert "does not exist" in reason_of(tmp_path / "nothing")
    assert "must be the path" in reason_of(5)
    newer = copy_of(killed, tmp_path / "newer")
    facts = json.loads((newer / "session.json").read_text())
    (newer / "session.json").write_text(json.dumps({**facts, "format": 99, "fluid": "9.0"}))
    assert "is of Fluid 9.0, format 99" in reason_of(newer)


def test_the_choice_of_a_metric_is_checked_before_it_is_used(killed: Path) -> None:
    assert fluid.load(killed, mode="max").mode == "max"
    both = fluid.load(killed, ["loss", "real"], ["min", "max"])
    assert (both.metric, both.mode) == (("loss", "real"), ("min", "max"))
    with pytest.raises(InvalidFieldError, match="must be one; for several, see pareto"):
        _ = both.best
    for wrong in ({"mode": "least"}, {"metric": 5}, {"metric": []}, {"metric": ["loss", "real"], "mode": ["min"]}):
        with pytest.raises(InvalidFieldError):
            fluid.load(killed, **wrong)  # type: ignore[arg-type]
