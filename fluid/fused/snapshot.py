"""A copy of a pack's state, to go back to when an iteration has failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fluid.fused.data import Position
from fluid.fused.stacked_model import StackedModel
from fluid.fused.stacked_optimizers import StackedOptimizer
from fluid.fused.trainable import FusedTrainable


class _TrialProgress(NamedTuple):
    """How far a trial is, and the learning rates in its own optimizer. Its random numbers follow from that."""

    iteration: int
    steps: int
    position: Position
    rates: tuple[Any, ...]

    @classmethod
    def of(cls, trial: FusedTrainable) -> _TrialProgress:
        state, groups = trial._fused, trial.torch_optimizer.param_groups
        return cls(trial.iteration, state.steps, state.position, tuple(group["lr"] for group in groups))

    def give(self, trial: FusedTrainable) -> None:
        trial._elastic.iteration = self.iteration
        trial._fused.steps, trial._fused.position = self.steps, self.position
        for group, rate in zip(trial.torch_optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate


class PackSnapshot:
    """The state of a pack's trials at one time. It keeps its tensors, so that the next copy allocates nothing.

    Args:
        model: of the pack.
        optimizer: of the pack.
        trials: of the pack; other ones need another snapshot.
    """

    def __init__(self, model: StackedModel, optimizer: StackedOptimizer, trials: Sequence[FusedTrainable]) -> None:
        self._optimizer, self._trials = optimizer, trials
        self._tensors = [*model.tensors(), *optimizer.tensors()]
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        self.take()

    def take(self) -> None:
        """Copies the state as it is now."""
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._tensors)
        self._progress = [_TrialProgress.of(trial) for trial in self._trials]
        self._optimizer_states = self._optimizer.own_states(self._trials)

    def restore(self) -> None:
        """Brings the copied state back."""
        with torch.no_grad():
            torch._foreach_copy_(self._tensors, self._copies)
        for trial, progress in zip(self._trials, self._progress, strict=True):
            progress.give(trial)
        self._optimizer.set_own_states(self._trials, self._optimizer_states)
