"""Rare orders of the controller's requests and the engine's events."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.tune.schedulers import ASHAScheduler

from fluid import tune
from fluid.integrations.ray_tune.controller_bridge import ControllerBridge

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, sweep

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

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
