"""Sweeps over the estimators of LightGBM's scikit-learn interface."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
from lightgbm.basic import _choose_param_value

from fluid._given_executor import closes_executor
from fluid.errors import InvalidFieldError
from fluid.integrations.boosting import Rounds, as_rows, eval_sets_of, rounds_of
from fluid.integrations.lightgbm.datasets import DatasetSources
from fluid.integrations.lightgbm.sweeps import run_sweep
from fluid.integrations.lightgbm.training import train_rounds
from fluid.results.sweep import SweepResult
from fluid.user_calls import user_call

#: Parameters of estimators that are none of a booster.
_OF_ESTIMATORS = ("class_weight", "importance_type", "n_estimators")


@user_call
@closes_executor
def fit(
    estimator: Any,
    x: Any,
    y: Any,
    *,
    eval_set: Sequence[tuple[Any, Any]] | tuple[Any, Any],
    metric: str | Sequence[str],
    mode: str | Sequence[str] | None = None,
    sample_weight: Any = None,
    eval_sample_weight: Sequence[Any] | None = None,
    eval_metric: str | Sequence[str] | None = None,
    early_stopping_rounds: int | None = None,
    rounds_per_iteration: int | None = None,
    **options: Any,
) -> SweepResult:
    """Runs a sweep over ``estimator.fit(x, y)``, with ranges among the estimator's parameters.

    Example:
        >>> import lightgbm
        >>> import numpy as np
        >>> import fluid.integrations.lightgbm
        >>> x = np.random.default_rng(0).normal(size=(200, 3))
        >>> y = x.sum(axis=1) > 0
        >>> rate = fluid.search.uniform(0.1, 1)
        >>> model = lightgbm.LGBMClassifier(n_estimators=9, num_leaves=[4, 8], learning_rate=rate)
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.integrations.lightgbm.fit(
        ...         model, x, y, eval_set=[(x, y)], metric="valid_0-binary_logloss", samples=4
        ...     )
        >>> best = result.best.load_checkpoint()
        >>> type(best).__name__, best.score(x, y) > 0.9
        ('LGBMClassifier', True)

    Args:
        estimator: ``LGBMClassifier`` or ``LGBMRegressor``. Its ``n_estimators`` are the rounds of a trial.
        x: the data.
        y: the labels.
        eval_set: pairs of data and labels, or one pair, evaluated as ``valid_0``, ``valid_1``, ...
        metric: which value to optimize, such as ``"valid_0-multi_logloss"``.
        mode: as for :func:`train`.
        sample_weight: as the estimator's ``fit`` takes it.
        eval_sample_weight: as the estimator's ``fit`` takes it.
        eval_metric: further metrics, by their names, besides the estimator's own ``metric`` or that of its objective.
        early_stopping_rounds: a trial ends if a metric has not improved for so many rounds.
        rounds_per_iteration: as for :func:`train`.
        options: further arguments of :func:`fluid.run`.

    Returns:
        As :func:`fluid.run`. ``result.best.load_checkpoint()`` is the best estimator, fitted.

    Raises:
        InvalidFieldError: an argument cannot be used.
        SweepFailedError, SweepInterrupted, FluidError: as :func:`fluid.run`.
    """
    if not isinstance(estimator, (lightgbm.LGBMClassifier, lightgbm.LGBMRegressor)):
        raise InvalidFieldError("estimator", estimator, "must be an LGBMClassifier or LGBMRegressor; others: train()")
    if callable(estimator.objective):
        raise InvalidFieldError("estimator.objective", estimator.objective, "is a function, which train() takes")
    classes = np.unique(y) if isinstance(estimator, lightgbm.LGBMClassifier) else None
    params = _params_of(estimator, classes)
    if eval_metric is not None:
        params = _with_metrics(params, eval_metric)
    x = as_rows(x)
    sets = eval_sets_of(eval_set, eval_sample_weight, "eval_sample_weight")

    def dataset(data: Any, labels: Any, weight: Any, *, is_train: bool = False) -> Any:
        if is_train and classes is not None and estimator.class_weight is not None:
            from sklearn.utils.class_weight import compute_sample_weight

            balance = compute_sample_weight(estimator.class_weight, labels)
            weight = balance if weight is None else balance * np.asarray(weight)
        return lightgbm.Dataset(data, labels if classes is None else np.searchsorted(classes, labels), weight=weight)

    valid = [dataset(*each) for each in sets]
    first = _first_rows(y, classes)
    trainable = functools.partial(
        _fit,
        made_of=_FittedOf(estimator, x.iloc[first] if hasattr(x, "iloc") else x[first], np.asarray(y)[first]),
        sources=DatasetSources(dataset(x, y, sample_weight, is_train=True), valid),
        names=[f"valid_{number}" for number in range(len(valid))],
        rounds=rounds_of(estimator.n_estimators, rounds_per_iteration, early_stopping_rounds),
    )
    return run_sweep(trainable, params, metric, mode, options)


def _params_of(estimator: Any, classes: Any) -> dict[str, Any]:
    """Returns the parameters of an estimator's booster, ranges included."""
    params = {
        name: value
        for name, value in estimator.get_params().items()
        if value is not None and name not in _OF_ESTIMATORS
    }
    if classes is None:
        return {"objective": "regression", **params}
    if len(classes) <= 2:
        return {"objective": "binary", **params}
    return {"objective": "multiclass", **params, "num_class": len(classes)}


