"""Measures what the driver keeps in memory of trials that have ended, and of what classes that is.

    python benchmarks/driver_memory.py [--trials 20000] [--groups 3000] [--json FILE]

Two ways to submit: "one group", all trials in one group, whose results the caller reads as they come; and "group each",
groups of one trial, each waited for. Nothing is forgotten. Each runs in a process of its own, on 2 CPU devices of the
local backend; a trial has one iteration and a config of one number. "Resident" is how much the process grew from its
first trial, after some that are not counted, to its last result, per trial; "objects" are those that are reachable then
and were not there before, by the size that Python gives of each; what is left of the resident memory is the
allocator's: free blocks and fragmentation. "CPU" is the driver's, for a thousand trials.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fluid import FluidExecutor, Trial, TrialGroup

#: Trials that run before: what libraries take once is not counted.
_WARM_UP = 200
#: Groups that run at once where each trial has its own.
_AT_ONCE = 8
#: Classes that are shown each by itself.
_SHOWN = 25


def tiny(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One iteration."""
    yield {"loss": config["x"]}


def resident_bytes() -> int:
    """Bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def sizes() -> dict[int, tuple[str, int]]:
    """The class and the bytes of each object, by its id; also of those that the collector does not track."""
    found: dict[int, tuple[str, int]] = {}
    gc.collect()
    listed = gc.get_objects()
    own = {id(listed), id(found)}
    for tracked in listed:
        for one in (tracked, *gc.get_referents(tracked)):
            if id(one) not in found and id(one) not in own:
                kind = type(one)
                name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
                try:
                    found[id(one)] = name, sys.getsizeof(one)
                except Exception:
                    found[id(one)] = name, 0
    return found


def in_one_group(executor: FluidExecutor, trials: range) -> Any:
    """Runs all trials in one group."""
    listed = [Trial(tiny, {"x": x}, budget=1, trial_id=f"n{x}") for x in trials]
    handle = executor.submit_trialgroup(TrialGroup(listed))
    del listed
    for _ in handle.results():
        pass
    return handle


def in_groups(executor: FluidExecutor, trials: range) -> Any:
    """Runs each trial in a group of its own."""
    waiting = collections.deque[Any]()
    for x in trials:
        trial = Trial(tiny, {"x": x}, budget=1, trial_id=f"n{x}")
        waiting.append(executor.submit_trialgroup(TrialGroup([trial], name=f"g{x}")))
        if len(waiting) > _AT_ONCE:
            waiting.popleft().wait()
    for handle in waiting:
        handle.wait()
    return None


WAYS = {"one group": in_one_group, "group each": in_groups}


def measure(way: str, trials: int) -> dict[str, Any]:
    """Runs trials; returns bytes per trial, and the driver's seconds of CPU time for a thousand trials."""
    with tempfile.TemporaryDirectory() as folder, FluidExecutor("local", 2, verbose=0, run_dir=folder) as executor:
        warm = WAYS[way](executor, range(-_WARM_UP, 0))
        before = sizes()
        classes: collections.Counter[str] = collections.Counter()
        numbers: collections.Counter[str] = collections.Counter()
        first, cpu = resident_bytes(), time.process_time()
        handle = WAYS[way](executor, range(trials))
        cpu, last = time.process_time() - cpu, resident_bytes()
        for one, (name, size) in sizes().items():
            if one not in before:
                classes[name] += size
                numbers[name] += 1
        del handle, warm
    return {
        "trials": trials,
        "resident_bytes": (last - first) / trials,
        "object_bytes": sum(classes.values()) / trials,
        "cpu_s_per_1000": 1000.0 * cpu / trials,
        "classes": {
            name: {"bytes": size / trials, "objects": numbers[name] / trials}
            for name, size in classes.most_common(_SHOWN)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20_000, help="trials of the one group")
    parser.add_argument("--groups", type=int, default=3_000, help="groups of one trial")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    arguments = parser.parse_args()
    found = {}
    for way, trials in (("one group", arguments.trials), ("group each", arguments.groups)):
        if trials:
            with multiprocessing.get_context("spawn").Pool(1) as apart:
                found[way] = apart.apply(measure, (way, trials))
            print_figures(way, found[way])
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def print_figures(way: str, figures: dict[str, Any]) -> None:
    """Prints a table."""
    print(f"{way}, {figures['trials']:,} trials: {figures['cpu_s_per_1000']:.2f} s of CPU per 1,000 trials")
    print(f"{'bytes':>10} {'objects':>8}  per trial")
    print(f"{figures['resident_bytes']:10.0f} {'':8}  resident")
    print(f"{figures['object_bytes']:10.0f} {'':8}  objects, of which:")
    for name, one in figures["classes"].items():
        print(f"{one['bytes']:10.0f} {one['objects']:8.2f}  {name}")


if __name__ == "__main__":
    main()
