"""The batched programs of a pack: loss with gradients, and evaluation, of all rows at once.

``torch.func`` makes them of the user's functions: ``vmap`` over ``grad_and_value`` over ``functional_call``. What they
do is recorded (:mod:`fluid.fused.recording`) once per shape of batch, for any number of rows, and all packs of a
process share the recordings.
"""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from fluid.elastic.sync_batch_norm import SyncBatchNorm
from fluid.fused.data import RowBatch, structure_key
from fluid.fused.dropout import handing_out
from fluid.fused.key import FusionKey
from fluid.fused.obstacles import FusionError, one_line
from fluid.fused.recording import Recording, RowProgram
from fluid.fused.recurrent import RecurrenceByCells
from fluid.fused.stacked_model import Layout, named_tensors, trained_parameters
from fluid.fused.trainable import FusedTrainable, LossModule

#: Programs are recorded for these numbers of rows, to see which sizes are proportional to the rows.
_RECORDED_ROWS = (2, 3)
#: By class of the trials, so that they go with it; no program holds a pack's tensors. Above this number, the oldest
#: one of a class is dropped.
_shared_programs: weakref.WeakKeyDictionary[type, dict[Any, RowProgram]] = weakref.WeakKeyDictionary()
_MOST_SHARED = 256


class RowTensors(NamedTuple):
    """The tensors of some rows.

    Attributes:
        trained: parameters, ``(rows, *shape)``, in the order of :func:`trained_parameters`.
        others: buffers and other parameters; the programs write to those that the model writes to.
        is_shared: of each of the others, whether it is one tensor for all rows, without a dimension for them.
    """

    trained: list[torch.Tensor]
    others: list[torch.Tensor]
    is_shared: tuple[bool, ...]


