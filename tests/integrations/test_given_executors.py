"""Calls of integrations that refuse their arguments: an executor that they would close at their end is closed."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import FluidExecutor

SPACE = {"x": [1]}


def objective(trial: Any) -> float:
    return 0.0


def train(config: dict[str, Any]) -> dict[str, Any]:
    return {"loss": 0.0}


def of_fluid(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"fluid.{module}"), name)


def optuna(**options: Any) -> Any:
    import optuna

    return of_fluid("integrations.optuna", "optimize")(optuna.create_study(), objective, n_trials=-1, **options)


def hpbandster(**options: Any) -> Any:
    return of_fluid("integrations.hpbandster", "run")("HyperBand", None, train, max_budget=-1, **options)


def xgboost(name: str, **options: Any) -> Any:
    return of_fluid("integrations.xgboost", name)(None, SPACE, None, metric="loss", **options)


def lightgbm(name: str, **options: Any) -> Any:
    return of_fluid("integrations.lightgbm", name)(None, SPACE, None, metric="loss", **options)


def lightning(**options: Any) -> Any:
    return of_fluid("integrations.lightning", "sweep")("no module", SPACE, metric="loss", **options)


def transformers(**options: Any) -> Any:
    return of_fluid("integrations.transformers", "hyperparameter_search")("no trainer", SPACE, **options)


def tune_run(**options: Any) -> Any:
    return of_fluid("tune", "run")(train, scheduler="no such scheduler", **options)


def tuner(**options: Any) -> Any:
    return of_fluid("tune", "Tuner")(train, param_space=3, **options)


def restored(**options: Any) -> Any:
    return of_fluid("tune", "Tuner").restore("/no/such/folder", train, **options)


def fit(executor: FluidExecutor) -> Any:
    tuner = of_fluid("tune", "Tuner")(train, executor=executor)
    tuner._local_tuner.trainable = 3  # So that the call is refused before its sweep begins.
    return tuner.fit()


def needs(*modules: str) -> pytest.MarkDecorator:
    return pytest.mark.frameworks(*modules)


@pytest.fixture
def ray_ends() -> Iterator[None]:
    """Ends the cluster that a call may have started."""
    yield
    if ray := sys.modules.get("ray"):
        ray.shutdown()


@pytest.mark.usefixtures("ray_ends")
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(optuna, marks=needs("optuna")),
        pytest.param(hpbandster, marks=needs("hpbandster")),
        pytest.param(functools.partial(xgboost, "train"), marks=needs("xgboost"), id="xgboost-train"),
        pytest.param(functools.partial(xgboost, "fit"), marks=needs("xgboost"), id="xgboost-fit"),
        pytest.param(functools.partial(lightgbm, "train"), marks=needs("lightgbm"), id="lightgbm-train"),
        pytest.param(functools.partial(lightgbm, "fit"), marks=needs("lightgbm"), id="lightgbm-fit"),
        pytest.param(lightning, marks=needs("lightning")),
        pytest.param(transformers, marks=needs("transformers")),
        pytest.param(tune_run, marks=needs("ray")),
        pytest.param(tuner, marks=needs("ray")),
        pytest.param(restored, marks=needs("ray")),
        pytest.param(fit, marks=needs("ray")),
    ],
)
def test_a_call_that_raises_closes_the_executor_that_it_was_given(call: Callable[..., Any], tmp_path: Path) -> None:
    executor = FluidExecutor(backend="local", devices=1, run_dir=tmp_path, verbose=0)
    with pytest.raises(Exception) as raised:
        call(executor=executor)
    assert executor.closed, raised.value
