"""Tunes XGBoost on scikit-learn's handwritten digits, with boosting rounds as iterations.

    python examples/frameworks/xgboost_sweep.py [--samples 12] [--rounds 27] [--devices N] [--algorithm asha]

Needs ``pip install '.[xgboost,sklearn]'``.
"""

from __future__ import annotations

import argparse

import xgboost
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fluid.integrations.xgboost
from fluid.search import loguniform, randint, uniform


def main() -> None:
    """Runs the sweep, and prints its best model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12, help="number of trials")
    parser.add_argument("--rounds", type=int, default=27, help="boosting rounds of a trial")
    parser.add_argument("--devices", type=int, help="how many devices to use; by default all CPU cores")
    parser.add_argument("--algorithm", default="asha", help="as fluid.run has it")
    options = parser.parse_args()

    x, x_valid, y, y_valid = train_test_split(*load_digits(return_X_y=True), random_state=0)
    dtrain, dvalid = xgboost.DMatrix(x, y), xgboost.DMatrix(x_valid, y_valid)
    params = {
        "objective": "multi:softprob",
        "num_class": 10,
        "eval_metric": ["mlogloss", "merror"],
        "max_depth": randint(2, 8),
        "eta": loguniform(0.03, 1.0),
        "subsample": uniform(0.5, 1.0),
        "colsample_bytree": uniform(0.3, 1.0),
    }
    # It trains on the CPU: a trial on a GPU would only keep the GPU from others.
    with fluid.FluidExecutor(devices=options.devices or "cpu"):
        result = fluid.integrations.xgboost.train(
            params,
            dtrain,
            options.rounds,
            evals=[(dvalid, "valid")],
            metric="valid-merror",
            samples=options.samples,
            algorithm=options.algorithm,
            min_budget=min(3, options.rounds),
        )
    booster = result.best.load_checkpoint()
    accuracy = (booster.predict(dvalid).argmax(axis=1) == y_valid).mean()
    print(f"best: {result.best.config}")
    print(f"a model of {booster.num_boosted_rounds()} rounds, right on {accuracy:.1%} of the digits held out")


if __name__ == "__main__":
    main()
