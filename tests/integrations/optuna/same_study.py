"""Runs an objective by study.optimize and on Fluid, and compares the studies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluid.integrations.optuna import optimize


def everything(study: Any) -> list[Any]:
    """What a study knows of its trials, but for times."""
    return [
        (
            trial.number,
            trial.state.name,
            trial.values,
            trial.params,
            trial.distributions,
            trial.intermediate_values,
            trial.user_attrs,
            trial.system_attrs,
        )
        for trial in study.trials
    ]


def assert_same(make: Callable[[], Any], objective: Any, n_trials: int = 12, **options: Any) -> Any:
    """Runs a study by study.optimize and on Fluid, one trial at a time; returns the latter."""
    expected, got = make(), make()
    expected.optimize(objective, n_trials=n_trials, **options)
    optimize(got, objective, n_trials=n_trials, n_jobs=1, **options)
    assert everything(got) == everything(expected)
    return got
