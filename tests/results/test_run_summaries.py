"""Runs in short: how each stands, what is read to know it, and folders that are damaged or none of ours."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE

from fluid import FluidExecutor, InvalidFieldError, Trial, TrialGroup
from fluid.results.run_files import read_facts
from fluid.results.runs import (
    BestValue,
    RunSummaries,
    best_of_groups,
    find_runs,
    newest_first,
    newest_run,
    size_on_disk,
    summarize,
)
from fluid.trialgroup import Search


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    while True:
        yield {"loss": config["lr"]}


def executor_in(folder: Path) -> FluidExecutor:
    return FluidExecutor("local", 1, run_dir=folder, verbose=0)


def group(*rates: float) -> TrialGroup:
    trials = [Trial(train, {"lr": rate}, trial_id=f"t{place}") for place, rate in enumerate(rates)]
    return TrialGroup(trials, "sweep", search=Search("loss", "min", len(trials)))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two trials that has ended."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with executor_in(folder) as executor:
        assert executor.submit_trialgroup(group(0.5, 0.25)).wait(PATIENCE)
    return folder


@pytest.fixture
def run(ended: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(ended, tmp_path / "run"))


def without(run: Path, *facts: str) -> None:
    """Takes facts out of session.json, as if its session had been killed or were of an older Fluid."""
    content = {name: value for name, value in read_facts(run).items() if name not in (*facts, "crc")}
    (run / "session.json").write_text(json.dumps(content))


BEST = BestValue("loss", "min", 0.25, "t1")


def test_a_run_that_has_ended_is_known_by_session_json_alone(run: Path) -> None:
    for name in ("results.jsonl", "journal.jsonl", "trials.jsonl"):
        (run / name).write_bytes(b"nothing of this is read")
    found = summarize(run)
    assert (found.state, found.name, dict(found.trials), found.best) == ("done", "sweep", {"DONE": 2}, BEST)
    assert found.seconds is not None and 0.0 < found.seconds < PATIENCE and found.began is not None


def test_a_run_that_runs_and_one_that_was_killed_are_read_on(tmp_path: Path) -> None:
    summaries = RunSummaries()
    with executor_in(tmp_path / "run") as executor:
        assert summaries.of(tmp_path / "run").state == "running"
        handle = executor.submit_trialgroup(group(0.5, 0.25))
        assert handle.wait(PATIENCE)
        found = summaries.of(tmp_path / "run")
        assert (found.state, dict(found.trials), found.best) == ("running", {"DONE": 2}, BEST)
        # The logs of spare lanes come and go meanwhile.
        shutil.copytree(tmp_path / "run", tmp_path / "killed", ignore=shutil.ignore_patterns("logs"))
        handle.add(Trial(train, {"lr": 0.125}, trial_id="t2"))
        assert handle.wait(PATIENCE)
        found = summaries.of(tmp_path / "run")
        assert found.best is not None and (found.best.value, sum(found.trials.values())) == (0.125, 3)
    assert summaries.of(tmp_path / "run").state == "done"
    killed = tmp_path / "killed"
    assert (summarize(killed).state, summarize(killed).best) == ("done", BEST), "all its trials had ended"
    lines = (killed / "journal.jsonl").read_bytes().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if b'"ReportEnd"' in line)
    (killed / "journal.jsonl").write_bytes(b"".join(lines[:last]))
    content = {name: value for name, value in read_facts(killed).items() if name != "bytes"}
    (killed / "session.json").write_text(json.dumps(content))
    assert (summarize(killed).state, summarize(killed).best) == ("interrupted", BEST)


def test_trials_that_have_not_ended_are_told(tmp_path: Path) -> None:
    with executor_in(tmp_path / "run") as executor:
        endless = Trial(train, {"lr": 1.0}, budget=10**6, trial_id="a")
        next(iter(executor.submit_trialgroup(TrialGroup([endless], "one")).results()))
    found = summarize(tmp_path / "run")
    assert (found.state, dict(found.trials), found.name) == ("unfinished", {"UNFINISHED": 1}, "one")
    executor_in(tmp_path / "nothing").close()
    assert (summarize(tmp_path / "nothing").state, summarize(tmp_path / "nothing").name) == ("empty", "nothing")


def test_older_runs_are_read_whole(run: Path) -> None:
    new = summarize(run)
    without(run, "summary", "bytes")
    assert summarize(run) == new


@pytest.mark.parametrize(
    ("damage", "state", "why"),
    [
        (lambda run: (run / "session.json").write_bytes(b"\xff{"), "damaged", "session.json is"),
        (lambda run: (run / "session.json").write_text("[]"), "damaged", "session.json is"),
        (lambda run: (run / "session.json").write_text('{"format": 99, "fluid": "9.0"}'), "unreadable", "Fluid 9.0"),
        (lambda run: (run / "results.jsonl").unlink() or without(run, "summary"), "damaged", "no results.jsonl"),
        (
            lambda run: (run / "journal.jsonl").unlink() or without(run, "summary"),
            "damaged",
            "journal.jsonl is missing",
        ),
        (lambda run: shutil.rmtree(run), "damaged", ""),
        (lambda run: without(run, "began", "clock", "closed"), "done", ""),
        (lambda run: _say(run, summary={"trials": {"DONE": "x"}, "best": 3}), "damaged", ""),
        (lambda run: _say(run, summary={"trials": None, "best": {"value": "nan", "mode": 7}}), "empty", ""),
        (lambda run: _say(run, clock=[1], began=None, closed="now"), "done", ""),
    ],
)
def test_a_damaged_run_is_no_error(damage: Any, state: str, why: str, run: Path) -> None:
    damage(run)
    found = summarize(run)
    assert found.state == state and why in found.why, found


def _say(run: Path, **facts: Any) -> None:
    (run / "session.json").write_text(json.dumps({**read_facts(run), **facts}))


def test_a_folder_that_may_not_be_read_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert (summarize(run).state, summarize(run).why) == ("unreadable", "it may not be read")


def test_runs_are_found_below_a_folder(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "a/b/deep")
    shutil.copytree(run, tmp_path / "a/b/c/too deep")
    shutil.copytree(run, tmp_path / ".run.replaced-1")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(run)
    found = find_runs(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found.runs] == ["a/b/deep", "linked", "run"]
    assert [path.name for path in found.others] == ["circle", "notes"]
    assert find_runs(run) == ((run,), ())
    for nothing, why in ((tmp_path / "no", "does not exist"), (tmp_path / "file", "is a file")):
        with pytest.raises(InvalidFieldError, match=why):
            find_runs(nothing)


def test_the_newest_run_that_can_be_read(run: Path, tmp_path: Path) -> None:
    newer = Path(shutil.copytree(run, tmp_path / "a-newer"))
    _say(newer, began="2100-01-01 00:00:00")
    torn = Path(shutil.copytree(run, tmp_path / "torn"))
    _say(torn, began="2200-01-01 00:00:00")
    (torn / "results.jsonl").unlink()
    assert newest_run(tmp_path) == newer
    assert [one.path.name for one in newest_first(map(summarize, find_runs(tmp_path).runs))] == [
        "torn",
        "a-newer",
        "run",
    ]
    for nothing in (tmp_path / "no", run / "logs"):
        with pytest.raises(InvalidFieldError, match="there is no run in"):
            newest_run(nothing)


def test_the_best_of_groups_is_of_one_metric() -> None:
    loss, less, other = (
        BestValue("loss", "min", 0.5, "a"),
        BestValue("loss", "min", 0.25, "b"),
        BestValue("f1", "max", 1.0, "c"),
    )
    assert best_of_groups([loss, None, less, other, loss]) == less
    assert best_of_groups([loss, other]) == other and best_of_groups([None]) is None


def test_the_size_counts_what_is_on_the_disk_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a").write_bytes(bytes(1 << 20))
    before = size_on_disk(tmp_path)
    os.link(tmp_path / "deep/a", tmp_path / "deep/b")
    (tmp_path / "link").symlink_to("/")
    assert 1 << 20 <= before <= size_on_disk(tmp_path) < before + (1 << 15)
    assert size_on_disk(tmp_path / "no") == 0
