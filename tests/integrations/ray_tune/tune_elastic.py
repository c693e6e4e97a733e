"""An elastic trainable that the workers of a sweep can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fluid.elastic import ElasticTrainable, as_tune_trainable


class Fitted(ElasticTrainable):
    """A small regression by AdamW; a batch takes as long as a device would compute on its part of it.

    Config: ``lr``; ``seconds`` of a batch on one device; ``dies``, a rank whose process is killed, once, in the middle
    of its fourth iteration on two devices, and ``note``, the file that it writes then; ``wide``, the number of
    iterations on two devices after which it is done, or ``last``, its last iteration.
    """

    def build(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.config = config
        self.wide = 0
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config["lr"], weight_decay=0.1)
        x = torch.randn(39, 6)
        self.loader = self.make_loader(TensorDataset(x, torch.sin(x[:, :2])), batch_size=13, seed=3)

    def train_batch(self, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        time.sleep(self.config.get("seconds", 0.0) / self.size)
        if self.wide == 3 and self.rank == self.config.get("dies") and not os.path.exists(self.config["note"]):
            open(self.config["note"], "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}

    def end_iteration(self, metrics: dict[str, float]) -> Mapping[str, Any]:
        print(f"iteration {self.iteration + 1}", flush=True)
        self.wide += self.size == 2
        pids = torch.zeros(self.size, dtype=torch.int64)
        pids[self.rank] = os.getpid()
        self._elastic.group.all_reduce(pids)
        done = self.wide >= self.config.get("wide", 1_000) or self.iteration + 1 >= self.config.get("last", 1_000)
        return {**metrics, "lr": self.config["lr"], "width": self.size, "pids": pids.tolist(), "done": done}

    def extra_state(self) -> Any:
        return self.wide

    def load_extra_state(self, state: Any) -> None:
        self.wide = state


TuneFitted = as_tune_trainable(Fitted)


def losses(lr: float, iterations: int) -> list[float]:
    """Returns the losses of a trial in this process, without Fluid or Tune."""
    trial = Fitted()
    trial.setup({"lr": lr})
    return [float(trial.step()["loss"]) for _ in range(iterations)]
