"""Trials of benchmarks/lanes.py. As a program, one of them in a process of its own.

    python benchmarks/lanes_workload.py cuda

trains one :class:`Small` for two iterations, prints its process id, and keeps it until its input ends.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

_MATRIX = np.ones((32, 32))


#: Part of an iteration in which :class:`Busy` computes.
COMPUTES = 0.25


class Busy:
    """A trial with iterations of ``seconds``: it multiplies small matrices for a quarter of each, and waits after that.

    So does a trial whose work is done by a GPU. Other programs on the machine hardly make such iterations longer.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Has done nothing."""
        self._seconds = config["seconds"]
        self._weights = _MATRIX / 32.0

    def step(self) -> dict[str, float]:
        """Multiplies, and waits until the seconds are over."""
        ends, until = time.monotonic() + self._seconds, time.thread_time() + COMPUTES * self._seconds
        while time.thread_time() < until:
            self._weights = self._weights @ _MATRIX / 32.0
        time.sleep(max(0.0, ends - time.monotonic()))
        return {"loss": float(self._weights[0, 0])}

    def save_checkpoint(self, folder: str) -> Any:
        """Returns its weights."""
        return self._weights

    def load_checkpoint(self, state: Any) -> None:
        """Restores them."""
        self._weights = state


class Small:
    """A small network with its optimizer on ``device``; after each step it rests for a moment."""

    def setup(self, config: dict[str, Any]) -> None:
        """Makes the network."""
        import torch

        torch.manual_seed(0)
        self._rest_s = config.get("rest_s", 0.0)
        device = config["device"]
        layers = (torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        self._model = torch.nn.Sequential(*layers).to(device)
        self._optimizer = torch.optim.Adam(self._model.parameters())
        self._inputs = torch.randn(128, 256, device=device)
        self._targets = torch.randint(10, (128,), device=device)

    def step(self) -> dict[str, float]:
        """Trains one step."""
        import torch

        self._optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._model(self._inputs), self._targets)
        loss.backward()
        self._optimizer.step()
        time.sleep(self._rest_s)
        return {"loss": float(loss.detach()), "pid": os.getpid()}

    def save_checkpoint(self, folder: str) -> Any:
        """Returns the states of network and optimizer."""
        return self._model.state_dict(), self._optimizer.state_dict()

    def load_checkpoint(self, state: Any) -> None:
        """Restores them."""
        self._model.load_state_dict(state[0])
        self._optimizer.load_state_dict(state[1])


def main() -> None:
    """Trains a trial and keeps it until the end of the input."""
    trial = Small()
    trial.setup({"device": sys.argv[1]})
    trial.step()
    print(int(trial.step()["pid"]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
