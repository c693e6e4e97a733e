"""A sweep and what its user gives it: callbacks and searchers that raise anything, or change what they are given."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from sweep_trainables import curve

import fluid
from fluid import FluidExecutor, Result, SweepResult, TrialListener
from fluid.engine.events import Failure


def run(executor: FluidExecutor, **options: Any) -> SweepResult:
    arguments = {"metric": "loss", "mode": "min", "samples": 4, "budget": 3, "executor": executor, **options}
    return fluid.run(curve, {"x": fluid.search.uniform(0.0, 1.0)}, **arguments)


class Rude(TrialListener):
    """Raises in every method."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_start(self, trial_id: str) -> None:
        raise self.error

    def on_result(self, result: Result) -> None:
        raise self.error

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        raise self.error


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_callback_that_raises_anything_costs_no_result(executor: FluidExecutor, error: type[BaseException]) -> None:
    result = run(executor, algorithm="sha", eta=2, min_budget=1, callbacks=[Rude(error)])
    plain = run(executor, algorithm="sha", eta=2, min_budget=1)
    assert [len(trial.results) for trial in result.trials] == [trial.iteration for trial in result.trials]
    assert sorted(trial.iteration for trial in result.trials) == sorted(trial.iteration for trial in plain.trials)


class Changes(TrialListener):
    """Takes away what it has read, as some loggers do."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_result(self, result: Result) -> None:
        config: Any = result.config
        self.seen.append((result.metrics.pop("loss"), config.pop("x")))
        result.metrics["loss"] = -1.0


def test_callbacks_change_results_of_their_own(executor: FluidExecutor) -> None:
    first, second = Changes(), Changes()
    result = run(executor, algorithm="random", callbacks=[first, second])
    assert len(first.seen) == 12 and first.seen == second.seen
    assert all("x" in trial.config and each.metrics["loss"] >= 0.0 for trial in result.trials for each in trial.results)
    assert all("x" in trial.config for trial in executor.handles[-1].trials)


def test_a_space_that_exits_in_the_sessions_thread_ends_the_sweep_alone(executor: FluidExecutor) -> None:
    """Configs are sampled there, as trials end: here by a function of the user's."""
    session = executor.session

    def space(trial: Any) -> None:
        trial.suggest_float("x", 0.0, 1.0)
        if session.is_in_thread:
            sys.exit(5)

    with pytest.raises(SystemExit) as caught:
        fluid.run(
            curve, space, metric="loss", algorithm="random", samples=50, budget=1, max_concurrent=2, executor=executor
        )
    assert caught.value.code == 5
    assert len(run(executor, algorithm="random").trials) == 4


def test_a_sweep_in_a_listener_is_refused_before_anything_is_submitted(executor: FluidExecutor) -> None:
    raised: list[BaseException] = []

    class Runs(TrialListener):
        def on_start(self, trial_id: str) -> None:
            try:
                run(executor)
            except BaseException as error:
                raised.append(error)

    before = len(executor.handles)
    group = fluid.TrialGroup([fluid.Trial(curve, {"x": 0.5})])
    assert executor.submit_trialgroup(group, Runs()).wait(60.0)
    (error,) = raised
    assert isinstance(error, fluid.FluidError) and "a listener cannot wait for fluid.run" in str(error)
    assert len(executor.handles) == before + 1
