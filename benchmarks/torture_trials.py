"""The trials of torture.py: their values are a chain of hashes, so a state restored wrongly shows in all later ones.

A trial's config: ``seed``; ``seconds`` per iteration; ``padding``, bytes of a checkpoint beyond the state; ``notes``, a
folder that is kept for the session; and ``nasty``, the fault that the trial itself brings about in an iteration, once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torture_nasty import NASTY, spoil


def link(seed: str, iteration: int, before: str) -> str:
    """Returns the value of an iteration, which depends on all values before it."""
    return hashlib.sha256(f"{seed}/{iteration}/{before}".encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=4096)
def chain(seed: str, iterations: int) -> tuple[str, ...]:
    """Returns the values of a trial's first iterations."""
    values = [""]
    for iteration in range(1, iterations + 1):
        values.append(link(seed, iteration, values[-1]))
    return tuple(values[1:])


def be_nasty(config: dict[str, Any], trial: str, iteration: int) -> Any:
    """Brings about the fault of this iteration, if it has one that has not happened yet; returns the fault's answer."""
    kind = config["nasty"].get(str(iteration))
    if kind is None:
        return None
    try:
        os.close(os.open(Path(config["notes"], f"{kind}@{trial}@{iteration}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return None
    return NASTY[kind](config)


class Chain:
    """A class trainable that can be saved."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.done, self.value = 0, ""

    def step(self) -> dict[str, Any]:
        time.sleep(self.config["seconds"])
        answer = be_nasty(self.config, self.config["seed"].replace("/", "-"), self.done + 1)
        self.done += 1
        self.value = link(self.config["seed"], self.done, self.value)
        return spoil({"value": self.value, "pid": os.getpid()}, answer)

    def save_checkpoint(self, folder: str) -> None:
        state = {"done": self.done, "value": self.value}
        Path(folder, "state.json").write_text(json.dumps(state))
        if self.config["padding"]:
            Path(folder, "padding").write_bytes(os.urandom(self.config["padding"]))

    def load_checkpoint(self, folder: str) -> None:
        # Reads as a careless program would: a damaged checkpoint that Fluid hands over shows as a wrong value.
        state = json.loads(Path(folder, "state.json").read_text(errors="replace"))
        self.done, self.value = state["done"], state["value"]

    def poke(self, number: int) -> tuple[str, int]:
        """A method to call: the trial's seed, and the number it was given."""
        return self.config["seed"], number


def generate(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same as a generator function, which cannot be saved: it begins again whenever its process dies."""
    iteration, value = 0, ""
    while True:
        time.sleep(config["seconds"])
        answer = be_nasty(config, config["seed"].replace("/", "-"), iteration + 1)
        iteration += 1
        value = link(config["seed"], iteration, value)
        yield spoil({"value": value, "pid": os.getpid()}, answer)
