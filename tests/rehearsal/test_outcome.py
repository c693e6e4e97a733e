"""What a sweep took and found, read from its run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.errors import InvalidFieldError
from fluid.rehearsal import Overheads, RehearsalPlan, ReplayedIteration, rehearsing
from fluid.rehearsal.outcome import SweepOutcome, outcome_of, outcomes_of


class Falling:
    """Its loss falls with each iteration of as many seconds as its config says."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        raise AssertionError("a rehearsal makes no trainable")

    def step(self) -> dict[str, float]:
        raise AssertionError("a rehearsal runs no trainable")

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        return [ReplayedIteration({"loss": config["lr"] / i, "acc": i}, config["seconds"]) for i in iterations]


def make_trials(lrs: Sequence[float], *, seconds: float = 10.0, budget: int = 2) -> list[fluid.Trial]:
    return [fluid.Trial(Falling, {"lr": lr, "seconds": seconds}, budget=budget) for lr in lrs]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Path]:
    """Plays groups one after the other, and returns the run folder."""

    def play(*groups: fluid.TrialGroup, devices: int = 2) -> Path:
        folder = tmp_path / "run"
        options: dict[str, Any] = {"backend": "simulated", "packing": "off", "max_width": 1, "verbose": 0}
        with fluid.FluidExecutor(devices=devices, run_dir=folder, **options) as executor:
            for group in groups:
                executor.submit_trialgroup(group).wait()
        return folder

    return play


def test_figures(play: Callable[..., Path]) -> None:
    folder = play(fluid.TrialGroup(make_trials([0.8, 0.4, 0.2]), name="three"))
    outcome = outcome_of(folder, "loss")
    # Two trials of 20 s side by side, then the third alone.
    assert (outcome.makespan_s, outcome.lead_s, outcome.devices) == (40.0, 0.0, 2)
    assert outcome.device_hours == pytest.approx(80.0 / 3600.0)
    assert outcome.busy_share == pytest.approx(60.0 / 80.0)
    assert (outcome.trials, outcome.results, outcome.name) == (3, 6, "three")
    assert (outcome.metric, outcome.mode) == ("loss", "min")
    assert outcome.trace == ((10.0, 0.4), (20.0, 0.2), (40.0, 0.1))
    assert outcome.best == 0.1
    assert outcome.cost(3.6) == pytest.approx(0.08)


def test_times_to_values(play: Callable[..., Path]) -> None:
    outcome = outcome_of(play(fluid.TrialGroup(make_trials([0.8, 0.4, 0.2]))), "loss", "min")
    assert [outcome.seconds_to(value) for value in (1.0, 0.4, 0.3, 0.1, 0.05)] == [10.0, 10.0, 20.0, 40.0, None]
    assert [outcome.best_at(at) for at in (5.0, 10.0, 39.0, 100.0)] == [None, 0.4, 0.2, 0.1]
    with pytest.raises(InvalidFieldError, match="value"):
        outcome.seconds_to("low")  # type: ignore[arg-type]


def test_more_is_better(play: Callable[..., Path]) -> None:
    outcome = outcome_of(play(fluid.TrialGroup(make_trials([0.8, 0.4], budget=3))), "acc", "max")
    assert outcome.trace == ((10.0, 1.0), (20.0, 2.0), (30.0, 3.0))
    assert outcome.seconds_to(2) == 20.0
    assert outcome.seconds_to(4) is None


def test_its_trials(play: Callable[..., Path]) -> None:
    outcome = outcome_of(play(fluid.TrialGroup(make_trials([0.8, 0.4, 0.2]))), "loss")
    third = outcome.played[2]
    assert (third.config["lr"], third.state, third.iterations, third.value) == (0.2, "DONE", 2, 0.1)
    assert (third.began_s, third.ended_s, third.seconds, third.device_seconds) == (20.0, 40.0, 20.0, 20.0)


def test_without_a_metric_there_is_no_trace(play: Callable[..., Path]) -> None:
    outcome = outcome_of(play(fluid.TrialGroup(make_trials([0.8]))))
    assert (outcome.trace, outcome.best, outcome.metric, outcome.makespan_s) == ((), None, None, 20.0)
    assert outcome.seconds_to(1.0) is None


