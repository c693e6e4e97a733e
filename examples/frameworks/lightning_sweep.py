"""Tunes a Lightning module on scikit-learn's handwritten digits; an epoch is an iteration.

    python examples/frameworks/lightning_sweep.py [--samples 12] [--epochs 9] [--devices N] [--algorithm asha]

Needs ``pip install '.[lightning,sklearn]'``.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

import fluid
from fluid.integrations.lightning import sweep
from fluid.search import loguniform, uniform


class Digits(L.LightningModule):
    """A network of one hidden layer."""

    def __init__(self, width: int = 64, lr: float = 1e-3, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        hidden = torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Dropout(dropout)
        self.net = torch.nn.Sequential(*hidden, torch.nn.Linear(width, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs what the sweep compares trials by."""
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), self.hparams["lr"])


class DigitsData(L.LightningDataModule):
    """The digits, of which a fifth is held out."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Splits the data, in the same way in each trial."""
        x, y = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
        self.train, self.val = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffles."""
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return DataLoader(self.val, len(self.val))


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
        "batch_size": [32, 64],
    }
    with fluid.FluidExecutor(devices=options.devices):
        result = sweep(
            Digits,
            space,
            datamodule=DigitsData,
            trainer={"max_epochs": options.epochs},
            metric="val_accuracy",
            mode="max",
            samples=options.samples,
            algorithm=options.algorithm,
        )
    model = Digits.load_from_checkpoint(result.best.load_checkpoint() / "lightning.ckpt")
    print(f"best: {result.best.config}")
    print(f"a network of width {model.hparams.width}, right on {result.best.value:.1%} of the digits held out")


if __name__ == "__main__":
    main()
