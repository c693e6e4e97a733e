"""The runtime of an :class:`~fluid.elastic.trainable.ElasticTrainable`: process group, batch shard, gradients, seeds.

Separate from the class that users derive from, whose attributes are theirs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fluid.elastic.gradients import GradientAverager, Overlap
from fluid.elastic.groups.group import Group
from fluid.elastic.groups.rendezvous import Rendezvous
from fluid.elastic.loader import Shard
from fluid.errors import FluidError


class SingleProcessGroup:
    """The group of a process that trains alone: its size is 1, and its operations do nothing."""

    rank = 0
    size = 1
    broken = False
    on_operation: Callable[[], None] | None = None

    def connect(self, rendezvous: Rendezvous, rank: int, size: int) -> None:
        """Not supported."""
        raise FluidError("a group of one process cannot connect to others")

    def disconnect(self, generation: int) -> None:
        """Does nothing."""

    def configure(self, rendezvous: Rendezvous, rank: int, size: int, connection: int = 0) -> None:
        """Not supported."""
        raise FluidError("a group of one process cannot be configured")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leaves the tensor unchanged."""

    def can_overlap(self, tensor: torch.Tensor) -> bool:
        """Whether sums run beside the computation: not here."""
        return False

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Leaves the tensor unchanged."""
        return lambda: None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Leaves the tensor unchanged."""

    def barrier(self) -> None:
        """Returns at once."""

    def confirm(self) -> None:
        """Returns at once."""

    def abort(self, generation: int) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        """Does nothing."""


