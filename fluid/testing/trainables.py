"""What trials run in the conformance suite of backends. Lanes import it: it loads nothing large."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from fluid.trainables.driver_link import driver_link
from fluid.trainables.reporting import trial_dir


class Sleeper:
    """Sleeps for each iteration, and can be saved."""

    def setup(self, config: dict[str, Any]) -> None:
        """Begins; ``config["seconds"]`` are those of an iteration."""
        self.seconds, self.steps = config["seconds"], 0

    def step(self) -> dict[str, Any]:
        """Sleeps; reports how often it has."""
        time.sleep(self.seconds)
        self.steps += 1
        return {"step": self.steps}

    def save_checkpoint(self, folder: str) -> None:
        """Saves how often it has slept."""
        (Path(folder) / "steps.json").write_text(json.dumps(self.steps))

    def load_checkpoint(self, folder: str) -> None:
        """Loads that."""
        self.steps = json.loads((Path(folder) / "steps.json").read_text())

    def tell(self, value: Any) -> Any:
        """Returns a value, and how often it has slept; raises a value that is text."""
        if isinstance(value, str):
            raise ValueError(value)
        return self.steps, value

    def cleanup(self) -> None:
        """Does nothing."""


class Drawing(Sleeper):
    """Draws a number in each iteration, and writes it to its own folder; reports both, and how many lines are there."""

    def step(self) -> dict[str, Any]:
        """Sleeps, draws and writes."""
        told = super().step()
        draw = random.random()
        path = trial_dir() / "draws"
        with path.open("a") as file:
            file.write(f"{draw}\n")
        return {**told, "draw": draw, "written": path.read_text()}


class Asking(Sleeper):
    """Asks the submitter in each iteration."""

    def step(self) -> dict[str, Any]:
        """Sleeps, and asks."""
        return {**super().step(), "got": driver_link().ask(self.steps)}
