"""What benchmarks/xgboost_study.py tunes: XGBoost on scikit-learn's handwritten digits, each image in nine places."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import xgboost

CLASSES = 10
ROUNDS = 50


@functools.cache
def matrices() -> tuple[xgboost.DMatrix, xgboost.DMatrix]:
    """Returns the data to train on, 12,123 images, and 450 images to compare models on."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    held_out = np.arange(len(images)) % 4 == 0
    places = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1)]
    pictures = images[~held_out].reshape(-1, 8, 8)
    moved = np.concatenate([np.roll(pictures, place, axis=(1, 2)) for place in places]).reshape(-1, 64)
    training = xgboost.DMatrix(moved, np.tile(labels[~held_out], len(places)), nthread=1)
    return training, xgboost.DMatrix(images[held_out], labels[held_out], nthread=1)


FIXED = {"objective": "multi:softprob", "num_class": CLASSES}


def objective(trial: Any, nthread: int | None = 1) -> float:
    """An objective of Optuna, which knows nothing of Fluid.

    Args:
        trial: Optuna's.
        nthread: threads of XGBoost; ``None`` for as many as XGBoost takes by itself, all cores.
    """
    params = {
        **FIXED,
        "nthread": nthread,
        "max_depth": trial.suggest_int("max_depth", 2, 6),
        "eta": trial.suggest_float("eta", 0.03, 1.0, log=True),
        "min_child_weight": trial.suggest_float("min_child_weight", 0.5, 8.0, log=True),
        "lambda": trial.suggest_float("lambda", 1e-3, 10.0, log=True),
    }
    training, valid = matrices()
    told: dict[str, Any] = {}
    xgboost.train(params, training, ROUNDS, evals=[(valid, "valid")], evals_result=told, verbose_eval=False)
    return float(told["valid"]["mlogloss"][-1])
