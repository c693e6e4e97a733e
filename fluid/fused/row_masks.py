"""The masks of a pack's Dropouts, of all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fluid.fused.counters import counted_numbers
from fluid.fused.data import map_batch
from fluid.fused.dropout import CountedMasks, MaskPlan, Site, probabilities
from fluid.fused.trainable import FusedTrainable, record_sites, shape_of


class RowMasks:
    """What the masks of a pack's rows are made of. Its tensors stay the same ones as long as the size does.

    Args:
        device: the pack's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trials: tuple[FusedTrainable, ...] = ()
        #: By shape of a row's batch: which Dropouts it calls, and how the masks are made.
        self._sites: dict[Any, list[Site]] = {}
        self._plans: dict[Any, MaskPlan] = {}
        self._keys = torch.empty(0, dtype=torch.int64, device=device)
        self._step = torch.empty_like(self._keys)

    def set_rows(self, trials: tuple[FusedTrainable, ...], size: int) -> None:
        """Notes which trials the rows are, of so many in memory: dead rows have the masks of the last trial."""
        self._trials = (*trials, *trials[-1:] * (size - len(trials)))
        keys = torch.tensor([trial._fused.mask_key for trial in self._trials], dtype=torch.int64)
        if len(self._keys) != size:
            self._plans.clear()
            self._keys = torch.empty(size, dtype=torch.int64, device=self._device)
            self._step = torch.empty_like(self._keys)
        self._keys.copy_(keys)
        for plan in self._plans.values():
            self._set_probabilities(plan)

    def begin(self, steps: int) -> None:
        """Notes that so many steps follow."""
        self._steps = steps
        #: Of each row, its optimizer's steps so far; and before each of the steps that follow.
        self._begun = torch.tensor([trial._fused.steps for trial in self._trials])
        self._table = (self._begun + torch.arange(steps).unsqueeze(-1)).to(self._device)

    def of_rows(self, rows: slice) -> Callable[[int, Any], list[torch.Tensor]]:
        """Returns what gives the masks of some rows, by number of the step and batch: for each site ``(rows, ...)``."""
        masks = CountedMasks(self._keys[rows], self._begun[rows], self._steps)
        return lambda step, batch: masks.of(step, self._plan(batch), rows)

    def drawing(self, step: int, batch: Any) -> Callable[[], list[torch.Tensor]]:
        """Returns what computes the masks of all rows by operations on static tensors, which a graph can repeat.

        After a later call for a batch of this shape, it computes the masks of that step.
        """
        plan = self._plan(batch)
        self._step.copy_(self._table[step])
        return lambda: plan.masks(counted_numbers(self._keys, self._step, plan.count))

    def _plan(self, batch: Any) -> MaskPlan:
        """Returns how to make the masks of batches like this one, of some rows."""
        shape = shape_of(batch, begin=1)
        if shape not in self._plans:
            if shape not in self._sites:
                trial = self._trials[0]
                trial.model.train()
                self._sites[shape] = record_sites(trial, map_batch(lambda tensor: tensor[0], batch))
            self._plans[shape] = MaskPlan(self._sites[shape], len(self._trials), self._device)
            self._set_probabilities(self._plans[shape])
        return self._plans[shape]

    def _set_probabilities(self, plan: MaskPlan) -> None:
        plan.set_probabilities([probabilities(trial.model, plan.sites) for trial in self._trials])
