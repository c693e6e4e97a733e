"""The trials of the soak test: a few iterations that do next to nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Stepper:
    """A class trainable that can be saved.

    Config: ``x``; and ``ends``: ``"error"`` to raise in the second iteration, ``"lane"`` to end the process there, or
    any other text.
    """

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.steps = config, 0

    def step(self) -> dict[str, float]:
        self.steps += 1
        _end(self.config, self.steps)
        return {"loss": self.config["x"] / self.steps}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        Path(checkpoint_dir, "state.json").write_text(json.dumps(self.steps), encoding="utf-8")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.steps = json.loads(Path(checkpoint_dir, "state.json").read_text(encoding="utf-8"))

    def cleanup(self) -> None:
        pass


def climb(config: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """The same as a generator, which cannot be saved."""
    for step in range(1, 100):
        _end(config, step)
        yield {"loss": config["x"] / step}


def make_climb(number: int) -> Callable[[Mapping[str, Any]], Iterator[dict[str, float]]]:
    """Returns a generator function that is pickled by itself, as those of a loop are."""

    def climb_to(config: Mapping[str, Any]) -> Iterator[dict[str, float]]:
        for result in climb(config):
            yield {**result, "number": float(number)}

    return climb_to


def _end(config: Mapping[str, Any], step: int) -> None:
    if step == 2 and config["ends"] == "error":
        raise ValueError("this trial is to fail")
    if step == 2 and config["ends"] == "lane":
        os._exit(3)
