"""``fluid export``."""

from __future__ import annotations

import argparse

from fluid.commands.inout import Subparsers
from fluid.display.format import count
from fluid.errors import InvalidFieldError


def add_export(commands: Subparsers) -> None:
    """Adds ``fluid export``."""
    export = commands.add_parser("export", help="log a run to TensorBoard, MLflow, W&B, CSV or Parquet")
    export.add_argument("run", metavar="RUN", help="the run folder of a session")
    export.add_argument("--tensorboard", metavar="DIR", help="write TensorBoard's files below this folder")
    export.add_argument(
        "--mlflow", metavar="URI", help="log to this MLflow server or store, such as sqlite:///mlflow.db"
    )
    export.add_argument("--experiment", metavar="NAME", help="MLflow's experiment (default: the name of each group)")
    export.add_argument("--wandb", metavar="PROJECT", help="log to this project of Weights & Biases")
    export.add_argument("--wandb-mode", metavar="MODE", help="online, offline or disabled (default: WANDB_MODE)")
    export.add_argument("--csv", metavar="DIR", help="write trials.csv and iterations.csv to this folder")
    export.add_argument("--parquet", metavar="DIR", help="write trials.parquet and iterations.parquet to this folder")
    export.set_defaults(command=_export)


def _export(arguments: argparse.Namespace) -> None:
    from fluid import loggers  # Each logger imports its client once it is named.
    from fluid.loggers.export import export

    chosen: list[loggers.TrialLogger] = []
    if arguments.tensorboard is not None:
        chosen.append(loggers.TensorBoard(arguments.tensorboard))
    if arguments.mlflow is not None:
        chosen.append(loggers.MLflow(arguments.mlflow, arguments.experiment))
    if arguments.wandb is not None:
        chosen.append(loggers.WandB(arguments.wandb, mode=arguments.wandb_mode))
    if arguments.csv is not None:
        chosen.append(loggers.CSV(arguments.csv))
    if arguments.parquet is not None:
        chosen.append(loggers.Parquet(arguments.parquet))
    if not chosen:
        where = "--tensorboard, --mlflow, --wandb, --csv or --parquet"
        raise InvalidFieldError("run", arguments.run, f"is to be logged nowhere: give {where}")
    trials, results = export(arguments.run, chosen)
    for logger in chosen:
        print(f"logged {count(trials, 'trial')} and {count(results, 'result')} to {type(logger).__name__}")
