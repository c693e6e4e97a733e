"""Run folders of commit f877213 are read, shown and resumed, as they were by that version.

``tests/data/make_run_folders.py`` made them, and ``expected.json``, what ``fluid.load`` said of each then: ``metrics``
by a group of generators that report what JSON does not have, ``kept`` by a group of a class that kept checkpoints,
``killed`` by another one whose session was killed, ``swept``, ``killed_sweep`` and ``resumed_sweep`` by ASHA sweeps of
``fluid.run`` of which the last two were killed, and the last went on; and ``tuned`` by an ASHA sweep of Ray Tune.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepResult
from fluid.cli import main
from fluid.reports.page.html import html_page
from fluid.reports.page.server import RunServer
from fluid.reports.run.loader import load_run
from fluid.results.run_files import FORMAT
from fluid.search import uniform

DATA = Path(__file__).parents[1] / "data"
EXPECTED: dict[str, Any] = json.loads((DATA / "f877213" / "expected.json").read_text(encoding="utf-8"))
PATIENCE = 90.0

resumed_here = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the trainables in payloads.pkl are bytecode of Python 3.11"
)


@pytest.fixture(params=EXPECTED)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one of the folders, of the folder's own name."""
    return Path(shutil.copytree(DATA / "f877213" / request.param, tmp_path / request.param))


@pytest.fixture
def made() -> Iterator[ModuleType]:
    """The module that made the folders."""
    spec = importlib.util.spec_from_file_location("make_run_folders", DATA / "make_run_folders.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["make_run_folders"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_run_folders"]


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def said_of(result: SweepResult) -> dict[str, Any]:
    """What ``expected.json`` has of a sweep's result."""
    best = result.best
    return {
        "name": result.name,
        "state": result.state,
        "best": {"trial": best.trial_id, "value": best.value, "iteration": best.iteration, "config": best.config},
        "checkpoint": best.checkpoint is not None,
        "trials": {
            trial.trial_id: {
                "state": trial.state,
                "iteration": trial.iteration,
                "config": trial.config,
                "last": trial.results[-1].metrics,
                "iterations": [one.iteration for one in trial.results],
                "losses": [one.metrics["loss"] for one in trial.results],
            }
            for trial in result.trials
        },
    }


def same(value: Any) -> str:
    """A value as text: NaN is equal to itself, -0.0 differs from 0, and 1 from 1.0 and True."""
    return json.dumps(value, sort_keys=True)


def iterations(folder: Path) -> dict[str, list[int]]:
    """What each trial reported, as ``results.jsonl`` has it."""
    found: dict[str, list[int]] = defaultdict(list)
    for line in lines(folder, "results.jsonl"):
        assert line["metrics"].get("count", line["iteration"]) == line["iteration"], "what it computed is its iteration"
        found[line["trial"]].append(line["iteration"])
    return dict(found)


def test_it_is_loaded_as_it_was(folder: Path) -> None:
    result = fluid.load(folder, metric="loss", mode="min")
    assert same(said_of(result)) == same(EXPECTED[folder.name])
    assert not result.notes
    table = result.dataframe("iteration")
    assert len(table) == sum(trial["iteration"] for trial in EXPECTED[folder.name]["trials"].values())


@pytest.mark.parametrize("folder", ["metrics"], indirect=True)
def test_metrics_that_json_does_not_have_are_read_as_its_text_and_numbers(folder: Path) -> None:
    (whole,) = (trial for trial in fluid.load(folder).trials if trial.trial_id == "whole")
    assert same(whole.results[1].metrics) == same(
        {
            "loss": 0.5,
            "eval": {"top": {"accuracy": 0.75}, "counts": {"2": "a", "(1, 2)": "b"}},
            "exact": "Decimal('0.2')",
            "ratio": "Fraction(2, 3)",
            "point": [2, -0.0],
            "hidden": "array([0, 1])",
            "scalar": 2,
            "when": "datetime.datetime(2026, 1, 2, 0, 0)",
            "bad": math.inf,
            "note": "schön\n",
            "raw": "b'\\x00\\xff'",
            "nothing": None,
            "is_even": True,
        }
    )
    assert math.isnan(whole.results[2].metrics["bad"])
    best = fluid.load(folder, metric="eval/top/accuracy", mode="max").best
    assert (best.trial_id, best.iteration, best.value) == ("whole", 6, 1.0 - 0.5**6)


@resumed_here
@pytest.mark.parametrize("folder", ["kept", "swept", "killed_sweep", "resumed_sweep"], indirect=True)
def test_its_checkpoints_are_loaded(folder: Path) -> None:
    best = fluid.load(folder, metric="loss", mode="min").best
    saved = best.load_checkpoint()
    assert saved.count in (best.iteration, EXPECTED[folder.name]["trials"][best.trial_id]["iteration"])
    assert saved.seen == list(range(1, saved.count + 1))