class RowPrograms:
    """The programs of a model and its trainable's functions.

    Args:
        trial: any trial of the pack, not yet in it. The programs compute with a copy of its model, without values.
        key: the trial's.

    Attributes:
        traced: how many programs it has recorded, as no pack in this process had before.
    """

    def __init__(self, trial: FusedTrainable, key: FusionKey) -> None:
        model = self._model = _without_values(trial.model)
        self.trained_names = list(trained_parameters(model))
        self.other_names = [name for name, _ in named_tensors(model) if name not in set(self.trained_names)]
        self._layout = Layout(model)
        self._names = [f"model.{name}" for name in (*self.trained_names, *self.other_names)]
        self._loss = LossModule(self._model, trial.loss)
        self._evaluation = LossModule(self._model, trial.evaluate)
        self.traced = 0
        self._programs: dict[Any, RowProgram] = {}
        self._shared = _shared_programs.setdefault(type(trial), {})
        self._device = trial.device
        self._key = (key.attributes, key.modules, key.parameters, key.settings, trial.device)

    def train(
        self, tensors: RowTensors, masks: Sequence[torch.Tensor], batch: RowBatch
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Returns the gradients of the trained parameters, and the losses ``(rows,)``.

        Raises:
            FusionError: the function cannot be computed for rows at once.
        """

        def loss(trained: Any, others: Any, masks: Any, batch: Any) -> torch.Tensor:
            with handing_out(masks):
                return self._call(self._loss, trained, others, batch).reshape(())

        _, (*gradients, losses) = self._run("loss", grad_and_value(loss), tensors, masks, batch)
        return gradients, losses

    def evaluate(self, tensors: RowTensors, batch: RowBatch) -> dict[str, torch.Tensor]:
        """Returns the results of the trainable's ``evaluate``, each ``(rows,)``.

        Raises:
            FusionError: the function cannot be computed for rows at once.
        """

        def evaluate(trained: Any, others: Any, masks: Any, batch: Any) -> dict[str, torch.Tensor]:
            found = self._call(self._evaluation, trained, others, batch)
            return {name: torch.as_tensor(value).reshape(()) for name, value in found.items()}

        program, outputs = self._run("evaluate", evaluate, tensors, [], batch)
        results: dict[str, torch.Tensor] = tree_unflatten(outputs, program.structure)
        return results

    def _call(self, program: LossModule, trained: Any, others: Any, batch: Any) -> Any:
        tensors = dict(zip(self._names, (*trained, *others), strict=True))
        return functional_call(program, tensors, (batch,))

    def _empty(self, rows: int) -> list[torch.Tensor]:
        """Returns trained tensors for so many rows, laid out in memory as those of a pack are."""
        views = self._layout.views(self._layout.empty(rows, self._device))
        return [views[name] for name in self.trained_names]

    def _run(
        self, name: str, function: Any, tensors: RowTensors, masks: Sequence[torch.Tensor], batch: RowBatch
    ) -> tuple[RowProgram, list[torch.Tensor]]:
        """Runs the program of a function of the tensors, the masks and the batch of one row."""
        rows = len(tensors.trained[0])
        leaves, structure = tree_flatten(batch.batch)
        key = (
            name,
            tensors.is_shared,
            batch.common,
            structure_key(structure),
            *(_shape(leaf, 0 if batch.common else 1) for leaf in leaves),
        )
        program = self._programs.get(key) or self._programs.get((rows, *key))
        inputs = [*tensors.trained, *tensors.others, *masks]
        inputs += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if program is None:
            program = self._shared_program(
                name, key, rows, _BatchedFunction(function, self._empty, tensors, masks, batch)
            )
            self._programs[key if program.rows is None else (rows, *key)] = program
        return program, program(rows, inputs)

    def _shared_program(self, name: str, key: tuple[Any, ...], rows: int, function: _BatchedFunction) -> RowProgram:
        """Returns a program that another pack has recorded, or records it."""
        shared, key = self._shared, (*key, *self._key)
        program = shared.get(key) or shared.get((rows, *key))
        if program is None:
            if len(shared) >= _MOST_SHARED:
                del shared[next(iter(shared))]
            program = self._record(name, rows, function)
            self.traced += 1
            shared[key if program.rows is None else (rows, *key)] = program
        return program

    def _record(self, name: str, rows: int, function: _BatchedFunction) -> RowProgram:
        self._model.train(name == "loss")
        with _running(self._model) as running, warnings.catch_warnings(), _by_plain_operations(self._model):
            # Of operations that vmap runs for one row after the other.
            warnings.filterwarnings("error", message="There is a performance drop")
            try:
                one, two = (function.record(count) for count in _RECORDED_ROWS)
                return RowProgram.for_any_rows(one, two) or RowProgram(function.record(rows))
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                where = f" in {running[-1]}" if running else ""
                missing = re.search(r"batching rule for ([\w:]+)", str(error))
                why = one_line(error) if missing is None else f"vmap has no batching rule for {missing[1]}"
                reason = f"{name}() cannot run for several trials at once{where}: {why}"
                raise FusionError(reason) from error


class _BatchedFunction:
    """A function of the tensors, the masks and the batch of one row, batched over rows."""

    def __init__(
        self,
        function: Any,
        empty: Callable[[int], list[torch.Tensor]],
        tensors: RowTensors,
        masks: Sequence[torch.Tensor],
        batch: RowBatch,
    ) -> None:
        self._function = function
        self._empty = empty
        self._common = batch.common
        self._tensors = tensors
        self._masks = list(masks)
        self._leaves, self._structure = tree_flatten(batch.batch)

    def record(self, rows: int) -> Recording:
        """Records it for so many rows, all equal to the first; none of the real ones is written to."""
        trained = self._empty(rows)
        for copied, tensor in zip(trained, self._tensors.trained, strict=True):
            copied.copy_(tensor[:1].expand_as(copied))
        of_others = list(zip(self._tensors.others, self._tensors.is_shared, strict=True))
        others = [other if is_shared else _repeated(other, rows) for other, is_shared in of_others]
        masks = [_repeated(mask, rows) for mask in self._masks]
        leaves = self._leaves if self._common else [_repeated(leaf, rows) for leaf in self._leaves]
        of_leaves = [0 if isinstance(leaf, torch.Tensor) and not self._common else None for leaf in leaves]
        dims = (0, [None if is_shared else 0 for is_shared in self._tensors.is_shared], 0, of_leaves)
        arguments, structure = tree_flatten((trained, others, masks, leaves))
        places = [place for place, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]

        def row(trained: Any, others: Any, masks: Any, leaves: Any) -> Any:
            return self._function(trained, others, masks, tree_unflatten(leaves, self._structure))

        def all_rows(*inputs: torch.Tensor) -> Any:
            for place, tensor in zip(places, inputs, strict=True):
                arguments[place] = tensor
            return vmap(row, in_dims=dims)(*tree_unflatten(arguments, structure))

        return Recording.of(all_rows, [arguments[place] for place in places], rows)


def _repeated(value: Any, rows: int) -> Any:
    """Returns a tensor with so many times the first row; what is no tensor is the same for all rows."""
    return value[:1].repeat(rows, *[1] * (value.dim() - 1)) if isinstance(value, torch.Tensor) else value


def _shape(value: Any, begin: int) -> Any:
    return (value.shape[begin:], value.dtype) if isinstance(value, torch.Tensor) else value


def _without_values(model: torch.nn.Module) -> torch.nn.Module:
    """Copies a model, but for the values of its parameters and buffers; tensors with several names keep them."""
    empty: dict[int, Any] = {}
    for _, tensor in named_tensors(model):
        copied = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
        empty[id(tensor)] = copied
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):  # It knows the trial, which is not to be copied.
            empty[id(module._members)] = module._members
    return copy.deepcopy(model, empty)


@contextmanager
def _by_plain_operations(model: torch.nn.Module) -> Iterator[None]:
    """Within the block attention and recurrence are computed by operations for which vmap has rules, not by kernels."""
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), RecurrenceByCells():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for module in model.modules():
            if isinstance(module, torch.nn.RNNBase):
                module._init_flat_weights()  # It refers to the parameters that it was called with.


@contextmanager
def _running(model: torch.nn.Module) -> Iterator[list[str]]:
    """Within the block, the list has the names and types of the model's modules that run, the innermost last."""
    running: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        shown = f"{name or 'the model'} ({type(module).__name__})"
        hooks.append(module.register_forward_pre_hook(lambda *_, shown=shown: running.append(shown)))
        hooks.append(module.register_forward_hook(lambda *_: (running.pop(), None)[1]))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()
