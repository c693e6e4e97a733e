"""A data loader that splits each global batch over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, TensorDataset

from fluid.errors import InvalidFieldError, require_integer

# -- shard ---------------------------------------------------------------------------------------
#
# How a global batch is split over the ranks. The order of the samples does not depend on the width.


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a global batch.

    Attributes:
        start: position of its first sample.
        count: number of its samples; may be 0 if there are more ranks than samples.
        total: number of samples in the whole batch.
    """

    start: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Shard:
        """Returns the part of one of ``size`` ranks. Parts are contiguous, and their sizes differ by at most 1.

        Raises:
            InvalidFieldError: the batch is empty.
        """
        total = require_integer("total", total, at_least=1)
        start = total * rank // size
        return cls(start, total * (rank + 1) // size - start, total)

    @property
    def weight(self) -> float:
        """The weight of this part's mean in the mean over the batch."""
        return self.count / self.total

    @property
    def bounds(self) -> tuple[int, int]:
        """Range of at least one sample: the first, and the one after the last.

        A rank without a sample takes another's, with weight 0, so that the same code runs on every rank.
        """
        start = min(self.start, self.total - 1)
        return start, start + max(1, self.count)

    def take(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Returns this rank's part of a tensor that holds the whole batch along ``dim``.

        Raises:
            InvalidFieldError: the tensor's length along ``dim`` is not the batch's.
        """
        if tensor.shape[dim] != self.total:
            raise InvalidFieldError("tensor", tuple(tensor.shape), f"dimension {dim} must be the batch, {self.total}")
        start, end = self.bounds
        return tensor.narrow(dim, start, end - start)


# -- loader --------------------------------------------------------------------------------------


class ShardContext(Protocol):
    """The rank for which a loader works; it is notified of each batch."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def begin_batch(self, shard: Shard) -> None:
        """Records the part of the batch that is worked on from now on."""
        ...


class ElasticLoader:
    """Loads this rank's part of each global batch, in an order that is the same at every width.

    Iterating yields the rest of the epoch, and the next epoch the next time. Its position is part of the trainable's
    state. Usually made by :meth:`ElasticTrainable.make_loader`, which passes the context.

    Args:
        context: rank and size.
        dataset: as for ``torch.utils.data.DataLoader``; a ``TensorDataset`` is indexed by whole batches, without one.
        batch_size: samples in a global batch, over all ranks.
        shuffle: whether each epoch has its own order.
        seed: seed of these orders.
        drop_last: whether to skip the last batch if it is not full.
        options: further arguments of ``DataLoader``, such as ``num_workers`` and ``collate_fn``.

    Raises:
        InvalidFieldError: an argument cannot be used.

    Example:
        >>> import torch
        >>> from fluid.elastic import ElasticLoader
        >>> from fluid.elastic.runtime import Runtime  # Here of one process.
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(5))
        >>> loader = ElasticLoader(Runtime(), dataset, batch_size=2, shuffle=False)
        >>> [batch[0].tolist() for batch in loader]
        [[0, 1], [2, 3], [4]]
        >>> loader.epoch
        1
    """

    def __init__(
        self,
        context: ShardContext,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        self.batch_size = require_integer("batch_size", batch_size, at_least=1)
        self.seed = require_integer("seed", seed, at_least=0)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise InvalidFieldError("dataset", dataset, "must have a length and be indexed by position")
        if {"sampler", "batch_sampler"} & options.keys():
            raise InvalidFieldError("options", sorted(options), "samplers are not supported: the loader sets the order")
        self.dataset = dataset
        self._context = context
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._options = options
        self._epoch = 0
        #: Global batches of the epoch that were yielded.
        self._position = 0
        if len(self) == 0:
            raise InvalidFieldError("dataset", len(dataset), "has too few samples for one batch")

    def __len__(self) -> int:
        """Global batches in an epoch."""
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (rest > 0 and not self._drop_last)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's parts of the epoch's remaining batches."""
        plan = list(range(self._position, len(self)))
        order = self._order()
        shards = [self._shard(number) for number in plan]
        picked = (self._pick(order, number, shard) for number, shard in zip(plan, shards, strict=True))
        epoch = self._epoch
        for number, shard, batch in zip(plan, shards, self._load(picked), strict=False):
            # Before the yield: a caller that breaks out of the loop has used the batch.
            self._epoch, self._position = (epoch, number + 1) if number + 1 < len(self) else (epoch + 1, 0)
            self._context.begin_batch(shard)
            yield batch

    def take(self, batches: int) -> Iterator[Any]:
        """Yields this rank's parts of that many global batches, across epochs if needed.

        Raises:
            InvalidFieldError: ``batches`` is not a whole number of at least 1.
        """
        left = require_integer("batches", batches, at_least=1)
        while left:
            for batch in islice(self, left):
                left -= 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        """Its position: epoch, global batches of it that were yielded, and seed."""
        return {"epoch": self._epoch, "position": self._position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from the position of another loader."""
        self._epoch, self._position, self.seed = state["epoch"], state["position"], state["seed"]

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(len(self.dataset))
        generator = torch.Generator()
        # With seed + epoch, the orders of one seed would be those of the next seed, shifted by one.
        generator.manual_seed((self.seed * 1_000_003 + self._epoch) % 2**63)
        return torch.randperm(len(self.dataset), generator=generator)

    def _shard(self, number: int) -> Shard:
        samples = min(self.batch_size, len(self.dataset) - number * self.batch_size)
        return Shard.of(samples, self._context.rank, self._context.size)

    def _pick(self, order: torch.Tensor, number: int, shard: Shard) -> torch.Tensor:
        start, end = shard.bounds
        first = number * self.batch_size
        return order[first + start : first + end]

    def _load(self, picked: Iterator[torch.Tensor]) -> Iterator[Any]:
        if type(self.dataset) is TensorDataset and not self._options:
            tensors = self.dataset.tensors
            for indices in picked:
                # Not dataset[indices]: the tensors may be on a GPU, the indices are not.
                moved = {device: _on(device, indices) for device in {tensor.device for tensor in tensors}}
                yield tuple(tensor[moved[tensor.device]] for tensor in tensors)
        else:
            yield from DataLoader(self.dataset, batch_sampler=_Batches(picked), **self._options)


def _on(device: torch.device, indices: torch.Tensor) -> torch.Tensor:
    """Returns indices on a device; does not wait for what a GPU still computes, as a copy of pageable memory would."""
    return indices.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else indices.to(device)


class _Batches:
    """A batch sampler for ``DataLoader``: the indices of each batch."""

    def __init__(self, picked: Iterator[torch.Tensor]) -> None:
        self._picked = picked

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self._picked)
