"""The trainables of these tests' studies."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def curve(config: dict[str, Any], step: int) -> float:
    """A loss that falls, oscillating, towards the squared distance of ``x`` from 2; some configurations fall late."""
    return float((config["x"] - 2.0) ** 2 + 30.0 * math.exp(-config["lr"] * step) + math.sin(2.0 * step))


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(9):
        yield {"loss": curve(config, step)}


def train_both(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(3):
        yield {"loss": (config["x"] - 2.0) ** 2, "size": float(step), "other": "text"}


def train_for_ever(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while True:
        yield {"loss": config["x"]}
        time.sleep(0.002)


def wait_for_a_file(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Reports once, and ends only when a file exists."""
    yield {"loss": config["x"]}
    while not Path(config["go"]).exists():
        time.sleep(0.002)


def fail_above_one(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with open(config["log"], "a", encoding="utf-8") as file:
        file.write("begun\n")
    yield {"loss": config["x"]}
    if config["x"] > 1.0:
        raise ValueError("the loss is NaN")
    yield {"loss": config["x"]}


def report_what_is_asked(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from config["reports"]


def give_up_above_one(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import optuna

    yield {"loss": config["x"]}
    if config["x"] > 1.0:
        raise optuna.TrialPruned("hopeless")


def sleep_at_the_last(trial: Any) -> float:
    """An objective of which the seventh trial takes much longer than the others."""
    time.sleep(9.0 if trial.number == 6 else 0.01)
    return float(trial.suggest_float("x", 0.0, 1.0))
