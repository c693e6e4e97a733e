"""Records the operations on tensors that a function consists of, as a program for any number of rows.

``torch.func`` dispatches each operation through several layers of Python and C++, which takes several times as long as
small models compute. A recording has what arrives below all these layers: plain operations on stacked tensors. It is
made by a ``TorchDispatchMode``, as ``torch.fx.experimental.proxy_tensor.make_fx`` does, but of real tensors only and
without the metadata for compilers, which takes most of the time there.

Two recordings with different numbers of rows, which differ only in sizes that are proportional to the rows, make one
program for any number of rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_aten = torch.ops.aten
#: Operations whose result, or the size of it, depends on the numbers in a tensor.
_VALUES_MATTER = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _TensorNumber:
    """A tensor of a recording, by number: first the inputs, then the results, in the order of the calls."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class _Operation(NamedTuple):
    """One operation. The leaves are its arguments; its results that are tensors have numbers, by position."""

    function: Any
    leaves: list[Any]
    structure: TreeSpec
    results: dict[int | None, int]


class Recording(NamedTuple):
    """What a function did.

    Attributes:
        rows: how many there were.
        inputs: how many tensors it was given.
        calls: those that matter, in their order.
        constants: tensors that are neither inputs nor results, by number.
        outputs: the numbers of the tensors that it returned.
        structure: of what it returned.
    """

    rows: int
    inputs: int
    calls: list[_Operation]
    constants: dict[int, torch.Tensor]
    outputs: list[int]
    structure: TreeSpec

    @classmethod
    def of(cls, function: Callable[..., Any], inputs: Sequence[torch.Tensor], rows: int) -> Recording:
        """Records a call. It computes, and writes to the inputs if the function does.

        Raises:
            TypeError: the function does what depends on the numbers in a tensor.
            Exception: what the function raises.
        """
        recorder = _OperationRecorder(inputs)
        with recorder:
            outputs, structure = tree_flatten(function(*inputs))
        numbers = [recorder.number_of(output) for output in outputs]
        calls = _that_matter(recorder.calls, numbers)
        used = {leaf.number for call in calls for leaf in call.leaves if isinstance(leaf, _TensorNumber)}.union(numbers)
        constants = {number: tensor for number, tensor in recorder.constants.items() if number in used}
        return cls(rows, len(inputs), calls, constants, numbers, structure)


