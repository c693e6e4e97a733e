"""Searches without a last trial (``num_samples=-1``): they run until a stopper or the time budget ends them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from fluid import tune
from fluid.errors import InvalidFieldError

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, sweep

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

#: Seconds after which a sweep gives up. Far longer than needed, as the machine may be busy.
PATIENCE = 60.0
SCORE = {"metric": "score", "mode": "max", "time_attr": "training_iteration"}
#: Trials that may wait, by Tune's own limit, and results after which the sweeps end.
PENDING, RESULTS = 8, 60


class EndsAll(Stopper):
    """Ends a sweep after so many results, and records the most trials that waited."""

    def __init__(self) -> None:
        self.results = 0

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.results += 1
        return False

    def stop_all(self) -> bool:
        return self.results >= RESULTS


class Watch(tune.Callback):
    def __init__(self) -> None:
        self.most_waiting = 0

    def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
        waiting = sum(trial.status in ("PENDING", "PAUSED") for trial in trials)
        self.most_waiting = max(self.most_waiting, waiting)


class Counts(Searcher):
    def __init__(self) -> None:
        super().__init__(metric="score", mode="max")
        self.number = 0

    def suggest(self, trial_id: str) -> dict[str, float]:
        self.number += 1
        return {"x": float(self.number), "ends_at": 3}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        pass


@pytest.mark.parametrize(
    ("scheduler", "searcher"),
    [
        (lambda: None, lambda: None),
        (lambda: ASHAScheduler(**SCORE, max_t=3, grace_period=1), lambda: None),
        (lambda: None, Counts),
        (lambda: tune.SuccessiveHalvingScheduler("score", "max", max_t=3, bracket_size=3), lambda: None),
        (lambda: tune.SuccessiveHalvingScheduler("score", "max", max_t=3, bracket_size=3), Counts),
    ],
    ids=["random", "asha", "searcher", "halving", "halving with a searcher"],
)
def test_trials_are_made_as_others_end(
    executor: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: Callable[[], TrialScheduler | None],
    searcher: Callable[[], Searcher | None],
) -> None:
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", str(PENDING))
    watch = Watch()
    options = {
        "config": None if searcher() else {"x": tune.uniform(0.0, 1.0), "ends_at": 3},
        "num_samples": -1,
        "scheduler": scheduler(),
        "search_alg": searcher(),
        "stop": EndsAll(),
        "callbacks": [watch],
        "time_budget_s": PATIENCE,
    }
    # Not all of its trials begin.
    done = tune.run(Climber, storage_path=str(tmp_path), verbose=0, executor=executor, **options)
    assert options["stop"].results >= RESULTS
    assert watch.most_waiting <= PENDING + 3
    assert {trial.status for trial in done.trials} == {"TERMINATED"}


def test_a_limit_on_pending_trials_that_the_user_sets_is_obeyed(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_MAX_PENDING_TRIALS_PG", "2")
    watch = Watch()
    options = {"config": {"x": 1.0, "ends_at": 2}, "num_samples": 12, "callbacks": [watch], "time_budget_s": PATIENCE}
    done = sweep(Climber, tmp_path, executor, options)
    assert [trial.iterations for trial in done.trials] == [[1, 2]] * 12
    assert watch.most_waiting <= 2


def test_a_bracket_of_all_trials_of_an_endless_search_is_refused(executor: Any, tmp_path: Path) -> None:
    options = {
        "config": {"x": tune.uniform(0.0, 1.0)},
        "num_samples": -1,
        "scheduler": tune.SuccessiveHalvingScheduler("score", "max", max_t=3),
        "time_budget_s": PATIENCE,
    }
    with pytest.raises(InvalidFieldError, match="bracket_size=None"):
        sweep(Climber, tmp_path, executor, options)
