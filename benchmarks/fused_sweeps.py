"""Measures whole sweeps with fused trials against the same sweeps without, each in a process of its own.

    python benchmarks/fused_sweeps.py [--quick] [--part native|spread|convolutions|tune] [--json FILE]

Perceptrons of width 32 on scikit-learn's digits (:mod:`fused_sweeps_workload`), on 2 CPU devices, budget 27 and eta 3;
``packing="auto"`` and ``packing="off"`` in turns, medians of the runs. "native" is ASHA, synchronous halving and
HyperBand with the same seed: the halving must keep the same trials at each rung, up to ties within a sample of the
evaluation. "spread" is the best accuracy of ASHA over five seeds, both ways. "convolutions" are trials that fusing does
not pay for: what trying costs. Seconds are those of ``fluid.run``, with the lanes' start; "trained" leaves that out.
"tune" has a quarter of the trials under Ray Tune's ASHA, HyperBand and PBT: with an executor, both ways, and
``tune.run(reuse_actors=True)`` by itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy
from fused_sweeps_workload import Convolutions, Perceptron
from measuring import machine, run_apart, write_json

import fluid
from fluid.search import loguniform, randint, uniform

DEVICES, BUDGET, ETA = 2, 27, 3
WAYS = ("auto", "off")
SPACE = {
    "lr": loguniform(1e-3, 1.0),
    "momentum": uniform(0.0, 0.95),
    "decay": loguniform(1e-6, 1e-2),
    "seed": randint(0, 1_000_000),
}
MODELS = {"perceptron": Perceptron, "convolutions": Convolutions}


class Started(fluid.TrialListener):
    """Notes when the first trial was set up, seconds."""

    at: float | None = None

    def on_start(self, trial_id: str) -> None:
        self.at = self.at or time.perf_counter()


def sweep(model: str, algorithm: str, packing: str, samples: int, seed: int) -> dict[str, Any]:
    """Runs a sweep in this process; returns its figures."""
    begun, started = time.perf_counter(), Started()
    with fluid.FluidExecutor(backend="local", devices=DEVICES, verbose=0, packing=packing) as executor:
        result = fluid.run(
            MODELS[model],
            SPACE,
            metric="accuracy",
            mode="max",
            samples=None if algorithm == "hyperband" else samples,
            budget=BUDGET,
            eta=ETA,
            algorithm=algorithm,
            seed=seed,
            executor=executor,
            callbacks=[started],
        )
        ended = time.perf_counter()
    steps = [step for trial in result.trials for step in trial.results]
    assert started.at is not None
    best = max(result.trials, key=lambda trial: float(trial.results[-1].metrics["accuracy"]))
    return {
        "seconds": ended - begun,
        "trained": ended - started.at,
        "iterations": len(steps),
        "rows": max(step.rows for step in steps),
        "accuracy": float(result.best.value),
        "best": best.config,
        "lengths": [trial.iteration for trial in sorted(result.trials, key=lambda trial: trial.trial_id)],
    }


def compare(model: str, algorithm: str, samples: int, runs: int, seed: int = 0) -> dict[str, Any]:
    """Measures both ways in turns; prints and returns medians."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(runs):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            arguments = ["--one", model, algorithm, way, str(samples), str(seed)]
            apart = run_apart(__file__, arguments, what=f"{algorithm}, {way}", timeout=1_200.0)
            if apart is not None:
                found[way].append(apart.figures)
    if not all(found.values()):
        return {}
    fused, alone = (found[way][0] for way in WAYS)
    middle = {
        f"{field}_{way}": statistics.median(each[field] for each in found[way])
        for way in WAYS
        for field in ("seconds", "trained", "accuracy", "iterations", "rows")
    }
    figures: dict[str, Any] = {**middle, "runs": runs}
    figures["speedup"] = middle["seconds_off"] / middle["seconds_auto"]
    figures["speedup_trained"] = middle["trained_off"] / middle["trained_auto"]
    print(
        f"{model}, {algorithm:10} off {middle['seconds_off']:7.2f} s, fused {middle['seconds_auto']:7.2f} s: "
        f"{figures['speedup']:.2f}x, {figures['speedup_trained']:.2f}x without the lanes' start; "
        f"up to {middle['rows_auto']:.0f} rows, best {middle['accuracy_off']:.4f} and {middle['accuracy_auto']:.4f}",
        flush=True,
    )
    if algorithm != "asha":
        pairs = zip(fused["lengths"], alone["lengths"], strict=True)
        figures["unlike_trials"] = sum(one != other for one, other in pairs)
        figures["same_best"] = fused["best"] == alone["best"]
        print(f"    trials of unlike length {figures['unlike_trials']}, same best configuration {figures['same_best']}")
    return figures


def native(samples: int, runs: int) -> dict[str, Any]:
    return {algorithm: compare("perceptron", algorithm, samples, runs) for algorithm in ("asha", "sha", "hyperband")}


