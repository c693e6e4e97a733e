"""The base class of elastic trainables, whose number of devices changes while they train."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch

from fluid.elastic.averaging import Means
from fluid.elastic.host_copies import HostCopies
from fluid.elastic.loader import ElasticLoader, Shard
from fluid.elastic.runtime import Runtime, map_tensors, stateful_parts
from fluid.elastic.state import is_plain_tensor, map_leaves
from fluid.elastic.sync_batch_norm import SyncBatchNorm
from fluid.errors import FluidError

#: The file in a checkpoint's folder.
STATE_FILE = "elastic.pt"
#: A tensor of at most so many bytes may be a step counter of an optimizer, which stays on the CPU.
_SMALL_BYTES = 4096


class ElasticTrainable:
    """Data-parallel training whose results do not depend on the number of devices.

    Derive from it, make models, optimizers and loaders in :meth:`build`, and train on one batch in
    :meth:`train_batch`, as for one device. Each device gets its part of every global batch. Before an optimizer
    steps, its gradients are averaged over the whole batch.

    **State.** Every attribute with ``state_dict`` and ``load_state_dict``, also in lists, tuples and dicts, is sent to
    devices that join and is part of checkpoints; so is the result of :meth:`extra_state`.

    **Batch normalization** computes its statistics over one device's part of the batch, and keeps rank 0's running
    statistics. So it depends on the width, unless :meth:`sync_batch_norm` converts it.

    **Random numbers** are seeded in every iteration from PyTorch's seed after :meth:`build`, the iteration's number and
    the rank. So a run at one width is reproducible, but dropout differs between widths.

    Attributes:
        fluid_elastic: tells Fluid that trials of this class may span several devices.
        batch_state: for each attribute with one column per sample of the global batch, such as the hidden state of a
            recurrent network: its name, and the dimension of the batch. Such an attribute is a tensor, a tuple or
            list of tensors, or ``None``; within an iteration each device sees its own columns.

    Example:
        A linear regression; alone, it trains at width 1:

        >>> import torch
        >>> from fluid.elastic import ElasticTrainable
        >>> class Line(ElasticTrainable):
        ...     def build(self, config):
        ...         x = torch.arange(8.0).reshape(8, 1) / 8
        ...         self.loader = self.make_loader(torch.utils.data.TensorDataset(x, 3 * x), batch_size=4)
        ...         self.model = torch.nn.Linear(1, 1)
        ...         self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"])
        ...     def train_batch(self, batch):
        ...         x, y = batch
        ...         loss = torch.nn.functional.mse_loss(self.model(x), y)
        ...         self.optimizer.zero_grad()
        ...         loss.backward()
        ...         self.optimizer.step()
        ...         return {"loss": loss}
        >>> line = Line()
        >>> line.setup({"lr": 0.1})
        >>> losses = [line.step()["loss"] for _ in range(3)]
        >>> losses[-1] < losses[0], line.iteration, line.size
        (True, 3, 1)
    """

    fluid_elastic: ClassVar[bool] = True
    batch_state: ClassVar[Mapping[str, int]] = {}

    _elastic: Runtime
    _elastic_copies: HostCopies
    _elastic_columns: dict[str, Any]

    # -- methods that users write-------------------------------------------------------------------------------

    def build(self, config: dict[str, Any]) -> None:
        """Makes models, optimizers, schedulers and loaders. Runs on every device, before the device joins others."""
        raise NotImplementedError(f"{type(self).__name__} must define build(config), which makes its models")

    def train_batch(self, batch: Any) -> Mapping[str, Any]:
        """Trains on this device's part of one global batch; returns the metrics' means over that part."""
        raise NotImplementedError(f"{type(self).__name__} must define train_batch(batch) or train_iteration()")

    def train_iteration(self) -> Mapping[str, Any]:
        """Runs one iteration, by default an epoch of ``self.loader``, and returns its metrics."""
        means = self.means()
        for batch in self.loader:  # type: ignore[attr-defined]
            means.add(self.train_batch(batch), self.count)
        self.replicate_buffers()
        return self.end_iteration(means.result())

    def end_iteration(self, metrics: dict[str, float]) -> Mapping[str, Any]:
        """Called at the end of the default iteration, to step schedulers and to validate; returns the metrics."""
        return metrics

    def extra_state(self) -> Any:
        """Returns further state; picklable, and the same on every device at the end of an iteration."""
        return None

    def load_extra_state(self, state: Any) -> None:
        """Restores what :meth:`extra_state` returned."""

    # -- methods that users call-------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This device's rank among those that train this trial, from 0."""
        return self._elastic.rank

    @property
    def size(self) -> int:
        """Number of devices that train this trial."""
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
        """Number of this device's samples in the current batch; 0 if it repeats another device's with weight 0."""
        return self._elastic.count

    def make_loader(self, dataset: Any, batch_size: int, **options: Any) -> ElasticLoader:
        """Makes a loader that gives every device its part; see :class:`ElasticLoader` for the arguments."""
        return ElasticLoader(self._elastic, dataset, batch_size, **options)

    def shard(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Returns this device's part of a global batch that was loaded without :class:`ElasticLoader`.

        Raises:
            FluidError: there are fewer columns than devices, and the class has :attr:`batch_state`.
        """
        shard = Shard.of(tensor.shape[dim], self.rank, self.size)
        if self.batch_state and not shard.count:
            raise FluidError(f"{shard.total} columns cannot be split over {self.size} devices")
        self._elastic.begin_batch(shard)
        return shard.take(tensor, dim)

    @contextmanager
    def sync(self, *optimizers: torch.optim.Optimizer) -> Iterator[None]:
        """Averages gradients at the end of the block, before the step, so that they can be clipped or unscaled.

        To accumulate gradients of several batches before a step, put each batch's ``backward`` into its own block.

        Args:
            optimizers: the optimizers whose gradients are averaged; by default all.
        """
        yield
        for optimizer in optimizers or self._parts_of(torch.optim.Optimizer).values():
            self._elastic.average(optimizer)

    def means(self) -> Means:
        """Makes an accumulator of metrics: ``means.add({"loss": loss}, self.count)``, ``means.result()``."""
        return Means(self._elastic.group)

    def all_reduce_mean(self, value: Any, count: int | None = None) -> float:
        """Returns the mean of a value over the samples of all devices; all of them call this.

        Args:
            value: the mean over this device's samples.
            count: the number of these samples; by default that of the current batch.
        """
        means = self.means()
        means.add({"value": value}, self.count if count is None else count)
        return means.result()["value"]

    def replicate_buffers(self) -> None:
        """Broadcasts rank 0's buffers; automatic at the end of an iteration, and to be called before validation."""
        self._elastic.replicate_buffers(self._parts_of(torch.nn.Module))

    def sync_batch_norm(self, model: torch.nn.Module) -> torch.nn.Module:
        """Makes a model's batch normalization use the whole global batch; returns the model."""
        return SyncBatchNorm.convert(model, self._elastic)

    # -- the interface to Fluid and Ray Tune ------------------------------------------------------

    def setup(self, config: dict[str, Any]) -> None:
        """Builds everything. Override :meth:`build`, not this."""
        self._elastic = Runtime()
        self._elastic_copies = HostCopies()
        self._elastic_columns = {}
        self._elastic_build(config)
        self._check_names()
        self._elastic.seed = torch.initial_seed()
        self._watch_optimizers()

    def step(self) -> dict[str, Any]:
        """Runs one iteration. Override :meth:`train_iteration`, not this."""
        runtime = self._elastic
        runtime.begin_iteration()
        self._watch_optimizers()  # A checkpoint may have made others.
        for name, columns in self._all_columns().items():
            setattr(self, name, runtime.scatter(columns, self.batch_state[name]))
        metrics = dict(self.train_iteration())
        self._check_names()
        self._watch_optimizers()  # So may the iteration; it ends with no more memory than it needs.
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
        """Writes the state into a folder; a trainable of any width can load it."""
        (self.fluid_begin_checkpoint() or partial(_write, self.elastic_state()))(checkpoint_dir)

    def fluid_begin_checkpoint(self) -> Callable[[str], None] | None:
        """Copies the state from a GPU to host memory; returns what writes it as :meth:`save_checkpoint`, in any thread.

        Returns:
            ``None`` where :meth:`save_checkpoint` has to write it at once: on CPUs, without room for a copy, or if the
            class has a :meth:`save_checkpoint` of its own.
        """
        is_own = type(self).save_checkpoint is ElasticTrainable.save_checkpoint
        if not is_own or self.device.type != self._elastic_copies.kind:
            return None
        copied = self._elastic_copies.take(self.elastic_state())
        return None if copied is None else lambda folder: _write(copied.state, folder)

    def fluid_reads_checkpoint(self) -> bool:
        """Whether Fluid's own code reads the checkpoint, and none of the class, which might write to its folder."""
        return type(self).load_checkpoint is ElasticTrainable.load_checkpoint

    def load_checkpoint(self, checkpoint: str) -> None:
        """Reads what :meth:`save_checkpoint` wrote into a folder."""
        file = os.path.join(checkpoint, STATE_FILE)
        is_mapped = self.device.type == self._elastic_copies.kind
        # The trial's own file, with the picklable objects that extra_state() returned.
        load = partial(torch.load, file, map_location="cpu", weights_only=False)
        if not is_mapped:
            self.load_elastic_state(load())
            return
        # A GPU takes large tensors from the file itself. What stays on the CPU must not keep the file.
        state = load(mmap=True)
        try:
            rest = copy.deepcopy({**state, "parts": None})
        except Exception:  # Of a class of the user's, in whose values there may be tensors of the file.
            state = rest = load()
        self.load_elastic_state({**rest, "parts": map_leaves(state["parts"], _is_small, torch.clone)})

    def cleanup(self) -> None:
        """Releases its resources; called once, at the end. A class that overrides it must call this one too."""
        if hasattr(self, "_elastic"):
            self._elastic.group.shutdown()

    def elastic_state(self) -> dict[str, Any]:
        """Returns the state at the end of an iteration, which is the same on every device."""
        return {
            "iteration": self._elastic.iteration,
            "seed": self._elastic.seed,
            "parts": {name: part.state_dict() for name, part in self._parts_of(object).items()},
            "columns": self._all_columns(),
            "extra": self.extra_state(),
        }

    def load_elastic_state(self, state: Mapping[str, Any]) -> None:
        """Loads a state that :meth:`elastic_state` returned, here or on another device.

        Raises:
            FluidError: the state is of a trainable with other parts.
        """
        parts = self._parts_of(object)
        if parts.keys() != state["parts"].keys():
            odd = sorted(parts.keys() ^ state["parts"].keys())
            raise FluidError(f"the state does not fit this {type(self).__name__}: {', '.join(odd)} differ")
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

    def _elastic_build(self, config: dict[str, Any]) -> None:
        """Calls :meth:`build`; a class of Fluid's own that trains in a loop of its own does more."""
        self.build(config)

    def _elastic_joined(self, reported: int, metrics: dict[str, Any] | None) -> None:
        """Called after it has joined a generation, when rank and size may have changed.

        Args:
            reported: the last iteration whose result the driver has received.
            metrics: what the last :meth:`step` returned; ``None`` if the state has come from another device since.
        """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.optim.Optimizer) and "_elastic" in vars(self):
            self._elastic.watch(value)  # It may step before the next iteration.

    def _watch_optimizers(self) -> None:
        """Has all optimizers average their gradients, and forgets those that were replaced."""
        optimizers = self._parts_of(torch.optim.Optimizer).values()
        for optimizer in optimizers:
            self._elastic.watch(optimizer)
        self._elastic.keep_averagers(optimizers)
        # PyTorch has had several classes of them.
        scalers = self._parts_of(object).values()
        self._elastic.scalers = [scaler for scaler in scalers if hasattr(scaler, "_found_inf_per_device")]

    def _all_columns(self) -> dict[str, Any]:
        """The columns of all devices, as gathered last; at width 1, the attributes."""
        return {name: getattr(self, name, None) for name in self.batch_state} | self._elastic_columns

    def _check_names(self) -> None:
        """Refuses attributes that hide a method of the base class, such as ``self.step = 0``."""
        for name in vars(self).keys() & _METHODS:
            if not callable(getattr(self, name)):
                raise FluidError(
                    f"self.{name} = {getattr(self, name)!r} in {type(self).__name__} hides the method {name}() of "
                    "ElasticTrainable: give the attribute another name"
                )

    def _parts_of(self, kind: type) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if not name.startswith("_elastic")}
        return {name: part for name, part in stateful_parts(own).items() if isinstance(part, kind)}


def _is_small(node: Any) -> bool:
    return is_plain_tensor(node) and bool(node.nbytes <= _SMALL_BYTES)


def _write(state: Any, folder: str) -> None:
    torch.save(state, os.path.join(folder, STATE_FILE))


#: The methods of the base class, which attributes must not hide.
_METHODS = frozenset(name for name, value in vars(ElasticTrainable).items() if callable(value))
