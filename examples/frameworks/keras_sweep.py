"""Tunes a Keras model on scikit-learn's handwritten digits; an epoch is an iteration.

    KERAS_BACKEND=torch python examples/frameworks/keras_sweep.py [--samples 12] [--epochs 9] [--devices N]

Needs ``pip install '.[keras,sklearn]'``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import fluid
from fluid.integrations.keras import fit
from fluid.search import loguniform, uniform


def build(config: Mapping[str, Any]) -> keras.Model:
    """Makes a network of one hidden layer."""
    layers = [
        keras.layers.Input((64,)),
        keras.layers.Dense(config["width"], activation="relu"),
        keras.layers.Dropout(config["dropout"]),
        keras.layers.Dense(10, activation="softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(config["lr"]), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(config: dict[str, Any]) -> None:
    """The function of a trial."""
    keras.utils.set_random_seed(0)
    x, x_valid, y, y_valid = digits()
    fit(build(config), x, y, epochs=config["epochs"], batch_size=32, validation_data=(x_valid, y_valid))


def digits() -> list[Any]:
    """Splits the data, in the same way in each trial."""
    x, y = load_digits(return_X_y=True)
    return list(train_test_split(x / 16, y, random_state=0))


def main() -> None:
    """Runs the sweep, and prints its best model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12, help="number of trials")
    parser.add_argument("--epochs", type=int, default=9, help="epochs of a trial")
    parser.add_argument("--devices", type=int, help="how many devices to use; by default all")
    parser.add_argument("--algorithm", default="asha", help="as fluid.run has it")
    options = parser.parse_args()

    space = {
        "width": [32, 64, 128],
        "lr": loguniform(1e-4, 1e-1),
        "dropout": uniform(0.0, 0.5),
        "epochs": options.epochs,
    }
    with fluid.FluidExecutor(devices=options.devices):
        result = fluid.run(
            train,
            space,
            metric="val_accuracy",
            mode="max",
            samples=options.samples,
            algorithm=options.algorithm,
            budget=options.epochs,
        )
    model = build(result.best.config)
    model.load_weights(result.best.load_checkpoint() / "model.weights.h5")
    _, x_valid, _, y_valid = digits()
    _, accuracy = model.evaluate(x_valid, y_valid, verbose=0)
    print(f"best: {result.best.config}")
    print(f"a model with {model.count_params()} weights, right on {accuracy:.1%} of the digits held out")


if __name__ == "__main__":
    main()
