"""Measures fluid.run against trials submitted by hand, and against Optuna and Ray Tune on real digits, in one run.

    python benchmarks/native_sweep.py [--runs 5] [--part hand|peers] [--json FILE]

"hand": random search and successive halving on 2 CPU devices of one open executor, by ``fluid.run`` and by
``submit_trialgroup`` with the same configs, in turns; the ratio is that of the medians.
"peers": 64 perceptrons on scikit-learn's digits under asynchronous successive halving (budget 27, eta 3), each
measurement in a process of its own, imports left out: ``fluid.run``, ``study.optimize(n_jobs=2)`` with Optuna's
SuccessiveHalvingPruner, and ``tune.run`` with Tune's ASHAScheduler. Needs scikit-learn, Optuna and Ray.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import machine, run_apart
from native_sweep_workload import Classifier, busy, empty, train

import fluid
from fluid.search import loguniform, make_sampler, make_space, randint, uniform

DEVICES = 2
SAMPLES, BUDGET = 64, 27
RUNGS = (1, 3, 9, 27)
LINE = {"x": uniform(0.0, 1.0)}
DIGITS = {"lr": loguniform(1e-4, 1e-1), "alpha": loguniform(1e-6, 1e-1), "hidden": randint(8, 65)}
_numbers = itertools.count()


# -- by hand -------------------------------------------------------------------------------------------------


def trials_by_hand(trainable: Any, samples: int, budget: int, follow_up_iterations: int = 0) -> list[fluid.Trial]:
    sampler, run = make_sampler("random", make_space(LINE), seed=0), next(_numbers)
    configs = [sampler.ask() for _ in range(samples)]
    return [
        fluid.Trial(
            trainable,
            suggestion.config,
            budget=budget,
            trial_id=f"hand-{run}-{number}",
            follow_up_iterations=follow_up_iterations,
        )
        for number, suggestion in enumerate(configs)
        if suggestion is not None
    ]


def random_by_hand(trainable: Any, samples: int, budget: int) -> float:
    handle = fluid.submit_trialgroup(fluid.TrialGroup(trials_by_hand(trainable, samples, budget)))
    return min(result.metrics["loss"] for result in handle.results())


def halving_by_hand(trainable: Any, samples: int) -> float:
    """As in examples/successive_halving.py."""
    trials = trials_by_hand(trainable, samples, RUNGS[0], RUNGS[-1] - RUNGS[0])
    handle = fluid.submit_trialgroup(fluid.TrialGroup(trials))
    alive = [trial.id for trial in trials]
    for rung, further in enumerate(RUNGS[1:]):
        handle.wait()
        last = {result.trial_id: result.metrics["loss"] for result in handle.results()}
        ranked = sorted(alive, key=last.__getitem__)
        alive, dropped = ranked[: samples // 3 ** (rung + 1)], ranked[samples // 3 ** (rung + 1) :]
        for trial_id in alive:
            handle.extend(trial_id, further - RUNGS[rung], follow_up_iterations=RUNGS[-1] - further)
        for trial_id in dropped:
            handle.stop(trial_id)
    return min(result.metrics["loss"] for result in handle.results())


def by_run(trainable: Any, samples: int, budget: int, algorithm: str) -> float:
    options = {"metric": "loss", "samples": samples, "budget": budget, "algorithm": algorithm}
    return float(fluid.run(trainable, LINE, **options).best.value)


def hand(runs: int) -> dict[str, Any]:
    """Measures ``fluid.run`` and trials by hand, in turns."""
    cases: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "random, 256 x 1 empty": (lambda: random_by_hand(empty, 256, 1), lambda: by_run(empty, 256, 1, "random")),
        "random, 64 x 27 empty": (lambda: random_by_hand(empty, 64, 27), lambda: by_run(empty, 64, 27, "random")),
        "random, 32 x 9 of 5 ms": (lambda: random_by_hand(busy, 32, 9), lambda: by_run(busy, 32, 9, "random")),
        "halving, 64 to 27 empty": (lambda: halving_by_hand(empty, 64), lambda: by_run(empty, 64, 27, "sha")),
        "halving, 64 to 27 of 5 ms": (lambda: halving_by_hand(busy, 64), lambda: by_run(busy, 64, 27, "sha")),
    }
    figures = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        fluid.FluidExecutor(backend="local", devices=DEVICES, verbose=0, run_dir=Path(folder) / "run"),
    ):
        for name, ways in cases.items():
            seconds: tuple[list[float], list[float]] = ([], [])
            for number in range(runs + 1):
                values = [0.0, 0.0]
                for way in (number % 2, 1 - number % 2):  # In turns also within a round, as the machine is shared.
                    begun = time.perf_counter()
                    values[way] = ways[way]()
                    if number:  # The first is to warm up.
                        seconds[way].append(time.perf_counter() - begun)
                assert values[0] == values[1], "the best of the same configs"
            by_hand, run = map(statistics.median, seconds)
            figures[name] = {"hand_s": by_hand, "run_s": run, "ratio": run / by_hand}
            print(f"{name:28} by hand {by_hand:7.3f} s   fluid.run {run:7.3f} s   {run / by_hand:5.2f}x")
    return figures


# -- peers, in a process of their own ------------------------------------------------------------------------


def sweep_of_fluid() -> tuple[int, float]:
    options = {"metric": "accuracy", "mode": "max", "samples": SAMPLES, "budget": BUDGET}
    with fluid.FluidExecutor(backend="local", devices=DEVICES, verbose=0):
        result = fluid.run(train, DIGITS, **options)
    return sum(trial.iteration for trial in result.trials), result.best.value


def sweep_of_optuna() -> tuple[int, float]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        lr, alpha = trial.suggest_float("lr", 1e-4, 1e-1, log=True), trial.suggest_float("alpha", 1e-6, 1e-1, log=True)
        classifier = Classifier({"lr": lr, "alpha": alpha, "hidden": trial.suggest_int("hidden", 8, 64)})
        best = 0.0
        for epoch in range(1, BUDGET + 1):
            accuracy = classifier.epoch()
            best = max(best, accuracy)
            trial.report(accuracy, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return best

    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.optimize(objective, n_trials=SAMPLES, n_jobs=DEVICES)
    values = [value for trial in study.trials for value in trial.intermediate_values.values()]
    return len(values), max(values)


def sweep_of_tune() -> tuple[int, float]:
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    def trainable(config: dict[str, Any]) -> None:
        classifier = Classifier(config)
        for _ in range(BUDGET):
            tune.report({"accuracy": classifier.epoch()})

    ray.init("local", num_cpus=DEVICES, logging_level="ERROR", include_dashboard=False, log_to_driver=False)
    domains = {"lr": tune.loguniform(1e-4, 1e-1), "alpha": tune.loguniform(1e-6, 1e-1), "hidden": tune.randint(8, 65)}
    scheduler = ASHAScheduler(max_t=BUDGET, grace_period=1, reduction_factor=3)
    options = {"metric": "accuracy", "mode": "max", "num_samples": SAMPLES, "scheduler": scheduler, "verbose": 0}
    analysis = tune.run(trainable, config=domains, resources_per_trial={"cpu": 1}, **options)
    frames = analysis.trial_dataframes.values()
    return sum(map(len, frames)), max(frame["accuracy"].max() for frame in frames if len(frame))


PEERS = {"fluid": sweep_of_fluid, "optuna": sweep_of_optuna, "tune": sweep_of_tune}


def peers(runs: int) -> dict[str, Any]:
    """Measures each of the three in processes of their own, in turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PEERS}
    for _, name in itertools.product(range(runs), PEERS):
        apart = run_apart(__file__, ["--peer", name], what=name, timeout=600.0)
        if apart is not None:
            found[name].append(apart.figures)
    figures = {
        name: {field: statistics.median(each[field] for each in measured) for field in measured[0]}
        for name, measured in found.items()
        if measured
    }
    for name, each in figures.items():
        ratio = each["seconds"] / figures["fluid"]["seconds"]
        per = 1e3 * each["seconds"] / each["iterations"]
        print(
            f"{name:8} {each['seconds']:7.2f} s {ratio:6.2f}x   {each['iterations']:5.0f} iterations of {per:6.1f} ms"
            f"   best accuracy {each['best']:.4f}"
        )
    return figures


def main() -> None:
    """Runs the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--part", choices=("hand", "peers"), action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", choices=tuple(PEERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        begun = time.perf_counter()
        iterations, best = PEERS[options.peer]()
        print(json.dumps({"seconds": time.perf_counter() - begun, "iterations": iterations, "best": best}))
        return
    parts = {"hand": hand, "peers": peers}
    figures = {name: parts[name](options.runs) for name in options.part or parts}
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n", encoding="utf-8")
        print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
