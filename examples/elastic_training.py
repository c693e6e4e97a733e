"""Elastic training without an executor: one run on one process, then on two, then on one again.

python examples/elastic_training.py    (needs PyTorch)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from tuning.interruption import exit_status

from fluid.elastic import ElasticRun, ElasticTrainable


class Circles(ElasticTrainable):
    """A classifier of points inside and outside a ring; one iteration is a pass over the points."""

    def build(self, config: dict[str, Any]) -> None:
        torch.manual_seed(config["seed"])
        points = torch.randn(4_000, 2)
        labels = ((points.norm(dim=1) - 1.0).abs() < 0.4).long()
        model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.model = model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config["lr"])
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=config["iterations"])
        # 65 samples over all devices: of two devices, one gets 32 and the other 33.
        self.loader = self.make_loader(TensorDataset(points, labels), batch_size=65, seed=config["seed"])

    def train_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        x, y = (part.to(self.device) for part in batch)
        self.optimizer.zero_grad()
        scores = self.model(x)
        loss = nn.functional.cross_entropy(scores, y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "accuracy": (scores.argmax(1) == y).float().mean()}

    def end_iteration(self, metrics: dict[str, float]) -> dict[str, float]:
        self.scheduler.step()
        return metrics


def main() -> None:
    """Trains twice, at width 1 and elastically, and compares the losses."""
    config = {"lr": 1e-2, "iterations": 9, "seed": 0}
    losses: dict[str, list[float]] = {}
    for name, widths in (("one process", (1, 1, 1)), ("elastic", (1, 2, 1))):
        losses[name] = []
        with ElasticRun(Circles, config) as run:
            for width in widths:
                run.resize(width)
                for result in run.run(3):
                    losses[name].append(result.metrics["loss"])
                    print(f"{name}: iteration {result.iteration} at width {result.width}, {result.metrics}")
    apart = max(abs(a - b) / b for a, b in zip(losses["elastic"], losses["one process"], strict=True))
    print(f"the losses differ by {apart:.1e} at most, relative")


if __name__ == "__main__":
    with exit_status():
        main()
