"""Sweeps that go on with code that was edited, with trials that had failed, and after a limit of time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepFailedError, SweepResult, TrialListener
from fluid.reports.run.loader import load_run
from fluid.search import uniform

SPACE = {"x": uniform(0.0, 1.0)}
ALGORITHMS = ["random", "asha", "sha", "hyperband", "tpe"]


def first_version(fails_above: float = 1.0, after: int = 0, pause_s: float = 0.0, kinds: str = " ") -> Any:
    def train(config: dict[str, Any], state: int | None) -> Iterator[tuple[dict[str, Any], int]]:
        done = state or 0
        while True:
            done += 1
            time.sleep(pause_s)
            if done > after and config["x"] > fails_above:
                raise ValueError(f"a mistake in the script: {kinds[int(config['x'] * len(kinds))]}")
            yield {"loss": config["x"] / done, "version": 1}, done

    return train


def second_version() -> Any:
    def train(config: dict[str, Any], state: int | None) -> Iterator[tuple[dict[str, Any], int]]:
        done = state or 0
        while True:
            done += 1
            yield {"loss": config["x"] / done, "version": 2}, done

    return train


class EndAfter(TrialListener):
    """Presses Ctrl-C after so many results."""

    def __init__(self, results: int) -> None:
        self.left = results

    def on_result(self, result: fluid.Result) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def sweep(folder: Path, trainable: Any, **options: Any) -> SweepResult:
    arguments = {"metric": "loss", "mode": "min", "samples": 9, "budget": 9, "name": "sweep", **options}
    return fluid.run(trainable, SPACE, run_dir=folder, resume=True, **arguments)


def versions(result: SweepResult) -> dict[str, str]:
    """Which version of the code each iteration of each trial is of."""
    return {
        trial.trial_id[-2:]: "".join(str(one.metrics["version"]) for one in trial.results) for trial in result.trials
    }


def stood(result: SweepResult) -> list[Any]:
    return [(trial.trial_id, trial.state, [one.iteration for one in trial.results]) for trial in result.trials]


def interrupt(folder: Path, **options: Any) -> dict[str, str]:
    """Begins a sweep of the first version, which is interrupted; returns what its trials had reported."""
    with pytest.raises(fluid.SweepInterrupted) as caught:
        sweep(folder, first_version(pause_s=0.1), callbacks=[EndAfter(4)], max_concurrent=3, **options)
    return versions(caught.value.result)


# -- code that was edited ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_edited_code_is_named_and_runs_in_trials_that_had_not_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = interrupt(tmp_path / "run", algorithm="random")
    begun = {name for name, reported in before.items() if reported}
    assert begun and len(begun) < 9
    result = sweep(tmp_path / "run", second_version(), algorithm="random", max_concurrent=3)
    for name, reported in versions(result).items():
        assert reported == ("1" * 9 if name in begun else "2" * 9)
    (warned,) = [record.getMessage() for record in caplog.records if "changed since" in record.getMessage()]
    assert warned.startswith("sweep: ") and " train changed since the session before: " in warned
    assert "keep the old code (code='new' gives it to all)" in warned
    (note,) = result.notes
    assert " train changed between two sessions: " in note and all(f"sweep-000{name}" in note for name in begun)
    assert note in fluid.load(tmp_path / "run").notes and note in load_run(tmp_path / "run").notes


@pytest.mark.slow
def test_all_trials_that_have_not_ended_can_take_the_new_code(tmp_path: Path) -> None:
    before = interrupt(tmp_path / "run", algorithm="random")
    result = sweep(tmp_path / "run", second_version(), algorithm="random", code="new", max_concurrent=3)
    assert {
        name: reported[: len(before[name])] for name, reported in versions(result).items() if name in before
    } == before
    for name, reported in versions(result).items():
        known = len(before.get(name, ""))
        assert set(reported[known:]) == {"2"} and len(reported) == 9
    assert " from iteration " in result.notes[0]
    again = sweep(tmp_path / "run", second_version(), algorithm="random", max_concurrent=3)
    assert versions(again) == versions(result) and again.notes == result.notes
    assert again.best.load_checkpoint() == again.best.iteration


@pytest.mark.slow
def test_the_same_code_is_not_said_to_have_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    interrupt(tmp_path / "run", algorithm="random")
    result = sweep(tmp_path / "run", first_version(pause_s=0.1), algorithm="random", max_concurrent=3)
    assert result.notes == () and "changed" not in caplog.text


# -- trials that had failed --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_trials_that_all_failed_are_tried_again(algorithm: str, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    folder, options = tmp_path / "run", {"algorithm": algorithm}
    with pytest.raises(SweepFailedError) as caught:
        sweep(folder, first_version(fails_above=-1.0, kinds=ascii_letters), **options)
    assert "earlier session" not in str(caught.value)
    with pytest.raises(SweepFailedError, match=r"these are failures of an earlier session: .*retry_failed=True"):
        sweep(folder, second_version(), **options)
    result = sweep(folder, second_version(), retry_failed=True, **options)
    assert result.state == "DONE" and not result.failures and max(trial.iteration for trial in result.trials) == 9
    assert set("".join(versions(result).values())) == {"2"}
    again = sweep(folder, second_version(), **options)
    assert stood(again) == stood(result) == stood(fluid.load(folder))


def test_a_sweep_that_was_given_up_goes_on_with_other_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SweepFailedError, match="failed alike"):
        sweep(tmp_path, first_version(fails_above=-1.0))
    capsys.readouterr()
    result = sweep(tmp_path, second_version())
    said = f"{len(result.failures)} of 9 trials failed; these are failures of an earlier session: resume=True, retry_"
    assert 3 <= len(result.failures) < 9 and said in capsys.readouterr().err
    again = sweep(tmp_path, second_version(), retry_failed=True)
    assert not again.failures and "earlier session" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_failed_trial_goes_on_from_its_checkpoint(algorithm: str, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    folder, options = tmp_path / "run", {"algorithm": algorithm, "min_budget": 3}
    first = sweep(folder, first_version(fails_above=0.5, after=2), **options)
    assert first.failures and len(first.failures) < 9
    result = sweep(folder, second_version(), retry_failed=True, code="new", **options)
    assert result.state == "DONE" and not result.failures
    for trial in result.trials:
        assert [one.iteration for one in trial.results] == list(range(1, trial.iteration + 1))
        if trial.trial_id in first.failures:
            assert trial.iteration >= 3 and versions(result)[trial.trial_id[-2:]].startswith("112")
            assert [one.metrics["loss"] for one in trial.results] == [
                pytest.approx(trial.config["x"] / n) for n in range(1, trial.iteration + 1)
            ], "its state is that of its checkpoint"
    assert stood(sweep(folder, second_version(), **options)) == stood(result)


# -- limits of time ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["random", "asha", "sha", "tpe"])
def test_a_sweep_goes_on_after_its_time_budget(algorithm: str, tmp_path: Path) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    folder, train = tmp_path / "run", first_version(pause_s=0.1)
    first = sweep(folder, train, algorithm=algorithm, time_budget_s=1.0)
    assert first.state == "UNFINISHED" and first.notes == (
        "The sweep ended early: the time budget of 1 s was used up.",
    )
    assert {trial.state for trial in first.trials} <= {"UNFINISHED", "PAUSED", "DONE", "STOPPED"}
    assert stood(fluid.load(folder)) == stood(first)
    second = sweep(folder, train, algorithm=algorithm, time_budget_s=0.5)
    assert second.state == "UNFINISHED"
    result = sweep(folder, train, algorithm=algorithm)
    assert result.state == "DONE" and result.notes == () and len(result.trials) == 9
    assert len({trial.config["x"] for trial in result.trials}) == 9, "no session begins the search anew"
    assert max(trial.iteration for trial in result.trials) == 9
    if algorithm == "random":
        assert {trial.iteration for trial in result.trials} == {9}
    for trial in result.trials:
        assert [one.metrics["loss"] for one in trial.results] == [
            pytest.approx(trial.config["x"] / n) for n in range(1, trial.iteration + 1)
        ], "each goes on from where it was"


def in_time(folder: Path, **options: Any) -> SweepResult:
    with FluidExecutor(backend="local", devices=1, run_dir=folder, verbose=0):
        return fluid.run(
            first_version(pause_s=0.1),
            SPACE,
            metric="loss",
            mode="min",
            samples=6,
            budget=9,
            algorithm="random",
            name="sweep",
            **options,
        )


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"time_budget_s": 1.0}, {"deadline": 1.5}], ids=lambda limit: next(iter(limit)))
def test_a_sweep_in_an_executor_in_force_goes_on_after_its_limit(limit: dict[str, float], tmp_path: Path) -> None:
    first = in_time(tmp_path / "run", **limit)
    assert first.state == "UNFINISHED" and "STOPPED" not in {trial.state for trial in first.trials}
    result = sweep(tmp_path / "run", first_version(pause_s=0.1), samples=6, algorithm="random")
    assert result.state == "DONE" and [trial.iteration for trial in result.trials] == [9] * 6


@pytest.mark.slow
def test_a_sweep_without_samples_goes_on_without_its_limit(tmp_path: Path) -> None:
    def quick(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"loss": config["x"]}

    options = {"algorithm": "random", "samples": None, "budget": 1, "trial_options": {"isolation": "lane"}}
    first = sweep(tmp_path / "run", quick, time_budget_s=0.5, max_concurrent=70, **options)
    assert len(first.trials) > 64
    result = sweep(tmp_path / "run", quick, **options)
    assert result.state == "DONE" and len(result.trials) == len(first.trials)


# -- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"metric": "version"}, r"metric=\['version'\]: cannot be with resume=True: .*\('loss', 'min'\).*'version'"),
        ({"mode": "max"}, r"metric=.*\('loss', 'min'\).*\('loss', 'max'\)"),
        ({"priority": 2.0}, "priority=2.0: cannot be with resume=True: the sweep of the folder has 1.0"),
        ({"owner": "me"}, "owner='me': cannot be with resume=True: the sweep of the folder has None"),
        ({"seed": 7}, r"its config\['x'\] is 0\.\d+, and would be 0\.\d+"),
        ({"samples": 3}, "give at least as many samples"),
        ({"budget": 27}, r"rungs \(1, 3, 9\), not \(1, 3, 9, 27\)"),
        ({"code": "old"}, "code='old': must be"),
        ({"retry_failed": 1}, "retry_failed=1: must be True or False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_differ_are_named_with_both_values(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    sweep(tmp_path / "run", second_version())
    with pytest.raises(InvalidFieldError, match=problem):
        sweep(tmp_path / "run", second_version(), **options)


@pytest.mark.parametrize("options", [{"code": "new"}, {"retry_failed": True}])
def test_what_is_about_resuming_needs_resume(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError, match="needs resume=True"):
        fluid.run(second_version(), SPACE, metric="loss", mode="min", **options)


@pytest.mark.slow
def test_fields_of_trials_may_be_others(tmp_path: Path) -> None:
    def here(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        while True:
            time.sleep(0.1)
            yield {"loss": config["x"], "at_home": os.getcwd() == str(fluid.trial_dir()), "version": 1}

    def seen(result: SweepResult) -> set[bool]:
        return {one.metrics["at_home"] for trial in result.trials for one in trial.results[-1:]}

    options = {"algorithm": "random", "samples": 3}
    with pytest.raises(fluid.SweepInterrupted) as caught:
        sweep(tmp_path / "run", here, callbacks=[EndAfter(2)], **options)
    assert seen(caught.value.result) == {False}
    assert seen(sweep(tmp_path / "run", here, trial_options={"chdir": True}, **options)) == {True}
