"""HpBandSter's BOHB over a small neural network for handwritten digits, on this machine's devices.

python examples/hpbandster_bohb.py --synchronous

It needs HpBandSter and scikit-learn, which has the digits: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import ConfigSpace
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from tuning.interruption import exit_status

from fluid import FluidExecutor
from fluid.integrations.hpbandster import run


class Digits:
    """A network of one hidden layer; an iteration is a pass over the training half."""

    def setup(self, config: dict[str, Any]) -> None:
        images, labels = load_digits(return_X_y=True)
        self.data = train_test_split(images / 16.0, labels, test_size=0.5, random_state=0)
        self.network = MLPClassifier(
            (config["hidden"],),
            activation=config["activation"],
            learning_rate_init=config["lr"],
            alpha=config["alpha"],
            random_state=0,
        )

    def step(self) -> dict[str, float]:
        train, test, train_labels, test_labels = self.data
        self.network.partial_fit(train, train_labels, classes=range(10))
        return {"error": 1.0 - float(self.network.score(test, test_labels))}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "network.pkl").write_bytes(pickle.dumps(self.network))

    def load_checkpoint(self, folder: str) -> None:
        self.network = pickle.loads((Path(folder) / "network.pkl").read_bytes())


def space() -> ConfigSpace.ConfigurationSpace:
    """Returns the search space."""
    made = ConfigSpace.ConfigurationSpace()
    made.add(
        ConfigSpace.UniformFloatHyperparameter("lr", 1e-5, 1e-1, log=True),
        ConfigSpace.UniformFloatHyperparameter("alpha", 1e-6, 1e-1, log=True),
        ConfigSpace.UniformIntegerHyperparameter("hidden", 4, 128, log=True),
        ConfigSpace.CategoricalHyperparameter("activation", ["relu", "tanh", "logistic"]),
    )
    return made


def main() -> None:
    """Prints the best configuration of each budget."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--optimizer", default="BOHB", choices=["BOHB", "HyperBand", "RandomSearch"])
    parser.add_argument("--synchronous", action="store_true", help="one iteration after another")
    parser.add_argument("--max-budget", type=int, default=27, help="passes over the data")
    parser.add_argument("--iterations", type=int, default=4, help="number of runs of Successive Halving")
    parser.add_argument("--devices", type=int, help="how many devices to use (default all)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    executor = FluidExecutor(devices=args.devices)
    result = run(
        args.optimizer,
        space(),
        Digits,
        metric="error",
        max_budget=args.max_budget,
        n_iterations=args.iterations,
        synchronous=args.synchronous,
        executor=executor,
        seed=args.seed,
    )
    runs = [one for one in result.get_all_runs() if one.loss is not None]
    configs = result.get_id2config_mapping()
    for budget in sorted({one.budget for one in runs}):
        best = min((one for one in runs if one.budget == budget), key=lambda one: one.loss)
        count = sum(one.budget == budget for one in runs)
        print(f"budget {budget:g}: {count} runs, lowest error {best.loss:.4f} with {configs[best.config_id]['config']}")
    print(f"run folder {executor.run_dir}")


if __name__ == "__main__":
    with exit_status():
        main()
