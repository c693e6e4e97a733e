"""Population based training: what exploits cost, and Ray Tune's beside it, in time and in what is found.

    python benchmarks/pbt.py [--seeds 10] [--ray-seeds 10] [--stock-seeds 3] [--data DIR] [--json FILE]

A population of 16 trains a network on real digits for 40 iterations of 20 ms each, on two CPU devices, and is ready
every fourth. Ways: Fluid; Fluid without exploits, quantile 0, whose members pause as often; Ray Tune's scheduler,
stock and with reuse_actors. Each run is a process of its own; its time is that of the sweep alone, with the executor
or the cluster started, and with lanes or workers still to start. The same seeds have the same first configs under a
system; the two draw them differently.

With --data, the two are also rehearsed on LCBench (YAHPO Gym's files), where no time counts but the virtual one:
normalised regret, 0 for the best value of 2,000 random configs and 1 for the worst one at the end, when both sweeps of
a seed have ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import about, run_apart, write_json
from pbt_workload import ITERATION_S, Member, write_digits
from rich.console import Console
from rich.table import Table

MEMBERS, BUDGET, READY, DEVICES = 16, 40, 4, 2
WAYS = ("fluid", "fluid_no_exploits", "ray", "ray_reuse_actors")
_RATE, _MOMENTUM = (1e-3, 1.0), (0.0, 0.99)
#: Of LCBench; every fifth of those of benchmarks/tpe_rungs.py.
TASKS = ("3945", "34539", "126025")
REHEARSED = ("pbt", "raytune-pbt")
_TIMEOUT_S = 900.0


# -- one run, in a process of its own ----------------------------------------------------------------------


def run_fluid(data: str, seed: int, quantile: float) -> dict[str, Any]:
    """Runs the sweep by Fluid."""
    import fluid
    from fluid.search import PBT, loguniform, uniform

    space = {"rate": loguniform(*_RATE), "momentum": uniform(*_MOMENTUM), "seed": seed, "data": data}
    with fluid.FluidExecutor("local", devices=DEVICES, packing="off", profile=None, verbose=0):
        begun = time.perf_counter()
        result = fluid.run(
            Member,
            space,
            metric="loss",
            algorithm=PBT(ready=READY, quantile=quantile),
            samples=MEMBERS,
            budget=BUDGET,
            seed=seed,
        )
        seconds = time.perf_counter() - begun
    iterations = sum(len(trial.results) for trial in result.trials)
    exploits = len(result.trials) - MEMBERS
    return {"seconds": seconds, "best": result.best.value, "iterations": iterations, "exploits": exploits}


def run_ray(data: str, seed: int, *, reuse: bool) -> dict[str, Any]:
    """Runs the sweep by Ray Tune."""
    import random

    import numpy as np
    import ray
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    class Counted(Member, tune.Trainable):
        pass

    ray.init(num_cpus=DEVICES, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    random.seed(seed)
    np.random.seed(seed)
    space = {"rate": tune.loguniform(*_RATE), "momentum": tune.uniform(*_MOMENTUM)}
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=READY,
        hyperparam_mutations=space,
        # Else values leave their distributions.
        custom_explore_fn=lambda config: {
            **config,
            "rate": min(max(config["rate"], _RATE[0]), _RATE[1]),
            "momentum": min(max(config["momentum"], _MOMENTUM[0]), _MOMENTUM[1]),
        },
        log_config=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            tune.with_resources(Counted, {"cpu": 1}),
            param_space={**space, "seed": seed, "data": data},
            tune_config=tune.TuneConfig(
                metric="loss", mode="min", num_samples=MEMBERS, scheduler=scheduler, reuse_actors=reuse
            ),
            run_config=tune.RunConfig(stop={"training_iteration": BUDGET}, storage_path=folder, verbose=0),
        )
        begun = time.perf_counter()
        results = tuner.fit()
        seconds = time.perf_counter() - begun
        frames = [one.metrics_dataframe for one in results]
    best = min(float(frame["loss"].min()) for frame in frames)
    iterations = sum(len(frame) for frame in frames)
    return {
        "seconds": seconds,
        "best": best,
        "iterations": iterations,
        "exploits": scheduler._num_perturbations,
    }


def run_way(way: str, seed: int) -> dict[str, Any]:
    """Runs one sweep in this process."""
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "digits.npz")
        write_digits(Path(data))
        if way.startswith("fluid"):
            return run_fluid(data, seed, 0.0 if way == "fluid_no_exploits" else 0.25)
        return run_ray(data, seed, reuse=way == "ray_reuse_actors")


# -- all runs ----------------------------------------------------------------------------------------------


def measure(seeds: Mapping[str, int], console: Console) -> dict[str, list[dict[str, Any]]]:
    """Runs all sweeps, those of a seed one after another."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for seed in range(max(seeds.values())):
        for way in WAYS:
            if seed < seeds[way]:
                apart = run_apart(__file__, ["--one", way, str(seed)], what=f"{way} {seed}", timeout=_TIMEOUT_S)
                if apart is not None:
                    found[way].append({"seed": seed, **apart.figures})
                    console.print(f"{way}, seed {seed}: {apart.figures}", highlight=False)
    return found