def spread(samples: int, runs: int) -> dict[str, Any]:
    """The best accuracy of ASHA, whose promotions depend on timing, over seeds."""
    bests: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(max(2, runs)):
        found = compare("perceptron", "asha", samples, 1, seed)
        for way in WAYS if found else ():
            bests[way].append(found[f"accuracy_{way}"])
    low, high = min(bests["off"]), max(bests["off"])
    fused = statistics.median(bests["auto"])
    print(f"best of ASHA without fusing {low:.4f} to {high:.4f}, fused {fused:.4f}: within {low <= fused <= high}")
    return {**bests, "is_within": low <= fused <= high}


def convolutions(samples: int, runs: int) -> dict[str, Any]:
    return compare("convolutions", "asha", max(8, samples // 8), runs)


TUNE_WAYS = (*WAYS, "reuse_actors")


def tune_sweep(algorithm: str, way: str, samples: int) -> dict[str, Any]:
    """Runs a sweep of Ray Tune in this process; returns its figures."""
    import ray
    from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, PopulationBasedTraining

    from fluid import tune
    from fluid.elastic import as_tune_trainable

    space = {
        "lr": tune.loguniform(1e-3, 1.0),
        "momentum": tune.uniform(0.0, 0.95),
        "decay": tune.loguniform(1e-6, 1e-2),
        "seed": tune.randint(0, 1_000_000),
    }
    scheduler = {
        "asha": lambda: ASHAScheduler(max_t=BUDGET, grace_period=1, reduction_factor=ETA),
        "hyperband": lambda: HyperBandScheduler(max_t=BUDGET, reduction_factor=ETA),
        "pbt": lambda: PopulationBasedTraining(
            time_attr="training_iteration", perturbation_interval=4, hyperparam_mutations={"lr": space["lr"]}
        ),
    }[algorithm]()
    random.seed(0)
    numpy.random.seed(0)
    ray.init(num_cpus=DEVICES, logging_level="ERROR", include_dashboard=False, log_to_driver=False)
    begun = time.perf_counter()
    analysis = tune.run(
        as_tune_trainable(Perceptron),
        config=space,
        num_samples=samples,
        scheduler=scheduler,
        metric="accuracy",
        mode="max",
        stop={"training_iteration": BUDGET},
        resources_per_trial={"cpu": 1},
        reuse_actors=way == "reuse_actors",
        executor=None if way == "reuse_actors" else fluid.FluidExecutor(devices=DEVICES, verbose=0, packing=way),
        verbose=0,
    )
    return {
        "seconds": time.perf_counter() - begun,
        "iterations": sum(trial.last_result["training_iteration"] for trial in analysis.trials),
        "accuracy": float(analysis.best_result["accuracy"]),
    }


def under_tune(samples: int, runs: int) -> dict[str, Any]:
    """Compares the ways under Ray Tune, in turns; prints and returns medians."""
    figures: dict[str, Any] = {}
    for algorithm in ("asha", "hyperband", "pbt"):
        count = samples // 16 if algorithm == "pbt" else samples // 4
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in TUNE_WAYS}
        for _ in range(runs):
            for way in TUNE_WAYS:
                arguments = ["--one-of-tune", algorithm, way, str(count)]
                apart = run_apart(__file__, arguments, what=f"Tune, {algorithm}, {way}", timeout=1_200.0)
                if apart is not None:
                    found[way].append(apart.figures)
        if not all(found.values()):
            continue
        middle = {way: statistics.median(each["seconds"] for each in found[way]) for way in TUNE_WAYS}
        figures[algorithm] = {"trials": count, **{way: found[way] for way in TUNE_WAYS}}
        times = ", ".join(f"{way} {middle[way]:.1f} s ({middle[way] / middle['auto']:.2f}x)" for way in TUNE_WAYS)
        print(f"Ray Tune, {algorithm}, {count} trials: {times}", flush=True)
    return figures


PARTS = {"native": native, "spread": spread, "convolutions": convolutions, "tune": under_tune}


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 trials, one run of each")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--part", choices=tuple(PARTS), action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--one-of-tune", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_of_tune:
        algorithm, way, samples = options.one_of_tune
        print(json.dumps(tune_sweep(algorithm, way, int(samples))))
        return
    if options.one:
        model, algorithm, packing, samples, seed = options.one
        print(json.dumps(sweep(model, algorithm, packing, int(samples), int(seed))))
        return
    samples, runs = (64, 1) if options.quick else (options.samples, options.runs)
    figures = {"machine": machine(), "date": datetime.date.today().isoformat(), "samples": samples}
    for name in options.part or PARTS:
        figures[name] = PARTS[name](samples, runs)
        write_json(options.json, figures)


if __name__ == "__main__":
    main()
