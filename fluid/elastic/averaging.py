"""Averages of metrics over the ranks, at the end of an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fluid.elastic.groups.group import Group
from fluid.errors import FluidError


class Means:
    """Means of metrics over the samples of all ranks.

    Values are summed on their own device, so that adding does not make the host wait. The ranks communicate once, in
    :meth:`result`.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sums: dict[str, Any] = {}
        self._count = 0

    def add(self, metrics: Mapping[str, Any], count: int) -> None:
        """Adds the means over ``count`` samples of this rank: numbers, or tensors with one element."""
        self._count += count
        for name, value in metrics.items():
            number = value.detach().reshape(()).double() if isinstance(value, torch.Tensor) else value
            # A rank without samples of its own adds nothing, even if its value is not finite.
            self._sums[name] = self._sums.get(name, 0.0) + (number * count if count else 0.0)

    def result(self) -> dict[str, float]:
        """Returns the means, which are the same on every rank; all ranks call this.

        Raises:
            FluidError: no rank has added a sample.
            GenerationBrokenError: a member failed.
        """
        numbers = torch.tensor([*map(float, self._sums.values()), float(self._count)], dtype=torch.float64)
        self._group.all_reduce(numbers)
        *sums, count = numbers.tolist()
        if not count:
            raise FluidError("no rank has added a sample: there is no mean")
        return {name: total / count for name, total in zip(self._sums, sums, strict=True)}
