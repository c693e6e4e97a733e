"""Measures the gain of widening trials in a search whose stages end with stragglers.

    python benchmarks/stragglers.py [--runs 3] [--trials 5] [--data DIR] [--systems wide,...] [--json FILE]

Successive Halving on two CPU devices, one thread each: in every stage the best half continues, with twice the budget,
and the next stage begins when all trials of a stage have ended. With an odd number of trials one device becomes idle;
with widening, the last trial uses both. Trials are perceptrons, on MNIST's images with ``--data`` (a folder with
``mnist-10k.npz``), else on scikit-learn's digits, or on random data of that shape where that is not installed.

"wide" is Fluid, "narrow" Fluid with max_width=1; "ray_default" and "ray_reuse_actors" are Ray Tune, with a run per
stage and, for the latter, actors that are reset instead of restarted. The systems take turns, and each is warm: Ray's
cluster runs, and Fluid's lanes have been used once and have measured the gain of widening.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from stragglers_workload import TASKS, Perceptron, Task, tune_trainable

from fluid import FluidExecutor, Trial, TrialGroup

DEVICES = 2
#: Iterations of the trials that warm Fluid's lanes up: both devices, then one trial alone.
WARM = (1, 1, 12)
#: Runs one stage: from rates and a budget to the last loss of each, and the iterations that ran on several devices.
Stage = Callable[[list[float], int], tuple[dict[float, float], int]]


@contextmanager
def fluid_stages(config: dict[str, Any], max_width: int) -> Iterator[Stage]:
    """Yields a function that runs stages on Fluid."""
    options: dict[str, Any] = {"devices": DEVICES, "max_packing": 1, "max_width": max_width, "verbose": 0}
    with tempfile.TemporaryDirectory() as folder, FluidExecutor("local", run_dir=folder, **options) as executor:
        warm = [Trial(Perceptron, {**config, "lr": 1e-3}, budget=budget) for budget in WARM]
        executor.submit_trialgroup(TrialGroup(warm)).wait()

        def stage(rates: list[float], budget: int) -> tuple[dict[float, float], int]:
            trials = [Trial(Perceptron, {**config, "lr": rate}, budget=budget) for rate in rates]
            handle = executor.submit_trialgroup(TrialGroup(trials))
            handle.wait()
            handle.raise_failures()
            results = list(handle.results())
            last = {result.config["lr"]: result.metrics["loss"] for result in results}
            return last, sum(result.width > 1.0 for result in results)

        yield stage


@contextmanager
def ray_stages(config: dict[str, Any], reuse_actors: bool) -> Iterator[Stage]:
    """Yields a function that runs stages on Ray Tune."""
    import ray
    from ray import tune

    trainable = tune_trainable()
    if not ray.is_initialized():
        os.environ["RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS"] = "0"
        ray.init(address="local", num_cpus=DEVICES, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:

        def stage(rates: list[float], budget: int) -> tuple[dict[float, float], int]:
            analysis = tune.run(
                trainable,
                config={**config, "lr": tune.grid_search(rates)},
                stop={"training_iteration": budget},
                storage_path=folder,
                reuse_actors=reuse_actors,
                verbose=0,
            )
            return {trial.config["lr"]: trial.last_result["loss"] for trial in analysis.trials}, 0

        yield stage


SYSTEMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "wide": lambda config: fluid_stages(config, DEVICES),
    "narrow": lambda config: fluid_stages(config, 1),
    "ray_default": lambda config: ray_stages(config, reuse_actors=False),
    "ray_reuse_actors": lambda config: ray_stages(config, reuse_actors=True),
}


def search(stage: Stage, trials: int, task: Task) -> tuple[float, int, float]:
    """Runs Successive Halving; returns its seconds, the iterations on two devices, and the best loss."""
    begun = time.perf_counter()
    rates = [10 ** (-2 - 2 * number / trials) for number in range(trials)]
    wide, budget, best = 0, task.first, float("inf")
    while rates:
        losses, spread = stage(rates, budget)
        wide += spread
        best = min(best, *losses.values())
        rates = sorted(losses, key=losses.__getitem__)[: len(rates) // 2]
        budget *= 2
    return time.perf_counter() - begun, wide, best


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3, help="measurements of each; the median counts")
    parser.add_argument("--trials", type=int, default=5, help="trials in the first stage")
    parser.add_argument("--data", metavar="DIR", help="folder with mnist-10k.npz")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which, comma-separated")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    task = TASKS["mnist" if options.data else "digits"]
    data = os.path.abspath(options.data) if options.data else None
    config = {"data": data, "task": task.name}
    systems = options.systems.split(",")
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for _ in range(options.runs):
        for name in systems:
            with SYSTEMS[name](config) as stage:
                seconds, wide, best = search(stage, options.trials, task)
            measured[name].append({"seconds": seconds, "iterations_on_two": wide, "best_loss": best})
            print(f"{name}: {seconds:.2f} s, {wide} iterations on two devices, best loss {best:.4f}", flush=True)
    medians = {name: statistics.median(one["seconds"] for one in runs) for name, runs in measured.items()}
    if "wide" in medians:
        for name in systems[1:] if systems[0] == "wide" else systems:
            print(f"{name} takes {medians[name] / medians['wide']:.2f} times as long as Fluid with widening")
    if options.json:
        figures = {
            "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}",
            "date": time.strftime("%Y-%m-%d"),
            "task": task._asdict(),
            "trials": options.trials,
            "median_s": medians,
            "runs": measured,
        }
        Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