def rehearse(data: str, tasks: Sequence[str], seeds: int) -> dict[str, dict[str, list[float]]]:
    """The regrets of both on LCBench at the end of their sweeps, by task and way, one for each seed."""
    from fluid.integrations.comparing.compare import ComparisonRequest, compare

    found: dict[str, dict[str, list[float]]] = {}
    for task in tasks:
        request = ComparisonRequest(
            benchmark=f"lcbench:{task}", data=data, algorithms=REHEARSED, devices=(8,), seeds=seeds
        )
        with tempfile.TemporaryDirectory() as folder:
            played = compare(request, Path(folder), jobs=2, progress=lambda _: None)
        if played.problems:
            raise SystemExit(str(played.problems))
        found[task] = {
            way: [
                request.source.regret(request.source.worst_known if one.best is None else one.best)
                for one in played.outcomes[way]
            ]
            for way in REHEARSED
        }
    return found


# -- tables ------------------------------------------------------------------------------------------------


def summary(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians of each way, and its times in those of Fluid's runs of the same seeds, per iteration that was run."""
    known = {one["seed"]: one for one in runs["fluid"]}
    found: dict[str, dict[str, float]] = {}
    for way, of_way in runs.items():
        pairs = [(one, known[one["seed"]]) for one in of_way if one["seed"] in known]
        if not pairs:
            continue
        ratios = [one["seconds"] / one["iterations"] * ours["iterations"] / ours["seconds"] for one, ours in pairs]
        best = [one["best"] for one in of_way]
        found[way] = {
            "runs": len(of_way),
            "seconds": statistics.median(one["seconds"] for one in of_way),
            "iterations": statistics.median(one["iterations"] for one in of_way),
            "exploits": statistics.median(one["exploits"] for one in of_way),
            "ratio": statistics.median(one["seconds"] / ours["seconds"] for one, ours in pairs),
            "ratio_per_iteration": statistics.median(ratios),
            "best": statistics.mean(best),
            "spread": statistics.stdev(best) if len(best) > 1 else 0.0,
        }
    return found


def table_of(found: Mapping[str, Mapping[str, float]]) -> Table:
    """A row for each way."""
    bound = MEMBERS * BUDGET * ITERATION_S / DEVICES
    title = f"{MEMBERS} members, {BUDGET} iterations of 20 ms, {DEVICES} devices: {bound:.1f} s of work"
    table = Table(title=title)
    for column in ("way", "runs", "seconds", "iterations", "exploits", "of Fluid's", "per iteration", "best loss"):
        table.add_column(column)
    for way, facts in found.items():
        table.add_row(
            way,
            f"{facts['runs']:.0f}",
            f"{facts['seconds']:.2f}",
            f"{facts['iterations']:.0f}",
            f"{facts['exploits']:.0f}",
            f"{facts['ratio']:.2f}x",
            f"{facts['ratio_per_iteration']:.2f}x",
            f"{facts['best']:.4f} ± {facts['spread']:.4f}",
        )
    return table


def regret_table(regrets: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """A row for each task of LCBench, and one for all."""
    table = Table(title="LCBench, rehearsed on 8 devices: normalised regret at the end, mean and spread over seeds")
    for column in ("task", *REHEARSED, "difference", "within the spread"):
        table.add_column(column)
    every = {way: [one for of_task in regrets.values() for one in of_task[way]] for way in REHEARSED}
    for task, of_task in [*regrets.items(), ("all", every)]:
        means = [statistics.mean(of_task[way]) for way in REHEARSED]
        spreads = [statistics.stdev(of_task[way]) if len(of_task[way]) > 1 else 0.0 for way in REHEARSED]
        cells = [f"{mean:.4f} ± {spread:.4f}" for mean, spread in zip(means, spreads, strict=True)]
        apart = means[0] - means[1]
        table.add_row(task, *cells, f"{apart:+.4f}", "yes" if abs(apart) <= max(spreads) else "no")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="runs of Fluid's two ways (default: 10)")
    parser.add_argument("--ray-seeds", type=int, default=10, help="of Ray Tune with reuse_actors (default: 10)")
    parser.add_argument("--stock-seeds", type=int, default=3, help="of Ray Tune as it is (default: 3)")
    parser.add_argument("--data", metavar="DIR", help="YAHPO Gym's files: also rehearse on LCBench")
    parser.add_argument("--tasks", default=",".join(TASKS), help="of LCBench, separated by commas")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(run_way(arguments.one[0], int(arguments.one[1]))))
        sys.stdout.flush()
        return
    console = Console(width=130)
    figures: dict[str, Any] = about()
    seeds = {"fluid": arguments.seeds, "fluid_no_exploits": arguments.seeds}
    seeds |= {"ray": arguments.stock_seeds, "ray_reuse_actors": arguments.ray_seeds}
    if max(seeds.values()):
        runs = measure(seeds, console)
        figures |= {"runs": runs, "summary": summary(runs)}
        write_json(arguments.json, figures)
        console.print(table_of(figures["summary"]))
    if arguments.data:
        figures["regrets"] = rehearse(arguments.data, arguments.tasks.split(","), max(1, arguments.seeds))
        write_json(arguments.json, figures)
        console.print(regret_table(figures["regrets"]))


if __name__ == "__main__":
    main()
