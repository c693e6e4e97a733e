"""Sweeps over ``xgboost.train``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xgboost

from fluid._given_executor import closes_executor
from fluid.errors import InvalidFieldError
from fluid.integrations.boosting import goals_among, rounds_of, space_of, sweep, without_set
from fluid.integrations.xgboost.matrices import Sets
from fluid.integrations.xgboost.training import direction, raw, train_rounds
from fluid.results.metrics import Goal
from fluid.results.sweep import SweepResult
from fluid.sweeping.algorithms import named
from fluid.user_calls import user_call

#: Parameters whose value is a list or a tuple.
_LISTS = frozenset(
    {"eval_metric", "interaction_constraints", "monotone_constraints", "quantile_alpha", "expectile_alpha"}
)


@user_call
@closes_executor
def train(
    params: Any,
    dtrain: Any,
    num_boost_round: int = 10,
    *,
    evals: Sequence[tuple[Any, str]] = (),
    metric: str | Sequence[str],
    mode: str | Sequence[str] | None = None,
    obj: Callable[..., Any] | None = None,
    custom_metric: Callable[..., Any] | None = None,
    maximize: bool | None = None,
    early_stopping_rounds: int | None = None,
    xgb_model: Any = None,
    verbose_eval: Any = None,
    rounds_per_iteration: int | None = None,
    **options: Any,
) -> SweepResult:
    """Runs a sweep over ``xgboost.train``: each trial trains a booster.

    Example:
        >>> import numpy as np
        >>> import xgboost
        >>> import fluid.integrations.xgboost
        >>> rows = np.random.default_rng(0).normal(size=(200, 3))
        >>> data = xgboost.DMatrix(rows, label=rows.sum(axis=1))
        >>> params = {"eta": fluid.search.loguniform(0.01, 1.0), "max_depth": [2, 4]}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.integrations.xgboost.train(
        ...         params, data, 9, evals=[(data, "train")], metric="train-rmse", samples=4
        ...     )
        >>> result.best.load_checkpoint().num_boosted_rounds(), result.best.value < 1.0
        (9, True)

    Args:
        params: parameters of the booster; lists of choices and distributions of :mod:`fluid.search` are tuned. Or a
            function of an Optuna trial that returns parameters. Without ``nthread`` a trial uses the threads of its
            device: one on a CPU core.
        dtrain: the data, a ``DMatrix``; or a function that returns it, called once in each process, for other classes.
        num_boost_round: most boosting rounds of a trial; 10 by default.
        evals: sets to evaluate, with their names, as ``xgboost.train`` takes them; a function may stand for a set.
        metric: which value to optimize, such as ``"valid-logloss"``.
        mode: ``"min"`` or ``"max"``; ``None``, the default, for what ``maximize`` says of it, else for the direction of
            XGBoost's own metric, else for what the name says (``docs/sweeps.md``).
        obj: objective function.
        custom_metric: function for a further metric.
        maximize: whether more is better of the metric that early stopping looks at: of ``custom_metric``, else of the
            last ``eval_metric``. ``None``, the default, for what ``mode`` or XGBoost's own metric says.
        early_stopping_rounds: a trial ends if the last metric of the last set has not improved for so many rounds.
        xgb_model: model to begin with: a ``Booster``, a path or its bytes.
        verbose_eval: accepted for a call's sake; Fluid's live view shows how the sweep stands.
        rounds_per_iteration: boosting rounds of an iteration, between which a trial can be stopped or saved; sets are
            evaluated at its end. ``None``, the default, for one, or as many as make 100 iterations of more rounds.
        options: further arguments of :func:`fluid.run`: ``samples``, ``algorithm``, ``seed``, ``executor``, ...

    Returns:
        As :func:`fluid.run`. ``result.best.load_checkpoint()`` is the best ``xgboost.Booster``.

    Raises:
        InvalidFieldError: an argument cannot be used.
        SweepFailedError, SweepInterrupted, FluidError: as :func:`fluid.run`.
    """
    if not evals:
        raise InvalidFieldError("evals", evals, "must name a set: a trial reports its metrics after each iteration")
    sets, names = Sets(dtrain, evals), [name for _, name in evals]
    said = _Said(params, custom_metric, maximize)
    goals = goals_among(metric, mode, names, said.mode_of)
    trainable = functools.partial(
        train_rounds,
        sets=sets,
        rounds=rounds_of(num_boost_round, rounds_per_iteration, early_stopping_rounds),
        obj=obj,
        custom_metric=custom_metric,
        maximize=maximize,
        begin=None if xgb_model is None else raw(xgboost.Booster(model_file=xgb_model)),
        modes={without_set(goal.metric, names): goal.mode for goal in goals},
    )
    return run_sweep(trainable, params, goals, options)


@dataclass(frozen=True)
class _Said:
    """What the call and XGBoost say of the direction of metrics.

    Attributes:
        params, custom_metric, maximize: as :func:`train` takes them.
    """

    params: Any = None
    custom_metric: Any = None
    maximize: bool | None = None

    def mode_of(self, name: str) -> str | None:
        """``"min"`` or ``"max"`` of a metric, by its name without a set; ``None`` if neither says it."""
        if self.maximize is not None and self._is_stopped_by(name):
            return "max" if self.maximize else "min"
        return direction(name)

    def _is_stopped_by(self, name: str) -> bool:
        """Whether early stopping looks at a metric: the custom one, else the last of those in params."""
        params = self.params if isinstance(self.params, Mapping) else {}
        listed = params.get("eval_metric") or ()
        listed = [listed] if isinstance(listed, str) else list(listed)
        if self.custom_metric is None:
            return not listed or name == listed[-1]
        return direction(name) is None or (bool(params.get("disable_default_eval_metric")) and name not in listed)


def run_sweep(trainable: Any, params: Any, goals: Sequence[Goal], options: Mapping[str, Any]) -> SweepResult:
    """Runs the sweep of a trainable that takes ``rounds``."""
    return sweep(
        trainable,
        space_of(params, _LISTS),
        rounds=trainable.keywords["rounds"],
        goals=goals,
        options={"name": f"xgboost-{named(options.get('algorithm', 'asha'))}", **options},
    )
