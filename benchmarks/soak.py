"""Soak test: thousands of trials through one driver; memory, descriptors and time per trial must not grow.

    python benchmarks/soak.py [--parts native,traced,tune] [--trials 20000] [--traced 4000] [--tune 2000] [--json FILE]

Three parts, each in a process of its own:

* "native": trials of three iterations through one FluidExecutor, in a rolling window of one group and in groups of
  their own; each is forgotten after it has ended. Every tenth is stopped early, every hundredth raises, every five
  hundredth ends its lane, every twentieth has a trainable of its own. The driver and the processes below it are
  sampled: memory, CPU seconds, open descriptors.
* "traced": the same, shorter and slower, with tracemalloc: what the driver keeps per trial, by line.
* "tune": trials of one iteration under ``fluid.tune.run``, with tracemalloc: what Fluid's own files keep per trial. The
  last result of each trial counts too: Fluid reads it, and Tune keeps it.

Growth is what is added from the first sample after the warm-up to the last. Live progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from measuring import machine
from soak_workload import Stepper, climb, make_climb

import fluid
from fluid import FluidExecutor, Trial, TrialGroup, TrialListener

DEVICES = 2
#: Trials under way at once natively, and under Tune.
WINDOW = 64
CONCURRENT = 8
#: Every so many trials, so many are submitted as a group of their own.
GROUP_EVERY = 160
GROUP = 16
#: Trials of the warm-up, in which caches fill and lanes start; a quarter of all trials if that is less.
WARM_UP = 1000
#: Samples of a run.
SAMPLES = 40
#: Most bytes of driver memory per trial: the goal.
GOAL = 1024
HERE = Path(__file__).resolve().parent
#: The folder that holds Fluid's files.
ROOT = Path(fluid.__file__).resolve().parent.parent


# -- samples -----------------------------------------------------------------------------------------------


def descendants(root: int) -> list[int]:
    """Returns the processes below a process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8").rpartition(")")[2]
                children.setdefault(int(status.split()[1]), []).append(int(entry))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def resident_bytes(pid: int) -> int:
    """Returns the resident bytes of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def descriptors(pid: int) -> int:
    """Returns the number of open descriptors of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


