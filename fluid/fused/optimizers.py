"""The optimizers of fused trainables, as the values that a trial chooses, and the PyTorch optimizers that they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fluid.errors import InvalidFieldError, require_number

#: The factor of the learning rate in a step; steps count from 0.
Schedule = Callable[[int], float]


class OptimizerSpec:
    """What the three optimizers share. Each class has the values of PyTorch's optimizer of its name.

    Attributes:
        lr: the learning rate.
        weight_decay: as in PyTorch's optimizer.
        clip_norm: the norm that a step's gradients together are cut to; ``None`` not to clip.
        schedule: the factor of ``lr`` in a step, by the steps done before it; ``None`` for 1.

    Example:
        >>> from fluid.fused import Adam, OptimizerSpec
        >>> isinstance(Adam(), OptimizerSpec), Adam().values()["lr"]
        (True, 0.001)
    """

    lr: float
    weight_decay: float
    clip_norm: float | None
    schedule: Schedule | None

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step."""
        return self.lr if self.schedule is None else self.lr * float(self.schedule(step))

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Makes PyTorch's optimizer with these values."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """Returns the values that PyTorch's optimizer holds in its groups of parameters."""
        raise NotImplementedError

    def set_values(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives PyTorch's optimizer these values, after it was restored from another trial's state."""
        for group in optimizer.param_groups:
            group.update(self.values())

    def step(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        """Clips the gradients and makes a step, the one after so many others."""
        if self.clip_norm is not None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        if self.schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.lr_at(steps)
        optimizer.step()

    def _check(self) -> None:
        """Refuses values that PyTorch's optimizer cannot use.

        Raises:
            InvalidFieldError: names the field.
        """
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

    lr: float
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

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Makes PyTorch's optimizer with these values."""
        return torch.optim.SGD(parameters, **self.values())

    def values(self) -> dict[str, Any]:
        """Returns the values that PyTorch's optimizer holds in its groups of parameters."""
        return {
            "lr": self.lr_at(0),
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

    lr: float = 1e-3
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

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Makes PyTorch's optimizer with these values."""
        return torch.optim.Adam(parameters, **self.values())

    def values(self) -> dict[str, Any]:
        """Returns the values that PyTorch's optimizer holds in its groups of parameters."""
        return {
            "lr": self.lr_at(0),
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

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Makes PyTorch's optimizer with these values."""
        return torch.optim.AdamW(parameters, **self.values())
