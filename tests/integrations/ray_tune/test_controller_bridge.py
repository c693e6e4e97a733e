"""Rare orders of the controller's requests and the engine's events."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, HyperBandScheduler, PopulationBasedTraining

from fluid import tune
from fluid.integrations.ray_tune.controller import bridge as controller_bridge
from fluid.integrations.ray_tune.controller.bridge import ControllerBridge

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, sweep

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Seconds after which a sweep gives up. Far longer than needed, as the machine may be busy.
PATIENCE = 60.0


def test_a_trial_continues_if_its_end_is_reported_after_the_decision_about_its_last_result(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This happens to a trial that is preempted in its last iteration.
    end, result, train = ControllerBridge.on_end, ControllerBridge.on_result, ControllerBridge.train
    #: Trials whose next result was requested after the last one, and ends that are held back until then.
    asked: set[str] = set()
    held: dict[str, tuple[Any, ...]] = {}

    def on_result(self: Any, one: Any) -> None:
        asked.discard(one.trial_id)
        result(self, one)

    def on_end(self: Any, trial_id: str, *how: Any) -> None:
        held[trial_id] = how
        if trial_id in asked:
            end(self, trial_id, *held.pop(trial_id))

    def ask(self: Any, actor: Any, task: Any) -> None:
        train(self, actor, task)
        trial_id = self._trials[actor].trial_id
        asked.add(trial_id)
        if trial_id in held:
            end(self, trial_id, *held.pop(trial_id))

    monkeypatch.setattr(ControllerBridge, "on_result", on_result)
    monkeypatch.setattr(ControllerBridge, "on_end", on_end)
    monkeypatch.setattr(ControllerBridge, "train", ask)
    asha = ASHAScheduler(
        time_attr="training_iteration", metric="score", mode="max", max_t=4, grace_period=1, reduction_factor=2
    )
    options = {"config": {"x": tune.grid_search([2.0, 1.0])}, "scheduler": asha, "time_budget_s": PATIENCE}
    done = sweep(Climber, tmp_path / "sweep", executor, options)
    assert done.trials[0].iterations == [1, 2, 3, 4]
    assert done.statuses == ["TERMINATED"] * 2


SCORE = {"metric": "score", "mode": "max", "time_attr": "training_iteration"}
SCHEDULERS = {
    "fifo": lambda: FIFOScheduler(),
    "hyperband": lambda: HyperBandScheduler(**SCORE, max_t=4, reduction_factor=2),
    "pbt": lambda: PopulationBasedTraining(
        **SCORE, perturbation_interval=2, hyperparam_mutations={"x": [0.1, 3.0]}, synch=True
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_controller_is_told_of_a_few_live_trials_at_a_time_however_far_lanes_run_ahead(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    # Tune's loggers keep files open for each live trial.
    monkeypatch.setattr(controller_bridge, "_MOST_LIVE", 2)
    monkeypatch.setattr(controller_bridge, "_MOST_LIVE_PER_DEVICE", 1)
    report, numbers = ControllerBridge._report_start, []

    def report_start(self: Any, tune_trial: Any) -> None:
        report(self, tune_trial)
        numbers.append(self.number_live)

    monkeypatch.setattr(ControllerBridge, "_report_start", report_start)
    options = {
        # Two trials run at the same time: an iteration takes longer than to report a trial.
        "config": {"x": tune.grid_search([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), "seconds": 0.1},
        "scheduler": SCHEDULERS[scheduler](),
        "stop": {"training_iteration": 4},
        "time_budget_s": PATIENCE,
    }
    done = sweep(Climber, tmp_path / "sweep", executor, options)
    # A trial of a population may have paused before the next one is reported.
    assert max(numbers) == 2 or (scheduler == "pbt" and max(numbers) == 1)
    assert done.statuses == ["TERMINATED"] * 6
    assert all(trial.iterations == list(range(1, len(trial.rows) + 1)) for trial in done.trials)
    assert max(trial.iterations[-1] for trial in done.trials) == 4


@pytest.mark.parametrize("stop", [{}, {"training_iteration": 100}, {"score": 99.5}], ids=["", "iterations", "metric"])
def test_a_trial_may_say_it_is_done_in_the_last_iteration_that_it_was_granted(
    executor: Any, tmp_path: Path, stop: dict[str, float]
) -> None:
    # 100 iterations are granted to a trial of unknown length.
    options = {"config": {"x": 1.0, "ends_at": 100}, "num_samples": 3, "stop": stop, "time_budget_s": PATIENCE}
    done = sweep(Climber, tmp_path / "sweep", executor, options)
    assert [trial.iterations for trial in done.trials] == [list(range(1, 101))] * 3
    assert done.statuses == ["TERMINATED"] * 3
    again = sweep(Climber, tmp_path / "again", executor, {**options, "config": {"x": 1.0, "ends_at": 101}})
    assert [len(trial.rows) for trial in again.trials] == [101 if not stop else 100] * 3
