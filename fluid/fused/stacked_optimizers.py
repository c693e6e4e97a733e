"""PyTorch's optimizers on stacked parameters: one step for all rows, each with hyperparameters of its own.

Parameters, gradients and states are matrices ``(rows, numbers)``, one for each type; a hyperparameter is a column
``(rows, 1)``. The formulas are those of ``torch.optim.SGD``, ``Adam`` and ``AdamW``. No operation mixes rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from fluid.fused.optimizers import SGD, Adam, AdamW, OptimizerSpec
from fluid.fused.stacked_model import Layout, Matrices, append_rows, take_rows, trained_parameters
from fluid.fused.trainable import FusedTrainable

#: Of each row, the state of its trial's own optimizer, by parameter; ``None`` where that has views of the stacked ones.
OwnStates = list[dict[Any, dict[str, Any]] | None]
#: Returns a hyperparameter of the rows that make a step, by name and by the type of what it is multiplied with.
Column = Callable[[str, torch.dtype], torch.Tensor]


class TrainingTensors(NamedTuple):
    """What an optimizer reads and writes, of some rows: ``(rows, numbers)`` by type; states by PyTorch's name.

    Before a step, there may be no gradients: then the step makes its own.
    """

    parameters: Matrices
    states: dict[str, Matrices]
    gradients: Matrices


class StackedOptimizer:
    """What the stacked optimizers share: their states, of which the trials' own optimizers have views.

    As in the :class:`~fluid.fused.stacked_model.StackedModel`, there may be dead rows after those of the trials.

    Attributes:
        states: by PyTorch's name of the state.
    """

    #: PyTorch's names of the states that have a number for each parameter, and whether there is a count of steps.
    names: ClassVar[tuple[str, ...]]
    counts_steps: ClassVar[bool]

    def __init__(self, layout: Layout, trials: Sequence[FusedTrainable], size: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        #: Of each number in a row, its group of parameters; empty if there is one group.
        self.groups = _groups(layout, trials[0]._fused.spec, device)
        #: Of each row, whether its trial's own optimizer has states.
        self._started: list[bool] = []
        #: Of each row, its steps so far, as PyTorch's optimizers count; theirs are views.
        self._counts = torch.empty(0)
        self.states: dict[str, Matrices] = {name: layout.zeros(size, device) for name in self.names}
        self.join(trials, trials, size)

    def tensors(self) -> list[torch.Tensor]:
        """Returns the states of all rows."""
        return [matrix for matrices in self.states.values() for matrix in matrices.values()]

    def own_states(self, trials: Sequence[FusedTrainable]) -> OwnStates:
        """Returns what :meth:`set_own_states` needs, beside :meth:`tensors`, to bring the trials' own states back."""
        return [
            None if started else {parameter: dict(state) for parameter, state in trial.torch_optimizer.state.items()}
            for trial, started in zip(trials, self._started, strict=True)
        ]

    def set_own_states(self, trials: Sequence[FusedTrainable], states: OwnStates) -> None:
        """Brings the states of the trials' own optimizers back."""
        self._started = [state is None for state in states]
        for trial, state in zip(trials, states, strict=True):
            if state is not None:
                own = trial.torch_optimizer.state
                own.clear()
                own.update({parameter: dict(values) for parameter, values in state.items()})
        self._attach(trials)

    def take(self, rows: Sequence[int], trials: Sequence[FusedTrainable], size: int) -> None:
        """Keeps these rows only, whose trials follow, in tensors of another size or in the same ones."""
        self._started = [self._started[row] for row in rows]
        for matrices in self.states.values():
            take_rows(matrices, rows, size)
        self._attach(trials)

    def join(self, new: Sequence[FusedTrainable], trials: Sequence[FusedTrainable], size: int) -> None:
        """Appends the rows of new trials; ``trials`` are all, with them."""
        nothing = self._layout.zeros(1, self._device)
        zeros = {dtype: row.expand(len(new), -1) for dtype, row in nothing.items()}
        for matrices in self.states.values():
            append_rows(matrices, zeros, len(self._started), size)
        views = {name: self._layout.views(matrices) for name, matrices in self.states.items()}
        for row, trial in enumerate(new, start=len(self._started)):
            started = False
            for name, parameter in trained_parameters(trial.model).items():
                state = trial.torch_optimizer.state.get(parameter, {})
                for kind in self.names:
                    if self.keeps_states(trial._fused.spec) and state.get(kind) is not None:
                        views[kind][name][row].copy_(state[kind])
                        started = True
            self._started.append(started)
        self._attach(trials)

    def detach(self, trial: FusedTrainable) -> None:
        """Gives the optimizer of a trial states of its own."""
        for state in trial.torch_optimizer.state.values():
            state.update({name: state[name].clone() for name in (*self.names, "step") if state.get(name) is not None})

    def begin(self, trials: Sequence[FusedTrainable], steps: int) -> StackedSteps:
        """Returns the next steps of all rows."""
        raise NotImplementedError

    def finish(self, trials: Sequence[FusedTrainable]) -> None:
        """Tells the trials' own optimizers of the steps that were made."""
        kept = [self.keeps_states(trial._fused.spec) for trial in trials]
        is_new = [keeps and not started for keeps, started in zip(kept, self._started, strict=True)]
        self._started = [started or new for started, new in zip(self._started, is_new, strict=True)]
        if any(is_new):
            self._attach(trials)
        else:
            self._count(trials)
        for trial in trials:
            spec, steps = trial._fused.spec, trial._fused.steps
            if spec.schedule is not None and steps:
                spec.set_rates(trial.torch_optimizer, steps - 1)

    def keeps_states(self, spec: OptimizerSpec) -> bool:
        """Whether PyTorch's optimizer with these values has states."""
        raise NotImplementedError

    def _count(self, trials: Sequence[FusedTrainable]) -> None:
        self._counts.copy_(torch.tensor([trial._fused.steps for trial in trials]))

    def _attach(self, trials: Sequence[FusedTrainable]) -> None:
        """Makes the states of the trials' optimizers views of their rows."""
        views = {name: self._layout.views(matrices) for name, matrices in self.states.items()}
        # As PyTorch's optimizers count.
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        self._counts = torch.empty(len(trials), dtype=dtype)
        self._count(trials)
        for row, (trial, started) in enumerate(zip(trials, self._started, strict=True)):
            if not started:
                continue
            for name, parameter in trained_parameters(trial.model).items():
                state = trial.torch_optimizer.state[parameter]
                if self.counts_steps:
                    state["step"] = self._counts[row]
                state.update({kind: views[kind][name][row] for kind in self.names})


