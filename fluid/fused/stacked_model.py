"""The models of several trials as stacked tensors: one row per trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

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

    def zeros(self, rows: int, device: torch.device) -> Matrices:
        """Returns a matrix of zeros ``(rows, numbers)`` for each type."""
        return {dtype: matrix.zero_() for dtype, matrix in self.empty(rows, device).items()}

    def empty(self, rows: int, device: torch.device) -> Matrices:
        """Returns a matrix ``(rows, numbers)`` for each type, without values."""
        return {
            dtype: torch.empty(rows, slots[-1].columns.stop, dtype=dtype, device=device)
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

    There may be more rows than models: *dead rows*, after all others. As long as the size stays, the tensors do, too.

    Args:
        models: of the first rows.
        size: rows in memory.

    Attributes:
        layout: of the trained parameters.
        matrices: the trained parameters by type, ``(size, numbers)``.
        others: buffers, and parameters that are not trained and differ between rows, by name, ``(size, *shape)``.
        shared: the other parameters that are not trained, by name.
    """

    def __init__(self, models: Sequence[torch.nn.Module], size: int) -> None:
        self.layout = Layout(models[0])
        self.matrices, self.others, self.shared = self._stack(models, size)
        self.attach(models)

    def tensors(self) -> list[torch.Tensor]:
        """Returns everything that belongs to rows."""
        return [*self.matrices.values(), *self.others.values()]

    def take(self, rows: Sequence[int], models: Sequence[torch.nn.Module], size: int) -> None:
        """Keeps these rows only, whose models follow, in tensors of another size or in the same ones."""
        take_rows(self.matrices, rows, size)
        take_rows(self.others, rows, size)
        self.attach(models)

    def join(self, new: Sequence[torch.nn.Module], models: Sequence[torch.nn.Module], size: int) -> None:
        """Appends the rows of new models; ``models`` are all, with them."""
        present = len(models) - len(new)
        if present:
            matrices, others, shared = self._stack(new, len(new))
            for name in [*self.shared.keys() | shared.keys()]:
                if not (name in self.shared and name in shared and _is_equal(self.shared[name], shared[name])):
                    _give_each_row(name, self.shared, self.others, present)
                    _give_each_row(name, shared, others, len(new))
            append_rows(self.matrices, matrices, present, size)
            append_rows(self.others, others, present, size)
        else:
            self.matrices, self.others, self.shared = self._stack(new, size)
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
        for module in model.modules():
            if isinstance(module, torch.nn.RNNBase):
                module.flatten_parameters()  # cuDNN wants them side by side.

    def _stack(
        self, models: Sequence[torch.nn.Module], size: int
    ) -> tuple[Matrices, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        named = [dict(named_tensors(model)) for model in models]
        first = next(iter(named[0].values()))
        matrices = self.layout.zeros(size, first.device)
        views = self.layout.views(matrices)
        others, shared = {}, {}
        for name, tensor in named[0].items():
            rows = [tensors[name].data for tensors in named]
            if name in views:
                torch.stack(rows, out=views[name][: len(rows)])
            elif isinstance(tensor, torch.nn.Parameter) and all(_is_equal(rows[0], row) for row in rows):
                shared[name] = rows[0]
            else:
                others[name] = rows[0].new_zeros(size, *tensor.shape)
                torch.stack(rows, out=others[name][: len(rows)])
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


_Key = TypeVar("_Key")


def take_rows(tensors: dict[_Key, torch.Tensor], rows: Sequence[int], size: int) -> None:
    """Moves these rows to the beginning, of tensors that have so many rows then; the others have any values."""
    for key, tensor in tensors.items():
        taken = tensor.index_select(0, torch.tensor(rows, dtype=torch.int64, device=tensor.device))
        tensors[key] = _of_size(tensor, 0, size)
        tensors[key][: len(rows)] = taken


def append_rows(tensors: dict[_Key, torch.Tensor], new: Mapping[_Key, torch.Tensor], present: int, size: int) -> None:
    """Writes new rows after those that are present, in tensors that have so many rows then."""
    for key, tensor in tensors.items():
        tensors[key] = _of_size(tensor, present, size)
        tensors[key][present : present + len(new[key])] = new[key]


def _of_size(tensor: torch.Tensor, present: int, size: int) -> torch.Tensor:
    """Returns a tensor with so many rows, or another with the first ones, those present, and then zeros."""
    if len(tensor) == size:
        return tensor
    other = tensor.new_zeros(size, *tensor.shape[1:])
    other[:present] = tensor[:present]
    return other