class Runtime:
    """The elastic part of a trainable.

    Attributes:
        group: the processes that train it, changed by :meth:`join`.
        iteration: iterations done.
        seed: seeds each iteration's random numbers, together with the iteration's number and the rank.
        shard: the part of the global batch that is worked on; ``None`` before the first.
        scalers: the trainable's gradient scalers.
        overlap: of the averagers of this generation.
    """

    def __init__(self) -> None:
        self.group: Group = SingleProcessGroup()
        self.iteration = 0
        self.seed = 0
        self.shard: Shard | None = None
        self.scalers: list[Any] = []
        #: Optimizers whose gradients were averaged since their last step, by id.
        self._averaged: set[int] = set()
        #: Optimizers that average their gradients before each step.
        self._watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        #: The averagers of this generation. They hold their optimizers, and are dropped where all ranks drop them, not
        #: when an optimizer is collected, which is at another time on each rank: all must exchange the same buckets.
        self._averagers: dict[torch.optim.Optimizer, GradientAverager] = {}
        self.overlap = Overlap()

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        # A copied model, as for a moving average of its weights, is trained by the same processes.
        return self

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    @property
    def weight(self) -> float:
        """The weight of this rank's mean in the mean over the global batch."""
        return 1.0 / self.size if self.shard is None else self.shard.weight

    @property
    def count(self) -> int:
        """Number of this rank's samples in the global batch."""
        return 1 if self.shard is None else self.shard.count

    def join(self, group: Group) -> None:
        """Enters a generation of a group, or the group of one process."""
        self.overlap = Overlap(self.overlap.is_allowed and not self.overlap.failed)
        for averager in self._averagers.values():
            averager.close()
        self._averagers.clear()
        self.group = group

    def begin_batch(self, shard: Shard) -> None:
        """Starts another global batch; its gradients are not averaged yet."""
        self.shard = shard
        self._averaged.clear()

    def begin_iteration(self) -> None:
        """Starts an iteration, with random numbers of its own for each iteration and rank."""
        self.shard = None
        self._averaged.clear()
        seed_everything(self.seed, self.iteration, self.rank)

    # -- gradients -----------------------------------------------------------------------------------------

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer average its gradients before each step, unless :meth:`average` was called for it."""
        if optimizer in self._watched:
            return
        self._watched.add(optimizer)

        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.size == 1:
                return
            if any(callable(argument) for argument in (*args, *kwargs.values())):
                raise FluidError("an optimizer's closure is not supported on several devices")
            if id(optimizer) not in self._averaged:
                if any(scaler._found_inf_per_device(optimizer) for scaler in self.scalers):
                    # On a rank that has found infinite gradients it skips the step, while the others would average.
                    raise FluidError(
                        "a GradScaler has looked at gradients that are not averaged yet: on several devices, call "
                        "backward() within `with self.sync(optimizer):`"
                    )
                self.average(optimizer)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._averaged.discard(id(optimizer))

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the gradients of an optimizer's parameters by their means over the global batch."""
        if self.size > 1:
            self._averager(optimizer).average()
        self._averaged.add(id(optimizer))

    def _averager(self, optimizer: torch.optim.Optimizer) -> GradientAverager:
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
        ]
        averager = self._averagers.get(optimizer)
        if averager is None or not averager.is_for(parameters):
            self._drop_averagers_of(parameters)
            averager = GradientAverager(self.group, parameters, lambda: self.weight, self.overlap)
            self._averagers[optimizer] = averager
        return averager

    def keep_averagers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Drops the averagers of all other optimizers; all ranks call this with the same ones."""
        wanted = set(optimizers)
        for optimizer in [optimizer for optimizer in self._averagers if optimizer not in wanted]:
            self._averagers.pop(optimizer).close()

    def _drop_averagers_of(self, parameters: list[torch.Tensor]) -> None:
        """Drops averagers whose parameters another optimizer steps now: their hooks would send the gradients, too."""
        stepped = set(map(id, parameters))
        for optimizer, averager in list(self._averagers.items()):
            if not stepped.isdisjoint(map(id, averager.parameters)):
                averager.close()
                del self._averagers[optimizer]

    # -- state that differs between ranks ---------------------------------------------------

    def replicate_buffers(self, modules: Mapping[str, torch.nn.Module]) -> None:
        """Broadcasts rank 0's buffers to all ranks, such as the running statistics of batch normalization."""
        if self.size > 1:
            kinds: dict[tuple[Any, Any], list[torch.Tensor]] = {}
            for module in modules.values():
                for buffer in module.buffers():
                    kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
            for alike in kinds.values():
                flat = torch.cat([buffer.detach().reshape(-1) for buffer in alike])
                self.group.broadcast(flat)
                for buffer, piece in zip(alike, flat.split([buffer.numel() for buffer in alike]), strict=True):
                    buffer.copy_(piece.view_as(buffer))

    def gather(self, value: Any, dim: int) -> Any:
        """Concatenates the ranks' parts of a tensor, or of tensors in tuples and lists."""
        if self.size == 1:
            return value
        lengths = torch.zeros(self.size, dtype=torch.int64)
        parts = list(_tensors(value))
        if parts:
            lengths[self.rank] = parts[0].shape[dim]
        self.group.all_reduce(lengths)
        start, total = int(lengths[: self.rank].sum()), int(lengths.sum())

        def whole(part: torch.Tensor) -> torch.Tensor:
            full = torch.zeros(*part.shape[:dim], total, *part.shape[dim + 1 :], dtype=part.dtype, device=part.device)
            full.narrow(dim, start, part.shape[dim]).copy_(part.detach())
            self.group.all_reduce(full)
            return full

        return map_tensors(value, whole)

    def scatter(self, value: Any, dim: int) -> Any:
        """Returns this rank's part of a result of :meth:`gather`.

        Raises:
            FluidError: it has fewer columns than there are ranks.
        """

        def part(full: torch.Tensor) -> torch.Tensor:
            shard = Shard.of(full.shape[dim], self.rank, self.size)
            if full.shape[dim] < self.size:
                raise FluidError(f"{full.shape[dim]} columns of state cannot be split over {self.size} devices")
            return shard.take(full, dim).clone()

        return value if self.size == 1 else map_tensors(value, part)


def seed_everything(seed: int, iteration: int, rank: int) -> None:
    """Seeds Python's, NumPy's and PyTorch's global generators."""
    words = np.random.SeedSequence([seed, iteration, rank]).generate_state(3, np.uint64)
    sys.modules["random"].seed(int(words[0]))  # PyTorch has loaded it.
    np.random.seed(int(words[1]) % 2**32)
    # Not torch.manual_seed: it also looks for every kind of accelerator, which takes longer.
    torch.default_generator.manual_seed(int(words[2]) % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(int(words[2]) % 2**63)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Changes the tensors in nested tuples and lists."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)([map_tensors(item, change) for item in value])
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def stateful_parts(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects with ``state_dict`` and ``load_state_dict`` by name, also those in lists, tuples and dicts.

    An object with several names is returned under the first.
    """
    parts = {}
    seen: set[int] = set()
    for name, value in _leaves(attributes):
        stateful = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
        if stateful and id(value) not in seen:
            seen.add(id(value))
            parts[name] = value
    return parts


def _leaves(named: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in named.items():
        name = f"{prefix}{key}"
        if type(value) in (list, tuple):
            yield from _leaves(dict(enumerate(value)), f"{name}.")
        elif type(value) is dict:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value
