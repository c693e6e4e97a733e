"""Trials of benchmarks/spare_lanes.py: a small PyTorch model whose trials note when they compute.

The module itself does without PyTorch, so that the driver does not load it.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any


class Found:
    """Trains a small model; Fluid cannot see that it uses PyTorch before a lane has loaded it.

    The config: ``notes``, a folder; ``number``, the trial's; ``batches``, of an iteration.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._note = Path(config["notes"], f"{config['number']}.txt")
        self._tell("setup")
        self.torch = self.load()
        nn = self.torch.nn
        self.torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.optimizer = self.torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches, self.iteration = config["batches"], 0

    def load(self) -> Any:
        return importlib.import_module("torch")

    def step(self) -> dict[str, Any]:
        self._tell("iteration")
        x, y = self.torch.randn(32, 64), self.torch.zeros(32, dtype=self.torch.int64)
        loss = self.torch.zeros(())
        for _ in range(self.batches):
            self.optimizer.zero_grad()
            loss = self.torch.nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
        self.iteration += 1
        return {"loss": loss.item()}

    def save_checkpoint(self, folder: str) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.iteration}
        self.torch.save(state, Path(folder, "state.pt"))

    def load_checkpoint(self, folder: str) -> None:
        state = self.torch.load(Path(folder, "state.pt"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = state["done"]

    def _tell(self, what: str) -> None:
        with self._note.open("a") as file:
            file.write(f"{time.monotonic()} {what} {os.getpid()}\n")


class Named(Found):
    """The same; the import statement tells Fluid ahead that it uses PyTorch."""

    def load(self) -> Any:
        import torch

        return torch
