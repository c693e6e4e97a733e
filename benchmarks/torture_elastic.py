"""The elastic trials of torture.py. Apart from the others, as it imports PyTorch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torture_nasty import spoil
from torture_trials import be_nasty, link

from fluid.elastic import ElasticTrainable

#: Parameters of the model, all whole numbers that follow from the value: a newcomer that has others shows.
_PARAMETERS = 1000


def weights(value: str) -> torch.Tensor:
    """Returns the parameters that belong to a value."""
    start = int(value or "0", 16) % 10_007
    return ((torch.arange(_PARAMETERS) * 31 + start) % 10_007).float()


class ElasticChain(ElasticTrainable):
    """The chain of hashes on several devices: the value in the extra state, and parameters that must agree with it."""

    def build(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.value = ""
        self.done = 0
        self.model = nn.Linear(_PARAMETERS, 1, bias=False)
        with torch.no_grad():
            self.model.weight.copy_(weights(""))
        self.loader = self.make_loader(TensorDataset(torch.arange(8.0).reshape(8, 1)), batch_size=8)

    def train_iteration(self) -> dict[str, Any]:
        name = self.config["seed"].rpartition("/")[2]
        if self.size > 1 and self.rank == 0:
            Path(self.config["notes"], f"rank0.{name}").write_text(str(os.getpid()))
        time.sleep(self.config["seconds"] / self.size)
        answer = be_nasty(self.config, self.config["seed"].replace("/", "-"), self.done + 1)
        (mean,) = (self.all_reduce_mean(batch.mean()) for (batch,) in self.loader)
        if abs(mean - 3.5) > 1e-4 or not torch.equal(self.model.weight.flatten(), weights(self.value)):
            self.value = "wrong"
        self.done += 1
        self.value = link(self.config["seed"], self.done, self.value)
        with torch.no_grad():
            self.model.weight.copy_(weights(self.value))
        return spoil({"value": self.value, "pid": os.getpid()}, answer)

    def extra_state(self) -> Any:
        return self.done, self.value

    def load_extra_state(self, state: Any) -> None:
        self.done, self.value = state
