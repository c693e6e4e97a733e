"""Reports of training functions that users write themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightgbm

from fluid import get_checkpoint, report
from fluid.errors import require_integer

#: The model, within a checkpoint.
_MODEL_FILE = "model.txt"


def report_callback(rounds_per_iteration: int = 1) -> Callable[[Any], None]:
    """Returns a callback that reports boosting rounds to Fluid, for ``lightgbm.train`` or an estimator's ``fit``.

    Metrics are named ``valid_0-auc``. A trial that is saved goes on if the function passes on what :func:`remaining`
    returns. Outside a trial the callback does nothing.

    Example:
        >>> import lightgbm
        >>> import numpy as np
        >>> import fluid
        >>> from fluid.integrations.lightgbm import remaining, report_callback
        >>> rows = np.random.default_rng(0).normal(size=(200, 3))
        >>> def train(config):
        ...     data = lightgbm.Dataset(rows, rows.sum(axis=1))
        ...     params = {"verbosity": -1, "metric": "l2", **config}
        ...     lightgbm.train(params, data, **remaining(9), valid_sets=[data], callbacks=[report_callback()])
        >>> space = {"learning_rate": fluid.search.loguniform(0.01, 1.0), "num_leaves": [4, 8]}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(train, space, metric="training-l2", mode="min", samples=4, budget=9)
        >>> lightgbm.Booster(model_file=result.best.load_checkpoint() / "model.txt").num_trees()
        9

    Args:
        rounds_per_iteration: boosting rounds between two reports; 1 by default.
    """
    return _RoundReport(require_integer("rounds_per_iteration", rounds_per_iteration, at_least=1))


class _RoundReport:
    """Reports a round."""

    #: Before LightGBM's early stopping, which ends the round by an exception.
    order = 25
    before_iteration = False

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def __call__(self, env: Any) -> None:
        if (env.iteration + 1 - env.begin_iteration) % self._rounds == 0:
            metrics = {f"{each[0]}-{each[1]}": float(each[2]) for each in env.evaluation_result_list}
            report(metrics, save=lambda folder: env.model.save_model(folder / _MODEL_FILE))


def remaining(num_boost_round: int) -> dict[str, Any]:
    """Returns what ``lightgbm.train`` has still to do in this trial: its ``num_boost_round`` and its ``init_model``.

    Example:
        >>> from fluid.integrations.lightgbm import remaining
        >>> remaining(100)
        {'num_boost_round': 100, 'init_model': None}

    Args:
        num_boost_round: rounds of the whole trial.
    """
    folder = get_checkpoint()
    if folder is None:
        return {"num_boost_round": num_boost_round, "init_model": None}
    model = lightgbm.Booster(model_file=folder / _MODEL_FILE)
    return {"num_boost_round": max(0, num_boost_round - model.current_iteration()), "init_model": model}
