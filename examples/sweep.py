"""A sweep with Ray Tune on Fluid: a small network on real images, under ASHA or HyperBand.

    python examples/sweep.py                             # handwritten digits, nothing is downloaded
    python examples/sweep.py --algo hyperband --data DIR # CIFAR-10 from a folder
    python examples/sweep.py --executor tune             # the same with Ray Tune alone

At the end it prints the best configuration and the path of the run's report.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS", "0")

import ray
from models.images import ImageTrial, load_images
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator
from tuning.interruption import exit_status
from tuning.progress import Progress

import fluid.cli
from fluid import FluidExecutor, tune


def main() -> None:
    """Runs the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", choices=("asha", "hyperband"), default="asha", help="the scheduler (default asha)")
    parser.add_argument("--data", metavar="DIR", help="a folder with CIFAR-10 (default: the digits)")
    parser.add_argument("--samples", type=int, default=32, help="how many configurations to try (default 32)")
    parser.add_argument("--epochs", type=int, default=27, help="most epochs of a trial (default 27)")
    parser.add_argument("--devices", type=int, help="how many GPUs or CPU cores to use (default all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the configurations (default 0)")
    parser.add_argument("--executor", choices=("fluid", "tune"), default="fluid", help="what runs it (default fluid)")
    options = parser.parse_args()
    data = os.path.abspath(options.data) if options.data else None
    load_images(data)  # A folder without data fails here, once, instead of in every trial.
    executor = FluidExecutor(devices=options.devices) if options.executor == "fluid" else None
    # A cluster of its own, even if one runs on this machine, or ran and left its address behind.
    ray.init("local", num_cpus=options.devices, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    begun = time.monotonic()
    interruption = None
    try:
        analysis = tune.run(
            ImageTrial,
            name=time.strftime(f"{options.algo}_on_{options.executor}_%Y%m%d-%H%M%S"),
            config=space(data),
            num_samples=options.samples,
            search_alg=BasicVariantGenerator(random_state=options.seed),
            scheduler=scheduler(options.algo, options.epochs),
            metric="accuracy",
            mode="max",
            resources_per_trial={"cpu": 1, "gpu": int(bool(ray.cluster_resources().get("GPU")))},
            callbacks=[Progress("accuracy", "max")],
            verbose=0,
            executor=executor,
        )
    except tune.SweepInterrupted as error:
        interruption, analysis = error, error.result
    seconds = time.monotonic() - begun
    if executor is not None:
        fluid.cli.main(["report", str(executor.run_dir)])
    print_outcome(analysis, seconds, cut_off=0 if interruption is None else len(interruption.cut_off))
    if interruption is not None:
        raise interruption


def space(data: str | None) -> dict[str, Any]:
    """Returns the search space."""
    return {
        "lr": tune.loguniform(1e-3, 0.5),
        "momentum": tune.uniform(0.0, 0.95),
        "weight_decay": tune.loguniform(1e-6, 1e-2),
        "batch_size": tune.choice([16, 32, 64, 128]),
        "channels": tune.choice([8, 16, 32]),
        "dropout": tune.uniform(0.0, 0.5),
        "seed": 0,
        "data": data,
    }


def scheduler(name: str, epochs: int) -> TrialScheduler:
    """Returns the scheduler, which gives a third of the trials three times as many epochs."""
    if name == "asha":
        return ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=3)
    return HyperBandScheduler(max_t=epochs, reduction_factor=3)


def print_outcome(analysis: Any, seconds: float, *, cut_off: int = 0) -> None:
    """Prints the best trial and the size of the sweep."""
    epochs = sum(trial.last_result.get("training_iteration", 0) for trial in analysis.trials)
    print(f"\n{len(analysis.trials)} trials, {epochs} epochs in all, {seconds:.1f} s; in {analysis.experiment_path}")
    if cut_off:
        print(f"interrupted: {cut_off} of the trials were cut off")
    if not epochs:
        return
    best = analysis.get_best_trial(scope="all")
    at = max(analysis.trial_dataframes[best.trial_id].to_dict("records"), key=lambda row: row["accuracy"])
    print(
        f"best: accuracy {at['accuracy']:.4f}, on test images {at['test_accuracy']:.4f}, "
        f"after {at['training_iteration']} epochs"
    )
    for name, value in best.config.items():
        if name not in ("seed", "data"):
            print(f"  {name:12} {value:.4g}" if isinstance(value, float) else f"  {name:12} {value}")


if __name__ == "__main__":
    with exit_status():
        main()
