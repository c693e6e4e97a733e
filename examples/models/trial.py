"""The base class of the trials of the three sweeps."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from fluid.elastic import ElasticTrainable

#: The entry of a config with everything that is not tuned: ``data``, ``seed`` and the sizes of a scale.
FIXED = "fixed"
#: Reported with every result: its start (seconds since the epoch), its duration, and its CPU time, in seconds.
BEGUN, SECONDS, WORK = "begun_s", "seconds", "work_s"
TIMES = (BEGUN, SECONDS, WORK)


def tuned(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of a config."""
    return {name: value for name, value in config.items() if name != FIXED}


def seed_of(config: Mapping[str, Any]) -> int:
    """Returns a seed that follows from the hyperparameters and the sweep's seed, not from when or where it runs."""
    identity = json.dumps([tuned(config), config[FIXED]["seed"]], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=4).digest(), "big")


class SweptTrial(ElasticTrainable):
    """Trains one model; one iteration is a pass over the training data and a validation.

    Attributes:
        config: the hyperparameters, and ``fixed``.
        seed: of this trial.
    """

    config: dict[str, Any]
    seed: int

    def build(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)  # A trial has one core; more threads would compete for it.
        # Searchers may suggest NumPy numbers, which PyTorch does not accept as the size of a layer.
        self.config = {name: value.item() if hasattr(value, "item") else value for name, value in config.items()}
        self.seed = seed_of(self.config)
        torch.manual_seed(self.seed)
        self.build_model(self.config, self.config[FIXED])
        self.set_rates()

    def build_model(self, config: dict[str, Any], fixed: dict[str, Any]) -> None:
        """Makes models, optimizers and loaders."""
        raise NotImplementedError

    def set_rates(self) -> None:
        """Sets those hyperparameters of the optimizers that may change during training, from the config.

        Population based training loads another trial's checkpoint under a new config. The optimizers' state then
        holds the other trial's rates.
        """
        raise NotImplementedError

    def load_extra_state(self, state: Any) -> None:
        self.set_rates()

    def step(self) -> dict[str, Any]:
        begun, work = time.time(), time.thread_time()
        metrics = super().step()
        return {**metrics, BEGUN: begun, SECONDS: time.time() - begun, WORK: time.thread_time() - work}


def shrunk(width: int, fixed: Mapping[str, Any]) -> int:
    """Returns the width of a layer at the scale of the sweep."""
    return max(1, width // fixed["shrink"])
