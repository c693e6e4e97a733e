"""What benchmarks/groups_real.py tunes: trials that sleep, longer on devices that it calls slow."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ray.tune import Trainable

#: Gigabytes of each device; all but the first take :data:`SLOWDOWN` times as long.
DEVICES = (8.0, 2.0, 2.0)
SLOWDOWN = 1.5


def sleep(seconds: float) -> None:
    """Sleeps for an iteration on the device of this process."""
    is_slow = json.loads(os.environ["FLUID_DEVICES"])[0] > 0
    time.sleep(seconds * (SLOWDOWN if is_slow else 1.0))


def sleeper(config: dict[str, Any], state: int | None = None) -> Iterator[tuple[dict[str, float], int]]:
    """Sleeps, as a generator."""
    done = state or 0
    while True:
        sleep(config["seconds"])
        done += 1
        yield {"loss": 1.0 / done}, done


class Sleeper(Trainable):  # type: ignore[misc]
    """Sleeps, as a trainable of Ray Tune."""

    def setup(self, config: dict[str, Any]) -> None:
        """Has slept 0 times."""
        self.done = 0

    def step(self) -> dict[str, float]:
        """Sleeps."""
        sleep(self.config["seconds"])
        self.done += 1
        return {"loss": 1.0 / self.done}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes how often it has slept."""
        Path(checkpoint_dir, "done").write_text(str(self.done), encoding="utf-8")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Reads it."""
        self.done = int(Path(checkpoint_dir, "done").read_text(encoding="utf-8"))
