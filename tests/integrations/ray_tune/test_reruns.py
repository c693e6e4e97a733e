"""Sweeps that are resumed, restored or run again in the executor in which they were begun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from fluid import FluidExecutor, tune
from fluid.integrations.ray_tune.controller.submission import TrialIds
from fluid.reports.run.loader import load_run

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, await_uploads, sweep

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Seconds after which a sweep gives up. Far longer than needed, as the machine may be busy.
PATIENCE = 60.0
#: Trials that raise at two iterations, the first time each.
RAISING = {"x": tune.grid_search([1.0, 2.0]), "raises_at": [3, 4], "ends_at": 5}
#: After a failure a trial goes on from the checkpoint of its second iteration.
EVERY_SECOND = tune.CheckpointConfig(checkpoint_frequency=2)


def shown(executor: Any, name: str) -> list[str]:
    """The trials of the newest group of a name, as reports show them."""
    groups = [group for group in load_run(executor.run_dir).groups if group.name == name]
    return [trial.trial_id for trial in groups[-1].trials]


def test_a_sweep_is_resumed_after_each_failure(executor: Any, tmp_path: Path) -> None:
    options = {"config": {**RAISING, "folder": str(tmp_path)}, "checkpoint_config": EVERY_SECOND}
    begun = sweep(Climber, tmp_path, executor, {**options, "time_budget_s": PATIENCE})
    assert begun.statuses == ["ERROR"] * 2
    for last in ("ERROR", "TERMINATED"):
        await_uploads()
        resumed = sweep(Climber, tmp_path, executor, {**options, "resume": "AUTO+ERRORED"})
        assert resumed.statuses == [last] * 2
        assert [trial.iterations[0] for trial in resumed.trials] == [3, 3]
        assert sorted(shown(executor, "sweep")) == sorted(trial.trial_id for trial in begun.analysis.trials)
    assert [trial.iterations for trial in resumed.trials] == [[3, 4, 5]] * 2


def test_a_tuner_is_restored_after_each_failure(executor: Any, tmp_path: Path) -> None:
    tuner = tune.Tuner(
        Climber,
        param_space={**RAISING, "folder": str(tmp_path)},
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path), checkpoint_config=EVERY_SECOND, verbose=0),
        executor=executor,
    )
    assert len(tuner.fit().errors) == 2
    for errors in (2, 0):
        await_uploads()
        tuner = tune.Tuner.restore(str(tmp_path / "sweep"), Climber, executor=executor, resume_errored=True)
        results = tuner.fit()
        assert len(results.errors) == errors
    assert sorted(result.metrics["score"] for result in results) == [5.0, 10.0]


def test_sweeps_whose_trials_have_equal_ids(executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TEST_TUNE_TRIAL_UUID", "same")
    for number in range(3):
        options = {"config": {"x": 1.0, "ends_at": 3}, "num_samples": 2, "name": f"sweep-{number}"}
        done = sweep(Climber, tmp_path, executor, options)
        assert [trial.iterations for trial in done.trials] == [[1, 2, 3]] * 2
        assert shown(executor, f"sweep-{number}") == ["same_00000", "same_00001"]


def test_ids_of_sessions_before_are_taken(tmp_path: Path) -> None:
    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        lines = [{"group": "0", "name": "sweep"}, {"trial": "a", "group": "0"}, {"trial": "a.1", "group": "0"}]
        (executor.run_dir / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ids = TrialIds.of(executor)
        assert [ids.new("a"), ids.new("a"), ids.new("b"), ids.new("b")] == ["a.2", "a.3", "b", "b.1"]
        assert TrialIds.of(executor) is ids