def test_it_is_shown(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*command: str) -> str:
        assert main(list(command)) == 0
        return capsys.readouterr().out

    expected = EXPECTED[folder.name]
    trials, best = expected["trials"], expected["best"]
    text = said("report", str(folder), "--html", str(tmp_path / "page.html"))
    assert f"{len(trials)} trials" in text and all(name in text for name in trials)
    assert f"best loss {best['value']:.5g} (less is better): {best['trial']}, at iteration {best['iteration']}" in text
    report = json.loads(said("report", str(folder), "--json"))
    assert report["best"]["value"] == best["value"]
    shown = {
        one["trial"]: (one["state"], one["iterations"], one["config"], one["last"]["loss"]) for one in report["trials"]
    }
    assert shown == {
        name: (one["state"], one["iteration"], one["config"], one["losses"][-1]) for name, one in trials.items()
    }
    for name, trial in trials.items():
        assert said("why", str(folder), name).startswith(name)
        (story,) = json.loads(said("why", str(folder), name, "--json"))["trials"]
        assert (story["trial"], story["iterations"]) == (name, trial["iteration"])


def test_it_is_viewed(folder: Path) -> None:
    with RunServer([folder]) as server:
        runs = list(server.follower.state.runs)
        page = html_page(runs)
    assert all(name in page for name in EXPECTED[folder.name]["trials"])


@resumed_here
@pytest.mark.parametrize("folder", ["killed"], indirect=True)
def test_a_killed_session_goes_on(folder: Path) -> None:
    before = iterations(folder)
    with FluidExecutor.resume(folder, devices=2, verbose=0) as executor:
        (handle,) = executor.handles
        handle.resume("x0.5")  # The user had paused it.
        assert handle.wait(PATIENCE)
        assert set(handle.states.values()) == {"DONE"}, handle.failures
        heard = [(one.trial_id, one.iteration) for one in handle.results()]
        assert handle.best("loss", "min").trial_id == "x0.25"
    assert before.keys() == {"x0.25", "x0.5", "x1.0"}
    assert sorted(heard) == [(name, number) for name in sorted(before) for number in range(1, 13)]
    assert iterations(folder) == {name: list(range(1, 13)) for name in before}


@resumed_here
@pytest.mark.parametrize("folder", ["killed_sweep", "resumed_sweep", "swept"], indirect=True)
def test_a_sweep_goes_on(folder: Path, made: ModuleType) -> None:
    before = lines(folder, "results.jsonl")
    seconds = 0.0 if folder.name == "swept" else 0.05
    result = fluid.run(
        made.Counter,
        {"x": uniform(0.0, 1.0), "seconds": seconds},
        metric="loss",
        mode="min",
        samples=6,
        budget=9,
        algorithm="asha",
        seed=1,
        name="sweep",
        run_dir=folder,
        resume=True,
    )
    after = iterations(folder)
    assert lines(folder, "results.jsonl")[: len(before)] == before, "what was written is left as it is"
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in after.values())
    # All three are the same sweep: it ends as the one did that was not killed.
    whole = EXPECTED["swept"]
    assert (result.best.trial_id, result.best.value) == (whole["best"]["trial"], whole["best"]["value"])
    assert after.keys() == whole["trials"].keys()
    assert {trial.trial_id: trial.config["x"] for trial in result.trials} == {
        name: trial["config"]["x"] for name, trial in whole["trials"].items()
    }
    if folder.name != "killed_sweep":
        assert len(lines(folder, "results.jsonl")) == len(before), "nothing was left to do"


@resumed_here
@pytest.mark.parametrize("folder", ["kept", "metrics"], indirect=True)
def test_a_session_that_ended_is_extended(folder: Path) -> None:
    trial, more = {"kept": ("x0.5", 3), "metrics": ("whole", 0)}[folder.name]
    before = iterations(folder)
    with FluidExecutor.resume(folder, devices=1, verbose=0) as executor:
        (handle,) = executor.handles
        assert handle.done
        if more:
            handle.extend(trial, more)
            assert handle.wait(PATIENCE)
        (sent,) = (one for one in handle.results() if one.trial_id == trial and one.iteration == 2)
        assert same(sent.metrics) == same(
            next(one for one in lines(folder, "results.jsonl") if (one["trial"], one["iteration"]) == (trial, 2))[
                "metrics"
            ]
        )
    assert iterations(folder) == {**before, trial: list(range(1, len(before[trial]) + more + 1))}


def test_a_folder_of_any_earlier_format_is_read_and_one_of_a_later_is_refused(folder: Path) -> None:
    path = folder / "session.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert facts["format"] == 1
    del facts["format"]
    for earlier in ({}, {"format": 0}, *({"format": number} for number in range(1, FORMAT + 1))):
        path.write_text(json.dumps({**facts, **earlier}), encoding="utf-8")
        assert same(said_of(fluid.load(folder, metric="loss", mode="min"))) == same(EXPECTED[folder.name])
        assert len(load_run(folder).trials) == len(EXPECTED[folder.name]["trials"])
    path.write_text(json.dumps({**facts, "format": FORMAT + 1, "fluid": "9.0"}), encoding="utf-8")
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    reason = rf"is of Fluid 9\.0, format {FORMAT + 1}; this Fluid reads formats up to {FORMAT}"
    for read in (fluid.load, load_run, FluidExecutor.resume):
        with pytest.raises(InvalidFieldError, match=reason):
            read(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files, "nothing was changed"
