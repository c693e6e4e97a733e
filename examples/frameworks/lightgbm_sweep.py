"""Tunes LightGBM on scikit-learn's handwritten digits, with boosting rounds as iterations.

    python examples/frameworks/lightgbm_sweep.py [--samples 12] [--rounds 27] [--devices N] [--algorithm asha]

Needs ``pip install '.[lightgbm,sklearn]'``.
"""

from __future__ import annotations

import argparse

import lightgbm
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fluid.integrations.lightgbm
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
    data = lightgbm.Dataset(x, y)
    valid = lightgbm.Dataset(x_valid, y_valid, reference=data)
    params = {
        "objective": "multiclass",
        "num_class": 10,
        "metric": ["multi_logloss", "multi_error"],
        "num_leaves": randint(4, 32),
        "learning_rate": loguniform(0.03, 0.5),
        "feature_fraction": uniform(0.3, 1.0),
    }
    # It trains on the CPU: a trial on a GPU would only keep the GPU from others.
    with fluid.FluidExecutor(devices=options.devices or "cpu"):
        result = fluid.integrations.lightgbm.train(
            params,
            data,
            options.rounds,
            valid_sets=[valid],
            metric="valid_0-multi_error",
            samples=options.samples,
            algorithm=options.algorithm,
            min_budget=min(3, options.rounds),
        )
    booster = result.best.load_checkpoint()
    accuracy = (booster.predict(x_valid).argmax(axis=1) == y_valid).mean()
    print(f"best: {result.best.config}")
    print(f"a model of {booster.current_iteration()} rounds, right on {accuracy:.1%} of the digits held out")


if __name__ == "__main__":
    main()
