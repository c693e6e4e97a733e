"""Dropout with masks that are drawn outside the model, from the generator of the trial that they are for.

Under ``torch.func.vmap`` all rows would share one generator. So the shapes of a model's masks are recorded once per
batch shape (:func:`recording`), the masks of a batch are drawn before the model runs (:meth:`MaskPlan.draw`), and the
modules take them in the order of their calls (:func:`handing_out`). A trial that trains alone draws in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from fluid.errors import FluidError, InvalidFieldError, require_number


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

    Within ``loss`` in training it multiplies by a mask that was drawn from the trial's generator: 0 with probability
    p, else ``1 / (1 - p)``. Elsewhere it is ``torch.nn.Dropout``. Its p may differ between trials of a pack. Other
    modules that draw random numbers, also ``torch.nn.Dropout``, run in trials that train alone only.

    Args:
        p: the probability of a zero, at least 0 and below 1.

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
    """How to draw the masks of batches of one shape, for some rows.

    Args:
        sites: the calls that need masks, in their order.
        probabilities: of each row, that of a zero at each site.
        device: of the masks.
    """

    def __init__(self, sites: Sequence[Site], probabilities: Sequence[Sequence[float]], device: torch.device) -> None:
        self._sites = sites
        columns = torch.tensor(probabilities, dtype=torch.float64).reshape(len(probabilities), len(sites))
        self._zero = columns.float().to(device)
        self._scale = (1.0 / (1.0 - columns)).to(device)
        self._sizes = [math.prod(site.shape) for site in sites]
        self._uniform = torch.empty(len(probabilities), sum(self._sizes), device=device)

    def draw(self, generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
        """Draws the masks of one batch.

        Args:
            generators: of each row, on the plan's device. A row draws all its numbers at once, so that they are the
                same alone and in a pack.

        Returns:
            For each site ``(rows, *shape)``.
        """
        if not self._sites:
            return []
        for row, generator in zip(self._uniform, generators, strict=True):
            row.uniform_(generator=generator)
        masks = []
        for number, (site, uniform) in enumerate(
            zip(self._sites, self._uniform.split(self._sizes, dim=1), strict=True)
        ):
            column = slice(number, number + 1)
            mask = (uniform >= self._zero[:, column]).to(site.dtype).mul_(self._scale[:, column].to(site.dtype))
            masks.append(mask.view(-1, *site.shape))
        return masks
