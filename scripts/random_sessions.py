"""Runs any number of random engine sessions, and checks every invariant of the engine after each of their events.

    python scripts/random_sessions.py 20000 [--seed S] [--steps N] [--jobs J]

The sessions are those of ``fluid.testing.random_sessions``: an engine, a fake backend whose lanes raise, die and fail
to start, and a submitter that adds, extends, stops and calls trials. Session number i has seed S + i, so one that fails
can be run again by itself: ``--seed SEED 1``. The exit status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_STEPS = 250
#: Seeds that a worker process takes at once, and failures that are printed whole.
_BATCH, _SHOWN = 20, 5


def run_sessions(steps: int, seeds: range) -> list[tuple[int, str]]:
    """Runs one session per seed.

    Args:
        steps: random steps of each, before it is brought to its end.
        seeds: of the sessions.

    Returns:
        Seed and traceback, with the trials' stories, of every session that failed.
    """
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    from fluid.testing.random_sessions import random_session

    failed = []
    for seed in seeds:
        try:
            random_session(seed, steps)
        except Exception:  # Whatever is wrong with the engine: the next session is run all the same.
            failed.append((seed, traceback.format_exc()))
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions", type=int, help="how many to run")
    parser.add_argument("--seed", type=int, default=0, help="of the first session (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=_STEPS, help="random steps of each (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name, least in (("sessions", 1), ("steps", 1), ("jobs", 1), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"{name} must be at least {least}, not {getattr(options, name)}")
    end = options.seed + options.sessions
    batches = [range(first, min(first + _BATCH, end)) for first in range(options.seed, end, _BATCH)]
    done, failures, mark = 0, 0, 0
    for batch, failed in zip(batches, _results(batches, options.steps, options.jobs), strict=True):
        done += len(batch)
        for seed, story in failed:
            failures += 1
            print(f"\nsession of seed {seed} failed", story if failures <= _SHOWN else "", sep="\n", flush=True)
        if done * 20 // options.sessions > mark:
            mark = done * 20 // options.sessions
            print(f"{done:,} of {options.sessions:,} sessions, {failures} failed", flush=True)
    return 1 if failures else 0


def _results(batches: list[range], steps: int, jobs: int) -> Iterator[list[tuple[int, str]]]:
    work = partial(run_sessions, steps)
    if jobs == 1:
        yield from map(work, batches)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(work, batches)


if __name__ == "__main__":
    sys.exit(main())
