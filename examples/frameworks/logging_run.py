"""A sweep that is logged everywhere: TensorBoard, MLflow, Weights & Biases (offline), CSV, Parquet and Prometheus.

    python examples/frameworks/logging_run.py --folder logs
    tensorboard --logdir logs/tensorboard
    mlflow ui --backend-store-uri sqlite:///logs/mlflow.db
    wandb sync logs/wandb/offline-run-*

It tunes a linear classifier of scikit-learn's digits; an iteration is a pass over the data. See docs/watching.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

import fluid
from fluid.loggers import CSV, MLflow, Parquet, TensorBoard, TrialLogger, WandB
from fluid.search import loguniform


def train(config: dict[str, Any], state: SGDClassifier | None) -> Iterator[tuple[dict[str, Any], SGDClassifier]]:
    pixels, digits = load_digits(return_X_y=True)
    pixels, held_out, digits, truth = train_test_split(pixels / 16.0, digits, random_state=0)
    model = state
    if model is None:
        options = {"learning_rate": "constant", "eta0": config["lr"], "alpha": config["alpha"]}
        model = SGDClassifier(loss="log_loss", random_state=0, **options)
    while True:
        model.partial_fit(pixels, digits, classes=range(10))
        loss = log_loss(truth, model.predict_proba(held_out), labels=range(10))
        yield {"accuracy": model.score(held_out, truth), "loss": {"held_out": loss}}, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", metavar="DIR", help="where the logs go (default: a new temporary folder)")
    add("--samples", type=int, default=9, metavar="N", help="configurations to try (default 9)")
    add("--devices", type=int, metavar="N", help="how many GPUs or CPU cores to use (default all)")
    options = parser.parse_args()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="fluid-logs-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    loggers: list[TrialLogger] = [
        TensorBoard(folder / "tensorboard"),
        MLflow(f"sqlite:///{folder / 'mlflow.db'}"),
        WandB("digits", mode="offline", folder=folder),
        CSV(),
        Parquet(),
    ]
    space = {"lr": loguniform(1e-4, 1.0), "alpha": loguniform(1e-6, 1e-1)}
    with fluid.FluidExecutor(devices=options.devices, loggers=loggers, metrics_port=0) as executor:
        result = fluid.run(
            train, space, metric="accuracy", mode="max", samples=options.samples, budget=9, name="digits"
        )
        page = urlopen(f"http://{executor.metrics_address}/metrics").read().decode()
        print(*(line for line in page.splitlines() if line.startswith("fluid_trials")), sep="\n")
    print(f"best: accuracy {result.best.value:.4f} with {result.best.config}")
    print(f"logs: {folder}; tables: {result.run_dir}/csv and {result.run_dir}/parquet")


if __name__ == "__main__":
    main()
