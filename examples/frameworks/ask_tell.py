"""A sweep whose configs a search library suggests: Ax, SMAC, or a searcher of your own.

    python examples/frameworks/ask_tell.py                      # a local search of 20 lines
    python examples/frameworks/ask_tell.py --searcher ax
    python examples/frameworks/ask_tell.py --searcher smac      # its Hyperband says how far each trial runs

It tunes a small network on scikit-learn's digits; an iteration is an epoch. See docs/searchers.md.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

import fluid
from fluid.search import AskTell

EPOCHS = 9


def train(config: dict[str, Any], state: MLPClassifier | None) -> Iterator[tuple[dict[str, float], MLPClassifier]]:
    pixels, digits = load_digits(return_X_y=True)
    pixels, held_out, digits, truth = train_test_split(pixels / 16.0, digits, random_state=0)
    model = state
    if model is None:
        layers = (int(config["width"]),)
        model = MLPClassifier(layers, learning_rate_init=10 ** config["log_lr"], random_state=0)
    while True:
        model.partial_fit(pixels, digits, classes=np.arange(10))
        yield {"accuracy": model.score(held_out, truth)}, model


class LocalSearch:
    """Steps from the best config so far; the steps become smaller where they do not help."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.best: dict[str, Any] = {"log_lr": -3.0, "width": 32}
        self.loss = float("inf")
        self.scale = 1.0

    def ask(self) -> dict[str, Any]:
        log_lr = self.best["log_lr"] + self.random.normal(0.0, self.scale)
        width = self.best["width"] * 2 ** self.random.normal(0.0, self.scale)
        return {"log_lr": float(np.clip(log_lr, -5.0, 0.0)), "width": int(np.clip(width, 8, 128))}

    def tell(self, config: dict[str, Any], loss: float) -> None:
        if loss < self.loss:
            self.best, self.loss = config, loss
        else:
            self.scale *= 0.9


def own_searcher(samples: int) -> Any:
    search = LocalSearch()
    return AskTell(search.ask, search.tell)


def ax_searcher(samples: int) -> Any:
    from ax.api.client import Client
    from ax.api.configs import RangeParameterConfig

    from fluid.integrations.ax import AxSearcher

    client = Client(random_seed=0)
    client.configure_experiment(
        [
            RangeParameterConfig(name="log_lr", parameter_type="float", bounds=(-5.0, 0.0)),
            RangeParameterConfig(name="width", parameter_type="int", bounds=(8, 128), scaling="log"),
        ]
    )
    # Ax begins with quasi-random configs; "quality" in place of "random_search" fits Gaussian processes after these.
    client.configure_generation_strategy(method="random_search")
    return AxSearcher(client)


def smac_searcher(samples: int) -> Any:
    from ConfigSpace import ConfigurationSpace, Float, Integer
    from smac import MultiFidelityFacade, Scenario

    from fluid.integrations.smac import SMACSearcher

    space = ConfigurationSpace(seed=0)
    space.add(Float("log_lr", (-5.0, 0.0)), Integer("width", (8, 128), log=True))
    folder = tempfile.mkdtemp(prefix="smac-")
    budgets = {"min_budget": 1, "max_budget": EPOCHS}
    scenario = Scenario(space, deterministic=True, n_trials=samples, output_directory=folder, **budgets)
    return SMACSearcher(MultiFidelityFacade(scenario, logging_level=False))


SEARCHERS = {"own": own_searcher, "ax": ax_searcher, "smac": smac_searcher}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searcher", choices=sorted(SEARCHERS), default="own", help="what suggests the configs")
    parser.add_argument("--samples", type=int, default=20, help="how often it is asked (default: 20)")
    parser.add_argument("--devices", type=int, help="number of devices (default: all)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="(ax|botorch|torch)")
    with fluid.FluidExecutor(devices=arguments.devices):
        result = fluid.run(
            train,
            metric="accuracy",
            samples=arguments.samples,
            searcher=SEARCHERS[arguments.searcher](arguments.samples),
            algorithm="full" if arguments.searcher == "smac" else "asha",
            budget=EPOCHS,
        )
    epochs = sum(trial.iteration for trial in result.trials)
    print(f"{len(result.trials)} trials, {epochs} epochs")
    print(f"best: accuracy {result.best.value:.4f} with {result.best.config}")


if __name__ == "__main__":
    main()