def test_a_search_says_its_metric(tmp_path: Path) -> None:
    space = {"lr": fluid.search.uniform(0.1, 1.0), "seconds": 10.0}
    with fluid.FluidExecutor(backend="simulated", devices=2, run_dir=tmp_path / "run", verbose=0):
        result = fluid.run(Falling, space, metric="loss", samples=6, budget=9)
    outcome = outcome_of(tmp_path / "run")
    assert (outcome.metric, outcome.best, outcome.trials) == ("loss", result.best.value, 6)
    assert [trial.iterations for trial in outcome.played] == [trial.iteration for trial in result.trials]
    assert [trial.config for trial in outcome.played] == [trial.config for trial in result.trials]


def test_groups_apart(play: Callable[..., Path]) -> None:
    groups = [fluid.TrialGroup(make_trials([0.8, 0.4]), name="a"), fluid.TrialGroup(make_trials([0.2]), name="b")]
    folder = play(*groups)
    assert outcome_of(folder, "loss").makespan_s == 40.0
    assert outcomes_of(folder, "loss") == [outcome_of(folder, "loss")]  # No search has submitted them.
    first, second = (outcome_of(folder, "loss", group=name) for name in "ab")
    assert (first.name, first.makespan_s, first.busy_share) == ("a", 20.0, 1.0)
    # Its start is its own submission, and of its time one of two devices is idle.
    assert (second.name, second.makespan_s, second.busy_share, second.trace[0]) == ("b", 20.0, 0.5, (10.0, 0.1 * 2))
    with pytest.raises(InvalidFieldError, match="must be one of"):
        outcome_of(folder, "loss", group="c")


def test_each_search_is_a_sweep(tmp_path: Path) -> None:
    space = {"lr": fluid.search.uniform(0.1, 1.0), "seconds": 10.0}
    with fluid.FluidExecutor(backend="simulated", devices=2, run_dir=tmp_path / "run", verbose=0):
        results = [fluid.run(Falling, space, metric="loss", samples=n, budget=3, name=f"s{n}") for n in (2, 4)]
    found = outcomes_of(tmp_path / "run")
    assert [(each.name, each.trials) for each in found] == [("s2", 2), ("s4", 4)]
    assert found[0].best == outcome_of(tmp_path / "run", group="s2").best
    assert min(result.best.value for result in results) == min(each.best or 9.0 for each in found)


def test_starts_are_part_of_the_makespan(tmp_path: Path) -> None:
    overheads = Overheads(start_s=5.0, source="given")
    plan = RehearsalPlan(devices=1, overheads=overheads)
    with rehearsing(plan), fluid.FluidExecutor(run_dir=tmp_path / "run", verbose=0) as executor:
        executor.submit_trialgroup(fluid.TrialGroup(make_trials([0.8]))).wait()
    outcome = outcome_of(tmp_path / "run", "loss")
    assert outcome.makespan_s == pytest.approx(20.0 + outcome.lead_s)


def test_a_real_run(tmp_path: Path) -> None:
    def train(config: Mapping[str, Any]) -> Any:
        for step in (1, 2):
            yield {"loss": config["lr"] / step}
            if config["lr"] < 0.1:
                raise ValueError("diverged")

    trials = [fluid.Trial(train, {"lr": lr}, budget=2) for lr in (0.5, 0.25, 0.01)]
    with fluid.FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
    outcome = outcome_of(tmp_path / "run", "loss")
    assert (outcome.trials, outcome.results, outcome.devices) == (3, 5, 1)
    assert outcome.best == 0.125  # A trial that failed is not the best.
    assert [trial.state for trial in outcome.played] == ["DONE", "DONE", "FAILED"]
    assert 0.0 < outcome.lead_s <= outcome.makespan_s  # A lane had to start.
    assert outcome.device_hours == pytest.approx(outcome.makespan_s / 3600.0)
    assert 0.0 <= outcome.busy_share < 1.0


def test_json_and_back(play: Callable[..., Path]) -> None:
    outcome = outcome_of(play(fluid.TrialGroup(make_trials([0.8, 0.4]))), "loss")
    assert SweepOutcome.from_json(json.loads(json.dumps(outcome.as_json()))) == outcome


@pytest.mark.parametrize("content", [{}, {"format": 2}, {"format": 1}, {"format": 1, "trace": 3, "played": []}])
def test_json_of_something_else(content: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError, match="outcome"):
        SweepOutcome.from_json(content)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="run_dir"):
        outcome_of(tmp_path / "none")
    with pytest.raises(InvalidFieldError, match="run_dir"):
        outcome_of(tmp_path)
