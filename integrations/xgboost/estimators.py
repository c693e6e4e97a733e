"""Sweeps over the estimators of XGBoost's scikit-learn interface."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xgboost

from fluid._given_executor import closes_executor
from fluid.errors import InvalidFieldError
from fluid.integrations.boosting import Rounds, as_rows, eval_sets_of, goals_among, rounds_of
from fluid.integrations.options import require_options
from fluid.integrations.xgboost.matrices import Sets
from fluid.integrations.xgboost.sweeps import run_sweep
from fluid.integrations.xgboost.training import direction, raw, train_rounds
from fluid.results.sweep import SweepResult
from fluid.sweep import run
from fluid.user_calls import user_call


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
    sample_weight_eval_set: Sequence[Any] | None = None,
    rounds_per_iteration: int | None = None,
    **options: Any,
) -> SweepResult:
    """Runs a sweep over ``estimator.fit(x, y)``, with ranges among the estimator's parameters.

    Example:
        >>> import numpy as np
        >>> import xgboost
        >>> import fluid.integrations.xgboost
        >>> x = np.random.default_rng(0).normal(size=(200, 3))
        >>> y = x.sum(axis=1) > 0
        >>> model = xgboost.XGBClassifier(n_estimators=9, max_depth=[2, 4], learning_rate=fluid.search.uniform(0.1, 1))
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.integrations.xgboost.fit(
        ...         model, x, y, eval_set=[(x, y)], metric="validation_0-logloss", samples=4
        ...     )
        >>> best = result.best.load_checkpoint()
        >>> type(best).__name__, best.score(x, y) > 0.9
        ('XGBClassifier', True)

    Args:
        estimator: ``XGBClassifier``, ``XGBRegressor`` or one of the random forests. Its ``n_estimators`` are the rounds
            of a trial; its ``early_stopping_rounds`` apply.
        x: the data.
        y: the labels. Classes are 0, 1, ... as XGBoost has them.
        eval_set: pairs of data and labels, or one pair, evaluated as ``validation_0``, ``validation_1``, ...
        metric: which value to optimize, such as ``"validation_0-logloss"``.
        mode: as for :func:`train`.
        sample_weight: weights, as the estimator's ``fit`` takes them.
        sample_weight_eval_set: those of the pairs of ``eval_set``.
        rounds_per_iteration: as for :func:`train`.
        options: further arguments of :func:`fluid.run`.

    Returns:
        As :func:`fluid.run`. ``result.best.load_checkpoint()`` is the best estimator, fitted.

    Raises:
        InvalidFieldError: an argument cannot be used.
        SweepFailedError, SweepInterrupted, FluidError: as :func:`fluid.run`.
    """
    params = _params_of(estimator, y)
    parameter = "is a parameter of the estimator: give it to its class"
    require_options(run, options, dict.fromkeys(estimator.get_params(), parameter))

    def matrix(data: Any, label: Any, weight: Any) -> Any:
        kinds = {"enable_categorical": estimator.enable_categorical, "feature_types": estimator.feature_types}
        return xgboost.DMatrix(data, label=label, weight=weight, missing=estimator.missing, **kinds)

    given = eval_sets_of(eval_set, sample_weight_eval_set, "sample_weight_eval_set")
    evals = [(matrix(*each), f"validation_{number}") for number, each in enumerate(given)]
    trainable = functools.partial(
        _fit,
        estimator=estimator,
        sets=Sets(matrix(as_rows(x), y, sample_weight), evals),
        rounds=rounds_of(estimator.get_num_boosting_rounds(), rounds_per_iteration, estimator.early_stopping_rounds),
    )
    goals = goals_among(metric, mode, [name for _, name in evals], direction)
    return run_sweep(trainable, params, goals, options)


def _params_of(estimator: Any, y: Any) -> dict[str, Any]:
    """Returns the parameters of an estimator's booster, ranges included.

    Raises:
        InvalidFieldError: the estimator is of another kind.
    """
    if not isinstance(estimator, (xgboost.XGBClassifier, xgboost.XGBRegressor)):
        raise InvalidFieldError("estimator", estimator, "must be an XGBClassifier or an XGBRegressor; others: train()")
    for name in ("objective", "eval_metric", "callbacks"):
        value = getattr(estimator, name)
        if callable(value) or (name == "callbacks" and value):
            raise InvalidFieldError(f"estimator.{name}", value, "is a function; train() takes obj= and custom_metric=")
    params = {name: value for name, value in estimator.get_xgb_params().items() if value is not None}
    if isinstance(estimator, xgboost.XGBClassifier):
        classes = np.unique(y)
        if not np.array_equal(classes, np.arange(len(classes))):
            raise InvalidFieldError("y", classes, "must have the classes 0, 1, ...")
        if len(classes) > 2:
            params |= {"objective": "multi:softprob", "num_class": len(classes)}
    return params


def _fit(
    config: dict[str, Any], state: Any, *, estimator: Any, sets: Sets, rounds: Rounds
) -> Iterator[tuple[dict[str, float], Any]]:
    """As :func:`_train`, with the fitted estimator as the state."""
    booster = None if state is None else state.get_booster()
    options: dict[str, Any] = {"obj": None, "custom_metric": None, "maximize": None, "begin": None}
    for metrics, trained in train_rounds(config, booster, sets=sets, rounds=rounds, **options):
        yield metrics, _Fitted(estimator, config, trained)


class _Fitted:
    """An estimator that is fitted when it is unpickled: saving is seldom, and iterations are many."""

    def __init__(self, estimator: Any, config: Mapping[str, Any], booster: Any) -> None:
        self._estimator = estimator
        self._config = config
        self._booster = booster

    def __reduce__(self) -> Any:
        return _fitted, (self._estimator, self._config, raw(self._booster))


def _fitted(estimator: Any, config: Mapping[str, Any], model: bytes) -> Any:
    known = estimator.get_params()
    made = type(estimator)(**{**known, **{name: value for name, value in config.items() if name in known}})
    made.load_model(bytearray(model))
    return made