class StackedSteps:
    """Some steps of all rows: their columns are made at once, so that no step waits for the device.

    Args:
        optimizer: whose states are changed.
        trials: of all rows.
        steps: how many.

    Attributes:
        terms: which terms a step computes: what rows are given more than their columns.
    """

    def __init__(self, optimizer: StackedOptimizer, trials: Sequence[FusedTrainable], steps: int) -> None:
        self._optimizer = optimizer
        self._steps = steps
        self._rows = len(trials)
        specs = [trial._fused.spec for trial in trials]
        done = [trial._fused.steps for trial in trials]
        rates = [
            [_rates(spec, begin + step) for step in range(steps)] if spec.schedule else [_rates(spec, 0)] * steps
            for spec, begin in zip(specs, done, strict=True)
        ]
        #: Learning rates, ``float64 (steps, rows, groups)``, and numbers of steps, ``float64 (steps, rows, 1)``.
        self._lr = torch.tensor(rates, dtype=torch.float64).transpose(0, 1)
        self._count = (torch.tensor(done) + torch.arange(1, steps + 1).unsqueeze(-1)).unsqueeze(-1).double()
        self._decay = _column([spec.weight_decay for spec in specs])
        self._has_decay = any(spec.weight_decay for spec in specs)
        norms = [math.inf if spec.clip_norm is None else spec.clip_norm for spec in specs]
        self._clips = any(math.isfinite(norm) for norm in norms)
        #: Hyperparameters by name: ``(rows, 1)``, or for each step ``(steps, rows, 1)`` or ``(steps, rows, groups)``.
        self._columns: dict[str, _Columns] = {}
        if self._clips:
            self._add_columns(clip_norm=_column(norms))
        self.terms: tuple[bool, ...] = (self._has_decay, self._clips)

    def apply(self, step: int, rows: slice, training: TrainingTensors) -> None:
        """Makes one step of some rows.

        Args:
            step: its number among these steps.
            rows: which.
            training: theirs; the gradients are overwritten.
        """
        self.change(training, lambda name, dtype: self._columns[name].at(dtype, step, rows))

    def change(self, training: TrainingTensors, column: Column) -> None:
        """Makes a step with hyperparameters that are given. What it does follows from :attr:`terms` alone.

        Args:
            training: of rows; the gradients are overwritten.
            column: returns a hyperparameter of these rows.
        """
        if self._clips:
            self._clip(training.gradients, column)
        for dtype, gradient in training.gradients.items():
            states = {name: matrices[dtype] for name, matrices in training.states.items()}
            self._update(training.parameters[dtype], states, gradient, column)

    def table(self, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, slice]]:
        """Returns all columns of all steps, ``(steps, rows, width)``, and where each is in the width.

        Args:
            dtype: of what they are multiplied with.
        """
        parts, places, begin = [], {}, 0
        for name, columns in self._columns.items():
            part = columns[dtype]
            parts.append(part.expand(self._steps, self._rows, part.shape[-1]))
            places[name] = slice(begin, begin := begin + part.shape[-1])
        return torch.cat(parts, dim=-1), places

    def _add_columns(self, **columns: torch.Tensor) -> None:
        """Adds hyperparameters, given in float64 on the CPU."""
        device = self._optimizer._device
        self._columns |= {name: _Columns(values, device) for name, values in columns.items()}

    def _clip(self, gradients: Matrices, column: Column) -> None:
        each = [torch.linalg.vector_norm(gradient, dim=1, keepdim=True) for gradient in gradients.values()]
        norm = each[0] if len(each) == 1 else torch.linalg.vector_norm(torch.stack(each), dim=0)
        limit = column("clip_norm", norm.dtype)
        # Without a limit, the gradient stays as it is, even where it is infinite.
        factor = torch.where(limit.isinf(), 1.0, (limit / (norm + 1e-6)).clamp(max=1.0))
        for gradient in gradients.values():
            gradient.mul_(factor)

    def _update(
        self, parameters: torch.Tensor, states: dict[str, torch.Tensor], gradient: torch.Tensor, column: Column
    ) -> None:
        """Changes the parameters and states of one type."""
        raise NotImplementedError

    def _of_numbers(self, name: str, dtype: torch.dtype, column: Column) -> torch.Tensor:
        """Returns what depends on the learning rate: ``(rows, 1)``, or ``(rows, numbers)`` by group."""
        values = column(name, dtype)
        groups = self._optimizer.groups.get(dtype)
        return values if groups is None else values.index_select(1, groups)


