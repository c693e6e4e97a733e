"""The class that users derive from to train on a number of devices that changes while they train."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from fluid.elastic.averaging import Means
from fluid.elastic.loader import ElasticLoader
from fluid.elastic.runtime import Runtime, map_tensors, stateful_parts
from fluid.elastic.shard import Shard
from fluid.elastic.sync_batch_norm import SyncBatchNorm
from fluid.errors import FluidError

_FILE = "elastic.pt"


class ElasticTrainable:
    """Data-parallel training whose results do not depend on how many devices it has.

    Derive from it, make models, optimizers and loaders in :meth:`build`, and train on one batch in
    :meth:`train_batch`, as if there were one device. Each device gets its part of every global batch; before an
    optimizer steps, its gradients become the means over the whole batch.

    **State.** Every attribute that has ``state_dict`` and ``load_state_dict``, in lists, tuples and dicts too, is
    brought to devices that join and is part of checkpoints; so is what :meth:`extra_state` returns.

    **Batch normalization** computes its statistics over one device's part of the batch, and the running ones are
    rank 0's, so it depends on the width, unless :meth:`sync_batch_norm` converts it.

    **Random numbers** are seeded anew in every iteration, from the seed that PyTorch has after :meth:`build`, the
    iteration's number and the rank. So a run at one width can be repeated, but dropout differs between widths.

    Attributes:
        fluid_elastic: tells Fluid that trials of this class may span several devices.
        batch_state: names of attributes that hold one column per sample of the global batch, such as the hidden
            state of a recurrent network, and the dimension that is the batch. They are tensors, or tuples or lists
            of them, or ``None``; within an iteration each device sees its own columns.
    """

    fluid_elastic: ClassVar[bool] = True
    batch_state: ClassVar[Mapping[str, int]] = {}

    _elastic: Runtime
    _elastic_columns: dict[str, Any]

    # -- what users write ----------------------------------------------------------------------------------

    def build(self, config: dict[str, Any]) -> None:
        """Makes models, optimizers, schedulers and loaders; runs on every device, before it has joined others."""
        raise NotImplementedError(f"{type(self).__name__} needs a build(config) that makes its models")

    def train_batch(self, batch: Any) -> Mapping[str, Any]:
        """Trains on this device's part of one global batch; returns means over it."""
        raise NotImplementedError(f"{type(self).__name__} needs train_batch(batch), or its own train_iteration()")

    def train_iteration(self) -> Mapping[str, Any]:
        """Runs one iteration and returns its metrics; by default, an epoch of ``self.loader``."""
        means = self.means()
        for batch in self.loader:  # type: ignore[attr-defined]
            means.add(self.train_batch(batch), self.count)
        self.replicate_buffers()
        return self.end_iteration(means.result())

    def end_iteration(self, metrics: dict[str, float]) -> Mapping[str, Any]:
        """Ends the default iteration: the place to step schedulers and to validate; returns the metrics."""
        return metrics

    def extra_state(self) -> Any:
        """State that no attribute tells; picklable, and the same on every device at the end of an iteration."""
        return None

    def load_extra_state(self, state: Any) -> None:
        """Takes what :meth:`extra_state` returned."""

    # -- what users call -----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This device's number among those that train this trial, from 0."""
        return self._elastic.rank

    @property
    def size(self) -> int:
        """How many devices train this trial."""
        return self._elastic.size

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self._elastic.iteration

    @property
    def device(self) -> torch.device:
        """The device to train on."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def count(self) -> int:
        """Samples in this device's part of the current batch; 0 if it was given another device's to work along."""
        return self._elastic.count

    def make_loader(self, dataset: Any, batch_size: int, **options: Any) -> ElasticLoader:
        """Makes a loader of which every device gets its part; see :class:`ElasticLoader` for the arguments."""
        return ElasticLoader(self._elastic, dataset, batch_size, **options)

    def shard(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This device's part of a global batch that all devices have, for those who load their data themselves.

        Raises:
            FluidError: there are fewer columns than devices, and the class keeps state by column.
        """
        shard = Shard.of(tensor.shape[dim], self.rank, self.size)
        if self.batch_state and not shard.count:
            raise FluidError(f"{shard.total} columns cannot be split over {self.size} devices")
        self._elastic.enter(shard)
        return shard.take(tensor, dim)

    @contextmanager
    def sync(self, *optimizers: torch.optim.Optimizer) -> Iterator[None]:
        """Averages gradients at the end of the block, ahead of the step: for those who clip or unscale them.

        To add up gradients of several batches before a step, put each batch's ``backward`` into a block of its own.

        Args:
            optimizers: whose gradients; by default those of all.
        """
        yield
        for optimizer in optimizers or self._parts_of(torch.optim.Optimizer).values():
            self._elastic.average(optimizer)

    def means(self) -> Means:
        """Something to sum metrics up in: ``means.add({"loss": loss}, self.count)``, ``means.result()``."""
        return Means(self._elastic.group)

    def all_reduce_mean(self, value: Any, count: int | None = None) -> float:
        """The mean of a value over the samples of all devices; all of them call this.

        Args:
            value: the mean over this device's samples.
            count: how many these are; by default those of the current batch.
        """
        means = self.means()
        means.add({"value": value}, self.count if count is None else count)
        return means.result()["value"]

    def replicate_buffers(self) -> None:
        """Gives all devices rank 0's buffers; done at the end of every iteration, and wanted before validation."""
        self._elastic.replicate_buffers(self._parts_of(torch.nn.Module))

    def sync_batch_norm(self, model: torch.nn.Module) -> torch.nn.Module:
        """Makes a model's batch normalization use the whole global batch; returns the model."""
        return SyncBatchNorm.convert(model, self._elastic)

    # -- the trainable, as Fluid and Ray Tune know it ------------------------------------------------------

    def setup(self, config: dict[str, Any]) -> None:
        """Builds everything. Override :meth:`build`, not this."""
        self._elastic = Runtime()
        self._elastic_columns = {}
        self.build(config)
        self._elastic.seed = torch.initial_seed()
        for optimizer in self._parts_of(torch.optim.Optimizer).values():
            self._elastic.watch(optimizer)

    def step(self) -> dict[str, Any]:
        """Runs one iteration. Override :meth:`train_iteration`, not this."""
        runtime = self._elastic
        runtime.begin()
        for name, columns in self._all_columns().items():
            setattr(self, name, runtime.scatter(columns, self.batch_state[name]))
        metrics = dict(self.train_iteration())
        self.replicate_buffers()
        if runtime.size > 1:
            self._elastic_columns = {
                name: runtime.gather(getattr(self, name, None), dim) for name, dim in self.batch_state.items()
            }
        else:
            self._elastic_columns = {}
        runtime.iteration += 1
        return metrics

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes the state into a folder; it can be read at any width."""
        torch.save(self.state(), os.path.join(checkpoint_dir, _FILE))

    def load_checkpoint(self, checkpoint: str) -> None:
        """Reads what :meth:`save_checkpoint` wrote into a folder."""
        # The trial's own file: it holds whatever extra_state() returned.
        self.load_state(torch.load(os.path.join(checkpoint, _FILE), map_location="cpu", weights_only=False))

    def cleanup(self) -> None:
        """Releases what it holds; called once, at the end. Whoever overrides it calls this one too."""
        if hasattr(self, "_elastic"):
            self._elastic.group.shutdown()

    def state(self) -> dict[str, Any]:
        """The state at the end of an iteration, the same on every device."""
        return {
            "iteration": self._elastic.iteration,
            "seed": self._elastic.seed,
            "parts": {name: part.state_dict() for name, part in self._parts_of(object).items()},
            "columns": self._all_columns(),
            "extra": self.extra_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes a state that another device, or this one before, was in.

        Raises:
            FluidError: it is that of a trainable with other parts.
        """
        parts = self._parts_of(object)
        if parts.keys() != state["parts"].keys():
            odd = sorted(parts.keys() ^ state["parts"].keys())
            raise FluidError(f"the state is not that of this {type(self).__name__}: {', '.join(odd)} differ")
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
        for optimizer in self._parts_of(torch.optim.Optimizer).values():
            optimizer.zero_grad(set_to_none=True)
        self._elastic.iteration, self._elastic.seed = state["iteration"], state["seed"]
        device = self.device
        self._elastic_columns = {
            name: map_tensors(columns, lambda tensor: tensor.to(device)) for name, columns in state["columns"].items()
        }
        for name, columns in self._elastic_columns.items():
            setattr(self, name, columns)
        self.load_extra_state(state["extra"])

    def _elastic_joined(self, reported: int, metrics: dict[str, Any] | None) -> None:
        """Called when it has joined a generation: rank and size may be new.

        Args:
            reported: the last iteration whose result is known outside.
            metrics: what the last :meth:`step` returned; ``None`` if the state came from another device since.
        """

    def _all_columns(self) -> dict[str, Any]:
        """The columns of all devices: those of the last gathering, or, at width 1, what is there."""
        return {name: getattr(self, name, None) for name in self.batch_state} | self._elastic_columns

    def _parts_of(self, kind: type) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if not name.startswith("_elastic")}
        return {name: part for name, part in stateful_parts(own).items() if isinstance(part, kind)}
