"""A run of real processes, recorded and then rehearsed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.measure.profile import Profile
from fluid.rehearsal import RehearsalPlan, overheads_of, recorded, rehearsing
from fluid.rehearsal.overheads import overheads_in


def train(config: dict[str, Any]) -> Any:
    for step in range(1, 9):
        time.sleep(config["pause"])
        yield {"loss": config["lr"] / step, "name": f"step {step}"}


def sweep(folder: Path) -> Any:
    trials = [
        fluid.Trial(train, {"lr": lr, "pause": pause}, budget=8, trial_id=f"{lr}-{pause}")
        for lr in (0.1, 0.2)
        for pause in (0.03, 0.06)
    ]
    options: dict[str, Any] = {"backend": "local", "devices": 2, "max_packing": 1, "run_dir": folder, "verbose": 0}
    with fluid.FluidExecutor(**options) as executor:
        handle = executor.submit_trialgroup(fluid.TrialGroup(trials))
        handle.wait()
        return handle.makespan


@pytest.mark.slow
def test_a_real_run_is_rehearsed(tmp_path: Path) -> None:
    real = sweep(tmp_path / "real")
    source = recorded(tmp_path / "real")
    overheads = source.overheads
    assert overheads == overheads_of(tmp_path / "real")
    assert overheads.lane_s > 0.0
    assert overheads.start_s > 0.0
    assert "measured in" in overheads.source
    assert "not measured there, and taken to cost nothing: beta (more devices)" in overheads.source
    with rehearsing(RehearsalPlan(source=source)):
        rehearsed = sweep(tmp_path / "rehearsed")
    first, second = (
        {trial.trial_id: [result.metrics for result in trial.results] for trial in fluid.load(folder).trials}
        for folder in (tmp_path / "real", tmp_path / "rehearsed")
    )
    assert second == first
    # Starts of lanes are no iterations; the overheads tell them.
    seconds = {trial.trial_id: trial.seconds for trial in fluid.load(tmp_path / "real").trials}
    assert max(seconds.values()) <= rehearsed < 1.5 * real
    of_second = {trial.trial_id: trial.seconds for trial in fluid.load(tmp_path / "rehearsed").trials}
    assert of_second == pytest.approx(seconds)


def test_overheads_of_a_profile() -> None:
    profile = Profile()
    for _ in range(5):
        profile.observe("a", seconds=2.0)
        profile.observe("a", seconds=2.2, co_residents=2)
        profile.observe("a", seconds=1.1, width=2)
    profile.observe_resize(3.0)
    found = overheads_of(profile)
    assert (found.alpha, found.beta, found.epsilon) == pytest.approx((1.1, 1.1, 3.0))
    assert found.source.startswith("measured in a profile: alpha (packing) 1.1, beta (more devices) 1.1, epsilon (a r")
    unknown = "the start of a host's fork server, the start of a lane, the set-up of a trial, saving, restoring"
    assert found.source.endswith(f"taken to cost nothing: {unknown}")


def test_packing_that_was_measured_to_cost_nothing_is_not_unknown() -> None:
    profile = Profile()
    for _ in range(5):
        profile.observe("a", seconds=2.0)
        profile.observe("a", seconds=2.0, co_residents=2)
    found = overheads_of(profile)
    assert 1.0 < found.alpha < 1.01
    assert "packed" not in found.source
    nothing = overheads_of(Profile())
    assert nothing.alpha == 1.0
    assert nothing.source.endswith("; trials are not packed, as it is not known what that costs")


def entries(trial: str, lane: int, placed: float, started: float, took: float) -> list[dict[str, Any]]:
    return [
        {"what": "NotePlaced", "trial_id": trial, "at": placed, "lane_ids": [lane]},
        {"what": "TrialStarted", "trial_id": trial, "at": started, "seconds": took, "iteration": 0},
    ]


def test_the_start_of_each_lane_counts_where_each_trial_has_one_of_its_own() -> None:
    def lane(lane_id: int, at: float, seconds: float) -> dict[str, Any]:
        return {"what": "LaneReady", "lane_id": lane_id, "at": at, "seconds": seconds}

    first = [lane(0, 5.0, 5.0), lane(1, 6.0, 6.0), *entries("a", 0, 0.0, 7.0, 2.0), *entries("b", 1, 0.0, 9.0, 3.0)]
    found = overheads_in(Profile(), first, "a run", "")
    assert (found.server_s, found.lane_s, found.start_s) == (0.0, 5.5, 2.5)
    # Of a spare lane nothing was waited for: its start takes its time all the same.
    later = [lane(2, 6.5, 0.5), *entries("c", 2, 10.0, 14.0, 4.0)]
    later += [lane(3, 11.5, 1.5), *entries("d", 3, 10.0, 13.0, 1.5)]
    found = overheads_in(Profile(), [*first, *later], "a run", "")
    assert (found.server_s, found.lane_s, found.start_s) == (4.5, 1.0, 2.5)
    assert "the start of a host's fork server 4.5 s, the start of a lane 1 s" in found.source


def test_the_first_set_up_in_a_lane_is_part_of_its_start() -> None:
    first, second = entries("a", 0, 0.0, 4.0, 2.5), entries("b", 1, 0.0, 5.0, 3.5)
    found = overheads_in(Profile(), [*first, *second], "a run", "")
    assert (found.lane_s, found.start_s) == (1.5, 3.0)  # No lane was used twice.
    later = entries("c", 0, 10.0, 10.25, 0.25)
    found = overheads_in(Profile(), [*first, *second, *later], "a run", "")
    assert (found.lane_s, found.start_s) == (4.25, 0.25)