class _Columns:
    """A hyperparameter on the device, by the type of what it is multiplied with."""

    def __init__(self, values: torch.Tensor, device: torch.device) -> None:
        self._of = {dtype: values.to(device, dtype) for dtype in (torch.float32, torch.float64)}

    def __getitem__(self, dtype: torch.dtype) -> torch.Tensor:
        return self._of[wide(dtype)]

    def at(self, dtype: torch.dtype, step: int, rows: slice) -> torch.Tensor:
        """Returns it for one step of some rows."""
        values = self[dtype]
        return values[rows] if values.dim() == 2 else values[step, rows]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of hyperparameters of numbers of a type: as in PyTorch's optimizers, it has at least 32 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _column(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1)


def _rates(spec: OptimizerSpec, step: int) -> list[float]:
    """Returns the learning rates of a step, by group."""
    return [spec.lr_at(step, module) for module in spec.modules]


def _groups(layout: Layout, spec: OptimizerSpec, device: torch.device) -> Matrices:
    """Returns the group of each number in a row, ``int64 (numbers,)`` by type; nothing if there is one group."""
    if len(spec.modules) == 1:
        return {}
    return {
        dtype: torch.cat(
            [torch.full((slot.columns.stop - slot.columns.start,), spec.group_of(slot.name)) for slot in slots]
        ).to(device)
        for dtype, slots in layout.slots.items()
    }


class StackedSGD(StackedOptimizer):
    """``torch.optim.SGD``."""

    names = ("momentum_buffer",)
    counts_steps = False

    def begin(self, trials: Sequence[FusedTrainable], steps: int) -> StackedSteps:
        """Returns the next steps of all rows."""
        return _SGDSteps(self, trials, steps, self._started)

    def keeps_states(self, spec: OptimizerSpec) -> bool:
        """Whether there is momentum."""
        assert isinstance(spec, SGD)
        return spec.momentum != 0.0


