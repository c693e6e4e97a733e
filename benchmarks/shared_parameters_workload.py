"""Trials of the part ``with_parameters`` of benchmarks/shared_data.py: held once they have their parameters."""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import tune

#: Ways to give a trial its data: by ``tune.with_parameters``, in a closure, or a few bytes in their place.
PARAMETER_MODES = ("with_parameters", "closure", "none")


def hold(config: dict[str, Any], array: Any, tensor: Any) -> None:
    """Notes when the trial has its data, reads each byte once, and waits until the benchmark has measured it."""
    has_data_at = time.time()
    array.max()
    tensor.numpy().max()
    ctypes.CDLL(None).malloc_trim(0)
    folder, number = Path(config["notes"]), config["number"]
    note = {"pid": os.getpid(), "at": has_data_at, "reading_s": time.time() - has_data_at}
    (folder / f"{number}~").write_text(json.dumps(note))
    (folder / f"{number}~").rename(folder / f"{number}.json")
    while not (folder / "go").exists():
        time.sleep(0.01)


class HeldWithParameters(tune.Trainable):  # type: ignore[misc]
    """Has its data from ``tune.with_parameters``."""

    def setup(self, config: dict[str, Any], **data: Any) -> None:
        hold(config, **data)

    def step(self) -> dict[str, Any]:
        return {"loss": 0.0, "done": True}


def make_trainable(mode: str, size: int) -> type:
    """Returns the trainable of a way, with an array and a tensor of ``size`` bytes each."""
    count = 1 if mode == "none" else size
    array = np.random.default_rng(0).integers(0, 256, count, np.uint8)
    tensor = torch.from_numpy(np.random.default_rng(1).integers(0, 256, count, np.uint8))
    if mode != "closure":
        return tune.with_parameters(HeldWithParameters, array=array, tensor=tensor)

    class HeldInClosure(HeldWithParameters):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config, array=array, tensor=tensor)

    return HeldInClosure
