"""The batched programs of a pack: loss with gradients, and evaluation, of all rows at once.

``torch.func`` makes them of the user's functions: ``vmap`` over ``grad_and_value`` over ``functional_call``. Each is
traced once per number of rows and shape of batch, to the plain operations on stacked tensors that it consists of:
dispatching through two layers of ``torch.func`` in every step takes several times as long as small models compute.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from fluid.elastic.sync_batch_norm import SyncBatchNorm
from fluid.fused.data import RowBatch
from fluid.fused.dropout import handing_out
from fluid.fused.refusal import FusionError, one_line
from fluid.fused.stacked_model import named_tensors, trained_parameters
from fluid.fused.trainable import FusedTrainable, LossModule, shape_of


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
    """

    def __init__(self, trial: FusedTrainable) -> None:
        model = self._model = _without_values(trial.model)
        self.trained_names = list(trained_parameters(model))
        self.other_names = [name for name, _ in named_tensors(model) if name not in set(self.trained_names)]
        self._names = [f"model.{name}" for name in (*self.trained_names, *self.other_names)]
        self._loss = LossModule(self._model, trial.loss)
        self._evaluation = LossModule(self._model, trial.evaluate)
        self._traced: dict[Any, Callable[..., Any]] = {}

    @property
    def traced(self) -> int:
        """Number of programs."""
        return len(self._traced)

    def train(
        self, tensors: RowTensors, masks: Sequence[torch.Tensor], batch: RowBatch
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Returns the gradients of the trained parameters, and the losses ``(rows,)``.

        Raises:
            FusionError: the function cannot be computed for rows at once.
        """

        def loss(trained: Any, others: Any, masks: Any, leaves: Any) -> torch.Tensor:
            with handing_out(masks):
                return self._call(self._loss, trained, others, tree_unflatten(leaves, structure)).reshape(())

        leaves, structure = tree_flatten(batch.batch)
        arguments = (tensors.trained, tensors.others, list(masks), leaves)
        program = self._program("loss", grad_and_value(loss), arguments, tensors.is_shared, batch)
        gradients, losses = program(*arguments)
        return gradients, losses

    def evaluate(self, tensors: RowTensors, batch: RowBatch) -> dict[str, torch.Tensor]:
        """Returns the results of the trainable's ``evaluate``, each ``(rows,)``.

        Raises:
            FusionError: the function cannot be computed for rows at once.
        """

        def evaluate(trained: Any, others: Any, masks: Any, leaves: Any) -> dict[str, torch.Tensor]:
            found = self._call(self._evaluation, trained, others, tree_unflatten(leaves, structure))
            return {name: torch.as_tensor(value).reshape(()) for name, value in found.items()}

        leaves, structure = tree_flatten(batch.batch)
        arguments: Any = (tensors.trained, tensors.others, [], leaves)
        program = self._program("evaluate", evaluate, arguments, tensors.is_shared, batch)
        results: dict[str, torch.Tensor] = program(*arguments)
        return results

    def _call(self, program: LossModule, trained: Any, others: Any, batch: Any) -> Any:
        tensors = dict(zip(self._names, (*trained, *others), strict=True))
        return functional_call(program, tensors, (batch,))

    def _program(
        self, name: str, function: Any, arguments: Any, is_shared: tuple[bool, ...], batch: RowBatch
    ) -> Callable[..., Any]:
        key = (name, len(arguments[0][0]), is_shared, batch.common, shape_of(batch.batch))
        if key not in self._traced:
            self._traced[key] = self._trace(name, function, arguments, is_shared, batch)
        return self._traced[key]

    def _trace(
        self, name: str, function: Any, arguments: Any, is_shared: tuple[bool, ...], batch: RowBatch
    ) -> Callable[..., Any]:
        trained, others, masks, leaves = arguments
        # The trace computes, and writes to the buffers that it is given.
        own = [other if shared else other.clone() for other, shared in zip(others, is_shared, strict=True)]
        copies = (trained, own, masks, leaves)
        of_others = [None if shared else 0 for shared in is_shared]
        batched = vmap(function, in_dims=(0, of_others, 0, None if batch.common else 0))
        self._model.train(name == "loss")
        with _running(self._model) as running, warnings.catch_warnings():
            # Of operations that vmap runs for one row after the other.
            warnings.filterwarnings("error", message="There is a performance drop")
            try:
                program: Callable[..., Any] = _without_detaching(make_fx(batched)(*copies))
                return program
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:
                where = f" in {running[-1]}" if running else ""
                missing = re.search(r"batching rule for ([\w:]+)", str(error))
                why = one_line(error) if missing is None else f"vmap has no batching rule for {missing[1]}"
                reason = f"{name}() cannot run for several trials at once{where}: {why}"
                raise FusionError(reason) from error


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


def _without_detaching(program: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Removes operations that only matter to autograd, which no program is under."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.recompile()
    return program


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
