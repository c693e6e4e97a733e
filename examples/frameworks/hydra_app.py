"""A Hydra application: each job of a multirun is a trial of Fluid. It trains a small network on scikit-learn's digits.

python examples/frameworks/hydra_app.py                                   # one job, in this process
python examples/frameworks/hydra_app.py --multirun                        # the sweep of hydra_app.yaml, on Fluid
python examples/frameworks/hydra_app.py -m hidden=8,16 hydra.launcher.devices=2
"""

from __future__ import annotations

import logging
import warnings

import hydra
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path=".", config_name="hydra_app")
def main(config: DictConfig) -> float:
    """Trains with the config of one job; returns the accuracy, for sweepers that optimize."""
    x, x_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=config.seed)
    model = MLPClassifier(
        (config.hidden,), alpha=config.alpha, max_iter=config.epochs, learning_rate_init=0.01, random_state=config.seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x / 16, y)
    accuracy = float(model.score(x_test / 16, y_test))
    log.info("alpha=%g hidden=%d: accuracy %.4f", config.alpha, config.hidden, accuracy)
    return accuracy


if __name__ == "__main__":
    main()
