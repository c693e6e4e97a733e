"""Sweeps over ``lightgbm.train``."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import lightgbm
from lightgbm.basic import _ConfigAliases

from fluid._given_executor import closes_executor
from fluid.errors import InvalidFieldError
from fluid.integrations.boosting import goals_among, rounds_of, space_of, sweep
from fluid.integrations.lightgbm.datasets import DatasetSources
from fluid.integrations.lightgbm.training import direction, train_rounds
from fluid.results.sweep import SweepResult
from fluid.sweeping.algorithms import named
from fluid.user_calls import user_call

#: Parameters whose value is a list or a tuple.
_LISTS = frozenset(
    {"metric", "metrics", "metric_types", "eval_at", "ndcg_eval_at", "ndcg_at", "map_eval_at", "map_at", "label_gain"}
    | {"monotone_constraints", "mc", "monotone_constraint", "monotonic_cst", "interaction_constraints"}
    | {"categorical_feature", "cat_feature", "ignore_column", "max_bin_by_feature", "feature_contri", "fc", "fp"}
    | {"auc_mu_weights", "feature_penalty"}
)
#: Names of the number of boosting rounds.
_ROUNDS = (
    *("num_iterations", "num_iteration", "n_iter", "num_tree", "num_trees", "num_round", "num_rounds", "nrounds"),
    *("num_boost_round", "n_estimators", "max_iter"),
)
#: Names of the number of rounds that early stopping waits.
_PATIENCE = ("early_stopping_round", "early_stopping_rounds", "early_stopping", "n_iter_no_change")
_MIN_DELTA = ("early_stopping_min_delta",)


@user_call
@closes_executor
def train(
    params: Any,
    train_set: Any,
    num_boost_round: int = 100,
    valid_sets: Any = (),
    valid_names: Any = None,
    feval: Any = None,
    init_model: Any = None,
    *,
    metric: str | Sequence[str],
    mode: str | Sequence[str] | None = None,
    rounds_per_iteration: int | None = None,
    **options: Any,
) -> SweepResult:
    """Runs a sweep over ``lightgbm.train``: each trial trains a booster.

    Example:
        >>> import lightgbm
        >>> import numpy as np
        >>> import fluid.integrations.lightgbm
        >>> rows = np.random.default_rng(0).normal(size=(200, 3))
        >>> data = lightgbm.Dataset(rows, rows.sum(axis=1))
        >>> params = {"learning_rate": fluid.search.loguniform(0.01, 1.0), "num_leaves": [4, 8], "metric": "l2"}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.integrations.lightgbm.train(
        ...         params, data, 9, valid_sets=[data], valid_names=["train"], metric="train-l2", samples=4
        ...     )
        >>> result.best.load_checkpoint().num_trees(), result.best.value < 3.0
        (9, True)

    Args:
        params: parameters of the booster; lists of choices and distributions of :mod:`fluid.search` are tuned. Or a
            function of an Optuna trial that returns parameters. Without ``num_threads`` a trial uses the threads of its
            device: one on a CPU core. ``early_stopping_round`` and the number of rounds are as ``lightgbm.train`` has
            them.
        train_set: the data, a ``Dataset`` that still has its raw data.
        num_boost_round: most boosting rounds of a trial; 100 by default.
        valid_sets: sets to evaluate, as ``lightgbm.train`` takes them.
        valid_names: their names.
        feval: function for further metrics, or several.
        init_model: model to begin with: a ``Booster`` or a path.
        metric: which value to optimize, such as ``"valid_0-auc"``.
        mode: ``"min"`` or ``"max"``; ``None``, the default, for what ``feval`` says of its metrics, for
            which it is called once here with constant predictions; else for the direction of LightGBM's own metric,
            else for what the name says (``docs/sweeps.md``).
        rounds_per_iteration: boosting rounds of an iteration, between which a trial can be stopped or saved; sets are
            evaluated at its end. ``None``, the default, for one, or as many as make 100 iterations of more rounds.
        options: further arguments of :func:`fluid.run`: ``samples``, ``algorithm``, ``seed``, ``executor``, ...

    Returns:
        As :func:`fluid.run`. ``result.best.load_checkpoint()`` is the best ``lightgbm.Booster``.

    Raises:
        InvalidFieldError: an argument cannot be used.
        SweepFailedError, SweepInterrupted, FluidError: as :func:`fluid.run`.
    """
    space, taken = _without(params, (*_ROUNDS, *_PATIENCE, *_MIN_DELTA))
    most = next((taken[name] for name in _ROUNDS if name in taken), num_boost_round)
    patience = next((taken[name] for name in _PATIENCE if name in taken), None)
    obj = None
    if isinstance(space, Mapping) and callable(space.get("objective")):
        space = dict(space)
        obj = space.pop("objective")
    _require_known_names(space)
    valid = [valid_sets] if isinstance(valid_sets, lightgbm.Dataset) else list(valid_sets or ())
    if not valid:
        raise InvalidFieldError("valid_sets", valid_sets, "must name a set: a trial reports its metrics")
    model = lightgbm.Booster(model_file=init_model) if _is_path(init_model) else init_model
    trainable = functools.partial(
        train_rounds,
        sources=DatasetSources(train_set, valid),
        names=_names_of(train_set, valid, valid_names),
        rounds=rounds_of(most, rounds_per_iteration, patience, taken.get(*_MIN_DELTA, 0.0)),
        obj=obj,
        feval=feval,
        begin=None if model is None else model.model_to_string(),
    )
    said = {} if feval is None or mode is not None else trainable.keywords["sources"].modes_said(feval, space)
    return run_sweep(trainable, space, metric, mode, options, said)


def run_sweep(
    trainable: functools.partial[Any],
    params: Any,
    metric: Any,
    mode: Any,
    options: Mapping[str, Any],
    said: Mapping[str, str] = MappingProxyType({}),
) -> SweepResult:
    """Runs the sweep of a trainable that takes ``rounds`` and ``names``; ``said`` has modes by the user's metrics."""
    names = trainable.keywords["names"]
    return sweep(
        trainable,
        space_of(params, _LISTS),
        rounds=trainable.keywords["rounds"],
        goals=goals_among(metric, mode, names, lambda name: said.get(name) or direction(name)),
        options={"name": f"lightgbm-{named(options.get('algorithm', 'asha'))}", **options},
    )


