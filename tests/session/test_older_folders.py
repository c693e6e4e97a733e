"""Run folders that an earlier version wrote: they are resumed, shown and loaded.

The folders in ``older/`` were written by the last version whose journal gave no reason for lost devices, whose profile
knew no device models (format 2), and whose session.json had no id: ``ended`` by a session of two groups that ended in
order, ``killed`` by the same one, killed in its midst, and ``swept`` by a sweep of ``fluid.run`` that was killed.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from older_trainables import Counter

import fluid
from fluid.cli import main
from fluid.executor import FluidExecutor
from fluid.measure.profile import FORMAT, Profile
from fluid.reports.run.loader import load_run
from fluid.resources import Device
from fluid.search import uniform

PATIENCE = 90.0
FOLDERS = ("ended", "killed", "swept")


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one of the folders, elsewhere than where it was written."""
    shutil.copytree(Path(__file__).parent / "older" / request.param, tmp_path / "run")
    return tmp_path / "run"


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "session.json").read_text(encoding="utf-8"))
    return found


def entries(folder: Path, what: str) -> list[dict[str, Any]]:
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if entry["what"] == what]


def counts(folder: Path) -> dict[str, list[int]]:
    """What each trial counted, as ``results.jsonl`` has it."""
    found: dict[str, list[int]] = defaultdict(list)
    for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found[entry["trial"]].append(entry["metrics"].get("count", entry["iteration"]))
    return dict(found)


@pytest.mark.parametrize("folder", ["ended", "killed"], indirect=True)
def test_it_is_the_folder_of_an_earlier_version(folder: Path) -> None:
    assert [sorted(entry) for entry in entries(folder, "NoteDeviceLost")] == [["at", "device_id", "v", "what"]]
    assert "id" not in facts(folder)
    assert folder.name != "ended" or json.loads((folder / "profile.json").read_text(encoding="utf-8"))["format"] == 2


@pytest.mark.parametrize("folder", ["killed"], indirect=True)
def test_a_killed_session_goes_on_from_its_checkpoints(folder: Path) -> None:
    (saved,) = (int(path.name.partition("-")[0]) for path in (folder / "trials/count0/checkpoints").iterdir())
    began = facts(folder)["began"]
    with FluidExecutor.resume(folder, devices=2, verbose=0) as executor:
        for handle in executor.handles:
            assert handle.wait(PATIENCE)
            assert set(handle.states.values()) == {"DONE"}, handle.failures
    budgets = {"count0": 90, "count1": 30, "count2": 6, "down": 9}
    assert counts(folder) == {name: list(range(1, budget + 1)) for name, budget in budgets.items()}
    started = [entry["iteration"] for entry in entries(folder, "TrialStarted") if entry["trial_id"] == "count0"]
    assert started[:2] == [0, saved], "it may be moved later, which starts it once more"
    assert facts(folder)["began"] == began and facts(folder)["id"]
    (group, _) = load_run(folder).groups
    assert group.search is not None and (group.search.metric, group.search.besides) == ("loss", ())


@pytest.mark.parametrize("folder", ["ended"], indirect=True)
def test_a_session_that_ended_is_resumed_and_extended(folder: Path) -> None:
    before = Profile.load(folder / "profile.json")
    with FluidExecutor.resume(folder, devices=[Device(0, model="Core A")], verbose=0) as executor:
        first, _ = executor.handles
        assert executor.profile.seconds_per_iteration("counting", "Core A") == before.seconds_per_iteration("counting")
        first.extend("count2", 3)
        assert first.wait(PATIENCE)
    assert counts(folder)["count2"] == list(range(1, 10))
    written = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    assert written["format"] == FORMAT
    assert Profile.load(folder / "profile.json").models("counting") == ["Core A"], "it took the measurements over"


@pytest.mark.parametrize("folder", ["swept"], indirect=True)
def test_a_killed_sweep_goes_on(folder: Path) -> None:
    before = counts(folder)
    result = fluid.run(
        Counter,
        {"step": uniform(0.5, 2.0)},
        metric="loss",
        mode="min",
        algorithm="asha",
        samples=8,
        budget=9,
        seed=1,
        run_dir=folder,
        resume=True,
    )
    after = counts(folder)
    assert len(result.trials) == len(after) == 8
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in after.values())
    assert all(after[name][: len(numbers)] == numbers for name, numbers in before.items())
    assert len(after[result.best.trial_id]) == 9
    assert result.best.load_checkpoint()._count == 9


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_it_is_shown(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(folder)
    assert not run.notes, "a device that was removed was not given up"
    assert main(["report", str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert main(["report", str(folder), "--json"]) == 0
    for trial in run.trials:
        assert main(["why", str(folder), trial.trial_id]) == 0
    assert run.trials[0].trial_id in capsys.readouterr().out
    lost = [(index, came) for _, index, came in run.timeline.changes if not came]
    assert lost == ([(1, False)] if len(run.groups) == 2 else [])


@pytest.mark.parametrize("folder", ["ended"], indirect=True)
def test_its_results_and_checkpoints_are_loaded(folder: Path) -> None:
    sweep = fluid.load(folder)
    assert {trial.trial_id: trial.iteration for trial in sweep.trials} == {
        "count0": 90,
        "count1": 30,
        "count2": 6,
        "down": 9,
    }
    assert next(trial for trial in sweep.trials if trial.trial_id == "count1").load_checkpoint()._count == 30


@pytest.mark.parametrize("folder", ["ended"], indirect=True)
def test_its_profile_is_that_of_any_model_until_one_is_measured(folder: Path, tmp_path: Path) -> None:
    profile = Profile.load(folder / "profile.json")
    seconds = profile.seconds_per_iteration("counting")
    assert seconds is not None and profile.models("counting") == [None]
    assert profile.seconds_per_iteration("counting", "NVIDIA H200") == seconds
    assert profile.speeds("counting", ["NVIDIA H200", "NVIDIA A100"]) == {"NVIDIA H200": 1.0, "NVIDIA A100": 1.0}
    profile.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    again.observe("counting", seconds, model="NVIDIA H200")
    assert again.models("counting") == ["NVIDIA H200"]
    assert again.seconds_per_iteration("counting", "NVIDIA A100") is None
