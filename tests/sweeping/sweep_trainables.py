"""Trainables of the tests of native sweeps."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def curve(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Falls towards ``x``, so that the order of trials is that of ``x`` at each iteration."""
    iteration = 0
    while True:
        iteration += 1
        yield {"loss": config["x"] + 1.0 / iteration, "gain": -config["x"], "at": iteration}


def unhurried(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """As ``curve``, in iterations that take a moment."""
    for metrics in curve(config):
        time.sleep(0.05)
        yield metrics


def short(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Ends by itself after ``length`` iterations."""
    for iteration in range(config["length"]):
        yield {"loss": float(iteration)}


def once(config: dict[str, Any]) -> dict[str, Any]:
    """Returns its metrics, and notes each call."""
    with Path(config["calls"]).open("a", encoding="utf-8") as calls:
        calls.write("called\n")
    return {"loss": config["x"]}


def sleep_and_return(config: dict[str, Any]) -> dict[str, Any]:
    """Takes some seconds, and returns its metrics."""
    time.sleep(config["seconds"])
    return {"loss": config["seconds"]}


def perfect(config: dict[str, Any], state: int | None) -> Iterator[tuple[dict[str, Any], int]]:
    """Has the same accuracy from the third iteration on, whatever its config."""
    for iteration in range(state or 0, 100):
        yield {"accuracy": min(1.0, iteration / 2)}, iteration + 1


def fail_above_one(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for iteration in range(100):
        if config["x"] > 1.0 and iteration == 1:
            raise ValueError(f"{config['x']} is too much")
        yield {"loss": config["x"]}


def fail_behind_zero(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Fails at once after it has reached 0."""
    for iteration in range(100):
        yield {"loss": max(0.0, 2.0 - iteration)}
        if iteration == 2:
            raise ValueError("there is no more to do")


def fail_or_end(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Fails at once above 1, and ends by itself after up to 9 iterations below."""
    if config["x"] > 1.0:
        raise ValueError(f"{config['x']} is too much")
    for iteration in range(int(config["x"] * 10)):
        yield {"loss": config["x"] / (iteration + 1)}


def out_of_memory_above_one(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for iteration in range(100):
        if config["x"] > 1.0 and iteration == 1:
            raise MemoryError("nothing is left")
        yield {"loss": config["x"]}


def nan_below_zero(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    while True:
        yield {"loss": float("nan") if config["x"] < 0.0 else config["x"]}


class Counter:
    """Counts its iterations; the first to come to ``dies_at`` kills its process, once."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.count = config, 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        marker = self.config.get("marker")
        if marker and self.count == self.config["dies_at"]:
            try:
                Path(marker).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": self.config["x"] / self.count, "count": self.count}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "count.json").write_text(json.dumps(self.count))

    def load_checkpoint(self, folder: str) -> None:
        self.count = json.loads(Path(folder, "count.json").read_text())

    def cleanup(self) -> None:
        pass


class SlowCounter(Counter):
    """Waits at each iteration for a ticket: a file in ``folder`` that nobody has taken before."""

    def step(self) -> dict[str, Any]:
        while True:
            for ticket in Path(self.config["folder"]).glob("ticket-*"):
                try:
                    ticket.unlink()
                except FileNotFoundError:
                    continue
                return super().step()
            time.sleep(0.01)


class SilentCounter(SlowCounter):
    """Reports no loss below 0.5."""

    def step(self) -> dict[str, Any]:
        metrics = super().step()
        return metrics if self.config["x"] >= 0.5 else {"count": metrics["count"]}


def silent_above_one(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Reports no loss above 1, and elsewhere in every second iteration only."""
    for iteration in range(100):
        yield {"at": iteration, **({"loss": config["x"]} if config["x"] <= 1.0 and iteration % 2 == 0 else {})}


def slow_curve(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A function without a state that waits as :class:`SlowCounter` does."""
    counter = SlowCounter()
    counter.setup(config)
    while True:
        yield counter.step()


def noting(config: dict[str, Any], state: int | None = None) -> Iterator[tuple[dict[str, int], int]]:
    """Notes each iteration that it has computed to the end in ``folder``, in a file of its ``name``."""
    done = state or 0
    while True:
        time.sleep(config["pace"])
        done += 1
        with Path(config["folder"], f"{config['name']}.txt").open("a", encoding="utf-8") as notes:
            notes.write(f"{done}\n")
        yield {"count": done}, done


def telling_its_process(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Falls towards ``x``, and tells in which process it runs."""
    for iteration in range(1, 100):
        yield {"loss": config["x"] + 1.0 / iteration, "pid": os.getpid()}
