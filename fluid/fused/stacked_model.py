"""The models of several trials as stacked tensors: one row per trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

Matrices = dict[torch.dtype, torch.Tensor]


class Slot(NamedTuple):
    """Where a parameter lies: its name, its shape, and its columns in the matrix of its type."""

    name: str
    shape: tuple[int, ...]
    columns: slice


class Layout:
    """How the parameters that a model trains are laid out: side by side, in a matrix for each type.

    Attributes:
        slots: by type, in the order of the model's parameters.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.slots: dict[torch.dtype, list[Slot]] = {}
        for name, parameter in trained_parameters(model).items():
            slots = self.slots.setdefault(parameter.dtype, [])
            begin = slots[-1].columns.stop if slots else 0
            slots.append(Slot(name, tuple(parameter.shape), slice(begin, begin + parameter.numel())))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's parameters."""
        return sum(slots[-1].columns.stop * dtype.itemsize for dtype, slots in self.slots.items())

    def empty(self, rows: int, device: torch.device) -> Matrices:
        """Returns a matrix of zeros ``(rows, numbers)`` for each type."""
        return {
            dtype: torch.zeros(rows, slots[-1].columns.stop, dtype=dtype, device=device)
            for dtype, slots in self.slots.items()
        }

    def views(self, matrices: Matrices) -> dict[str, torch.Tensor]:
        """Returns each parameter's part of the matrices, ``(rows, *shape)``, by name."""
        return {
            slot.name: matrices[dtype][:, slot.columns].view(len(matrices[dtype]), *slot.shape)
            for dtype, slots in self.slots.items()
            for slot in slots
        }


class StackedModel:
    """The parameters and buffers of models of one shape.

    The models keep no tensors of their own: theirs are views of their row, until :meth:`detach`. Parameters that are
    not trained and equal in all rows are there once, for all: nothing writes to them, not even after :meth:`detach`.
    Buffers are never shared, as models write to them.

    Attributes:
        layout: of the trained parameters.
        matrices: the trained parameters by type, ``(rows, numbers)``.
        others: buffers, and parameters that are not trained and differ between rows, by name, ``(rows, *shape)``.
        shared: the other parameters that are not trained, by name.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.layout = Layout(models[0])
        self.matrices, self.others, self.shared = self._stack(models)
        self.attach(models)

    def tensors(self) -> list[torch.Tensor]:
        """Returns everything that belongs to rows."""
        return [*self.matrices.values(), *self.others.values()]

    def take(self, rows: Sequence[int], models: Sequence[torch.nn.Module]) -> None:
        """Keeps these rows only, whose models follow."""
        self.matrices = {dtype: take_rows(matrix, rows) for dtype, matrix in self.matrices.items()}
        self.others = {name: take_rows(tensor, rows) for name, tensor in self.others.items()}
        self.attach(models)

    def join(self, new: Sequence[torch.nn.Module], models: Sequence[torch.nn.Module]) -> None:
        """Appends the rows of new models; ``models`` are all, with them."""
        matrices, others, shared = self._stack(new)
        present = len(models) - len(new)
        if present:
            for name in [*self.shared.keys() | shared.keys()]:
                if not (name in self.shared and name in shared and _is_equal(self.shared[name], shared[name])):
                    _give_each_row(name, self.shared, self.others, present)
                    _give_each_row(name, shared, others, len(new))
            self.matrices = {dtype: torch.cat([matrix, matrices[dtype]]) for dtype, matrix in self.matrices.items()}
            self.others = {name: torch.cat([tensor, others[name]]) for name, tensor in self.others.items()}
        else:
            self.matrices, self.others, self.shared = matrices, others, shared
        self.attach(models)

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Makes the models' tensors views of their rows."""
        views = {**self.layout.views(self.matrices), **self.others}
        for row, model in enumerate(models):
            for name, tensor in named_tensors(model):
                tensor.data = self.shared[name] if name in self.shared else views[name][row]
                tensor.grad = None

    def detach(self, model: torch.nn.Module) -> None:
        """Gives a model tensors of its own, but for those that are shared."""
        for name, tensor in named_tensors(model):
            if name not in self.shared:
                tensor.data = tensor.data.clone()

    def _stack(
        self, models: Sequence[torch.nn.Module]
    ) -> tuple[Matrices, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        named = [dict(named_tensors(model)) for model in models]
        first = next(iter(named[0].values()))
        matrices = self.layout.empty(len(models), first.device)
        views = self.layout.views(matrices)
        others, shared = {}, {}
        for name, tensor in named[0].items():
            rows = [tensors[name].data for tensors in named]
            if name in views:
                for view, row in zip(views[name], rows, strict=True):
                    view.copy_(row)
            elif isinstance(tensor, torch.nn.Parameter) and all(_is_equal(rows[0], row) for row in rows):
                shared[name] = rows[0]
            else:
                others[name] = torch.stack(rows)
        return matrices, others, shared


def _is_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    is_same = one.data_ptr() == two.data_ptr() and one.stride() == two.stride()
    return is_same or bool(torch.equal(one, two))


def _give_each_row(name: str, shared: dict[str, torch.Tensor], others: dict[str, torch.Tensor], rows: int) -> None:
    """Stacks a tensor that so many rows have shared."""
    if name in shared:
        tensor = shared.pop(name)
        others[name] = tensor.expand(rows, *tensor.shape)


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that the optimizer changes, by name; one with several names has the first."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a model's parameters and buffers, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def take_rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Returns a copy of these rows of a tensor."""
    return tensor.index_select(0, torch.tensor(rows, dtype=torch.int64, device=tensor.device))
