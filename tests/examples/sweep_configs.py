"""Configurations of the three sweeps at their smallest scale."""

from __future__ import annotations

from typing import Any

import cifar10
import dcgan
import wlm
from tuning.algorithms import grid
from tuning.workload import Workload

WORKLOADS = {workload.name: workload for workload in (cifar10.WORKLOAD, wlm.WORKLOAD, dcgan.WORKLOAD)}


def config(workload: Workload, data: str, **changes: Any) -> dict[str, Any]:
    """Returns the middle of the space, with some hyperparameters set to other values."""
    middle = {name: values[0] for name, values in grid(workload.space, 1).items()}
    fixed = {"data": data, **workload.scale("tiny").fixed, **workload.prepare(data)}
    return {**middle, "seed": 0, **changes, "fixed": fixed}
