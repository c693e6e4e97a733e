"""How trials rank in Tune's schedulers, as the engine is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    PopulationBasedTraining,
)

from fluid import TrialGroupHandle, tune
from fluid.search_shape import Rung

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SCORE = {"metric": "score", "mode": "max"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Rung, float]]:
    """What the sweep tells; the engine hears it, too."""
    heard: list[tuple[str, Rung, float]] = []
    rank = TrialGroupHandle.rank

    def listen(handle: TrialGroupHandle, trial_id: str, rung: Rung, score: float) -> None:
        heard.append((trial_id, rung, score))
        rank(handle, trial_id, rung, score)

    monkeypatch.setattr(TrialGroupHandle, "rank", listen)
    return heard


def run(executor: Any, folder: Path, scheduler: Any, values: list[float], **options: Any) -> None:
    sweep(Climber, folder, executor, {"config": {"x": tune.grid_search(values)}, "scheduler": scheduler, **options})


def test_successive_halving(executor: Any, tmp_path: Path, told: Any) -> None:
    scheduler = tune.SuccessiveHalvingScheduler(**SCORE, max_t=9)
    run(executor, tmp_path, scheduler, [float(x) for x in range(1, 10)])
    first = [(rung.size, rung.places, score) for _, rung, score in told if rung.iterations == 1]
    # Less is better: the score of an iteration is x.
    assert {score for *_, score in first} <= {-float(x) for x in range(1, 10)} and len(first) >= 8
    assert {(size, places) for size, places, _ in first} == {(9, 3)}


def test_hyperband(executor: Any, tmp_path: Path, told: Any) -> None:
    scheduler = HyperBandScheduler(**SCORE, max_t=9, reduction_factor=3)
    run(executor, tmp_path, scheduler, [float(x) for x in range(1, 13)])
    brackets = {(rung.iterations, rung.size, rung.places) for _, rung, _ in told}
    assert (1, 9, 3) in brackets or (3, 5, 2) in brackets
    assert all(score < 0.0 for *_, score in told)


def test_asha_ranks_without_limit(executor: Any, tmp_path: Path, told: Any) -> None:
    scheduler = AsyncHyperBandScheduler(**SCORE, max_t=9, grace_period=1, reduction_factor=3)
    run(executor, tmp_path, scheduler, [3.0, 2.0, 1.0, 4.0])
    assert told and all(rung[1:5] == (None, 3, True, 0) for _, rung, _ in told)


def test_populations_have_parents(executor: Any, tmp_path: Path, told: Any) -> None:
    scheduler = PopulationBasedTraining(
        **SCORE,
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"x": [1.0, 2.0]},
        quantile_fraction=0.25,
        synch=True,
    )
    run(executor, tmp_path, scheduler, [1.0, 2.0, 3.0, 4.0], stop={"training_iteration": 6})
    assert told and {(rung.size, rung.places, rung.parents) for _, rung, _ in told} >= {(4, 3, 1)}
    assert {rung.iterations for _, rung, _ in told} <= {2, 4, 6}


def test_without_comparison_nothing_is_told(executor: Any, tmp_path: Path, told: Any) -> None:
    run(executor, tmp_path, FIFOScheduler(), [1.0, 2.0], stop={"training_iteration": 2})
    assert not told