class Sampler:
    """Samples this process, the processes below it and the memory of Fluid's files, every so many trials.

    Args:
        trials: number of trials of the run.
        traced: whether to trace allocations.
    """

    def __init__(self, trials: int, traced: bool) -> None:
        self.samples: list[dict[str, Any]] = []
        self._every = max(25, trials // SAMPLES)
        self._warm_up = min(WARM_UP, trials // 4)
        self._begun = time.perf_counter()
        #: What Fluid's files held after the warm-up, and at the end.
        self._held: list[tuple[int, tracemalloc.Snapshot]] = []
        if traced:
            tracemalloc.start()

    def count(self, before: int, done: int, *, last: bool = False) -> None:
        """Takes a sample if one is due now that so many trials have ended."""
        if done // self._every == before // self._every and not last:
            return
        gc.collect()
        below = descendants(os.getpid())
        point = {
            "trials": done,
            "seconds": round(time.perf_counter() - self._begun, 3),
            "cpu_s": round(time.process_time(), 3),
            "bytes": resident_bytes(os.getpid()),
            "descriptors": descriptors(os.getpid()),
            "processes_below": len(below),
            "most_descriptors_below": max(map(descriptors, below), default=0),
            "most_bytes_below": max(map(resident_bytes, below), default=0),
        }
        self.samples.append(point)
        if tracemalloc.is_tracing() and (last or (done >= self._warm_up and not self._held)):
            files = [tracemalloc.Filter(True, str(ROOT / part / "*")) for part in ("fluid", "integrations")]
            self._held.append((done, tracemalloc.take_snapshot().filter_traces(files)))
        memory = f"{point['bytes'] / 2**20:6.1f} MiB, {point['descriptors']} descriptors"
        print(f"{done:6d} trials {point['seconds']:8.1f} s, driver {memory}, {len(below)} processes", file=sys.stderr)

    def figures(self) -> dict[str, Any]:
        """Returns what has grown since the warm-up, and all samples."""
        half = len(self.samples) // 2
        kinds = ("descriptors", "most_descriptors_below", "processes_below", "most_bytes_below")
        return {
            "driver_bytes_per_trial": round(self._slope("bytes"), 1),
            # The most in either half of the run: at any one instant a lane may be starting.
            **{
                kind: [max(point[kind] for point in part) for part in (self.samples[:half], self.samples[half:])]
                for kind in kinds
            },
            "wall_ms_per_trial": self._first_and_last("seconds"),
            "cpu_ms_per_trial": self._first_and_last("cpu_s"),
            **(self._own() if self._held else {}),
            "samples": self.samples,
        }

    def _slope(self, key: str) -> float:
        """Growth per trial after the warm-up, by least squares."""
        points = [(point["trials"], point[key]) for point in self.samples if point["trials"] >= self._warm_up]
        return float(np.polyfit(*np.array(points, dtype=float).T, 1)[0])

    def _first_and_last(self, key: str) -> list[float]:
        """Milliseconds per trial of the first and of the last thousand trials after the first sample."""
        trials, seconds = ([point[name] for point in self.samples] for name in ("trials", key))
        span = min(1000, (trials[-1] - trials[0]) // 2)
        ends = [(trials[0], trials[0] + span), (trials[-1] - span, trials[-1])]
        return [round(1000.0 * float(np.diff(np.interp(end, trials, seconds))[0]) / span, 3) for end in ends]

    def _own(self) -> dict[str, Any]:
        """What Fluid's own files hold more than after the warm-up, in bytes per trial, and by line."""
        (warm, before), (last, after) = self._held
        lines = sorted(after.compare_to(before, "lineno"), key=lambda line: -line.size_diff)
        return {
            "own_bytes_per_trial": round(sum(line.size_diff for line in lines) / (last - warm), 1),
            "own_bytes_per_trial_by_line": {
                f"{Path(line.traceback[0].filename).relative_to(ROOT)}:{line.traceback[0].lineno}": round(per_trial, 1)
                for line in lines
                if (per_trial := line.size_diff / (last - warm)) >= 5.0
            },
        }


# -- native ------------------------------------------------------------------------------------------------


class Ends(TrialListener):
    """Collects the ids of trials that have ended."""

    def __init__(self) -> None:
        self.ids: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.states: Counter[str] = Counter()

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        self.states[state] += 1
        self.ids.put(trial_id)


class Window:
    """Keeps trials under way in one executor, and forgets each after it has ended."""

    def __init__(self, executor: FluidExecutor, trials: int) -> None:
        self._executor = executor
        self._trials = trials
        self._made = 0
        self.ends = Ends()
        #: Handle of each trial under way.
        self._handles: dict[str, Any] = {}
        self._group: Any = None

    def run(self, sampler: Sampler) -> None:
        """Runs all trials."""
        done = 0
        self._top_up()
        while self._handles:
            ended = [self.ends.ids.get()]
            while not self.ends.ids.empty():
                ended.append(self.ends.ids.get())
            before = done
            for trial_id in ended:  # One that was stopped after it was done has ended twice.
                if (handle := self._handles.pop(trial_id, None)) is not None:
                    handle.forget(trial_id)
                    done += 1
            self._top_up()
            sampler.count(before, done, last=not self._handles)

    def _top_up(self) -> None:
        """Adds as many trials to the group of the window as there is room for, or submits a group of their own."""
        while self._made < self._trials and len(self._handles) < WINDOW:
            apart = self._made % GROUP_EVERY == 0
            room = min(WINDOW - len(self._handles), GROUP_EVERY - self._made % GROUP_EVERY)
            last = min(self._made + (GROUP if apart else room), self._trials)
            trials = [trial(number) for number in range(self._made, last)]
            self._made = last
            if apart or self._group is None:
                handle = self._executor.submit_trialgroup(TrialGroup(trials), self.ends)
                self._group = handle if not apart else self._group
            else:
                handle = self._group
                handle.add(*trials)
            self._handles |= dict.fromkeys((trial.id for trial in trials), handle)
            for stopped in trials:
                if stopped.config["ends"] == "stopped":
                    handle.stop(stopped.id)


def trial(number: int) -> Trial:
    """Returns a trial of the native part."""
    rules = ((500, "lane"), (100, "error"), (10, "stopped"))
    ends = next((how for every, how in rules if number % every == every - 1), "done")
    config = {"x": number * 1e-3, "ends": ends}
    trainable = make_climb(number) if number % 20 == 0 else Stepper if number // 10 % 2 else climb
    return Trial(trainable, config, budget=3, trial_id=f"soak-{number:06d}")


def native(trials: int, traced: bool) -> dict[str, Any]:
    """Runs trials natively."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        sampler = Sampler(trials, traced)
        with FluidExecutor(backend="local", devices=DEVICES, run_dir=run_dir, verbose=0, max_failures=0) as executor:
            window = Window(executor, trials)
            window.run(sampler)
            files = list(run_dir.rglob("*"))
            sizes = {file.name: file.stat().st_size for file in files if file.is_file()}
    return {
        "trials": trials,
        "ended": dict(window.ends.states),
        "run_folder": {
            "entries": len(files),
            "bytes_per_trial": round(sum(sizes.values()) / trials),
            "largest_bytes": dict(Counter(sizes).most_common(4)),
        },
        **sampler.figures(),
    }


# -- under Tune --------------------------------------------------------------------------------------------


def under_tune(trials: int) -> dict[str, Any]:
    """Runs trials of one iteration under ``fluid.tune.run``."""
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    import ray
    from ray.tune import Callback

    from fluid import tune

    ray.init("local", num_cpus=DEVICES, logging_level=logging.ERROR, include_dashboard=False)
    sampler = Sampler(trials, traced=True)

    class Progress(Callback):  # type: ignore[misc]
        """Samples as trials end."""

        done = 0

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self.done += 1
            sampler.count(self.done - 1, self.done)

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        with FluidExecutor(backend="local", devices=DEVICES, run_dir=run_dir, verbose=0) as executor:
            analysis = tune.run(
                type("TuneStepper", (Stepper, tune.Trainable), {}),
                config={"x": tune.uniform(0.0, 1.0), "ends": "done"},
                num_samples=trials,
                max_concurrent_trials=CONCURRENT,
                stop={"training_iteration": 1},
                callbacks=[Progress()],
                storage_path=folder,
                verbose=0,
                executor=executor,
            )
            sampler.count(trials, trials, last=True)
    ray.shutdown()
    return {
        "trials": trials,
        "ended": dict(Counter(str(trial.status) for trial in analysis.trials)),
        **sampler.figures(),
    }


# -- the report --------------------------------------------------------------------------------------------

PARTS = ("native", "traced", "tune")


def measure(part: str, trials: int) -> dict[str, Any]:
    """Measures a part in this process."""
    return under_tune(trials) if part == "tune" else native(trials, traced=part == "traced")


def measure_apart(part: str, trials: int) -> Any:
    """Measures a part in a process of its own, which shows its progress."""
    with tempfile.TemporaryDirectory() as home:
        variables = {**os.environ, "HOME": home, "OMP_NUM_THREADS": "1", "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), variables.get("PYTHONPATH", "")]))
        command = [sys.executable, str(Path(__file__).resolve()), "--one", part, "--count", str(trials)]
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(measured: dict[str, Any]) -> None:
    """Prints a table of what was measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Growth per trial after the warm-up; goal: at most {GOAL} bytes", title_justify="left")
    for column in ("part", "trials", "driver RSS B", "Fluid's own B", "descriptors", "of a lane", "CPU ms", "wall ms"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, figures in measured.items():
        table.add_row(
            part,
            str(figures["trials"]),
            # Tracing takes memory too.
            f"{figures['driver_bytes_per_trial']:.0f}" if part == "native" else "",
            f"{figures['own_bytes_per_trial']:.0f}" if "own_bytes_per_trial" in figures else "",
            *(
                " to ".join(map(str, figures[kind]))
                for kind in ("descriptors", "most_descriptors_below", "cpu_ms_per_trial", "wall_ms_per_trial")
            ),
        )
    Console(width=120).print(table)


def main() -> None:
    """Measures, prints a table and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", default=",".join(PARTS), help="which parts, comma-separated")
    parser.add_argument("--trials", type=int, default=20_000, help="trials of the part native (default 20000)")
    parser.add_argument("--traced", type=int, default=4_000, help="trials of the part traced (default 4000)")
    parser.add_argument("--tune", type=int, default=2_000, help="trials of the part tune (default 2000)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            figures = measure(options.one, options.count)
        print(json.dumps(figures))
        return
    counts = {"native": options.trials, "traced": options.traced, "tune": options.tune}
    measured = {part: measure_apart(part, counts[part]) for part in options.parts.split(",")}
    report(measured)
    if options.json:
        command = " ".join(["python benchmarks/soak.py", *sys.argv[1:]])
        facts = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "command": command}
        Path(options.json).write_text(json.dumps({**facts, **measured}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
