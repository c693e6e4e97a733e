"""Cohorts in reports: their conditions in words, and how well configs told what trials take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid.cli import main
from fluid.engine.commands import NotePlaced
from fluid.engine.events import DeviceAdded
from fluid.measure.cohorts.tree import CohortTree
from fluid.measure.profile import Profile
from fluid.reports.analysis.cohorts import KeyCohorts, ShownCohort
from fluid.reports.page.data import page_data
from fluid.reports.run.loader import load_run
from fluid.resources import Device, MemoryNeed
from fluid.trialgroup import Trial
from tests.json_fields import undescribed

Sessions = Callable[..., Any]
Captured = pytest.CaptureFixture[str]


def parted() -> Profile:
    """Trials of batch size 32 take 1 s and 1 GiB, those of 256 take 8 s and 9 GiB; two of these were packed."""
    profile = Profile()
    tree = profile.cohorts["net"] = CohortTree()
    for number in range(16):
        size, seconds = (32, 1.0) if number % 2 else (256, 8.0)
        need = MemoryNeed(seconds * 2**30, (seconds == 8.0) * 2.0**30)
        tree.learn(f"t{number}", (("batch_size", str(size)),), seconds=seconds, need=need)
    for _ in range(6):
        profile.observe("net", 2.0)
        profile.observe("net [batch_size > 91]", 8.0)
        profile.observe("net [batch_size > 91]", 10.0, co_residents=2)
    return profile


def run_of(session: Sessions, profile: Profile, **models: str) -> Path:
    """Three trials, of which two were predicted: one takes 10 % longer, and one only ran beside another."""
    trials = [Trial(print, {"batch_size": 256}, budget=3, trial_id=name, profile_key="net") for name in "abc"]
    made = session({})
    made.happened(*(DeviceAdded(-1.0, Device(k, model=models.get(f"m{k}"))) for k in range(2)))
    made.submit("sweep", trials, at=-1.0)
    cohort = "net [batch_size > 91]"
    for name, predicted in (("a", None), ("b", 8.0), ("c", 8.0)):
        placed = NotePlaced(name, at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,), predicted_s=predicted)
        made.happened(
            placed
            if predicted is None
            else NotePlaced(
                name, at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,), predicted_s=predicted, cohort=cohort
            )
        )
    made.results(
        ("a", 1, 0.0, 8.0, 1.0, (0,), {"loss": 1.0}),
        ("b", 1, 8.0, 28.0, 1.0, (0,), {"loss": 1.0}),
        ("b", 2, 28.0, 36.8, 1.0, (0,), {"loss": 1.0}),
        ("c", 1, 36.8, 60.0, 0.5, (0,), {"loss": 1.0}),
    )
    for name in "abc":
        made.end(name)
    return Path(made.close(profile))


def test_a_report_shows_cohorts_in_words(session: Sessions, capsys: Captured) -> None:
    path = run_of(session, parted())
    assert main(["report", str(path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "cohorts of net trials an iteration memory alpha c" in lines
    assert "batch_size <= 91 8 1 s 1 GiB" in lines
    assert "batch_size > 91 8 8 s 9 GiB 1.250 2" in lines
    said = "net: seconds of 1 trial predicted from configs before the first iteration: median error 10 %"
    assert said in " ".join(lines)
    # What was measured of a cohort is in its table, what was of its key is told as of others.
    assert "net: 2 s per iteration alone, packing not measured, beta 1.000" in lines
    assert not [line for line in lines if line.startswith("net [")]


def test_json_and_page_have_the_cohorts(session: Sessions, capsys: Captured) -> None:
    path = run_of(session, parted())
    assert main(["report", str(path), "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)["cohorts"]
    assert (data["predicted_trials"], data["compared_trials"]) == (2, 1)
    assert data["median_error"] == pytest.approx(0.1)
    assert data["cohorts"][1] == {
        "conditions": "batch_size > 91",
        "trials": 8,
        "seconds": 8.0,
        "peak_bytes": 9.0 * 2**30,
        "alpha": pytest.approx(1.25),
        "c": 2,
    }
    assert undescribed({*data, *data["cohorts"][1]}, KeyCohorts.as_json) == set()
    shown = page_data([load_run(path)])["runs"][0]["cohorts"]
    assert [text for _, text, _ in shown] == [
        "batch_size <= 91: 1 s, 1 GiB (8 trials)",
        "batch_size > 91: 8 s, 9 GiB (8 trials)",
    ]


def test_why_says_what_a_trial_was_expected_to_take(session: Sessions, capsys: Captured) -> None:
    path = run_of(session, parted())
    assert main(["why", str(path), "b"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "expected to take 8 s an iteration, as its config tells (cohort net [batch_size > 91])" in told
    assert main(["why", str(path), "a"]) == 0
    assert "expected" not in capsys.readouterr().out


def test_seconds_on_several_device_models_are_not_compared(session: Sessions) -> None:
    (found,) = load_run(run_of(session, parted(), m0="A100", m1="H200")).cohorts
    assert (found.predicted, found.compared, found.error, found.error_text) == (2, 0, None, "")


def test_without_cohorts_nothing_is_shown(session: Sessions, capsys: Captured) -> None:
    path = session({"g": [Trial(print, trial_id="a")]}).close(Profile(cohorts=False))
    assert load_run(path).cohorts == ()
    assert main(["report", str(path)]) == 0
    assert "cohorts of" not in capsys.readouterr().out


def test_a_key_whose_trials_are_alike_has_no_table(session: Sessions, capsys: Captured) -> None:
    profile = Profile()
    tree = profile.cohorts["net"] = CohortTree()
    for number in range(16):
        tree.learn(f"t{number}", (("lr", str(0.1 * number)),), seconds=8.0)
    path = run_of(session, profile)
    assert load_run(path).cohorts[0].cohorts == ()
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "cohorts of" not in out and "median error 10 %" in " ".join(out.split())


def test_what_was_not_measured_is_said() -> None:
    assert (
        ShownCohort(conditions="x > 1", trials=1, seconds=None, peak_bytes=None).text == "x > 1: not measured (1 trial)"
    )
