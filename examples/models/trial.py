"""What the trials of the three sweeps have in common."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from fluid.elastic import ElasticTrainable

#: The entry of a config with all that is not tuned: ``data``, ``seed`` and how large everything is.
FIXED = "fixed"
#: Reported with every result: when it began (seconds since the epoch), how long it took, and the CPU time of it.
BEGUN, SECONDS, WORK = "begun_s", "seconds", "work_s"
TIMES = (BEGUN, SECONDS, WORK)


def tuned(config: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a config."""
    return {name: value for name, value in config.items() if name != FIXED}


def seed_of(config: Mapping[str, Any]) -> int:
    """A seed that follows from the hyperparameters and the sweep's seed: not from when, or where, the trial runs."""
    told = json.dumps([tuned(config), config[FIXED]["seed"]], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=4).digest(), "big")


class SweptTrial(ElasticTrainable):
    """Trains one model; an iteration is a pass over the training data and a validation.

    Attributes:
        config: the hyperparameters, and under ``fixed`` what is not tuned.
        seed: of this trial.
    """

    config: dict[str, Any]
    seed: int

    def build(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)  # A trial has one core; more threads than that would be in each other's way.
        # Searchers may give NumPy's numbers, which PyTorch does not take for the size of a layer.
        self.config = {name: value.item() if hasattr(value, "item") else value for name, value in config.items()}
        self.seed = seed_of(self.config)
        torch.manual_seed(self.seed)
        self.build_model(self.config, self.config[FIXED])
        self.set_rates()

    def build_model(self, config: dict[str, Any], fixed: dict[str, Any]) -> None:
        """Makes models, optimizers and loaders."""
        raise NotImplementedError

    def set_rates(self) -> None:
        """Gives the optimizers what the config says, as far as it may change while a trial trains.

        Population based training goes on from another trial's checkpoint with a config of its own; optimizers have
        the other's rates then, which are part of their state.
        """
        raise NotImplementedError

    def load_extra_state(self, state: Any) -> None:
        self.set_rates()

    def step(self) -> dict[str, Any]:
        begun, work = time.time(), time.thread_time()
        metrics = super().step()
        return {**metrics, BEGUN: begun, SECONDS: time.time() - begun, WORK: time.thread_time() - work}


def shrunk(width: int, fixed: Mapping[str, Any]) -> int:
    """The width of a layer at the scale of the sweep."""
    return max(1, width // fixed["shrink"])
