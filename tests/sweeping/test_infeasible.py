"""Trials whose code finds that their config cannot be evaluated."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidError, FluidExecutor, SweepResult, Trial, TrialGroup
from fluid.cli import main
from fluid.search import AskTell, uniform
from fluid.search.searchers import SearchOutcome

SPACE = {"x": uniform(0.0, 1.0)}
LARGE = "width too large for memory"


class TooWide(fluid.Infeasible):
    """One of the user's own, which takes other arguments than its message."""

    def __init__(self, width: float, limit: float) -> None:
        super().__init__(f"{width:.0f} is above {limit:.0f}")
        self.width, self.limit = width, limit


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Infeasible above 0.7, and below 0.3 after its third iteration, whose loss is the best of all."""
    if "calls" in config:
        with Path(config["calls"]).open("a", encoding="utf-8") as calls:
            calls.write("called\n")
    if config["x"] > 0.9:
        raise fluid.Infeasible(LARGE)
    if config["x"] > 0.8:
        raise TooWide(8, 4)
    if config["x"] > 0.7:
        raise fluid.Infeasible
    for iteration in range(1, 10):
        yield {"loss": config["x"] + 1 / iteration}
        if iteration == 3 and config["x"] < 0.3:
            raise fluid.Infeasible("late")


def from_memory(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    try:
        if config["x"] > 0.5:
            raise MemoryError
    except MemoryError as error:
        raise fluid.Infeasible("too wide") from error
    yield {"loss": config["x"]}


class Saved(fluid.TrialListener):
    """Notes how trials end."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        if failure is not None:
            self.ends.append((state, failure.message))


def run(executor: FluidExecutor | None, trainable: Any = train, space: Any = SPACE, **options: Any) -> SweepResult:
    arguments = {"metric": "loss", "mode": "min", "samples": 16, "budget": 9, "executor": executor, **options}
    return fluid.run(trainable, space, **arguments)


def require_right(result: SweepResult) -> None:
    unfit = {trial.trial_id for trial in result.trials if trial.config["x"] > 0.7}
    late = {trial.trial_id for trial in result.trials if trial.config["x"] < 0.3 and trial.infeasible}
    assert unfit and result.infeasible.keys() == unfit | late
    for trial in result.trials:
        reason, x = result.infeasible.get(trial.trial_id), trial.config["x"]
        assert (trial.state == "INFEASIBLE") == (reason is not None) and trial.infeasible == reason
        assert trial.iteration <= (0 if x > 0.7 else 3 if x < 0.3 else 9)
        if x > 0.7:
            text = LARGE if x > 0.9 else "TooWide: 8 is above 4" if x > 0.8 else "no reason was given"
            assert reason == text
    assert result.failures == {} and result.state == "DONE"
    assert result.best.trial_id not in result.infeasible


# These have executors of their own, and so come before the fixture's is in force.


def test_it_is_not_tried_again_in_any_session(tmp_path: Path) -> None:
    space = {**SPACE, "calls": str(tmp_path / "calls")}
    options = {"run_dir": tmp_path / "run", "name": "sweep", "algorithm": "random", "resume": True, "seed": 1}
    run(None, space=space, samples=8, **options)
    result = run(None, space=space, retry_failed=True, **options)
    require_right(result)
    assert (tmp_path / "calls").read_text(encoding="utf-8").count("called") == len(result.trials)
    loaded = fluid.load(tmp_path / "run")
    assert loaded.infeasible == result.infeasible and loaded.best.trial_id == result.best.trial_id