def _without(params: Any, names: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Returns parameters without those names, and the values that these had."""
    if not isinstance(params, Mapping):
        return params, {}
    taken = {name: params[name] for name in names if name in params}
    for name, value in taken.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidFieldError(f"params[{name!r}]", value, "must be a number: it cannot be tuned")
    return {name: value for name, value in params.items() if name not in taken}, taken


def _require_known_names(params: Any) -> None:
    """Refuses names that LightGBM would ignore, so that all trials would be the same."""
    aliases = _ConfigAliases._get_all_param_aliases()
    known = set(aliases).union(*aliases.values())
    for name in params if isinstance(params, Mapping) else ():
        if name not in known:
            alike = difflib.get_close_matches(str(name), known, n=1)
            meant = f"; {alike[0]!r} is one" if alike else ""
            raise InvalidFieldError(f"params[{name!r}]", params[name], f"is no parameter of LightGBM{meant}")


def _names_of(train_set: Any, valid_sets: Sequence[Any], names: Any) -> list[str]:
    given = [names] if isinstance(names, str) else list(names or ())
    if len(given) > len(valid_sets):
        raise InvalidFieldError("valid_names", names, f"has more names than the {len(valid_sets)} sets")
    defaults = ["training" if dataset is train_set else f"valid_{number}" for number, dataset in enumerate(valid_sets)]
    return [*given, *defaults[len(given) :]]


def _is_path(model: Any) -> bool:
    return model is not None and not isinstance(model, lightgbm.Booster)
