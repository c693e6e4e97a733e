"""Trials of benchmarks/shared_data.py: the CIFAR-10 example, held once it has its data."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models.alexnet import Augmented, Cifar10, load_tensors
from models.trial import FIXED

import fluid

#: Images that a trial learns from after it was measured.
_FEW = 64
#: Ways to get the data: by ``fluid.shared``, in each process anew, or not at all.
MODES = ("shared", "own", "none")
_IMAGES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")

load_own = functools.cache(load_tensors)


class Held(Cifar10):
    """Loads its data, reads each byte once, notes the seconds of both, and waits until the benchmark has measured it.

    Under ``fixed`` it also has ``mode``, one of :data:`MODES`, ``notes``, a folder, and ``number``, the trial's.
    """

    def data(self, config: dict[str, Any], seed: int) -> Augmented:
        fixed = config[FIXED]
        begun = time.perf_counter()
        if fixed["mode"] == "none":
            train = validation = torch.zeros(_FEW, 3, 32, 32, dtype=torch.uint8), torch.zeros(_FEW, dtype=torch.int64)
        else:
            arguments = fixed["data"], fixed["images"]
            train, validation = (
                load_own(*arguments) if fixed["mode"] == "own" else fluid.shared(load_tensors, *arguments)
            )
        loaded = time.perf_counter()
        for tensor in (*train, *validation):
            tensor.numpy().max()  # Unlike a sum, it makes no copy as int64.
        note = {"pid": os.getpid(), "loading_s": loaded - begun, "reading_s": time.perf_counter() - loaded}
        note["bytes"] = sum(tensor.nbytes for tensor in (*train, *validation))
        ctypes.CDLL(None).malloc_trim(0)  # What loaders have freed is no memory of the data.
        folder = Path(fixed["notes"])
        (folder / f"{fixed['number']}~").write_text(json.dumps(note))
        (folder / f"{fixed['number']}~").rename(folder / f"{fixed['number']}.json")
        while not (folder / "go").exists():
            time.sleep(0.01)
        few = [tuple(tensor[:_FEW] for tensor in split) for split in (train, validation)]
        return Augmented(*few, batch_size=_FEW, seed=seed)


def make_cifar10(folder: Path) -> None:
    """Writes random images in the files of CIFAR-10: 50,000 for training and 10,000 for the test."""
    import pickle

    random = np.random.default_rng(0)
    (batches := folder / "cifar-10-batches-py").mkdir()
    for name in _IMAGES:
        content = {b"data": random.integers(0, 256, (10_000, 3072), np.uint8), b"labels": [0] * 10_000}
        (batches / name).write_bytes(pickle.dumps(content))
