"""Measures what a finished iteration costs the driver, by stage of the session's thread.

    python benchmarks/result_costs.py [--quick] [--against CHECKOUT] [--json FILE]

Trials whose iterations do nothing run on one local device, in three ways: one trial of a class, whose results a
listener hears; the same, whose results a handle gives; and 16 trials of ``fluid.run``. What counts is the CPU time of
the session's thread, as each stage is entered and left; "rest" is what its turns take besides. The lane's own time and
that of readers in other threads do not count.

Then the lines of ``results.jsonl`` alone: what it takes to make their bytes with their checksums, and without.

``--against`` runs the same with another checkout of Fluid, in turn, so that both meet the same load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

_STAGES = ("poll", "engine", "journal", "notify", "rest")
_WORKLOADS = ("listener", "handle", "fluid.run")
_HERE = Path(__file__).resolve().parents[1]


class Empty:
    """Its iterations do nothing."""

    def setup(self, config: dict[str, Any]) -> None:
        self.step_count = 0

    def step(self) -> dict[str, Any]:
        self.step_count += 1
        return {"loss": 1.0 / self.step_count, "count": self.step_count}


class StageTimes:
    """CPU seconds of the session's thread by stage; time in a stage that another one calls counts for that one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_STAGES, 0.0)
        self._inner = [0.0]

    def wrap(self, owner: type, name: str, stage: str) -> None:
        """Measures a method."""
        method: Callable[..., Any] = getattr(owner, name)

        @wraps(method)
        def measured(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            self._inner.append(0.0)
            try:
                return method(*args, **kwargs)
            finally:
                took = time.thread_time() - begun
                self.seconds[stage] += took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, name, measured)


@contextmanager
def measured() -> Iterator[StageTimes]:
    """Measures the stages of the session's thread from now on."""
    from fluid.backends.local import LocalBackend
    from fluid.policies.engine import EngineState
    from fluid.session.folder.folder import RunFolder
    from fluid.session.pump import Pump

    times = StageTimes()
    times.wrap(Pump, "_turn", "rest")
    times.wrap(LocalBackend, "poll", "poll")
    times.wrap(EngineState, "handle", "engine")
    times.wrap(RunFolder, "journal", "journal")
    times.wrap(Pump, "notify", "notify")
    yield times


def run_workload(name: str, results: int, times: StageTimes, folder: str) -> dict[str, float]:
    """Runs a workload of so many results; returns microseconds per result of each stage."""
    import fluid
    from fluid import FluidExecutor, Trial, TrialGroup, TrialListener

    class Hears(TrialListener):
        heard = 0

        def on_result(self, result: Any) -> None:
            self.heard += 1

    options: Any = {"run_dir": folder, "verbose": 0, "packing": "off"}
    with FluidExecutor("local", devices=1, **options) as executor:
        executor.submit_trialgroup(TrialGroup([Trial(Empty, trial_id="first")])).wait()
        times.seconds = dict.fromkeys(_STAGES, 0.0)
        if name == "fluid.run":
            space, budget = {"x": fluid.search.uniform(0, 1)}, results // 16
            found = fluid.run(Empty, space, algorithm="random", metric="loss", mode="min", samples=16, budget=budget)
            assert sum(trial.iteration for trial in found.trials) == results // 16 * 16
        else:
            listener = Hears() if name == "listener" else None
            handle = executor.submit_trialgroup(TrialGroup([Trial(Empty, budget=results)]), listener)
            assert handle.wait()
            assert listener is None or listener.heard == results
        return {stage: 1e6 * seconds / results for stage, seconds in times.seconds.items()}


def measure_here(results: int) -> dict[str, dict[str, float]]:
    """Measures all workloads in this process, with the Fluid that it imports."""
    found = {}
    with measured() as times, tempfile.TemporaryDirectory() as folder:
        for name in _WORKLOADS:
            found[name] = run_workload(name, results, times, os.path.join(folder, name.replace(".", "-")))
    return found


def line_costs(lines: int = 2_000) -> dict[str, float]:
    """Microseconds that the bytes of a usual line take, with its checksum and without; the least of many runs."""
    from fluid.checksums import checked_lines

    metrics = {"loss": 0.8333333333333333, "accuracy": 0.71484375, "epoch": 12}
    entry = {"group": "0", "trial": "trial-00012", "iteration": 12, "metrics": metrics, "seconds": 0.0218239399994}
    text = json.dumps({**entry, "width": 1.0, "devices": [0], "at": 551.888290399})
    ways: dict[str, Callable[[], bytes]] = {
        "without": lambda: "".join([f"{text}\n" for _ in range(lines)]).encode(),
        "with": lambda: checked_lines([text for _ in range(lines)], 1 << 24),
    }
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(100):
        for name, make in ways.items():
            before = time.thread_time()
            make()
            found[name] = min(found[name], 1e6 * (time.thread_time() - before) / lines)
    return {**found, "bytes": float(len(text))}


def measure_in(checkout: Path, results: int) -> dict[str, dict[str, float]]:
    """The same in a process of its own, with the Fluid of a checkout."""
    program = [sys.executable, __file__, "--here", str(results)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(program, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what a finished iteration costs the driver, by stage.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the results, one run")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of Fluid to compare with")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--here", type=int, metavar="RESULTS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure_here(options.here)))
        return
    results, runs = (4_800, 1) if options.quick else (48_000, 3)
    checkouts = {"this": _HERE} | ({"before": options.against.resolve()} if options.against else {})
    measured_in: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in checkouts}
    for _ in range(runs):
        for name, checkout in checkouts.items():
            measured_in[name].append(measure_in(checkout, results))

    from rich.console import Console
    from rich.table import Table

    figures: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/result_costs.py", *(["--quick"] if options.quick else [])]),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "results": results,
        "microseconds_per_result": {},
    }
    table = Table(title=f"CPU microseconds of the session's thread per result; medians of {runs}")
    for column in ("Fluid", "workload", *_STAGES, "all"):
        table.add_column(column, justify="left" if column in ("Fluid", "workload") else "right")
    for name, each in measured_in.items():
        for workload in _WORKLOADS:
            stages = {stage: median(one[workload][stage] for one in each) for stage in _STAGES}
            stages["all"] = median(sum(one[workload].values()) for one in each)
            figures["microseconds_per_result"].setdefault(name, {})[workload] = stages
            table.add_row(name, workload, *(f"{value:.1f}" for value in stages.values()))
    Console().print(table)
    line = figures["microseconds_per_line"] = line_costs()
    print("a line of {bytes:.0f} bytes: {without:.2f} us, with its checksum {with:.2f} us".format(**line))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
