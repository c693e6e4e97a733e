"""Dropout with masks that are made outside the model, of the random numbers of the trial that they are for.

Under ``torch.func.vmap`` all rows would share one generator. So the shapes of a model's masks are recorded once per
batch shape (:func:`recording`), the masks of a batch are made before the model runs (:class:`MaskPlan`), and the
modules take them in the order of their calls (:func:`handing_out`). The random numbers follow from the trial's seed,
the number of the optimizer's step and the place in the masks (:mod:`fluid.fused.counters`), so that a trial that trains
alone has the same masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from fluid.errors import FluidError, InvalidFieldError, require_number
from fluid.fused.counters import counted_numbers, counted_numbers_on_cpu


class Site(NamedTuple):
    """One call of a :class:`Dropout` in training: its module's name, and the shape and type of its mask."""

    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _SiteRecorder:
    """Lets values through, and notes the masks that they would need."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.sites: list[Site] = []
        self._names = {id(module): name for name, module in model.named_modules()}

    def apply(self, module: Dropout, x: torch.Tensor) -> torch.Tensor:
        self.sites.append(Site(self._names[id(module)], tuple(x.shape), x.dtype))
        return x


class _Masks:
    """The masks of one batch, in the order of the calls."""

    def __init__(self, masks: Sequence[torch.Tensor]) -> None:
        self._left = list(reversed(masks))

    def apply(self, module: Dropout, x: torch.Tensor) -> torch.Tensor:
        if not self._left or self._left[-1].shape != x.shape:
            raise FluidError("a Dropout was called more often, or with another shape, than for the batch before")
        return x * self._left.pop()


class _Drawer:
    """Draws a mask for each call as it comes."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def apply(self, module: Dropout, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape, generator=self._generator, device=x.device) >= module.p
        return x * kept.to(x.dtype) / (1.0 - module.p)


_source: ContextVar[_SiteRecorder | _Masks | _Drawer | None] = ContextVar("fluid.fused.dropout", default=None)


class Dropout(torch.nn.Module):  # type: ignore[misc]
    """Dropout for a :class:`~fluid.fused.FusedTrainable`: each trial has masks of its own, also in a fused pack.

    Within ``loss`` in training it multiplies by a mask that follows from the trial's seed and the step: 0 with
    probability p, else ``1 / (1 - p)``. Elsewhere it is ``torch.nn.Dropout``. Its p may differ between trials of a
    pack. Other modules that draw random numbers, also ``torch.nn.Dropout``, run in trials that train alone only.

    Args:
        p: the probability of a zero, at least 0 and below 1. That of the masks is the nearest multiple of 2**-16.

    Raises:
        InvalidFieldError: p is outside its range.

    Example:
        >>> import torch
        >>> from fluid.fused import Dropout
        >>> dropout = Dropout(0.25)
        >>> dropout
        Dropout(p=0.25)
        >>> dropout.eval()(torch.ones(3)).tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = require_number("p", p, at_least=0.0)
        if self.p >= 1.0:
            raise InvalidFieldError("p", p, "must be below 1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` times its mask; in evaluation, ``x``."""
        if not self.training:
            return x
        source = _source.get()
        return torch.nn.functional.dropout(x, self.p) if source is None else source.apply(self, x)

    def extra_repr(self) -> str:
        """Returns what ``repr`` shows between the brackets."""
        return f"p={self.p}"


def has_dropout(model: torch.nn.Module) -> bool:
    """Whether a model has a :class:`Dropout`."""
    return any(isinstance(module, Dropout) for module in model.modules())


def probabilities(model: torch.nn.Module, sites: Sequence[Site]) -> list[float]:
    """Returns a model's probability of a zero at each site."""
    return [float(model.get_submodule(site.module).p) for site in sites]


@contextmanager
def recording(model: torch.nn.Module) -> Iterator[list[Site]]:
    """Within the block, the model's Dropouts change nothing, and their calls are added to the list."""
    recorder = _SiteRecorder(model)
    token = _source.set(recorder)
    try:
        yield recorder.sites
    finally:
        _source.reset(token)


