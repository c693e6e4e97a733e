"""One training step of some rows of a pack: gradients, and what the optimizer makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fluid.fused.data import RowBatch
from fluid.fused.programs import RowPrograms, RowTensors
from fluid.fused.stacked_model import Layout, Matrices
from fluid.fused.stacked_optimizers import TrainingTensors


class TrainingRows:
    """The tensors that training steps of some rows read and write.

    Args:
        layout: of the trained parameters.
        programs: of the pack.
        tensors: parameters, optimizer states and gradients of these rows.
        others: buffers, and parameters that are not trained, in the programs' order.
        is_shared: of each of the others, whether it is one tensor for all rows.

    Attributes:
        tensors: as given.
        inputs: of the programs.
        losses: sums over the samples so far, ``float64 (rows,)``.
    """

    def __init__(
        self,
        layout: Layout,
        programs: RowPrograms,
        tensors: TrainingTensors,
        others: Sequence[torch.Tensor],
        is_shared: tuple[bool, ...],
    ) -> None:
        self._layout, self._programs, self.tensors = layout, programs, tensors
        trained, gradients = layout.views(tensors.parameters), layout.views(tensors.gradients)
        names = programs.trained_names
        self.inputs = RowTensors([trained[name] for name in names], list(others), is_shared)
        self._gradients = [gradients[name] for name in names]
        self.losses = torch.zeros(len(self), dtype=torch.float64, device=self._gradients[0].device)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.inputs.trained[0])

    def state(self) -> list[torch.Tensor]:
        """Returns all that training changes, but for the losses; dimension 0 is the row."""
        of_states = [matrix for matrices in self.tensors.states.values() for matrix in matrices.values()]
        others = zip(self.inputs.others, self.inputs.is_shared, strict=True)
        return [*self.tensors.parameters.values(), *of_states, *(other for other, is_shared in others if not is_shared)]

    def shared(self) -> list[torch.Tensor]:
        """Returns the tensors that are there once for all rows."""
        others = zip(self.inputs.others, self.inputs.is_shared, strict=True)
        return [other for other, is_shared in others if is_shared]

    def like(self, rows: int) -> TrainingRows:
        """Returns other tensors of this kind for so many rows, without their values; shared ones are the same."""
        device = self.losses.device

        def empty() -> Matrices:
            return self._layout.empty(rows, device)

        tensors = TrainingTensors(empty(), {name: empty() for name in self.tensors.states}, empty())
        others = [
            other if is_shared else other.new_empty(rows, *other.shape[1:])
            for other, is_shared in zip(self.inputs.others, self.inputs.is_shared, strict=True)
        ]
        return TrainingRows(self._layout, self._programs, tensors, others, self.inputs.is_shared)

    def step(self, masks: Sequence[torch.Tensor], batch: RowBatch, optimize: Callable[[TrainingTensors], None]) -> None:
        """Trains on one batch.

        Args:
            masks: of the rows' Dropouts.
            batch: of the rows.
            optimize: changes parameters and states, given the gradients.

        Raises:
            FusionError: the loss cannot be computed for rows at once.
        """
        gradients, losses = self._programs.train(self.inputs, masks, batch)
        torch._foreach_copy_(self._gradients, list(gradients))
        optimize(self.tensors)
        self.losses += losses.double() * batch.samples
