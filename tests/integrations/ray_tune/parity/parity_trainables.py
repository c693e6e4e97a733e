"""Trainables that show what reaches them, and a reporter of progress that shows what reaches it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray.tune
from tune_sweeps import ReusableClimber

from fluid import tune


class Talker(ReusableClimber):
    """Prints in every iteration."""

    def step(self) -> dict[str, Any]:
        result = super().step()
        print("step", self.steps)
        print("warning", self.steps, file=sys.stderr)
        return result


def talk(config: dict[str, Any]) -> None:
    """Prints and reports."""
    for number in range(2):
        print("step", number)
        print("warning", number, file=sys.stderr)
        tune.report({"score": number})


_VALUES: dict[str, Any] = {
    "nested": {"a": 1, "b": {"c": [1, 2.5, "x"], "d": None}},
    "nan": float("nan"),
    "inf": float("inf"),
    "numpy": np.float64(0.5),
    "single": np.float32(0.25),
    "count": np.int64(3),
    "array": np.arange(3),
    "flag": True,
    "numpy flag": np.bool_(True),
    "text": "words",
    "none": None,
    "tuple": (1, 2),
    "list": [],
    "empty": {},
    "large": 2**52,
    "slash/es": 1,
}


class Values(tune.Trainable):
    """Reports a value of every kind, and Tune's own counters."""

    def step(self) -> dict[str, Any]:
        return {**_VALUES, "timesteps_this_iter": 4, "episodes_this_iter": 2}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        return True


def values(config: dict[str, Any]) -> None:
    """The same from a function."""
    for _ in range(2):
        tune.report({**_VALUES, "timesteps_total": 8})


def context(config: dict[str, Any]) -> None:
    """Reports all that a trial's context tells."""
    here = ray.tune.get_context()
    told = {
        "name": here.get_trial_name(),
        "id": here.get_trial_id(),
        "experiment": here.get_experiment_name(),
        "folder": here.get_trial_dir(),
        "resources": repr(here.get_trial_resources()),
        "checkpoint": ray.tune.get_checkpoint(),
        "cwd": os.getcwd() == here.get_trial_dir(),
        "variables": sorted(name for name in os.environ if name.startswith(("TUNE_", "RAY_CHDIR"))),
        "main": __name__,
    }
    for number in range(2):
        tune.report({**told, "score": config["x"] + number})


def artifacts(config: dict[str, Any]) -> None:
    """Writes into its working directory, unless the config says that it stays where the driver is."""
    for number in range(2):
        if not config.get("stays"):
            Path(f"artifact-{number}.txt").write_text(f"of {number}\n")
        tune.report({"number": number, "cwd": os.getcwd()})


class Reporter(tune.ProgressReporter):
    """Records how it is called."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def setup(
        self, start_time: Any = None, total_samples: Any = None, metric: Any = None, mode: Any = None, **more: Any
    ):
        self.told.append(["setup", total_samples, metric, mode, sorted(more)])

    def should_report(self, trials: list[Any], done: bool = False) -> bool:
        return done

    def report(self, trials: list[Any], done: bool, *sys_info: Any) -> None:
        self.told.append([done, [trial.status for trial in trials]])
