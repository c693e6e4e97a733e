"""Measures restores of promoted trials where host memory has room for few states: by value, and by age.

    python benchmarks/checkpoint_store.py [--algorithm hyperband] [--runs 3] [--megabytes 200] [--room 8] [--json FILE]

``fluid.run`` runs a sweep of 27 trials with rungs at 1, 3, 9 and 27 iterations: Hyperband, or its first bracket alone
(``--algorithm sha``: 27, 9, 3 and 1 trials). The memory of each of the two CPU devices has room for one state, so that
trials leave their lanes at rungs. Host memory has room for eight states. Under "value" the engine tells the host what
checkpoints are worth there, and has the best of a rung read ahead; under "age" the host hears nothing of that, and what
was written longest ago goes to disk first.

Each promotion, when a trial goes on from a rung, counts by where its state was found, as the journal says. The stall of
a promotion is what finding, reading and loading the checkpoint took in the lane. It is compared with reading a file of
as many bytes in host memory into a new array, in the same lane, right after it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import machine

import fluid
from fluid import FluidExecutor
from fluid.backends.local import LocalBackend
from fluid.engine.commands import Command, PrefetchCheckpoint, ValueCheckpoints
from fluid.resources import Device
from fluid.search import uniform

TRIALS, BUDGET, ETA = 27, 27, 3
RULES = ("value", "age")


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
        return {"loss": self.config["quality"], "copy_s": self.copy_s}

    def save_checkpoint(self, folder: str) -> None:
        self.state.tofile(os.path.join(folder, "state"))

    def load_checkpoint(self, folder: str) -> None:
        self.state = np.fromfile(os.path.join(folder, "state"), np.uint8)
        twin = self.config["twin"]
        begun = time.perf_counter()
        copy = np.fromfile(twin, np.uint8)
        self.copy_s = time.perf_counter() - begun
        del copy


class DeafBackend(LocalBackend):
    """Its host is told nothing of what checkpoints are worth."""

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries out commands, except those for the host's store."""
        super().execute([one for one in commands if not isinstance(one, (ValueCheckpoints, PrefetchCheckpoint))])


def run(rule: str, options: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Runs a sweep; returns how each promoted trial went on."""
    size = options.megabytes * 1_000_000
    with tempfile.TemporaryDirectory(dir="/dev/shm") as twins, tempfile.TemporaryDirectory() as folder:
        twin = os.path.join(twins, "state")
        np.ones(size, np.uint8).tofile(twin)
        devices = [Device(number, kind="cpu", memory_bytes=1.75 * size) for number in range(2)]
        make = LocalBackend if rule == "value" else DeafBackend
        backend = make(devices, run_dir=folder, checkpoint_memory_bytes=options.room * (size + 4096))
        executor = FluidExecutor(backend, run_dir=folder, packing="off", max_width=1, profile=None, verbose=0)
        space = {"quality": uniform(0.0, 1.0), "bytes": size, "seconds": options.seconds, "twin": twin}
        sweep = {"algorithm": options.algorithm, "samples": TRIALS, "budget": BUDGET, "eta": ETA, "seed": seed}
        fluid.run(Stateful, space, metric="loss", mode="min", executor=executor, **sweep)
        if options.keep:
            kept = Path(options.keep) / f"{rule}-{seed}"
            kept.mkdir(parents=True, exist_ok=True)
            for name in ("journal.jsonl", "results.jsonl"):
                (kept / name).write_bytes((Path(folder) / name).read_bytes())
        return promotions(Path(folder))


def promotions(folder: Path) -> list[dict[str, Any]]:
    """Returns how each promoted trial of a run went on: from where, in how many seconds, and what a copy took."""
    copies = {}
    for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        copies[result["trial"], result["iteration"]] = result["metrics"]["copy_s"]
    ended: dict[str, int] = {}
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        what, trial = entry["what"], entry.get("trial_id")
        if what == "ReportEnd":
            ended[trial] = entry["iteration"]
        elif what == "BudgetExtended":  # If it is not restored, its state has stayed on its device.
            rung = ended[trial]
            found[trial, rung] = {"trial": trial, "rung": rung, "source": "device"}
        elif what == "TrialStarted" and (trial, entry["iteration"]) in found and entry["restoring"]:
            one = found[trial, entry["iteration"]]
            if one["source"] == "device":
                one["source"], one["seconds"], one["bytes"] = entry["restoring"]
                one["copy_s"] = copies[trial, entry["iteration"] + 1]
    return list(found.values())


def summary(promoted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a rule."""
    sources = Counter(one["source"] for one in promoted)
    restored = [one for one in promoted if one["source"] != "device"]
    return {
        "promotions": len(promoted),
        "sources": dict(sources),
        "in_memory": 1.0 - sources["disk"] / len(promoted),
        # The lane's seconds contain the copy that it is compared with.
        "stall_s": statistics.median(one["seconds"] - one["copy_s"] for one in restored),
        "copy_s": statistics.median(one["copy_s"] for one in restored),
        "stall_by_copy": statistics.median((one["seconds"] - one["copy_s"]) / one["copy_s"] for one in restored),
    }


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--algorithm", choices=("hyperband", "sha"), default="hyperband", help="default hyperband")
    parser.add_argument("--runs", type=int, default=3, help="sweeps under each rule, which take turns; default 3")
    parser.add_argument("--megabytes", type=int, default=200, help="of a trial's state; default 200")
    parser.add_argument("--room", type=int, default=8, help="states that host memory has room for; default 8")
    parser.add_argument("--seconds", type=float, default=1.0, help="of an iteration; default 1")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES, help="default both")
    parser.add_argument("--keep", metavar="FOLDER", help="copy the journals and results of the runs to this folder")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file, to those of other sweeps")
    options = parser.parse_args()
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
    promoted: dict[str, list[dict[str, Any]]] = {rule: [] for rule in options.rules}
    for seed in range(options.runs):
        for rule, found in promoted.items():
            found += [{"seed": seed, **one} for one in run(rule, options, seed)]
    figures = {rule: summary(found) for rule, found in promoted.items()}
    print("rule   promotions  in memory  stall, s  copy, s  stall by copy  sources")
    for rule, one in figures.items():
        print(
            f"{rule:<6} {one['promotions']:>10}  {one['in_memory']:>8.1%}  {one['stall_s']:>8.3f}"
            f"  {one['copy_s']:>7.3f}  {one['stall_by_copy']:>13.2f}  {one['sources']}"
        )
    if options.json:
        file = Path(options.json)
        written = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        written[options.algorithm] = {
            "command": f"python benchmarks/checkpoint_store.py {' '.join(sys.argv[1:])}",
            "machine": {**machine(), "system": platform.release()},
            "date": time.strftime("%Y-%m-%d"),
            **figures,
            "promoted": promoted,
        }
        file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
