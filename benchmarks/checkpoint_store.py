"""Measures restores of promoted trials where host memory has room for few states: by value, and by age.

    python benchmarks/checkpoint_store.py [--runs 3] [--megabytes 200] [--room 8] [--json FILE]

A bracket of HyperBand with 27 trials and eta 3 runs on CPU devices whose memory holds one state each, so that every
trial leaves its lane at a rung. Host memory has room for eight states. Under "value" the host is told how trials rank
at their rung, and fetches those ahead that are about to be promoted; under "age", what was written longest ago goes
first. The stall of a promotion is what finding, reading and loading the checkpoint took in the lane. It is compared
with reading a file of as many bytes in host memory into a new array, in the same lane, right after it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import machine

from fluid import FluidExecutor, Trial, TrialGroup
from fluid.backends.local.backend import LocalBackend
from fluid.engine.checkpoint_places import CheckpointPlaced, CheckpointValue, PrefetchCheckpoint, ValueCheckpoints
from fluid.engine.commands import Command
from fluid.engine.events import Event, IterationDone, TrialSaved, TrialStarted
from fluid.resources import Device

#: Iterations of a trial, in all, at the end of each rung.
RUNGS = (1, 3, 9)
ETA = 3
_PATIENCE_S = 300.0


class Stateful:
    """Has a state of many bytes, and works a while in each iteration."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.copy_s = config, 0.0
        self.state = np.zeros(0, np.uint8)

    def step(self) -> dict[str, Any]:
        if not self.state.size:
            self.state = np.ones(self.config["bytes"], np.uint8)
        time.sleep(self.config["seconds"])
        self.state[::4096] += 1
        return {"loss": self.config["loss"], "copy_s": self.copy_s}

    def save_checkpoint(self, folder: str) -> None:
        self.state.tofile(os.path.join(folder, "state"))

    def load_checkpoint(self, folder: str) -> None:
        self.state = np.fromfile(os.path.join(folder, "state"), np.uint8)
        twin = self.config["twin"]
        begun = time.perf_counter()
        copy = np.fromfile(twin, np.uint8)
        self.copy_s = time.perf_counter() - begun
        del copy


class WatchedBackend(LocalBackend):
    """Notes restores; under "value" tells its host how trials rank, and has it fetch those that are promoted next."""

    rule = "value"

    def watch(self) -> None:
        """Begins to note."""
        self.restores: dict[str, list[Any]] = {}
        self.places: dict[str, Any] = {}
        self.wanted: list[str] = []
        self.values: dict[str, CheckpointValue] = {}
        self.asked: set[tuple[str, str]] = set()
        self.guard = threading.Lock()

    def rank(self, promoted: Sequence[str], others: Sequence[str]) -> None:
        """Takes which trials are promoted, as far as is known, the first one first, and which are not."""
        with self.guard:
            self.wanted = list(promoted)
            self.values |= {name: CheckpointValue(0.95, pinned=False) for name in promoted}
            self.values |= {name: CheckpointValue(0.02) for name in others}
        self.wake()

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out; those for the stores only if the rule is "value"."""
        if self.rule == "age":
            commands = [one for one in commands if not isinstance(one, (ValueCheckpoints, PrefetchCheckpoint))]
        super().execute(commands)

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Waits for what happens, and notes it."""
        events = super().poll(timeout)
        for event in events:
            if isinstance(event, (TrialSaved, CheckpointPlaced)):
                self.places[event.trial_id] = event.checkpoint
            elif isinstance(event, IterationDone):
                with self.guard:  # It is saved before it is ranked.
                    self.values[event.trial_id] = CheckpointValue(0.5)
            elif isinstance(event, TrialStarted) and event.restoring is not None:
                self.restores.setdefault(event.trial_id, []).append(event.restoring)
                with self.guard:  # It runs: its checkpoint is only there in case its lane is lost.
                    self.values[event.trial_id] = CheckpointValue(0.01)
                    self.wanted = [name for name in self.wanted if name != event.trial_id]
                    self.asked.clear()  # What had no room before may have some now.
        with self.guard:
            values, self.values, wanted = self.values, {}, list(self.wanted)
        if self.rule == "value":
            if values:
                super().execute([ValueCheckpoints(values)])
            for name in wanted:
                place = self.places.get(name)
                if place is not None and not place.in_memory and (name, place.path) not in self.asked:
                    self.asked.add((name, place.path))
                    super().execute([PrefetchCheckpoint(name, place, "localhost")])
        return events


