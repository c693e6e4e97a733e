"""Trainables that fail, each in a way of its own; each call is noted in the file ``config["calls"]``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def note(config: dict[str, Any]) -> None:
    with Path(config["calls"]).open("a", encoding="utf-8") as calls:
        calls.write("called\n")


def returns_nothing(config: dict[str, Any]) -> None:
    note(config)


def returns_a_number(config: dict[str, Any]) -> float:
    note(config)
    return 0.5


def returns_a_tuple(config: dict[str, Any]) -> Any:
    note(config)
    return 0.5, 0.9


def yields_a_number(config: dict[str, Any]) -> Iterator[float]:
    note(config)
    yield 0.5


def yields_a_pair(config: dict[str, Any]) -> Iterator[Any]:
    note(config)
    yield {"loss": 0.5}, "the state"


def yields_no_pair(config: dict[str, Any], state: Any) -> Iterator[Any]:
    note(config)
    yield {"loss": 0.5}


class StepsWithoutMetrics:
    def setup(self, config: dict[str, Any]) -> None:
        note(config)

    def step(self) -> None:
        pass


def misspells_a_key(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    note(config)
    yield {"loss": config["learning_rate"]}


def raises_after_two(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    note(config)
    for iteration in range(9):
        if iteration == 2:
            raise ValueError(f"no value of {config['x']}")
        yield {"loss": config["x"]}


def raises_otherwise_each_time(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each try comes one iteration further than the one before."""
    note(config)
    tries = Path(config["calls"]).read_text(encoding="utf-8").count("called")
    for iteration in itertools.count():
        if iteration == tries:
            raise ValueError("not yet")
        yield {"loss": config["x"]}


def finds_no_disk(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    note(config)
    raise OSError("the disk is away")
    yield {}


def finds_no_server(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    note(config)
    raise RuntimeError("connection to the server was lost")
    yield {}


def finds_no_gpu(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    note(config)
    raise RuntimeError("CUDA error: device-side assert triggered")
    yield {}


def validates_every_third(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for iteration in range(1, 10):
        yield {"loss": config["x"] + 1 / iteration} if iteration % 3 == 0 else {"train_loss": 1.0}


def validates_at_its_end(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for iteration in range(1, 10):
        yield {"loss": config["x"]} if iteration == 9 else {"train_loss": 1.0}


def has_no_poly(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    note(config)
    if config["kernel"] == "poly":
        raise ValueError("poly is not available")
    yield {"loss": config["degree"]}


def has_few_layers(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    note(config)
    if config["layers"] > 3:
        raise IndexError(f"layer {config['layers']} of 3")
    yield {"loss": config["layers"]}


def returns_nothing_above_one(config: dict[str, Any]) -> dict[str, Any] | None:
    note(config)
    return None if config["layers"] > 1 else {"loss": 1.0}