@contextmanager
def handing_out(masks: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within the block, each call of a Dropout takes the next of these masks."""
    token = _source.set(_Masks(masks))
    try:
        yield
    finally:
        _source.reset(token)


@contextmanager
def drawing(generator: torch.Generator) -> Iterator[None]:
    """Within the block, each call of a Dropout draws its mask: for trials on several devices, which no pack equals."""
    token = _source.set(_Drawer(generator))
    try:
        yield
    finally:
        _source.reset(token)


class MaskPlan:
    """How to make the masks of batches of one shape, for some rows, of random numbers.

    Args:
        sites: the calls that need masks, in their order.
        rows: how many.
        device: of the masks.

    Attributes:
        count: random numbers that a row needs for a batch.
    """

    def __init__(self, sites: Sequence[Site], rows: int, device: torch.device) -> None:
        self.sites = tuple(sites)
        self._sizes = [math.prod(site.shape) for site in sites]
        self.count = sum(self._sizes)
        #: Of each row and site: the least number that keeps a value, and what a kept value is multiplied with.
        self._least = torch.empty(rows, len(sites), dtype=torch.int16, device=device)
        self._scale = torch.empty(rows, len(sites), dtype=torch.float64, device=device)

    def set_probabilities(self, probabilities: Sequence[Sequence[float]]) -> None:
        """Sets the probability of a zero of each row at each site, in the same memory."""
        zero = torch.tensor(probabilities, dtype=torch.float64).reshape(self._scale.shape)
        least, above = (zero * 2**16 - 2**15).round(), 2**15
        self._least.copy_(least.clamp(max=above - 1).to(torch.int16))
        self._scale.copy_(torch.where(least < above, 1.0 / (1.0 - zero), 0.0))  # Else no number keeps a value.

    def masks(self, numbers: torch.Tensor, rows: slice = slice(None)) -> list[torch.Tensor]:
        """Returns masks: for each site ``(..., rows, *shape)``.

        Args:
            numbers: of :mod:`fluid.fused.counters`, ``(..., rows, count)``.
            rows: which of the plan's they are of.
        """
        masks = []
        for number, (site, part) in enumerate(zip(self.sites, numbers.split(self._sizes, dim=-1), strict=True)):
            column = slice(number, number + 1)
            mask = (part >= self._least[rows, column]).to(site.dtype)
            mask.mul_(self._scale[rows, column].to(site.dtype))
            masks.append(mask.view(*numbers.shape[:-1], *site.shape))
        return masks


#: Numbers that are drawn at once: for several steps, where a step needs few.
_NUMBERS_AT_ONCE = 2**16


class CountedMasks:
    """Masks of consecutive steps of some rows. Where they are small, those of several steps are computed at once.

    Args:
        keys: of each row's random numbers, ``int64 (rows,)``.
        begun: steps that each row has made before, ``int64 (rows,)`` on the CPU.
        steps: how many follow at most.
    """

    def __init__(self, keys: torch.Tensor, begun: torch.Tensor, steps: int) -> None:
        self._keys = keys
        self._begun = begun
        self._steps = steps
        #: By plan, the first of the steps whose masks are here, and these, ``(steps, rows, *shape)``.
        self._windows: dict[MaskPlan, tuple[int, list[torch.Tensor]]] = {}

    def of(self, step: int, plan: MaskPlan, rows: slice = slice(None)) -> list[torch.Tensor]:
        """Returns the masks of a step, counted from 0: for each site ``(rows, *shape)``.

        Args:
            step: its number.
            plan: for the shape of its batch.
            rows: which of the plan's these rows are.
        """
        if not plan.sites:
            return []
        first, masks = self._windows.get(plan, (step, []))
        if not masks or step - first >= len(masks[0]):
            self._windows.pop(plan, None)
            masks.clear()  # The memory of the last ones is the next ones'.
            first, count = step, max(1, len(self._keys) * plan.count)
            steps = max(1, min(_NUMBERS_AT_ONCE // count, self._steps - step))
            each = (self._begun + torch.arange(step, step + steps).unsqueeze(-1)).flatten().to(self._keys.device)
            keys = self._keys.repeat(steps)
            draw = counted_numbers if keys.is_cuda else counted_numbers_on_cpu
            masks = plan.masks(draw(keys, each, plan.count).view(steps, -1, plan.count), rows)
            self._windows[plan] = (first, masks)
        return [mask[step - first] for mask in masks]
