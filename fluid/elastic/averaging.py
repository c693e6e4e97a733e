"""Averages over the ranks: gradients before an optimizer steps, and metrics at the end of an iteration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fluid.elastic.group import Group
from fluid.errors import FluidError

#: Most bytes of gradients that are reduced together.
_BUCKET = 64 * 2**20


def average_gradients(group: Group, parameters: Iterable[torch.Tensor], weight: float) -> None:
    """Replaces gradients by their mean over the ranks.

    A missing gradient counts as zero. A parameter that has no gradient on any rank keeps none, as in a single process.

    Args:
        group: all its members call this with the same parameters.
        parameters: in the same order on every rank, none twice.
        weight: the weight of this rank's gradients; the ranks' weights sum to 1.

    Raises:
        FluidError: a gradient is sparse.
        GenerationBrokenError: a member failed.
    """
    for bucket in _buckets([parameter for parameter in parameters if parameter.requires_grad]):
        _average_bucket(group, bucket, weight)


def _average_bucket(group: Group, parameters: list[torch.Tensor], weight: float) -> None:
    missing = [parameter.grad is None for parameter in parameters]
    pieces = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise FluidError("averaging sparse gradients is not supported: make the embedding with sparse=False")
        if gradient is None or weight == 0.0:
            # Not multiplied by zero: a gradient from another rank's samples may not be finite.
            pieces.append(torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device))
        else:
            pieces.append(gradient.detach().reshape(-1))
    first = parameters[0]
    present = torch.tensor([not none for none in missing], dtype=first.dtype, device=first.device)
    flat = torch.cat([*pieces, present])
    if weight != 0.0:
        flat[: -len(parameters)].mul_(weight)
    group.all_reduce(flat)
    # Reading values from a GPU makes the host wait, so it is done only if a gradient is missing here.
    counts = flat[-len(parameters) :].tolist() if any(missing) else [1.0] * len(parameters)
    lengths = [parameter.numel() for parameter in parameters]
    means = flat[: -len(parameters)].split(lengths)
    for parameter, mean, present_somewhere in zip(parameters, means, counts, strict=True):
        if not present_somewhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(mean.view_as(parameter))


def _buckets(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields lists of parameters of one type on one device, of about _BUCKET bytes."""
    kinds: dict[tuple[Any, Any], list[torch.Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for alike in kinds.values():
        bucket: list[torch.Tensor] = []
        held = 0
        for parameter in alike:
            bucket.append(parameter)
            held += parameter.numel() * parameter.element_size()
            if held >= _BUCKET:
                yield bucket
                bucket, held = [], 0
        if bucket:
            yield bucket


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
