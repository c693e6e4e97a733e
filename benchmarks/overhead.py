"""Measures the overhead of running trials: Fluid and its peers on one machine, in one run.

    python benchmarks/overhead.py [--runs 3] [--systems fluid_local,...] [--workloads busy,empty] [--json FILE]

Two workloads on 2 CPU devices: "busy", 32 trials of 10 iterations of 10 ms of CPU time with ``import torch`` in the
setup, and "empty", 256 trials of one iteration that does nothing. Each measurement is a process of its own; "run" is
from the call that starts the sweep to its last result, "total" is the whole process. Ratios are against Fluid local.
A peer that is not installed (``pip install 'ray[tune]' syne-tune optuna torch``) is left out with a message.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import run_apart, write_json

DEVICES = 2
WORKLOADS: dict[str, dict[str, Any]] = {
    "busy": {"trials": 32, "iterations": 10, "milliseconds": 10.0, "import_torch": True},
    "empty": {"trials": 256, "iterations": 1, "milliseconds": 0.0, "import_torch": False},
}
HERE = Path(__file__).resolve().parent


def ideal(workload: dict[str, Any]) -> float:
    """Returns the seconds of work divided by the number of devices."""
    return float(workload["trials"] * workload["iterations"] * workload["milliseconds"]) * 1e-3 / DEVICES


def configs(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns one config per trial."""
    return [{**workload, "x": x} for x in range(workload["trials"])]


# -- the systems: each returns the seconds of its run ------------------------------------------------------


def fluid(backend: str, workload: dict[str, Any]) -> float:
    """Runs Fluid's native API."""
    from overhead_workload import trial_of

    from fluid import FluidExecutor, Trial, TrialGroup

    begun = time.perf_counter()
    with FluidExecutor(backend=backend, devices=DEVICES, verbose=0) as executor:
        trials = [Trial(trial_of(workload), config, budget=workload["iterations"]) for config in configs(workload)]
        handle = executor.submit_trialgroup(TrialGroup(trials))
        results = sum(1 for _ in handle.results())
        seconds = time.perf_counter() - begun
        handle.raise_failures()
    assert results == workload["trials"] * workload["iterations"], results
    return seconds


def ray_tune(reuse_actors: bool, workload: dict[str, Any]) -> float:
    """Runs Ray Tune, with a class trainable that can be reused."""
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    import ray
    from overhead_workload import burn
    from ray import tune

    class Trial(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: dict[str, Any]) -> None:
            if config["import_torch"]:
                import torch

                assert torch.__version__
            self.milliseconds = config["milliseconds"]

        def step(self) -> dict[str, float]:
            burn(self.milliseconds)
            return {"loss": 1.0}

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.setup(new_config)
            return True

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            return None

    ray.init(num_cpus=DEVICES, logging_level=logging.ERROR, include_dashboard=False)
    begun = time.perf_counter()
    analysis = tune.run(
        Trial,
        config={**workload, "x": tune.grid_search(list(range(workload["trials"])))},
        stop={"training_iteration": workload["iterations"]},
        resources_per_trial={"cpu": 1},
        reuse_actors=reuse_actors,
        verbose=0,
    )
    seconds = time.perf_counter() - begun
    assert all(trial.last_result["training_iteration"] == workload["iterations"] for trial in analysis.trials)
    return seconds


def syne_tune(workload: dict[str, Any]) -> float:
    """Runs Syne Tune's local backend: a process per trial."""
    from syne_tune import StoppingCriterion, Tuner
    from syne_tune.backend import LocalBackend
    from syne_tune.config_space import randint
    from syne_tune.optimizer.baselines import RandomSearch

    space = {
        "x": randint(0, 10**9),
        "iterations": workload["iterations"],
        "milliseconds": workload["milliseconds"],
        "import_torch": int(workload["import_torch"]),
    }
    begun = time.perf_counter()
    tuner = Tuner(
        trial_backend=LocalBackend(entry_point=str(HERE / "overhead_workload.py")),
        scheduler=RandomSearch(space, metrics=["loss"]),
        stop_criterion=StoppingCriterion(max_num_trials_finished=workload["trials"]),
        n_workers=DEVICES,
        sleep_time=0.1,
        print_update_interval=10**6,
        save_tuner=False,
    )
    tuner.run()
    return time.perf_counter() - begun


