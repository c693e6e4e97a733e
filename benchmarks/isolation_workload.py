"""Trials of benchmarks/isolation.py: empty ones, short ones, and a small PyTorch model whose trials note what they do.

The module itself does without PyTorch, so that the driver does not load it.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def empty(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Yields once."""
    yield {"loss": 0.0}


def busy(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Ten iterations of 10 ms, with PyTorch imported."""
    import torch

    for _ in range(10):
        end = time.perf_counter() + 0.01
        while time.perf_counter() < end:
            pass
        yield {"loss": float(torch.zeros(()))}


_loaded: list[bool] = []


def ones(count: int) -> Any:
    """An array, and a note that this process has made it."""
    import numpy as np

    _loaded.append(True)
    return np.ones(count)


def attaching(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Gets an array of 100 MB, which one process makes."""
    import fluid

    begun = time.perf_counter()
    fluid.shared(ones, 12_500_000)
    yield {"ms": 1e3 * (time.perf_counter() - begun), "loaded": bool(_loaded)}


def leaking(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Leaks 20 MB in a global, and tells what its process takes."""
    import isolation_workload as own

    own.LEAKED.append(os.urandom(20_000_000))
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    yield {"loss": 0.0, "rss_mb": int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6}


LEAKED: list[bytes] = []


class Noting:
    """A trial that notes when its set-up begins and when its clean-up ends, with PyTorch imported.

    The config: ``notes``, a file.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._note = Path(config["notes"])
        self._tell("setup")
        import torch

        self.torch = torch

    def step(self) -> dict[str, Any]:
        time.sleep(0.05)  # A spare lane is there by then.
        return {"loss": float(self.torch.zeros(()))}

    def cleanup(self) -> None:
        self._tell("end")

    def _tell(self, what: str) -> None:
        with self._note.open("a") as file:
            file.write(f"{time.monotonic()} {what} {os.getpid()}\n")


class Resting:
    """Linear(64) with SGD, whose trials tell their process and whether they were restored."""

    def setup(self, config: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch, self.done, self.was_restored = torch, 0, False
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self) -> dict[str, Any]:
        self.optimizer.zero_grad()
        loss = self.model(self.torch.ones(8, 64)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return {"loss": loss.item(), "pid": os.getpid(), "count": self.done, "was_restored": self.was_restored}

    def save_checkpoint(self, folder: str) -> None:
        self.torch.save({"model": self.model.state_dict(), "done": self.done}, Path(folder, "state.pt"))

    def load_checkpoint(self, folder: str) -> None:
        state = self.torch.load(Path(folder, "state.pt"))
        self.model.load_state_dict(state["model"])
        self.done, self.was_restored = state["done"], True


class Found:
    """Trains a small model; Fluid cannot see that it uses PyTorch before a lane has loaded it.

    The config: ``notes``, a folder; ``batches``, of an iteration.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self._note = Path(config["notes"], "0.txt")
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