class _OperationRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Within it, each operation on plain tensors is added to :attr:`calls`."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[_Operation] = []
        self.constants: dict[int, torch.Tensor] = {}
        #: By identity. All tensors are kept until the end, so that no other gets the same.
        self._numbers: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []
        #: Numbers of tensors that depend on the inputs.
        self._dependent: set[int] = {self._add(tensor) for tensor in inputs}

    def number_of(self, tensor: torch.Tensor) -> int:
        """Returns a tensor's number; one that is unknown is a constant."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._add(tensor)
            self.constants[number] = tensor
        return number

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation, and records it."""
        kwargs = kwargs or {}
        if function is _aten.detach.default:  # It matters to autograd only, and no program is under that.
            result = function(*args)
            self._numbers[id(result)] = self.number_of(args[0])
            self._tensors.append(result)
            return result
        if function is _aten.lift_fresh.default:  # Of a constant: a copy, so that a program may write to it.
            function = _aten.lift_fresh_copy.default
        leaves, structure = tree_flatten((args, kwargs))
        recorded = [_TensorNumber(self.number_of(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        used = {leaf.number for leaf in recorded if isinstance(leaf, _TensorNumber)}
        depends = not used.isdisjoint(self._dependent)
        if depends and any(tag in function.tags for tag in _VALUES_MATTER) and not _takes_positions(function, leaves):
            raise TypeError(f"{function} depends on the numbers in a tensor, which differ between batches")
        result = function(*args, **kwargs)
        parts = enumerate(result) if isinstance(result, (tuple, list)) else [(None, result)]
        results = {place: self._add(part) for place, part in parts if isinstance(part, torch.Tensor)}
        if depends:
            self._dependent.update(results.values())
            if function._schema.is_mutable:
                self._dependent.update(used)
        self.calls.append(_Operation(function, recorded, structure, results))
        return result

    def _add(self, tensor: torch.Tensor) -> int:
        # An operation that writes to a tensor returns it: it then has the number of that result.
        number = self._numbers[id(tensor)] = len(self._tensors)
        self._tensors.append(tensor)
        return number


def _takes_positions(function: Any, leaves: Sequence[Any]) -> bool:
    """Whether an operation is indexing by positions: only by a mask, the shape of its result depends on numbers."""
    masks = (torch.bool, torch.uint8)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return function is _aten.index.Tensor and all(index.dtype not in masks for index in tensors[1:])


def _that_matter(calls: Sequence[_Operation], outputs: Sequence[int]) -> list[_Operation]:
    """Returns the calls that write to a tensor, or on whose results the outputs depend."""
    needed = set(outputs)
    kept = []
    for call in reversed(calls):
        if call.function._schema.is_mutable or not needed.isdisjoint(call.results.values()):
            needed |= {leaf.number for leaf in call.leaves if isinstance(leaf, _TensorNumber)}
            kept.append(call)
    return kept[::-1]


class RowProgram:
    """Does what was recorded.

    Attributes:
        rows: the only number of rows that it is for; ``None`` if it is for any.
        structure: of what the function returned.
    """

    def __init__(self, recording: Recording, other: Recording | None = None) -> None:
        self.rows = recording.rows if other is None else None
        self.structure = recording.structure
        self._run = _module(recording, other).forward

    @classmethod
    def for_any_rows(cls, one: Recording, two: Recording) -> RowProgram | None:
        """Makes a program of two recordings; ``None`` if they differ in more than sizes proportional to the rows."""
        return cls(one, two) if _are_alike(one, two) else None

    def __call__(self, rows: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs it; returns the tensors that the function returned, flat."""
        assert self.rows in (None, rows)
        outputs: list[torch.Tensor] = self._run(rows, *inputs)
        return outputs


def _are_alike(one: Recording, two: Recording) -> bool:
    """Whether two recordings differ only in sizes that are proportional to the rows."""
    if (one.outputs, one.structure, one.constants.keys()) != (two.outputs, two.structure, two.constants.keys()):
        return False
    if not all(_is_same(tensor, two.constants[number]) for number, tensor in one.constants.items()):
        return False
    if len(one.calls) != len(two.calls):
        return False
    return all(
        (ours.function, ours.structure, ours.results) == (theirs.function, theirs.structure, theirs.results)
        and all(
            _is_equal(our, their) or _per_row(our, one.rows, their, two.rows) is not None
            for our, their in zip(ours.leaves, theirs.leaves, strict=True)
        )
        for ours, theirs in zip(one.calls, two.calls, strict=True)
    )


def _is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
    return one is two or (alike and torch.equal(one, two))


def _is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, _TensorNumber):
        return isinstance(two, _TensorNumber) and one.number == two.number
    return type(one) is type(two) and bool(one == two)


def _per_row(one: Any, rows: int, two: Any, other_rows: int) -> int | None:
    """Returns what a size is for each row, if it is proportional to the rows."""
    if type(one) is not int or type(two) is not int or one % rows or two % other_rows:
        return None
    return one // rows if one // rows == two // other_rows else None


def _module(recording: Recording, other: Recording | None) -> GraphModule:
    """Writes the program: its arguments are the number of rows, and the inputs."""
    graph = Graph()
    rows = graph.placeholder("rows")
    nodes = {number: graph.placeholder(f"input_{number}") for number in range(recording.inputs)}
    constants = {f"constant_{number}": tensor for number, tensor in recording.constants.items()}
    nodes |= {number: graph.get_attr(f"constant_{number}") for number in recording.constants}
    sizes: dict[int, Node] = {}

    def argument(ours: Any, theirs: Any) -> Any:
        if isinstance(ours, _TensorNumber):
            return nodes[ours.number]
        if other is None or _is_equal(ours, theirs):
            return ours
        each = ours // recording.rows
        if each not in sizes:
            sizes[each] = graph.call_function(operator.mul, (rows, each))
        return sizes[each]

    used = {leaf.number for call in recording.calls for leaf in call.leaves if isinstance(leaf, _TensorNumber)}
    used.update(recording.outputs)
    for call, twin in zip(recording.calls, (recording if other is None else other).calls, strict=True):
        arguments = [argument(*pair) for pair in zip(call.leaves, twin.leaves, strict=True)]
        node = graph.call_function(call.function, *tree_unflatten(arguments, call.structure))
        for place, number in call.results.items():
            if place is None:
                nodes[number] = node
            elif number in used:
                nodes[number] = graph.call_function(operator.getitem, (node, place))
    graph.output([nodes[number] for number in recording.outputs])
    return GraphModule(constants, graph, "RowProgram")
