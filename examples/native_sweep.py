"""A sweep in one call, ``fluid.run``, without Ray Tune or Optuna: on CIFAR-10, WikiText-2 or MNIST.

    python examples/native_sweep.py --data DIR                                 # ASHA on CIFAR-10, minutes on two cores
    python examples/native_sweep.py --data DIR --workload wlm --algorithm hyperband
    python examples/native_sweep.py --data DIR --workload dcgan --algorithm random --samples 6 --time-budget 120

At the end it prints the best configuration and the folder of the best model's checkpoint. See docs/first_sweep.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from models.alexnet import Cifar10
from models.data import CIFAR10, MNIST, WIKITEXT2, DataSet
from models.gan import Dcgan, train_classifier
from models.language import LanguageModel
from models.trial import FIXED, tuned
from tuning.interruption import exit_status
from tuning.scales import SCALE_NAMES, SCALES

import fluid
from fluid.search import loguniform, randint, uniform
from fluid.sweeping.algorithms import ALGORITHMS


class Task(NamedTuple):
    """Something to tune.

    Attributes:
        trainable: one of :mod:`models`.
        data: the data set that it learns from.
        metric, mode: what is optimized.
        space: the hyperparameters.
        prepare: makes what trials need besides the data, from its folder.
    """

    trainable: type
    data: DataSet
    metric: str
    mode: str
    space: Mapping[str, Any]
    prepare: Callable[[str], dict[str, Any]] = lambda folder: {}


TASKS = {
    "cifar10": Task(
        trainable=Cifar10,
        data=CIFAR10,
        metric="accuracy",
        mode="max",
        space={
            "lr": loguniform(1e-3, 1.0),
            "momentum": uniform(0.1, 0.9),
            "conv_1": [32, 64, 128],
            "conv_2": [64, 128, 256],
            "dense_1": [128, 256, 512, 1024],
            "dropout_1": uniform(0.01, 0.1),
            "dropout_2": uniform(0.05, 0.2),
        },
    ),
    "wlm": Task(
        trainable=LanguageModel,
        data=WIKITEXT2,
        metric="perplexity",
        mode="min",
        space={
            "lr": uniform(10.0, 30.0),
            "model": ["RNN_TANH", "RNN_RELU", "LSTM", "GRU"],
            "clip": uniform(0.1, 0.5),
            "nlayers": randint(2, 5),
            "nhid": randint(100, 301),
            "emsize": randint(100, 301),
            "dropout": uniform(0.1, 0.5),
            "batch": randint(10, 31),
            "bptt": randint(30, 41),
        },
    ),
    "dcgan": Task(
        trainable=Dcgan,
        data=MNIST,
        metric="inception",
        mode="max",
        space={"netG_lr": uniform(1e-4, 5e-4), "netD_lr": uniform(1e-4, 5e-4)},
        prepare=lambda folder: {"classifier": train_classifier(folder)},
    ),
}


def main(arguments: Sequence[str] | None = None) -> fluid.SweepResult:
    """Runs a sweep, prints its outcome and returns it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", choices=tuple(TASKS), default="cifar10", help="what to tune (default cifar10)")
    add("--algorithm", choices=[name for name in ALGORITHMS if name != "grid"], default="asha", help="(default asha)")
    add("--data", metavar="DIR", help="a folder with the data (default: download)")
    add("--scale", choices=SCALE_NAMES, default="small", help="seconds, minutes, or GPUs (default small)")
    add("--samples", type=int, metavar="N", help="configurations to try (default: by the scale)")
    add("--time-budget", type=float, metavar="S", help="seconds after which the sweep ends (default: none)")
    add("--seed", type=int, default=0, metavar="S", help="seed of all random numbers (default 0)")
    add("--devices", type=int, metavar="N", help="how many GPUs or CPU cores to use (default all)")
    add("--max-fused", type=int, metavar="N", help="most trials that train as one batched model; 1 for none")
    add("--run-dir", metavar="DIR", help="folder for results (default: a new one in ~/fluid_runs)")
    options = parser.parse_args(arguments)
    task, scale = TASKS[options.workload], SCALES[options.workload][options.scale]
    folder = task.data.locate(options.data)
    fixed = {"data": folder, **scale.fixed, **task.prepare(folder)}
    how = {} if options.max_fused is None else {"max_fused": options.max_fused}
    with fluid.FluidExecutor(devices=options.devices, run_dir=options.run_dir, **how):
        result = fluid.run(
            task.trainable,
            {**task.space, "seed": options.seed, FIXED: fixed},
            metric=task.metric,
            mode=task.mode,
            samples=options.samples or scale.samples,
            algorithm=options.algorithm,
            budget=scale.max_t,
            time_budget_s=options.time_budget,
            seed=options.seed,
            name=f"{options.workload}-{options.algorithm}",
        )
    print(summary(result))
    return result


def summary(result: fluid.SweepResult) -> str:
    """Returns the outcome of a sweep as text."""
    best = result.best
    iterations = sum(trial.iteration for trial in result.trials)
    config = tuned(best.config).items()
    lines = [
        f"{len(result.trials)} trials, {iterations} iterations; fluid report {result.run_dir}",
        *result.notes,
        f"best: {result.metric} {best.value:.4f}, {best.trial_id} after {best.iteration} iterations",
        f"its checkpoint: {best.checkpoint}",
        *(f"  {name:10} {value:.4g}" if isinstance(value, float) else f"  {name:10} {value}" for name, value in config),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    with exit_status():
        main()
