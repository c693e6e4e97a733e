"""Recurrent layers as loops over cells of plain operations.

``torch.func.vmap`` has no rules for the kernels of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, and of their cells. So a
program of rows is recorded with these loops in their place. They have the same parameters and the same results up to
rounding. A trial that trains alone keeps PyTorch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: The states of a cell: of an LSTM two, of others one. The first is its output.
_States = tuple[torch.Tensor, ...]
#: Returns the states after a step: given what comes of the input and of the first state, ``(samples, gates)``, and the
#: states before it.
_Cell = Callable[[torch.Tensor, torch.Tensor, _States], _States]


def _lstm(of_input: torch.Tensor, of_state: torch.Tensor, states: _States) -> _States:
    admitted, kept, new, shown = (of_input + of_state).chunk(4, -1)
    memory = kept.sigmoid() * states[1] + admitted.sigmoid() * new.tanh()
    return shown.sigmoid() * memory.tanh(), memory


def _gru(of_input: torch.Tensor, of_state: torch.Tensor, states: _States) -> _States:
    reset, update, new = of_input.chunk(3, -1)
    reset_by_state, update_by_state, new_by_state = of_state.chunk(3, -1)
    new = (new + (reset + reset_by_state).sigmoid() * new_by_state).tanh()
    return (new + (update + update_by_state).sigmoid() * (states[0] - new),)


def _tanh(of_input: torch.Tensor, of_state: torch.Tensor, states: _States) -> _States:
    return ((of_input + of_state).tanh(),)


def _relu(of_input: torch.Tensor, of_state: torch.Tensor, states: _States) -> _States:
    return ((of_input + of_state).relu(),)


_LAYERS: dict[Any, _Cell] = {torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _tanh, torch.rnn_relu: _relu}
_CELLS: dict[Any, _Cell] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
}


class RecurrenceByCells(TorchFunctionMode):  # type: ignore[misc]
    """Within it, recurrent layers are computed by plain operations."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function, or what stands for it.

        Raises:
            ValueError: there is a packed sequence, whose shape depends on numbers in the batch.
        """
        if function is torch._VF._pack_padded_sequence or (function in _LAYERS and not isinstance(args[3], bool)):
            raise ValueError("sequences that are packed differ in length between rows: pad them")
        if function in _LAYERS:
            return _layers(_LAYERS[function], *args)
        if function in _CELLS:
            return _one_cell(_CELLS[function], *args)
        return function(*args, **(kwargs or {}))


def _layers(
    cell: _Cell,
    sequence: torch.Tensor,
    states: torch.Tensor | _States,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Does what PyTorch's function of the same arguments does, whose names here are not all the same."""
    if train and dropout:
        raise ValueError("dropout between layers draws random numbers: use fluid.fused.Dropout")
    begin = (states,) if isinstance(states, torch.Tensor) else states
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    steps = (sequence.transpose(0, 1) if batch_first else sequence).unbind()
    ends: list[_States] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = weights[number * each : (number + 1) * each]
            found, end = _one_direction(cell, steps, tuple(part[number] for part in begin), own, has_biases, direction)
            outputs.append(found)
            ends.append(end)
        steps = tuple(torch.cat(parts, -1) for parts in zip(*outputs, strict=True)) if bidirectional else outputs[0]
    return torch.stack(steps, 1 if batch_first else 0), *map(torch.stack, zip(*ends, strict=True))


def _one_direction(
    cell: _Cell,
    steps: Sequence[torch.Tensor],
    states: _States,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    backwards: int,
) -> tuple[Sequence[torch.Tensor], _States]:
    """Returns the outputs of a layer in one direction, in the order of the steps, and its states at the end."""
    of_input, of_state, *others = weights
    biases, projection = (others[:2], others[2:]) if has_biases else ([None, None], others)
    inputs = torch.nn.functional.linear(torch.stack(tuple(steps)), of_input, biases[0]).unbind()
    if cell is not _gru or inputs[0].is_cuda:  # Under autocast PyTorch does so, but for a GRU on a CPU.
        states = tuple(state.to(inputs[0].dtype) for state in states)
    outputs = []
    for each in reversed(inputs) if backwards else inputs:
        states = cell(each, torch.nn.functional.linear(states[0], of_state, biases[1]), states)
        if projection:
            states = (torch.nn.functional.linear(states[0], projection[0]), *states[1:])
        outputs.append(states[0])
    return outputs[::-1] if backwards else outputs, states


def _one_cell(
    cell: _Cell,
    x: torch.Tensor,
    states: torch.Tensor | _States,
    of_input: torch.Tensor,
    of_state: torch.Tensor,
    bias: torch.Tensor | None = None,
    bias_of_state: torch.Tensor | None = None,
) -> torch.Tensor | _States:
    begin = (states,) if isinstance(states, torch.Tensor) else tuple(states)
    linear = torch.nn.functional.linear
    found = cell(linear(x, of_input, bias), linear(begin[0], of_state, bias_of_state), begin)
    return found[0] if isinstance(states, torch.Tensor) else found
