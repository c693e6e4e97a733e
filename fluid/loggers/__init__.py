"""Loggers: results of a session in TensorBoard, MLflow, Weights & Biases, CSV, Parquet and Prometheus.

``FluidExecutor(loggers=[...])`` takes them. Start reading at :mod:`fluid.loggers.logger`, what a logger is, and
:mod:`fluid.loggers.hub`, which calls them. A client such as mlflow is imported when its logger is made.
"""

from __future__ import annotations

from fluid.loggers.logger import LoggedSession, LoggedTrial, TrialLogger
from fluid.loggers.mlflow import MLflow
from fluid.loggers.tables import CSV, Parquet
from fluid.loggers.tensorboard import TensorBoard
from fluid.loggers.wandb import WandB

__all__ = ["CSV", "LoggedSession", "LoggedTrial", "MLflow", "Parquet", "TensorBoard", "TrialLogger", "WandB"]
