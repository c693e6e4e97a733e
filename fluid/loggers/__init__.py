"""Loggers: results of a session in TensorBoard, MLflow, Weights & Biases, CSV, Parquet and Prometheus.

``FluidExecutor(loggers=[...])`` takes them. Start reading at :mod:`fluid.loggers.logger`, what a logger is, and
:mod:`fluid.loggers.hub`, which calls them. Names are loaded on first use, and clients such as mlflow with them: an
executor without loggers imports none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluid.loggers.logger import LoggedSession, LoggedTrial, TrialLogger
    from fluid.loggers.mlflow import MLflow
    from fluid.loggers.parquet import Parquet
    from fluid.loggers.tables import CSV
    from fluid.loggers.tensorboard import TensorBoard
    from fluid.loggers.wandb import WandB

_HOME = {
    "CSV": "tables",
    "LoggedSession": "logger",
    "LoggedTrial": "logger",
    "MLflow": "mlflow",
    "Parquet": "parquet",
    "TensorBoard": "tensorboard",
    "TrialLogger": "logger",
    "WandB": "wandb",
}

__all__ = ["CSV", "LoggedSession", "LoggedTrial", "MLflow", "Parquet", "TensorBoard", "TrialLogger", "WandB"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'fluid.loggers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fluid.loggers.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
