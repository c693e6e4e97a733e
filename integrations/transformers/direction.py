"""Whether an objective of a Trainer is to be minimized or maximized, where the call does not say it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from fluid.directions import direction_of
from fluid.errors import InvalidFieldError

_DIRECTIONS = {"min": "minimize", "max": "maximize"}


def direction_said(trainer: Any, compute_objective: Callable[[dict[str, float]], Any] | None) -> str:
    """Returns ``"minimize"`` or ``"maximize"``: what the trainer says of the objective's metric, else its name.

    Args:
        trainer: a Trainer.
        compute_objective: ``None`` for the loss, or the sum of what ``trainer.compute_metrics`` returns.

    Raises:
        InvalidFieldError: neither says it, or they contradict each other.
    """
    args = trainer.args
    if compute_objective is not None:
        names = _looked_up(compute_objective)
        what = f"what compute_objective makes of {', '.join(names)}" if names else "what compute_objective returns"
    elif trainer.compute_metrics is None:
        return _DIRECTIONS["min"]
    else:
        names, what = [], "the sum of what compute_metrics returns"
    best = None if args.greater_is_better is None else _with_prefix(args.metric_for_best_model or "loss")
    trainers = "max" if args.greater_is_better else "min"
    if len(names) == 1:
        known = direction_of(names[0])
        if best == _with_prefix(names[0]) and known in (None, trainers):
            known = trainers
        elif best == _with_prefix(names[0]):
            known = None
    else:
        known = trainers if best is not None and best != "eval_loss" and not names else None
    if known is None:
        raise InvalidFieldError("direction", None, f"{what} may mean either; pass direction='minimize' or 'maximize'")
    return _DIRECTIONS[known]


class _LookedUp(dict[str, float]):
    """Metrics that have any name, and remember which were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __missing__(self, name: str) -> float:
        if name not in self.names:
            self.names.append(name)
        return 0.5

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]

    def pop(self, name: str, default: Any = None) -> Any:
        return self[name]


def _looked_up(compute_objective: Callable[[dict[str, float]], Any]) -> list[str]:
    """The metrics that a function looks up, if it returns one of them as it is: then it has their direction."""
    metrics = _LookedUp()
    with contextlib.suppress(Exception):
        return metrics.names if compute_objective(metrics) == 0.5 else []
    return []


def _with_prefix(name: str) -> str:
    return name if name.startswith("eval_") else f"eval_{name}"
