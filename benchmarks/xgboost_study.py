"""Measures an Optuna study of XGBoost with n_jobs=2 against the same trials on Fluid, in one run.

    python benchmarks/xgboost_study.py [--runs 3] [--trials 48] [--json FILE]

Every way trains the same models, two at a time: 50 boosting rounds on 12,123 images of digits.

* "optuna": ``study.optimize(objective, n_jobs=2)``, two threads of one interpreter, ``nthread=1`` in the objective;
* "optuna, nthread unset": the same without ``nthread``, so that each model takes both cores;
* "fluid, study": ``fluid.integrations.optuna.optimize`` on two devices, with the objective that sets no ``nthread``;
* "fluid.run": ``fluid.integrations.xgboost.train``, each boosting round an iteration, the best model kept.

Each measurement is a process of its own, ways take turns, and the order changes from run to run. Seconds are those from
before the executor is made to the end of the study: imports and data of the driver are left out, those of lanes count.
CPU seconds are those of the process and all that it started. Needs scikit-learn, XGBoost and Optuna.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import machine, run_apart

DEVICES = 2


def points(trials: int) -> list[dict[str, Any]]:
    """Returns the parameters of all trials."""
    rng = np.random.default_rng(0)

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    return [
        {
            "max_depth": int(rng.integers(2, 7)),
            "eta": log_uniform(0.03, 1.0),
            "min_child_weight": log_uniform(0.5, 8.0),
            "lambda": log_uniform(1e-3, 10.0),
        }
        for _ in range(trials)
    ]


def study_of(trials: int) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for point in points(trials):
        study.enqueue_trial(point)
    return study


def by_optuna(trials: int) -> list[float]:
    from xgboost_workload import objective

    study = study_of(trials)
    study.optimize(objective, n_trials=trials, n_jobs=DEVICES)
    return [trial.value for trial in study.trials]


def by_optuna_unset(trials: int) -> list[float]:
    from xgboost_workload import objective

    study = study_of(trials)
    study.optimize(functools.partial(objective, nthread=None), n_trials=trials, n_jobs=DEVICES)
    return [trial.value for trial in study.trials]


def by_fluid_study(trials: int) -> list[float]:
    from xgboost_workload import objective

    from fluid import FluidExecutor
    from fluid.integrations.optuna import optimize

    study = study_of(trials)
    with FluidExecutor(backend="local", devices=DEVICES, verbose=0) as executor:
        optimize(study, functools.partial(objective, nthread=None), n_trials=trials, executor=executor)
    return [trial.value for trial in study.trials]


def by_fluid_run(trials: int) -> list[float]:
    from xgboost_workload import FIXED, ROUNDS, matrices

    from fluid import FluidExecutor
    from fluid.integrations.xgboost import train
    from fluid.search import loguniform, randint

    training, valid = matrices()
    params = {
        **FIXED,
        "max_depth": randint(2, 7),
        "eta": loguniform(0.03, 1.0),
        "min_child_weight": loguniform(0.5, 8.0),
        "lambda": loguniform(1e-3, 10.0),
    }
    sweep = {"metric": "valid-mlogloss", "samples": trials, "points": points(trials), "algorithm": "random"}
    with FluidExecutor(backend="local", devices=DEVICES, verbose=0, keep="best:1"):
        result = train(params, training, ROUNDS, evals=[(valid, "valid")], **sweep)
    return [trial.metrics["valid-mlogloss"] for trial in result.trials]


WAYS = {
    "optuna": by_optuna,
    "optuna, nthread unset": by_optuna_unset,
    "fluid, study": by_fluid_study,
    "fluid.run": by_fluid_run,
}


def measure(way: str, trials: int) -> dict[str, float]:
    """Measures one way in this process."""
    import optuna  # noqa: F401
    from xgboost_workload import matrices

    import fluid.integrations.xgboost  # noqa: F401

    matrices()
    before, begun = cpu_seconds(), time.perf_counter()
    values = WAYS[way](trials)
    seconds = time.perf_counter() - begun
    assert len(values) == trials
    return {"seconds": seconds, "cpu_seconds": cpu_seconds() - before, "best": min(values), "sum": sum(values)}


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def compare(runs: int, trials: int) -> dict[str, Any]:
    """Measures all ways in turns, and prints a table."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(runs):
        order = list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]
        for way in order:
            apart = run_apart(__file__, ["--way", way, "--trials", str(trials)], what=way, timeout=1800.0)
            if apart is not None:
                found[way].append(apart.figures)
    sums = {round(each["sum"], 6) for measured in found.values() for each in measured}
    assert len(sums) == 1, f"all ways train the same models: {sums}"
    figures = {
        way: {name: statistics.median(each[name] for each in measured) for name in ("seconds", "cpu_seconds", "best")}
        | {"runs": [each["seconds"] for each in measured]}
        for way, measured in found.items()
    }
    for way, each in figures.items():
        each["ratio"] = each["seconds"] / figures["optuna"]["seconds"]
        print(
            f"{way:21} {each['seconds']:7.2f} s  {each['ratio']:5.2f}x  {each['cpu_seconds']:7.2f} s of CPU"
            f"   best {each['best']:.5f}"
        )
    return {"trials": trials, "ways": figures}


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trials", type=int, default=48)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--way", choices=tuple(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.way, options.trials)))
        return
    figures = compare(options.runs, options.trials)
    if options.json:
        text = json.dumps({"machine": machine(), **figures}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
        print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
