"""How a global batch is split over the ranks. The order of the samples does not depend on the width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluid.errors import InvalidFieldError, require_integer

if TYPE_CHECKING:
    import torch


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