class _SGDSteps(StackedSteps):
    def __init__(
        self, optimizer: StackedSGD, trials: Sequence[FusedTrainable], steps: int, started: Sequence[bool]
    ) -> None:
        super().__init__(optimizer, trials, steps)
        specs = [spec for trial in trials if isinstance(spec := trial._fused.spec, SGD)]
        self._nesterov = specs[0].nesterov
        self._has_momentum = any(spec.momentum for spec in specs)
        self._has_dampening = any(spec.dampening for spec in specs)
        self.terms += (self._nesterov, self._has_momentum, self._has_dampening)
        # A row without momentum uses its gradient as it is, and so does a row's first step with momentum.
        share = _column([1.0 - spec.dampening if spec.momentum else 1.0 for spec in specs]).repeat(steps, 1, 1)
        share[0, [not has_begun for has_begun in started]] = 1.0
        momentum = _column([spec.momentum for spec in specs])
        self._add_columns(momentum=momentum, share=share, weight_decay=self._decay, rate=-self._lr)

    def _update(
        self, parameters: torch.Tensor, states: dict[str, torch.Tensor], gradient: torch.Tensor, column: Column
    ) -> None:
        dtype = gradient.dtype
        if self._has_decay:
            gradient.addcmul_(parameters, column("weight_decay", dtype))
        change = gradient
        if self._has_momentum:
            momentum, buffer = column("momentum", dtype), states["momentum_buffer"]
            if self._has_dampening:
                buffer.mul_(momentum).addcmul_(gradient, column("share", dtype))
            else:
                buffer.mul_(momentum).add_(gradient)
            change = gradient.addcmul_(buffer, momentum) if self._nesterov else buffer
        parameters.addcmul_(change, self._of_numbers("rate", dtype, column))


class StackedAdam(StackedOptimizer):
    """``torch.optim.Adam`` and ``AdamW``."""

    names = ("exp_avg", "exp_avg_sq")
    counts_steps = True

    def begin(self, trials: Sequence[FusedTrainable], steps: int) -> StackedSteps:
        """Returns the next steps of all rows."""
        return _AdamSteps(self, trials, steps)

    def keeps_states(self, spec: OptimizerSpec) -> bool:
        """Always."""
        return True


class _AdamSteps(StackedSteps):
    def __init__(self, optimizer: StackedAdam, trials: Sequence[FusedTrainable], steps: int) -> None:
        super().__init__(optimizer, trials, steps)
        specs = [spec for trial in trials if isinstance(spec := trial._fused.spec, Adam)]
        self._is_decoupled = isinstance(specs[0], AdamW)
        first, second = (_column([spec.betas[number] for spec in specs]) for number in (0, 1))
        self._add_columns(
            first=first,
            first_share=1.0 - first,
            second=second,
            second_share=1.0 - second,
            eps=_column([spec.eps for spec in specs]),
            rate=-self._lr / (1.0 - first**self._count),
            scale=(1.0 - second**self._count).rsqrt(),
            weight_decay=1.0 - self._lr * self._decay if self._is_decoupled else self._decay,
        )

    def _update(
        self, parameters: torch.Tensor, states: dict[str, torch.Tensor], gradient: torch.Tensor, column: Column
    ) -> None:
        dtype = gradient.dtype
        mean, square = (states[name] for name in StackedAdam.names)
        if self._is_decoupled:
            parameters.mul_(self._of_numbers("weight_decay", dtype, column))
        elif self._has_decay:
            gradient.addcmul_(parameters, column("weight_decay", dtype))
        mean.mul_(column("first", dtype)).addcmul_(gradient, column("first_share", dtype))
        gradient.mul_(gradient)
        square.mul_(column("second", dtype)).addcmul_(gradient, column("second_share", dtype))
        root = torch.sqrt(square, out=gradient)
        root.mul_(column("scale", dtype)).add_(column("eps", dtype))
        change = torch.div(mean, root, out=gradient)
        parameters.addcmul_(change, self._of_numbers("rate", dtype, column))


def stacked_optimizer(
    layout: Layout, trials: Sequence[FusedTrainable], size: int, device: torch.device
) -> StackedOptimizer:
    """Makes the optimizer of rows whose trials, those of the first rows, have optimizers of one kind."""
    kind = StackedSGD if isinstance(trials[0]._fused.spec, SGD) else StackedAdam
    return kind(layout, trials, size, device)
