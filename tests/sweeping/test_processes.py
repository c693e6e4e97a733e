"""Each trial of a sweep has a process of its own, and keeps it as long as it may go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sweep_trainables import Counter, telling_its_process
from test_searcher import Halving, run
from waiting import eventually

import fluid
from fluid import FluidExecutor, SweepResult
from fluid.search import uniform


def processes(result: SweepResult) -> list[set[int]]:
    """Those of each trial."""
    return [{one.metrics["pid"] for one in trial.results} for trial in result.trials]


@pytest.mark.parametrize("algorithm", ["random", "asha", "sha"])
def test_a_promoted_trial_goes_on_where_it_is(executor: FluidExecutor, algorithm: str) -> None:
    result = fluid.run(
        telling_its_process,
        {"x": uniform(0.0, 1.0)},
        metric="loss",
        mode="min",
        samples=6,
        algorithm=algorithm,
        budget=9,
        executor=executor,
    )
    found = processes(result)
    assert [len(pids) for pids in found] == [1] * 6 and len(set.union(*found)) == 6
    assert max(len(trial.results) for trial in result.trials) == 9


def test_a_trial_that_a_searcher_lets_continue_goes_on_where_it_is(executor: FluidExecutor) -> None:
    result = run(executor, Halving([0.5, 0.25, 1.0]), telling_its_process, budget=6)
    found = processes(result)
    assert [len(trial.results) for trial in result.trials] == [2, 6, 2]
    assert [len(pids) for pids in found] == [1] * 3 and len(set.union(*found)) == 3
    assert [one.iteration for one in result.trials[1].results] == [1, 2, 3, 4, 5, 6]


def test_a_trial_that_nothing_extends_is_not_saved_as_it_ends(tmp_path: Path) -> None:
    """Whoever extends a trial by hand may do so: its state is saved in time."""
    with FluidExecutor("local", 1, run_dir=tmp_path / "run", keep="none", verbose=0) as executor:
        space = {"x": uniform(0.0, 1.0)}
        options = {"samples": 3, "algorithm": "random", "budget": 2, "executor": executor}
        fluid.run(Counter, space, metric="loss", mode="min", **options)
        group = fluid.TrialGroup([fluid.Trial(Counter, {"x": 0.5}, budget=2, trial_id="by-hand")])
        handle = executor.submit_trialgroup(group)
        assert handle.wait()
        journal = tmp_path / "run" / "journal.jsonl"

        def saved() -> set[str]:
            entries = [json.loads(line) for line in journal.read_text().splitlines()]
            return {entry["trial_id"] for entry in entries if entry["what"] == "TrialSaved"}

        eventually(saved)
        handle.extend("by-hand", by=1)
        assert handle.wait()
        assert [result.iteration for result in handle.results()] == [1, 2, 3]
        assert saved() == {"by-hand"}
