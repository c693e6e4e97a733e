"""The trials of tune_scalability.py."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ray import tune


class Sleeper(tune.Trainable):  # type: ignore[misc]
    """Sleeps, improves at its own rate, and saves as many bytes as asked for. It can be reused for another trial."""

    def setup(self, config: dict[str, Any]) -> None:
        self.iterations = 0
        self.state = os.urandom(config["size"])

    def step(self) -> dict[str, float]:
        time.sleep(self.config["sleep_s"])
        self.iterations += 1
        return {"score": self.iterations * self.config["x"]}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "state").write_bytes(self.state)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.state = (Path(checkpoint_dir) / "state").read_bytes()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True


class Count(tune.Callback):  # type: ignore[misc]
    """Counts the results that Tune receives; ``first`` is when the first one came, on the performance counter."""

    def __init__(self) -> None:
        self.results, self.first = 0, 0.0

    def on_trial_result(self, **_: Any) -> None:
        self.first = self.first or time.perf_counter()
        self.results += 1
