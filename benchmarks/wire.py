"""Measures what it takes to write and read what lanes tell of iterations: as data (fluid/wire.py), and pickled.

    python benchmarks/wire.py

A batch is what a lane sends at once: one iteration with three metrics, or eight of them. The pickled ones are named
tuples of the same values, as Fluid sent them before; the best of five rounds, CPU microseconds for a batch.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from fluid.engine.events import IterationDone
from fluid.lane.protocol import FromLane
from fluid.resources import MemoryNeed
from fluid.trainables.encoded_metrics import EncodedMetrics, encode_metrics
from fluid.wire import decoder, encode

_CALLS, _ROUNDS = 5000, 5


class Iterated(NamedTuple):
    """An iteration as a tuple."""

    at: float
    trial_id: str
    iteration: int
    seconds: float
    metrics: EncodedMetrics
    memory: tuple[float, float]
    finished: bool = False
    busy: float | None = None
    rows: int = 1
    settled: bool = True
    run: None = None


def microseconds(call: Callable[[], Any]) -> float:
    """CPU microseconds that a call takes."""
    best = float("inf")
    for _ in range(_ROUNDS):
        begun = time.process_time()
        for _ in range(_CALLS):
            call()
        best = min(best, time.process_time() - begun)
    return 1e6 * best / _CALLS


def main() -> None:
    decode = decoder(FromLane)
    table = Table("iterations", "as", "bytes", "written, us", "read, us", title="What a lane tells of iterations")
    for count in (1, 8):
        facts = [(12.5 + each, 0.25 + each, 1e6 + each, random.random()) for each in range(count)]
        metrics = [encode_metrics({"loss": value, "accuracy": 1.0 - value, "epoch": 3}) for *_, value in facts]
        tuples = [
            Iterated(at, "trial-000012", 3, seconds, told, (memory, 2e6))
            for (at, seconds, memory, _), told in zip(facts, metrics, strict=True)
        ]
        frames = [
            IterationDone(
                at, "trial-000012", 3, iteration=3, seconds=seconds, metrics=told, memory=MemoryNeed(most, 2e6)
            )
            for (at, seconds, most, _), told in zip(facts, metrics, strict=True)
        ]
        pickled, data = pickle.dumps(tuples, pickle.HIGHEST_PROTOCOL), encode(frames)
        assert decode(data) == frames and pickle.loads(pickled) == tuples
        for name, size, write, read in (
            ("pickled tuples", len(pickled), partial(pickle.dumps, tuples, 5), partial(pickle.loads, pickled)),
            ("data", len(data), partial(encode, frames), partial(decode, data)),
        ):
            table.add_row(str(count), name, str(size), f"{microseconds(write):.2f}", f"{microseconds(read):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