def test_reports_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    result = run(None, algorithm="random", run_dir=folder, seed=1, name="sweep")
    capsys.readouterr()
    main(["report", folder, "--html", str(tmp_path / "page.html")])
    text = " ".join(capsys.readouterr().out.split())
    assert f"{len(result.infeasible)} infeasible; " in text and "; seed 1" in text and " failed" not in text
    assert "infeasible: late" in text and f"{result.best.trial_id}, at iteration" in text
    unfit = next(trial for trial in result.trials if trial.infeasible == "late")
    main(["why", folder, unfit.trial_id])
    assert "is infeasible: late" in " ".join(capsys.readouterr().out.split())
    assert '"infeasible"' in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "infeasible first: trial" in repr(result) and "failed first" not in repr(result)
    pytest.importorskip("pandas")
    table = result.dataframe()
    rows = table[table["state"] == "INFEASIBLE"]
    assert dict(zip(rows["trial"], rows["error"], strict=True)) == result.infeasible


@pytest.mark.parametrize("algorithm", ["asha", "random", "hyperband", "sha", "tpe"])
def test_a_sweep_goes_on_past_infeasible_configs(
    algorithm: str, executor: FluidExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    if algorithm == "tpe":
        pytest.importorskip("optuna")
    ends = Saved()
    with caplog.at_level(logging.WARNING, "fluid"):
        result = run(executor, algorithm=algorithm, callbacks=[ends], seed=1)
    require_right(result)
    assert sorted(ends.ends) == sorted(("INFEASIBLE", reason) for reason in result.infeasible.values())
    assert "failed" not in caplog.text and "tried again" not in caplog.text
    if algorithm in ("asha", "random"):
        assert "late" in result.infeasible.values(), "though its loss was the best"


def test_a_grid_tries_all_others(executor: FluidExecutor) -> None:
    result = run(executor, space={"x": [0.95, 0.5, 0.1]}, algorithm="grid", samples=None)
    assert [trial.state for trial in result.trials] == ["INFEASIBLE", "DONE", "INFEASIBLE"]
    assert result.best.config == {"x": 0.5}


def test_it_is_no_matter_what_it_was_raised_from(executor: FluidExecutor) -> None:
    result = run(executor, from_memory, {"x": [0.4, 0.6]}, algorithm="grid", samples=None, budget=1)
    assert list(result.infeasible.values()) == ["too wide"]


def test_nothing_is_best_where_all_are_infeasible(executor: FluidExecutor) -> None:
    result = run(executor, space={"x": [0.1, 0.95]}, algorithm="grid", samples=None)
    assert len(result.infeasible) == 2
    with pytest.raises(FluidError, match=r"feasible has reported .*; 2 of 2 are infeasible, .*: late"):
        _ = result.best


def test_a_searcher_is_told(executor: FluidExecutor) -> None:
    values = iter([0.5, 0.95, 0.1, None])
    told: list[SearchOutcome] = []

    class Listed(AskTell):
        def tell(self, outcome: SearchOutcome) -> None:
            told.append(outcome)
            super().tell(outcome)

    heard: list[tuple[float, float]] = []
    mine = Listed(
        lambda: None if (x := next(values)) is None else {"x": x},
        lambda config, value: heard.append((config["x"], value)),
    )
    run(executor, space=None, searcher=mine, algorithm="full", max_concurrent=1)
    assert [(one.config["x"], one.state) for one in told] == [(0.5, "DONE"), (0.95, "INFEASIBLE"), (0.1, "INFEASIBLE")]
    assert told[1].values is None and told[1].failure == ("infeasible", LARGE)
    assert [x for x, _ in heard] == [0.5, 0.95, 0.1] and heard[1][1] == heard[0][1], "the worst so far"


def test_a_group_without_a_search_ends_so(executor: FluidExecutor) -> None:
    listener = Saved()
    group = TrialGroup([Trial(train, {"x": x}, budget=9, trial_id=f"t{x}") for x in (0.95, 0.5)], name="group")
    handle = executor.submit_trialgroup(group, listener)
    handle.wait()
    assert listener.ends == [("INFEASIBLE", LARGE)]
    assert [trial.state for trial in handle.trials] == ["INFEASIBLE", "DONE"]
    with pytest.raises(fluid.InvalidFieldError, match="is INFEASIBLE and cannot be extended"):
        handle.extend("t0.95", by=1)
