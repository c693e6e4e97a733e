"""Trainables of tests of shared runs, and their metrics without Fluid."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fluid.random_state import Seeds
from fluid.search import schedule

#: Iterations of a trial of the grid, and those at which its schedules may part.
BUDGET, PARTS = 40, (10, 20, 30)
#: One warm-up, and 3 x 4 x 4 ways to go on.
GRID = {
    "lr": schedule({0: 0.01, 10: [0.1, 0.2, 0.3], 20: [0.1, 0.2, 0.3, 0.4], 30: [0.01, 0.02, 0.03, 0.04]}),
}
#: Distinct beginnings of its trials, of each length.
NODES = 10 * (1 + 3 + 3 * 4 + 3 * 4 * 4)


def walk(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    """A random walk, whose metrics tell of all that came before; each iteration is noted in the file ``log``."""
    done, place = state or (0, random.random())
    while True:
        rate = config["lr"].at(done)
        place += rate * random.random() + float(np.random.normal())
        done += 1
        if "log" in config:
            note(config["log"], done)
        yield {"place": place, "rate": rate}, (done, place)


class Walk:
    """The same as a class."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.done, self.place = 0, random.random()
        self.set_up()

    def set_up(self) -> None:
        """Does more."""

    def rate(self) -> float:
        """That of the next iteration."""
        return float(self.config["lr"].at(self.done))

    def step(self) -> dict[str, float]:
        rate = self.rate()
        self.place += rate * random.random() + float(np.random.normal())
        self.done += 1
        return {"place": self.place, "rate": rate}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "state").write_text(json.dumps([self.done, self.place]))

    def load_checkpoint(self, folder: Any) -> None:
        self.done, self.place = json.loads((Path(folder) / "state").read_text())


def note(path: str, done: int) -> None:
    """Adds a line to a file, in one piece."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{done}\n".encode())
    os.close(file)


def alone(config: dict[str, Any], seeds: Seeds, iterations: int, trainable: Any = walk) -> list[dict[str, Any]]:
    """The metrics of a trial that nothing but this process has to do with."""
    here = random.getstate(), np.random.get_state()
    random.seed(seeds.random)
    np.random.seed(seeds.numpy)
    try:
        own = {name: value for name, value in config.items() if name != "log"}
        if isinstance(trainable, type):
            trial: Any = trainable()
            trial.setup(own)
            return [trial.step() for _ in range(iterations)]
        steps = trainable(own)
        return [next(steps)[0] for _ in range(iterations)]
    finally:
        random.setstate(here[0])
        np.random.set_state(here[1])


def lines(path: Path) -> list[int]:
    return [json.loads(line) for line in path.read_text().splitlines()]
