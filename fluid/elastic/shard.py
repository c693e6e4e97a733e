"""Which part of a global batch a rank takes. The order of the samples never depends on the width."""

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
        count: its samples; 0 if there are more ranks than samples.
        total: samples of the whole batch.
    """

    start: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Shard:
        """The part of one of ``size`` ranks: contiguous, and as large as the others' within one sample.

        Raises:
            InvalidFieldError: an empty batch.
        """
        total = require_integer("total", total, at_least=1)
        start = total * rank // size
        return cls(start, total * (rank + 1) // size - start, total)

    @property
    def weight(self) -> float:
        """What a mean over this part weighs in the mean over the batch."""
        return self.count / self.total

    @property
    def bounds(self) -> tuple[int, int]:
        """First sample and the one after the last, of at least one sample.

        A rank that has none takes one of another's: the same code runs on every rank, and its weight is 0.
        """
        start = min(self.start, self.total - 1)
        return start, start + max(1, self.count)

    def take(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's part of a tensor that holds the whole batch along ``dim``.

        Raises:
            InvalidFieldError: the tensor is not as long as the batch.
        """
        if tensor.shape[dim] != self.total:
            raise InvalidFieldError("tensor", tuple(tensor.shape), f"dimension {dim} must be the batch, {self.total}")
        start, end = self.bounds
        return tensor.narrow(dim, start, end - start)
