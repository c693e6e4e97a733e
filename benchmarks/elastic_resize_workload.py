"""The training of elastic_resize.py: under Fluid, and in its own loop under Horovod's elastic driver."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fluid.elastic import ElasticTrainable

#: Width of the hidden layers, of which there are two.
MODELS = {"small": 128, "10M": 2816}
BATCH = 32
BATCHES = 2


def make_model(hidden: int) -> nn.Module:
    """A perceptron."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """The batches of an iteration."""
    return torch.randn(BATCH * BATCHES, 784), torch.randint(10, (BATCH * BATCHES,))


class Perceptron(ElasticTrainable):
    """A perceptron trained by AdamW; an iteration is two batches of 32."""

    def build(self, config: dict[str, Any]) -> None:
        self.model = make_model(config["hidden"]).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loader = self.make_loader(TensorDataset(*make_data()), BATCH)

    def train_batch(self, batch: Any) -> dict[str, Any]:
        x, y = (part.to(self.device) for part in batch)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}


def note(path: str, size: int) -> None:
    """Appends the end of an iteration, and the width it had, to a file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{time.perf_counter()} {size}\n")


def train_under_horovod(hidden: int, log: str) -> None:
    """A worker of Horovod's elastic driver, as in its documentation; trains until it is killed."""
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    model = make_model(hidden)
    x, y = make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, iteration=0)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def loop(state: Any) -> None:
        while True:
            rank, size = hvd.rank(), hvd.size()
            for start in range(0, len(x), BATCH):
                part = slice(start + BATCH * rank // size, start + BATCH * (rank + 1) // size)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[part]), y[part]).backward()
                optimizer.step()
            state.iteration += 1
            if rank == 0:
                note(log, size)
            state.commit()

    loop(state)


if __name__ == "__main__":
    train_under_horovod(int(sys.argv[1]), sys.argv[2])
