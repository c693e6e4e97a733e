"""Tests of fluid.results.stored_run: what is read when, and that all who read a damaged folder see the same of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.loggers.run_reader import SessionReader
from fluid.rehearsal import ReplayedIteration
from fluid.rehearsal.outcome import outcome_of
from fluid.rehearsal.run_records import read_records
from fluid.reports.run.loader import load_run
from fluid.results.run_files import ReplacedError
from fluid.results.stored_run import read_run
from fluid.session.folder.resume import read_session
from fluid.sweeping.resuming import read_sweep


class Model:
    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        return [ReplayedIteration({"loss": config["lr"] / i}, seconds=60.0) for i in iterations]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    trials = [fluid.Trial(Model, {"lr": lr}, budget=5, trial_id=f"t{lr}") for lr in (1.0, 2.0, 3.0)]
    with fluid.FluidExecutor(
        backend="simulated", devices=2, max_width=1, run_dir=tmp_path / "run", verbose=0
    ) as executor:
        group = fluid.TrialGroup(trials, "sweep", search=fluid.Search("loss", "min"))
        assert executor.submit_trialgroup(group).wait()
    facts = json.loads((tmp_path / "run" / "session.json").read_bytes())
    (tmp_path / "run" / "session.json").write_text(json.dumps({**facts, "rehearsed": False}))  # So that it is resumed.
    return tmp_path / "run"


def lost_line(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], *lines[5:]]


def flipped_bit(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], lines[4].replace(b"60.0", b"40.0", 1), *lines[5:]]


def repeated_line(lines: list[bytes]) -> list[bytes]:
    return [*lines[:5], lines[4], *lines[5:]]


def torn_end(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-1], lines[-1][:-9]]


def other_json(lines: list[bytes]) -> list[bytes]:
    return [*lines[:4], b"7\n", b"rubbish\n", *lines[4:]]


def half_a_character(lines: list[bytes]) -> list[bytes]:
    """As before there were checksums: a text that no encoding has is where a number should be."""
    unchecked = [line.partition(b', "crc"')[0].removesuffix(b"}\n") + b"}\n" for line in lines]
    return [*unchecked[:4], re.sub(rb'"seconds": [^,]+', rb'"seconds": "\\ud800"', unchecked[4]), *unchecked[5:]]


DAMAGES = (lost_line, flipped_bit, repeated_line, torn_end, other_json, half_a_character)


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_see_the_same_of_a_damaged_folder(folder: Path, damage: Callable[[list[bytes]], list[bytes]]) -> None:
    path = folder / "results.jsonl"
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    loaded = {trial.trial_id: [one.iteration for one in trial.results] for trial in fluid.load(folder).trials}
    missing = sum(5 - len(numbers) for numbers in loaded.values())
    assert missing == (0 if damage in (repeated_line, other_json) else 1)
    reported = {trial.trial_id: [one.number for one in trial.finished] for trial in load_run(folder).trials}
    replayed = {trial.trial_id: list(trial.iterations) for trial in read_records(folder).trials}
    assert loaded == reported == replayed
    assert outcome_of(folder).results == sum(map(len, loaded.values()))
    logged: dict[str, list[int]] = {}
    for _, trial, result in SessionReader(folder, "session").results(1 << 62):
        if trial is not None and result is not None:
            logged.setdefault(trial.trial_id, []).append(result.iteration)
    assert logged == loaded
    events = [one for one in read_sweep(folder, "sweep").events if isinstance(one, fluid.Result)]
    assert len(events) == sum(map(len, loaded.values()))
    left = read_session(folder)  # Last: it cuts off what is torn.
    assert left.results.reported == {name: max(numbers) for name, numbers in loaded.items()}


def test_a_file_is_read_when_it_is_asked_for_and_read_on_after_that(folder: Path) -> None:
    path = folder / "results.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:6]) + lines[6][:20])
    run = read_run(folder)
    path.write_bytes(b"".join(lines[:7]))
    reported = run.reported
    assert len(reported) == 7, "it had not been read before"
    path.write_bytes(b"".join(lines))
    assert len(run.reported) == 7
    run.refresh()
    assert run.reported is reported and len(reported) == 15 and not run.notes and not run.losses()
    assert {name: [one.number for one in found] for name, found in run.of_trial.items()} == {
        name: [1, 2, 3, 4, 5] for name in ("t1.0", "t2.0", "t3.0")
    }
    path.write_bytes(b"".join(lines[:-2]))
    run.refresh()
    with pytest.raises(ReplacedError, match="truncated or replaced"):
        _ = run.reported


def test_nothing_is_unpickled_and_what_is_missing_is_noted(folder: Path) -> None:
    for name in ("journal.jsonl", "trials.jsonl", "payloads.pkl", "profile.json"):
        (folder / name).unlink()
    run = read_run(folder)
    (group,) = run.groups
    assert {name: (parts[0].state, parts[0].config) for name, parts in group.trials.items()} == {
        name: ("UNKNOWN", {}) for name in ("t1.0", "t2.0", "t3.0")
    }
    assert run.notes == [
        "journal.jsonl is missing: budgets and final states of trials are unknown.",
        "trials.jsonl is missing.",
        "trials.jsonl ends too early: its last lines are missing.",
    ]
    assert run.profile is None and not run.is_running and not run.forecasts
