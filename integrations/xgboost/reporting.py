"""Reports of training functions that users write themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xgboost

from fluid import get_checkpoint, report
from fluid.errors import require_integer

#: The model, within a checkpoint.
_MODEL_FILE = "model.ubj"


class ReportCallback(xgboost.callback.TrainingCallback):  # type: ignore[misc]
    """Reports each boosting round to Fluid, from ``xgboost.train`` or an estimator's ``fit``.

    Metrics are named ``valid-logloss``. A trial that is saved goes on if the function passes on what :func:`remaining`
    returns. Outside a trial the callback does nothing.

    Example:
        >>> import numpy as np
        >>> import xgboost
        >>> import fluid
        >>> from fluid.integrations.xgboost import ReportCallback, remaining
        >>> rows = np.random.default_rng(0).normal(size=(200, 3))
        >>> def train(config):
        ...     data = xgboost.DMatrix(rows, label=rows.sum(axis=1))
        ...     told = {"evals": [(data, "train")], "callbacks": [ReportCallback()], "verbose_eval": False}
        ...     xgboost.train(config, data, **remaining(9), **told)
        >>> space = {"eta": fluid.search.loguniform(0.01, 1.0), "max_depth": [2, 4]}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(train, space, metric="train-rmse", mode="min", samples=4, budget=9)
        >>> xgboost.Booster(model_file=result.best.load_checkpoint() / "model.ubj").num_boosted_rounds()
        9

    Args:
        rounds_per_iteration: boosting rounds between two reports; 1 by default.
    """

    def __init__(self, rounds_per_iteration: int = 1) -> None:
        super().__init__()
        self._rounds = require_integer("rounds_per_iteration", rounds_per_iteration, at_least=1)

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Mapping[str, Sequence[Any]]]) -> bool:
        """Reports, after enough rounds."""
        if (epoch + 1) % self._rounds == 0:
            metrics = {
                f"{name}-{metric}": values[-1] for name, log in evals_log.items() for metric, values in log.items()
            }
            report(metrics, save=lambda folder: model.save_model(folder / _MODEL_FILE))
        return False


def remaining(num_boost_round: int) -> dict[str, Any]:
    """Returns what ``xgboost.train`` has still to do in this trial: its ``num_boost_round`` and its ``xgb_model``.

    Example:
        >>> from fluid.integrations.xgboost import remaining
        >>> remaining(100)
        {'num_boost_round': 100, 'xgb_model': None}

    Args:
        num_boost_round: rounds of the whole trial.
    """
    folder = get_checkpoint()
    if folder is None:
        return {"num_boost_round": num_boost_round, "xgb_model": None}
    model = xgboost.Booster(model_file=folder / _MODEL_FILE)
    return {"num_boost_round": max(0, num_boost_round - model.num_boosted_rounds()), "xgb_model": model}
