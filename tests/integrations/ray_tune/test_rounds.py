"""Ray Tune's trials in rounds: all advance together, an iteration each in turn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray.tune

from fluid import FluidExecutor, tune

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, sweep

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("cluster"),
]


class Order(ray.tune.Callback):
    """The trials in the order of their results, by their ``x``."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any) -> None:
        self.seen.append((result["training_iteration"], trial.config["x"]))


def test_all_trials_of_a_grid_have_their_first_result_before_any_has_its_second(tmp_path: Path) -> None:
    order, grid = Order(), list(range(6))
    options = {"config": {"x": tune.grid_search(grid), "seconds": 0.02}, "stop": {"training_iteration": 4}}
    with FluidExecutor("local", devices=1, rounds=True, verbose=0, run_dir=tmp_path / "run") as executor:
        sweep(Climber, tmp_path / "sweep", executor, {**options, "callbacks": [order]})
    assert sorted(order.seen) == [(iteration, x) for iteration in range(1, 5) for x in grid]
    assert [iteration for iteration, _ in order.seen] == sorted(iteration for iteration, _ in order.seen)