def _with_metrics(params: Mapping[str, Any], further: Any) -> dict[str, Any]:
    """Adds metrics to those that the parameters stand for, as the estimator's own ``fit`` does."""
    names = [further] if isinstance(further, str) or callable(further) else list(further)
    for name in names:
        if not isinstance(name, str):
            raise InvalidFieldError(
                "eval_metric", name, "must be the name of a metric; train() takes functions, as feval="
            )
    params = _choose_param_value("metric", dict(params), params["objective"])
    own = params["metric"]
    own = [own] if isinstance(own, str) else own
    if not isinstance(own, (list, tuple)) or not all(isinstance(name, str) for name in own):
        reason = (
            "cannot be given besides an objective or a metric that is tuned: name all metrics in the estimator's metric"
        )
        raise InvalidFieldError("eval_metric", further, reason)
    return {**params, "metric": list(dict.fromkeys([*names, *own]))}


def _first_rows(y: Any, classes: Any) -> Any:
    """Positions of rows that have all classes, and of two rows at least."""
    if classes is None:
        return np.arange(min(2, len(y)))
    return np.sort(np.unique(np.asarray(y), return_index=True)[1])


@dataclass(frozen=True)
class _FittedOf:
    """What an estimator is fitted with, before it gets its model.

    Attributes:
        estimator: the user's, with ranges.
        x, y: a few rows, with all classes.
    """

    estimator: Any
    x: Any
    y: Any


def _fit(
    config: dict[str, Any],
    state: Any,
    *,
    made_of: _FittedOf,
    sources: DatasetSources,
    names: Sequence[str],
    rounds: Rounds,
) -> Iterator[tuple[dict[str, float], Any]]:
    """As ``train_rounds``, with the fitted estimator as the state."""
    booster = None if state is None else state.booster_
    shared = {"obj": None, "feval": None, "begin": None}
    for metrics, trained in train_rounds(config, booster, sources=sources, names=names, rounds=rounds, **shared):
        yield metrics, _FittedEstimator(made_of, config, trained)


class _FittedEstimator:
    """An estimator that is fitted when it is unpickled: saving is seldom, and iterations are many."""

    def __init__(self, made_of: _FittedOf, config: Mapping[str, Any], booster: Any) -> None:
        self._made_of = made_of
        self._config = config
        self._booster = booster

    def __reduce__(self) -> Any:
        return _fitted, (self._made_of, self._config, self._booster)


def _fitted(made_of: _FittedOf, config: Mapping[str, Any], booster: Any) -> Any:
    """Fits an estimator to a few rows, so that it knows classes and columns, and gives it the model."""
    known = made_of.estimator.get_params()
    params = {**known, **{name: value for name, value in config.items() if name in known}}
    estimator = type(made_of.estimator)(**{**params, "n_estimators": 1, "verbosity": -1})
    estimator.fit(made_of.x, made_of.y)
    estimator.set_params(n_estimators=params["n_estimators"])
    estimator.booster_.model_from_string(booster.model_to_string(num_iteration=-1))
    estimator.booster_.best_iteration = booster.best_iteration
    estimator.booster_.fluid_progress = booster.fluid_progress
    return estimator
