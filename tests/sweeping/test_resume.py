"""Sweeps that go on in another session, with the same decisions as one that was not interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweep_trainables import (
    Counter,
    SilentCounter,
    SlowCounter,
    curve,
    fail_above_one,
    fail_or_end,
    once,
    silent_above_one,
)
from waiting import eventually

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepResult
from fluid.search import uniform

SPACE = {"x": uniform(0.0, 1.0)}

DRIVER = """
import sys
import fluid
import sweep_trainables
from fluid.search import uniform

run_dir, algorithm, samples = sys.argv[1], sys.argv[2], int(sys.argv[3])
trainable = getattr(sweep_trainables, sys.argv[4])
fluid.run(trainable, {"x": uniform(0.0, 1.0), "folder": run_dir + "-gate"}, metric="loss", mode="min",
          samples=samples, budget=9, algorithm=algorithm, run_dir=run_dir, name="sweep", resume=True)
"""


def run_and_kill(run_dir: Path, algorithm: str, samples: int, trainable: str, after: int) -> None:
    """Runs the sweep, or goes on with it, until so many further iterations in all were reported; then kills it."""
    script, gate, results = run_dir.parent / "driver.py", Path(f"{run_dir}-gate"), run_dir / "results.jsonl"
    script.write_text(DRIVER, encoding="utf-8")
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""), str(Path(fluid.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    # The trials stop and wait after so many iterations in all.
    for number in range(after):
        (gate / f"ticket-{number}").touch()
    goal = after + (results.read_text().count("\n") if results.is_file() else 0)
    driver = subprocess.Popen([sys.executable, script, run_dir, algorithm, str(samples), trainable], env=environment)
    looked = 0

    def is_there() -> bool:
        nonlocal looked
        looked += 1
        if looked % 250 == 0:  # A trial without a state repeats iterations, which are not reported again.
            (gate / f"ticket-{after + looked}").touch()
        return results.is_file() and results.read_text().count("\n") >= goal

    eventually(is_there)
    driver.send_signal(signal.SIGKILL)
    driver.wait()


def resume(run_dir: Path, trainable: Any, space: Any, **options: Any) -> SweepResult:
    arguments = {"metric": "loss", "mode": "min", "samples": 9, "budget": 9, "name": "sweep", **options}
    result = fluid.run(trainable, space, run_dir=run_dir, resume=True, **arguments)
    assert stood(fluid.load(run_dir)) == stood(result)
    return result


def stood(result: SweepResult) -> list[Any]:
    """Its trials in order of submission, with their iterations, and the best of them."""
    trials = [(trial.trial_id, trial.state, [one.iteration for one in trial.results]) for trial in result.trials]
    return [*trials, (result.best.trial_id, result.best.iteration, result.best.value)]


def outcome(result: SweepResult) -> list[Any]:
    return [(trial.trial_id, trial.iteration, trial.config["x"]) for trial in result.trials]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "samples"), [("sha", 9), ("hyperband", 17), ("random", 5), ("asha", 9), ("tpe", 5)]
)
@pytest.mark.parametrize("after", [3, 8])
def test_a_killed_sweep_goes_on(algorithm: str, samples: int, after: int, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    run_dir, gate = tmp_path / "run", tmp_path / "run-gate"
    gate.mkdir()
    run_and_kill(run_dir, algorithm, samples, "SlowCounter", after)
    for number in range(2000):
        (gate / f"ticket-{number}").touch()
    result = resume(run_dir, SlowCounter, {**SPACE, "folder": str(gate)}, samples=samples, algorithm=algorithm)
    assert len(result.trials) == samples
    assert result.state == "DONE"
    for trial in result.trials:
        assert [one.iteration for one in trial.results] == list(range(1, trial.iteration + 1)), "none repeated or lost"
        assert [one.metrics["count"] for one in trial.results] == list(range(1, trial.iteration + 1))
    if algorithm in ("sha", "hyperband", "random"):
        with FluidExecutor(backend="local", devices=2, run_dir=tmp_path / "whole", verbose=0):
            options = {"metric": "loss", "mode": "min", "samples": samples, "budget": 9, "algorithm": algorithm}
            whole = fluid.run(Counter, SPACE, name="sweep", **options)
        assert outcome(result) == outcome(whole)
    assert max(trial.iteration for trial in result.trials) == 9


def test_a_sweep_that_was_done_is_given_as_it_is(tmp_path: Path) -> None:
    first = resume(tmp_path / "run", curve, SPACE)
    again = resume(tmp_path / "run", curve, SPACE)
    assert outcome(again) == outcome(first)
    assert [trial.state for trial in again.trials] == [trial.state for trial in first.trials]
    assert again.best.value == first.best.value


@pytest.mark.parametrize("algorithm", ["asha", "sha", "random"])
def test_a_function_that_returned_its_metrics_is_not_called_again(algorithm: str, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    space = {**SPACE, "calls": str(calls)}
    first = resume(tmp_path / "run", once, space, algorithm=algorithm)
    again = resume(tmp_path / "run", once, space, algorithm=algorithm)
    assert calls.read_text(encoding="utf-8").count("called") == 9
    assert outcome(again) == outcome(first)
    assert [trial.state for trial in again.trials] == [trial.state for trial in first.trials]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["asha", "sha", "hyperband", "random"])
def test_a_sweep_goes_on_though_trials_failed_or_ended_by_themselves(algorithm: str, tmp_path: Path) -> None:
    space = {"x": uniform(0.0, 2.0)}
    for trainable in (fail_or_end, fail_above_one, silent_above_one):
        folder = tmp_path / trainable.__name__
        first = resume(folder, trainable, space, algorithm=algorithm)
        again = resume(folder, trainable, space, algorithm=algorithm)
        assert outcome(again) == outcome(first)
        assert [trial.state for trial in again.trials] == [trial.state for trial in first.trials]
        assert again.failures == {trial: replace(why, exception=None) for trial, why in first.failures.items()}
        assert {trial.state for trial in first.trials if trial.iteration < 1 and trial.config["x"] > 1.0} <= {"FAILED"}


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 5, 9])
@pytest.mark.parametrize("algorithm", ["asha", "sha"])
def test_trials_that_never_report_the_metric_fail_after_a_kill_too(algorithm: str, after: int, tmp_path: Path) -> None:
    run_dir, gate = tmp_path / "run", tmp_path / "run-gate"
    gate.mkdir()
    run_and_kill(run_dir, algorithm, 9, "SilentCounter", after)
    for number in range(2000):
        (gate / f"ticket-{number}").touch()
    result = resume(run_dir, SilentCounter, {**SPACE, "folder": str(gate)}, algorithm=algorithm)
    silent = {trial.trial_id for trial in result.trials if trial.config["x"] < 0.5}
    assert 0 < len(silent) < 9
    assert {trial_id: failure.kind for trial_id, failure in result.failures.items()} == dict.fromkeys(silent, "metric")
    loaded = {trial.trial_id: (trial.state, trial.failure) for trial in fluid.load(run_dir).trials}
    assert loaded == {trial.trial_id: (trial.state, trial.failure) for trial in result.trials}
    assert result.best.value == min(trial.config["x"] / 9 for trial in result.trials if trial.trial_id not in silent)


@pytest.mark.slow
def test_a_sweep_goes_on_twice_though_its_trials_begin_again(tmp_path: Path) -> None:
    from sweep_trainables import slow_curve

    run_dir, gate = tmp_path / "run", tmp_path / "run-gate"
    gate.mkdir()
    for _ in range(2):  # The second time, the best trial has to begin again for its second rung: it has no state.
        run_and_kill(run_dir, "sha", 4, "slow_curve", 3)
    for number in range(200):
        (gate / f"ticket-{number}").touch()
    space = {**SPACE, "folder": str(gate)}
    result = resume(run_dir, slow_curve, space, samples=4, algorithm="sha")
    assert sorted(trial.iteration for trial in result.trials) == [1, 1, 1, 9]
    best = result.best.trial
    assert best.config["x"] == min(trial.config["x"] for trial in result.trials)
    assert [one.iteration for one in best.results] == list(range(1, 10))
    assert outcome(resume(run_dir, slow_curve, space, samples=4, algorithm="sha")) == outcome(result)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sha", "asha", "random"])
@pytest.mark.parametrize("lost", [1, 3])
def test_what_a_kill_kept_from_the_journal_is_in_its_place(algorithm: str, lost: int, tmp_path: Path) -> None:
    """Results are written before the journal, and a session may be killed in between."""
    run_dir, gate = tmp_path / "run", tmp_path / "run-gate"
    gate.mkdir()
    run_and_kill(run_dir, algorithm, 4, "SlowCounter", 6)
    lose_reports(run_dir / "journal.jsonl", lost)
    for number in range(200):
        (gate / f"ticket-{number}").touch()
    options: dict[str, Any] = {"samples": 4, "algorithm": algorithm}
    space = {**SPACE, "folder": str(gate)}
    result = resume(run_dir, SlowCounter, space, **options)
    again = resume(run_dir, SlowCounter, space, **options)
    assert outcome(again) == outcome(result)
    for trial in again.trials:
        assert [one.iteration for one in trial.results] == list(range(1, trial.iteration + 1))


def lose_reports(journal: Path, number: int) -> None:
    """Cuts the journal before the last reports of iterations."""
    lines = journal.read_text().splitlines(keepends=True)
    reports = [place for place, line in enumerate(lines) if '"IterationReported"' in line]
    journal.write_text("".join(lines[: reports[-number]]))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"seed": 7}, "resume=True: trial 'sweep-00000' of the folder does not follow from these arguments"),
        ({"name": "other"}, "name='other': is no sweep of .*, which has sweep"),
        ({"samples": 3}, "does not follow from these arguments"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    resume(tmp_path / "run", curve, SPACE)
    with pytest.raises(InvalidFieldError, match=problem):
        resume(tmp_path / "run", curve, SPACE, **options)


@pytest.mark.parametrize("algorithm", ["asha", "sha", "hyperband", "random"])
def test_a_sweep_whose_trials_ran_otherwise_is_refused(algorithm: str, tmp_path: Path) -> None:
    resume(tmp_path / "run", curve, SPACE, algorithm=algorithm)
    others: list[dict[str, Any]] = [{"budget": 27}, {"budget": 3}]
    if algorithm != "random":
        others += [{"eta": 2}, {"min_budget": 3}]
    if algorithm == "sha":
        others += [{"samples": 18}]
    for other in others:
        with pytest.raises(
            InvalidFieldError, match="resume=True: the sweep of the folder is one of up to 9 iterations"
        ):
            resume(tmp_path / "run", curve, SPACE, algorithm=algorithm, **other)


@pytest.mark.parametrize("algorithm", ["asha", "random"])
def test_a_sweep_may_go_on_with_more_samples(algorithm: str, tmp_path: Path) -> None:
    first = resume(tmp_path / "run", Counter, SPACE, algorithm=algorithm)
    more = resume(tmp_path / "run", Counter, SPACE, algorithm=algorithm, samples=12)
    configs = {trial.trial_id: trial.config for trial in more.trials}
    assert len(first.trials) == 9 and len(configs) >= 12
    assert {trial.trial_id: trial.config for trial in first.trials}.items() <= configs.items()


def test_resume_needs_a_folder() -> None:
    with pytest.raises(InvalidFieldError, match="resume=True: needs run_dir"):
        fluid.run(curve, SPACE, metric="loss", resume=True)
    with pytest.raises(InvalidFieldError, match="resume=3: must be True or False"):
        fluid.run(curve, SPACE, metric="loss", resume=3)  # type: ignore[arg-type]


def test_points_that_tpe_has_not_tried_yet_are_tried(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    points = [{"x": number / 10} for number in range(6)]
    for samples in (3, 8):
        options = {"samples": samples, "algorithm": "tpe", "points": points}
        result = resume(tmp_path / "run", curve, SPACE, **options)
    assert [trial.config["x"] for trial in result.trials][:6] == [point["x"] for point in points]
    assert len({trial.config["x"] for trial in result.trials}) == 8


@pytest.mark.parametrize("algorithm", ["asha", "tpe"])
def test_more_samples_where_fewer_promoted_the_last_one(algorithm: str, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    for samples in (2, 5, 8):
        result = resume(tmp_path / "run", curve, SPACE, samples=samples, algorithm=algorithm)
        assert len(result.trials) == samples and result.state == "DONE"
        for trial in result.trials:
            assert [one.iteration for one in trial.results] == list(range(1, trial.iteration + 1))
    assert max(trial.iteration for trial in result.trials) == 9
