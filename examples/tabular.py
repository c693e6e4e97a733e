"""A sweep over small networks for tables that come with scikit-learn, whose trials train many at a time: fused.

    python examples/tabular.py                                          # ASHA on the handwritten digits
    python examples/tabular.py --data breast_cancer --algorithm sha
    python examples/tabular.py --samples 256 --epochs 27 --packing off  # the same one by one, to compare

An iteration is an epoch. See docs/devices.md. It needs PyTorch and scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from models.tables import TABLES, Tabular
from tuning.interruption import exit_status

import fluid
from fluid.search import loguniform, randint, uniform

SPACE = {
    "width": [32, 64],
    "optimizer": ["sgd", "adamw"],
    # Trials of one width and one optimizer can be fused, whatever they have of these.
    "lr": loguniform(1e-3, 1e-1),
    "weight_decay": loguniform(1e-6, 1e-2),
    "dropout": uniform(0.0, 0.5),
    "seed": randint(0, 1_000),
}


def main(arguments: Sequence[str] | None = None) -> fluid.SweepResult:
    """Runs the sweep, prints its best trial, and returns its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", choices=TABLES, default="digits", help="(default digits)")
    add("--samples", type=int, default=64, help="how many trials (default 64)")
    add("--epochs", type=int, default=27, help="most epochs of a trial (default 27)")
    add("--algorithm", default="asha", help="as of fluid.run: asha, sha, hyperband, bohb, random, tpe (default asha)")
    add("--packing", default="auto", help="as FluidExecutor has it: auto, fused, off, ... (default auto)")
    add("--devices", type=int, help="how many GPUs or CPU cores to use (default all)")
    add("--seed", type=int, default=0, help="of the configurations (default 0)")
    add("--run-dir", metavar="DIR", help="folder for results (default: a new one in ~/fluid_runs)")
    options = parser.parse_args(arguments)
    with fluid.FluidExecutor(devices=options.devices, packing=options.packing, run_dir=options.run_dir):
        result = fluid.run(
            Tabular,
            {**SPACE, "data": options.data},
            metric="accuracy",
            mode="max",
            samples=options.samples,
            budget=options.epochs,
            algorithm=options.algorithm,
            seed=options.seed,
            name=f"{options.data}-{options.algorithm}",
        )
    epochs = sum(trial.iteration for trial in result.trials)
    print(f"{len(result.trials)} trials, {epochs} epochs in all; fluid report {result.run_dir}")
    print(f"best: right on {result.best.value:.1%} of the rows held out, after {result.best.iteration} epochs")
    print(f"  {result.best.config}")
    return result


if __name__ == "__main__":
    with exit_status():
        main()
