"""Urgent groups on real lanes: a running sweep makes room for them at once, and loses no iteration."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import Device, FluidExecutor, Trial, TrialGroup
from fluid.backends.local import LocalBackend
from fluid.reports.run.loader import load_run

pytestmark = pytest.mark.slow


def savable(config: dict[str, Any], state: int | None = None) -> Iterator[tuple[dict[str, Any], int]]:
    done = state or 0
    while True:
        time.sleep(config["seconds"])
        done += 1
        yield {"step": done, "pid": os.getpid()}, done


def unsavable(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for done in range(1, 1000):
        time.sleep(config["seconds"])
        yield {"step": done, "pid": os.getpid()}


@pytest.mark.parametrize("train", [savable, unsavable])
def test_an_urgent_group_runs_amid_a_sweep_whose_trials_lose_no_iteration(tmp_path: Path, train: Any) -> None:
    devices = [Device(index, kind="cpu") for index in range(2)]
    folder = tmp_path / "run"
    with FluidExecutor(LocalBackend(devices, preload=[]), packing="off", run_dir=folder, verbose=0) as executor:
        sweep = [Trial(train, {"seconds": 0.05}, budget=60, trial_id=f"s{number}") for number in range(2)]
        handle = executor.submit_trialgroup(TrialGroup(sweep, name="sweep"))
        results = handle.results()
        seen = [next(results) for _ in range(20)]
        group = TrialGroup([Trial(train, {"seconds": 0.05}, budget=3, trial_id="u")], name="now")
        urgent = executor.submit_trialgroup(group, priority=10.0, preempt=True)
        urged = list(urgent.results())
        assert not handle.done, "it went ahead of trials that still run"
        seen += list(results)
    assert [result.metrics["step"] for result in urged] == [1, 2, 3]
    for name in ("s0", "s1"):
        assert [result.metrics["step"] for result in seen if result.trial_id == name] == list(range(1, 61))
    told = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    notes = [line for line in told if line["what"] == "NotePreempted" and line.get("urgent_group") is not None]
    assert len({note["trial_id"] for note in notes}) == 1, "one trial made room, in place"
    victim = notes[0]["trial_id"]
    processes = {result.metrics["pid"] for result in seen if result.trial_id == victim}
    assert len(processes) == 1, "it went on in its process, where its state had stayed"
    assert urged[0].metrics["pid"] not in processes
    assert len(processes) == 1 or train is savable, "what cannot be saved stays where it was"
    run = load_run(folder)
    (trial,) = [each for each in run.trials if each.trial_id == victim]
    assert any("makes room for u, whose group is urgent" in line.text for line in run.story_of(trial))