def run(rule: str, size: int, room: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Runs a bracket; returns how each promoted trial was restored."""
    losses = np.random.default_rng(seed).permutation(ETA ** len(RUNGS)) / 27.0
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as twins, tempfile.TemporaryDirectory() as folder:
        twin = os.path.join(twins, "state")
        np.ones(size, np.uint8).tofile(twin)
        devices = [Device(number, kind="cpu", memory_bytes=1.75 * size) for number in range(2)]
        memory = int(room * (size + 4096))
        backend = WatchedBackend(devices, run_dir=folder, checkpoint_memory_bytes=memory)
        backend.rule = rule
        backend.watch()
        config = {"bytes": size, "seconds": seconds, "twin": twin}
        trials = [
            Trial(Stateful, {**config, "loss": float(loss)}, budget=1, trial_id=f"t{number:02}")
            for number, loss in enumerate(losses)
        ]
        with FluidExecutor(backend, run_dir=folder, packing="off", max_width=1, profile=None, verbose=0) as executor:
            handle = executor.submit_trialgroup(TrialGroup(trials))
            alive = [trial.trial_id for trial in trials]
            loss_of = {f"t{number:02}": float(loss) for number, loss in enumerate(losses)}
            for rung, more in zip(RUNGS, (*np.diff(RUNGS), 0), strict=True):
                deadline = time.monotonic() + _PATIENCE_S
                done: list[str] = []
                while len(done) < len(alive):  # Ranks by the results so far.
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{len(done)} of {len(alive)} trials have come to iteration {rung}")
                    time.sleep(0.02)
                    counts: dict[str, int] = {}
                    for result in handle.results():
                        counts[result.trial_id] = counts.get(result.trial_id, 0) + 1
                    now = [name for name in alive if counts.get(name, 0) >= rung]
                    if now != done:
                        done = now
                        best = sorted(done, key=loss_of.__getitem__)
                        kept = max(1, len(alive) // ETA)
                        backend.rank(best[:kept], best[kept:])
                handle.wait()
                handle.raise_failures()
                if not more:
                    break
                alive = sorted(alive, key=loss_of.__getitem__)[: len(alive) // ETA]
                backend.rank(alive, [])
                before = {name: len(backend.restores.get(name, ())) for name in alive}
                for name in alive:
                    handle.extend(name, int(more))
                handle.wait()
                copies = {result.trial_id: result.metrics["copy_s"] for result in handle.results()}
                for name in alive:
                    for restoring in backend.restores.get(name, [])[before[name] :][:1]:
                        found.append({**restoring._asdict(), "copy_s": copies[name], "rung": rung})
    return found


def summary(restores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a rule."""
    ratios = [one["seconds"] / one["copy_s"] for one in restores if one["copy_s"]]
    own = [(one["seconds"] - one["copy_s"]) / one["copy_s"] for one in restores if one["copy_s"]]
    return {
        "promotions": len(restores),
        "in_memory": sum(one["source"] == "memory" for one in restores) / max(1, len(restores)),
        # The lane's seconds contain the copy that it is compared with.
        "stall_s": statistics.median(one["seconds"] - one["copy_s"] for one in restores),
        "copy_s": statistics.median(one["copy_s"] for one in restores),
        "stall_by_copy": statistics.median(own),
        "stall_and_copy_by_copy": statistics.median(ratios),
    }


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3, help="brackets under each rule, which take turns")
    parser.add_argument("--megabytes", type=int, default=200, help="of a trial's state")
    parser.add_argument("--room", type=int, default=8, help="states that host memory has room for")
    parser.add_argument("--seconds", type=float, default=1.0, help="of an iteration")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
    restores: dict[str, list[dict[str, Any]]] = {"value": [], "age": []}
    for seed in range(options.runs):
        for rule, found in restores.items():
            found += run(rule, options.megabytes * 1_000_000, options.room, options.seconds, seed)
    figures = {rule: summary(found) for rule, found in restores.items()}
    print("rule   promotions  in memory  stall, s  copy, s  stall by copy")
    for rule, one in figures.items():
        print(
            f"{rule:<6} {one['promotions']:>10}  {one['in_memory']:>8.0%}  {one['stall_s']:>8.3f}"
            f"  {one['copy_s']:>7.3f}  {one['stall_by_copy']:>13.2f}"
        )
    if options.json:
        written = {
            "machine": {**machine(), "system": platform.release()},
            "date": time.strftime("%Y-%m-%d"),
            "options": vars(options),
            **figures,
            "restores": restores,
        }
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
