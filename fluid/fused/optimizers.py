"""The optimizers of fused trainables, as the values that a trial chooses, and the PyTorch optimizers that they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fluid.errors import InvalidFieldError, require_number

#: The factor of the learning rate in a step; steps count from 0.
Schedule = Callable[[int], float]
#: A learning rate for all parameters, or one for each of some submodules, by name.
Rates = float | Mapping[str, float]


class OptimizerSpec:
    """What the three optimizers share. Each class has the values of PyTorch's optimizer of its name.

    Attributes:
        lr: the learning rate; or the rates of parts of the model, by the names of submodules, as in
            ``{"encoder": 1e-4, "head": 1e-3}``. A parameter has the rate of the longest of these names that it is in;
            ``""`` is the whole model. They are parameter groups of PyTorch's optimizer.
        weight_decay: as in PyTorch's optimizer.
        clip_norm: the norm that a step's gradients together are cut to; ``None`` not to clip.
        schedule: the factor of ``lr`` in a step, by the steps done before it; ``None`` for 1.

    Example:
        >>> from fluid.fused import Adam, OptimizerSpec
        >>> isinstance(Adam(), OptimizerSpec), Adam().values()["lr"]
        (True, 0.001)
        >>> Adam(lr={"head": 0.01, "": 0.001}).modules
        ('head', '')
    """

    lr: Rates
    weight_decay: float
    clip_norm: float | None
    schedule: Schedule | None

    @property
    def modules(self) -> tuple[str, ...]:
        """The submodules with learning rates of their own, in the order of the groups of PyTorch's optimizer."""
        return tuple(self.lr) if isinstance(self.lr, Mapping) else ("",)

    def lr_at(self, step: int, module: str = "") -> float:
        """Returns the learning rate of a step, in one of :attr:`modules`."""
        lr = self.lr[module] if isinstance(self.lr, Mapping) else self.lr
        return lr if self.schedule is None else lr * float(self.schedule(step))

    def group_of(self, parameter: str) -> int:
        """Returns the number, in :attr:`modules`, of the submodule whose rate a parameter has.

        Raises:
            InvalidFieldError: it is in none of them.
        """
        inside = [module for module in self.modules if not module or f"{parameter}.".startswith(f"{module}.")]
        if not inside:
            raise InvalidFieldError("lr", self.lr, f"has no rate for the parameter {parameter!r}")
        return self.modules.index(max(inside, key=len))

    def make(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Makes PyTorch's optimizer of named parameters, with these values.

        Raises:
            InvalidFieldError: a parameter is in no module that has a rate, or such a module has no parameters.
        """
        raise NotImplementedError

    def values(self, module: str | None = None) -> dict[str, Any]:
        """Returns the values that PyTorch's optimizer holds in a group of parameters, by default the first."""
        raise NotImplementedError

    def set_values(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives PyTorch's optimizer these values, after it was restored from another trial's state."""
        for module, group in zip(self.modules, optimizer.param_groups, strict=True):
            group.update(self.values(module))

    def set_rates(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Gives PyTorch's optimizer the learning rates of a step."""
        for module, group in zip(self.modules, optimizer.param_groups, strict=True):
            group["lr"] = self.lr_at(step, module)

    def step(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Clips the gradients and makes a step, the one after so many others."""
        if self.clip_norm is not None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        if self.schedule is not None:
            self.set_rates(optimizer, steps)
        optimizer.step()

    def _groups(self, parameters: Mapping[str, torch.nn.Parameter]) -> list[dict[str, Any]]:
        """Returns the groups of parameters for PyTorch's optimizer."""
        groups: list[dict[str, Any]] = [{"params": [], "lr": self.lr_at(0, module)} for module in self.modules]
        for name, parameter in parameters.items():
            groups[self.group_of(name)]["params"].append(parameter)
        for module, group in zip(self.modules, groups, strict=True):
            if not group["params"]:
                raise InvalidFieldError("lr", self.lr, f"there are no parameters to train in {module!r}")
        return groups

    def _check(self) -> None:
        """Refuses values that PyTorch's optimizer cannot use.

        Raises:
            InvalidFieldError: names the field.
        """
        if isinstance(self.lr, Mapping):
            if not self.lr:
                raise InvalidFieldError("lr", self.lr, "must be a number, or have one for each of some submodules")
            for module, rate in self.lr.items():
                require_number(f"lr[{module!r}]", rate, at_least=0.0)
        else:
            require_number("lr", self.lr, at_least=0.0)
        require_number("weight_decay", self.weight_decay, at_least=0.0)
        if self.clip_norm is not None:
            require_number("clip_norm", self.clip_norm, at_least=0.0)
        if self.schedule is not None and not callable(self.schedule):
            raise InvalidFieldError("schedule", self.schedule, "must be a function of the step, or None")


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec):
    """Stochastic gradient descent, ``torch.optim.SGD``; see :class:`OptimizerSpec` for what is not PyTorch's.

    Raises:
        InvalidFieldError: PyTorch's optimizer cannot use a value.

    Example:
        >>> from fluid.fused import SGD
        >>> half_each_100_steps = SGD(lr=0.1, momentum=0.9, schedule=lambda step: 0.5 ** (step // 100))
        >>> half_each_100_steps.lr_at(250)
        0.025
    """

    lr: Rates
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._check()
        require_number("momentum", self.momentum, at_least=0.0)
        require_number("dampening", self.dampening, at_least=-math.inf)
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise InvalidFieldError("nesterov", self.nesterov, "needs a momentum, and a dampening of 0")

    def make(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Makes PyTorch's optimizer of named parameters, with these values."""
        return torch.optim.SGD(self._groups(parameters), **self.values())

    def values(self, module: str | None = None) -> dict[str, Any]:
        """Returns the values that PyTorch's optimizer holds in a group of parameters, by default the first."""
        return {
            "lr": self.lr_at(0, self.modules[0] if module is None else module),
            "momentum": self.momentum,
            "dampening": self.dampening,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
        }


@dataclass(frozen=True, kw_only=True)
class Adam(OptimizerSpec):
    """Adam, ``torch.optim.Adam``; see :class:`OptimizerSpec` for what is not PyTorch's.

    Raises:
        InvalidFieldError: PyTorch's optimizer cannot use a value.

    Example:
        >>> from fluid.fused import Adam
        >>> Adam(lr=0.001, betas=(0.9, 0.95), clip_norm=1.0).betas
        (0.9, 0.95)
    """

    lr: Rates = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._check()
        require_number("eps", self.eps, at_least=0.0)
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise InvalidFieldError("betas", self.betas, "must be two numbers")
        for beta in self.betas:
            if require_number("betas", beta, at_least=0.0) >= 1.0:
                raise InvalidFieldError("betas", self.betas, "must be below 1")

    def make(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Makes PyTorch's optimizer of named parameters, with these values."""
        return torch.optim.Adam(self._groups(parameters), **self.values())

    def values(self, module: str | None = None) -> dict[str, Any]:
        """Returns the values that PyTorch's optimizer holds in a group of parameters, by default the first."""
        return {
            "lr": self.lr_at(0, self.modules[0] if module is None else module),
            "betas": tuple(self.betas),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, ``torch.optim.AdamW``; see :class:`OptimizerSpec` for what is not PyTorch's.

    Raises:
        InvalidFieldError: PyTorch's optimizer cannot use a value.

    Example:
        >>> from fluid.fused import AdamW
        >>> AdamW(lr=0.001).weight_decay
        0.01
    """

    weight_decay: float = 0.01

    def make(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Makes PyTorch's optimizer of named parameters, with these values."""
        return torch.optim.AdamW(self._groups(parameters), **self.values())