def optuna(workload: dict[str, Any]) -> float:
    """Runs Optuna with two threads of one interpreter: no isolation, for reference."""
    import optuna
    from overhead_workload import trial_of

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        trial.suggest_int("x", 0, 10**9)
        return float(list(trial_of(workload)(workload))[-1]["loss"])

    begun = time.perf_counter()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=workload["trials"], n_jobs=DEVICES)
    return time.perf_counter() - begun


SYSTEMS: dict[str, Callable[[dict[str, Any]], float]] = {
    "fluid_local": lambda workload: fluid("local", workload),
    "fluid_ray": lambda workload: fluid("ray", workload),
    "ray_default": lambda workload: ray_tune(False, workload),
    "ray_reuse_actors": lambda workload: ray_tune(True, workload),
    "syne_tune_local": syne_tune,
    "optuna_threads": optuna,
}


# -- the benchmark -----------------------------------------------------------------------------------------


def measure(system: str, workload: str, timeout: float) -> tuple[float, float] | None:
    """Returns the seconds (run, total) of one process, or ``None`` if it failed."""
    arguments = ["--one", system, "--workload", workload]
    apart = run_apart(__file__, arguments, what=f"{system} on {workload}", timeout=timeout)
    return None if apart is None else (apart.figures, apart.seconds)


def torch_start() -> float:
    """Returns the seconds to start an interpreter and import torch."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begun


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3, help="runs of each; the median counts (default 3)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="which systems, comma-separated")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which workloads, comma-separated")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--timeout", type=float, default=1800.0, help="most seconds of one process")
    parser.add_argument("--one", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--workload", choices=list(WORKLOADS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with contextlib.redirect_stdout(sys.stderr):
            seconds = SYSTEMS[options.one](WORKLOADS[options.workload])
        print(seconds)
        sys.stdout.flush()
        os._exit(0)  # The shutdown of peers is not measured.
    report(options)


def report(options: argparse.Namespace) -> None:
    """Measures the systems in turn, so that a slow spell of the machine affects all, and prints the ratios."""
    from rich.console import Console
    from rich.table import Table

    systems = options.systems.split(",")
    start = statistics.median(torch_start() for _ in range(options.runs))
    console = Console()
    figures: dict[str, Any] = {"torch_start_s": start, "devices": DEVICES, "date": time.strftime("%Y-%m-%d")}
    console.print(f"{os.cpu_count()} cores, {figures['date']}; interpreter and torch start in {start:.2f} s")
    for name in options.workloads.split(","):
        workload = WORKLOADS[name]
        taken: dict[str, list[tuple[float, float]]] = {system: [] for system in systems}
        for _ in range(options.runs):
            for system in systems:
                pair = measure(system, name, options.timeout)
                taken[system] += [pair] if pair else []
        medians = {s: [statistics.median(p[i] for p in pairs) for i in (0, 1)] for s, pairs in taken.items() if pairs}
        figures[name] = {"ideal_s": ideal(workload), "run_and_total_s": medians}
        write_json(options.json, figures)
        table = Table(title=f"{name}: {workload}, ideal {ideal(workload):.2f} s", title_justify="left")
        for column in ("system", "run s", "total s", "trials/s", "run vs Fluid local", "total vs Fluid local"):
            table.add_column(column, justify="left" if column == "system" else "right")
        base = medians.get("fluid_local", [float("nan")] * 2)
        for system, (run, total) in medians.items():
            ratios = [f"{value / reference:.2f}x" for value, reference in zip((run, total), base, strict=True)]
            table.add_row(system, f"{run:.2f}", f"{total:.2f}", f"{workload['trials'] / run:.1f}", *ratios)
        console.print(table)
        if name == "busy" and "fluid_local" in medians:
            goal = ideal(workload) + start
            console.print(f"Fluid local / (ideal + one interpreter-and-torch start): {base[0] / goal:.2f}")


if __name__ == "__main__":
    main()
