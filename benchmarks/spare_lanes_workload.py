"""Trials of benchmarks/spare_lanes.py: a small PyTorch model that saves each iteration, and notes when it computes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Noting:
    """Trains a small model for ``seconds`` in each iteration; notes when it is set up and when an iteration begins.

    The config: ``notes``, a folder; ``number``, the trial's; ``seconds``, of an iteration.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._note = Path(config["notes"], f"{config['number']}.txt")
        self._seconds = config["seconds"]
        self._tell("setup", 0)
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.iteration = 0

    def step(self) -> dict[str, Any]:
        self._tell("iteration", self.iteration)
        end = time.monotonic() + self._seconds
        x, y = torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
        loss = torch.zeros(())
        while time.monotonic() < end:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
        self.iteration += 1
        return {"loss": loss.item()}

    def save_checkpoint(self, folder: str) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.iteration}
        torch.save(state, Path(folder, "state.pt"))

    def load_checkpoint(self, folder: str) -> None:
        state = torch.load(Path(folder, "state.pt"))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.iteration = state["done"]

    def _tell(self, what: str, iteration: int) -> None:
        with self._note.open("a") as file:
            file.write(f"{time.monotonic()} {what} {iteration} {os.getpid()}\n")
