"""Measures how soon a trial runs again whose lane was killed, with and without a spare lane, and what that costs.

    python benchmarks/spare_lanes.py [--kills 10] [--sweeps 3] [--json FILE]

A trial trains a small PyTorch model on one CPU device and saves each iteration. Its lane is killed (SIGKILL) several
times; measured is the time until its code is called in another lane, and until it begins its next iteration there.
PyTorch is "named" by an import statement of the trainable, so that the fork server loads it first; "found" in a way
that Fluid cannot see, and loaded by the fork server once a lane has told of it; or found and "not told", as before
lanes did. Sweeps of four trials on two devices are timed with and without a spare lane, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import machine, run_apart

#: Seconds after which a measurement has failed.
_PATIENCE_S = 120.0
#: Batches of an iteration, about 0.2 s; seconds between two kills.
_BATCHES = 300
_PAUSE_S = 1.0
#: Seconds until the first kill: by then the spare lane is there, and the fork server has loaded what it was told of.
_BEFORE_S = 10.0
#: The ways in which PyTorch is loaded.
WAYS = ("named", "found", "not told")


def notes_of(path: Path) -> list[tuple[float, str, int]]:
    """(time, what, process) for each note of a trial."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    words = [line.split() for line in lines if line.endswith("\n")]
    return [(float(at), what, int(pid)) for at, what, pid in words]


def first(path: Path, what: str, after: float, but: int | None = None) -> tuple[float, int]:
    """Waits for a note of that kind, of another process than ``but``; returns its time and its process."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for at, kind, pid in notes_of(path):
            if kind == what and at > after and pid != but:
                return at, pid
        time.sleep(0.002)
    raise TimeoutError(f"no {what} in {_PATIENCE_S:g} s")


def kill(way: str, spare_lanes: int, kills: int) -> dict[str, list[float]]:
    """Kills the lane of a trial so many times; returns the seconds until it is set up, and until it iterates."""
    from spare_lanes_workload import Found, Named

    from fluid import FluidExecutor, Trial, TrialGroup
    from fluid.backends.lanes.registry import Registry

    if way == "not told":
        Registry.preload = lambda self, modules: None  # type: ignore[method-assign]
    seconds: dict[str, list[float]] = {"setup": [], "iteration": []}
    with tempfile.TemporaryDirectory() as folder:
        config, note = {"notes": folder, "number": 0, "batches": _BATCHES}, Path(folder, "0.txt")
        options: dict[str, Any] = {"devices": 1, "packing": "off", "max_failures": kills + 1, "verbose": 0}
        with FluidExecutor("local", run_dir=Path(folder, "run"), spare_lanes=spare_lanes, **options) as executor:
            trial = Trial(Named if way == "named" else Found, config, budget=100_000)
            executor.submit_trialgroup(TrialGroup([trial]))
            _, pid = first(note, "iteration", 0.0)
            time.sleep(_BEFORE_S)
            for _ in range(kills):
                killed = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                for what, found in seconds.items():
                    at, new = first(note, what, killed, pid)
                    found.append(at - killed)
                pid = new
                time.sleep(_PAUSE_S)
    return seconds


def sweep(spare_lanes: int, iterations: int) -> float:
    """Returns the seconds that four trials take on two devices."""
    from spare_lanes_workload import Named

    from fluid import FluidExecutor, Trial, TrialGroup

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"devices": 2, "packing": "off", "verbose": 0}
        with FluidExecutor("local", run_dir=Path(folder, "run"), spare_lanes=spare_lanes, **options) as executor:
            trials = [
                Trial(Named, {"notes": folder, "number": number, "batches": _BATCHES}, budget=iterations)
                for number in range(4)
            ]
            begun = time.monotonic()
            handle = executor.submit_trialgroup(TrialGroup(trials))
            handle.wait()
            seconds = time.monotonic() - begun
            handle.raise_failures()
    return seconds


def apart(*arguments: str) -> Any:
    """Runs one measurement in a process of its own: the driver must not have loaded PyTorch."""
    found = run_apart(__file__, ["--only", *arguments], what=" ".join(arguments), timeout=600.0)
    if found is None:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return found.figures


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10, help="kills of each way; the medians count")
    parser.add_argument("--sweeps", type=int, default=3, help="pairs of sweeps; 0 for none")
    parser.add_argument("--iterations", type=int, default=60, help="iterations of each trial of a sweep")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        kind, *rest = options.only
        spares, count = map(int, rest[-2:])
        print(json.dumps(kill(rest[0], spares, count) if kind == "kill" else sweep(spares, count)))
        return
    kills: dict[str, Any] = {}
    for way in WAYS:
        for spares in (1, 0):
            found = apart("kill", way, str(spares), str(options.kills))
            medians = {f"{what}_s": statistics.median(each) for what, each in found.items()}
            kills[f"{way}, {spares} spare"] = {**medians, "longest_s": max(found["iteration"]), "runs": found}
            print(
                f"PyTorch {way}, spare_lanes={spares}: set up after {medians['setup_s']:.3f} s, runs again after "
                f"{medians['iteration_s']:.3f} s in the median, {max(found['iteration']):.3f} s at most"
            )
    sweeps: dict[str, list[float]] = {"1": [], "0": []}
    for number in range(options.sweeps):
        for spares in ("1", "0") if number % 2 else ("0", "1"):
            sweeps[spares].append(apart("sweep", spares, str(options.iterations)))
    ratio = statistics.median(sweeps["1"]) / statistics.median(sweeps["0"]) if options.sweeps else None
    if ratio is not None:
        print(f"a sweep with a spare lane takes {ratio:.3f} times as long as one without")
    if options.json:
        written = {
            "machine": {**machine(), "system": platform.release(), "python": sys.version.split()[0]},
            "date": time.strftime("%Y-%m-%d"),
            "kills": kills,
            "sweeps_s": sweeps,
            "sweep_ratio": ratio,
        }
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
