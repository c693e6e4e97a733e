"""What metrics mean: which are numbers, and whether less of one is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

from fluid.errors import InvalidFieldError, require_one_of, require_text
from fluid.keeping import finite_number, value_of

#: Words in the names of metrics for which less is better.
_LESS_IS_BETTER = frozenset(
    {"loss", "err", "error", "mse", "mae", "rmse", "mape", "nll", "perplexity", "ppl", "cost", "regret", "latency"}
    | {"distance", "divergence", "deviance", "brier", "wer", "cer"}
)
#: Bookkeeping entries that Ray Tune or the trainable adds to every result.
_BOOKKEEPING = frozenset(
    {"pid", "timestamp", "time_this_iter_s", "time_total_s", "time_since_restore", "iterations_since_restore"}
    | {"training_iteration", "timesteps_total", "episodes_total", "timesteps_since_restore", "should_checkpoint"}
    | {"done", "step", "epoch", "iteration"}
)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a metric's value can be compared and drawn: a finite number that is not a bool."""
    return isinstance(value, (int, float)) and finite_number(value) is not None


def less_is_better(metric: str) -> bool:
    """Whether less of a metric is better, judged by its name."""
    words = metric.lower().replace("/", "_").replace("-", "_").replace(".", "_").split("_")
    return any(word in _LESS_IS_BETTER or word.endswith("loss") for word in words)


def is_bookkeeping(metric: str) -> bool:
    """Whether a metric only counts time or iterations."""
    return metric.split("/")[0] in _BOOKKEEPING


class _WithNumbers(Protocol):
    def number(self, name: str) -> float | None: ...


class Goal(NamedTuple):
    """A metric to optimize.

    Attributes:
        metric: its name; nested names are joined by ``/``.
        less: whether less is better.
    """

    metric: str
    less: bool

    @property
    def mode(self) -> str:
        """``"min"`` or ``"max"``."""
        return "min" if self.less else "max"

    def value_in(self, metrics: object) -> float | None:
        """The metric's value in what a trial reported; ``None`` if that is no finite number."""
        return finite_number(value_of(metrics, self.metric))

    def value_of(self, result: _WithNumbers) -> float | None:
        """The metric's value in a result; ``None`` if that is no finite number."""
        return finite_number(result.number(self.metric))

    def is_better(self, value: float, other: float) -> bool:
        """Whether one value is better than another."""
        return value < other if self.less else value > other


def goals_of(metric: object, mode: object) -> tuple[Goal, ...]:
    """Returns the goals that a caller names; where it says no mode, the metric's name decides.

    Args:
        metric: a name, several, or ``None`` for no goal.
        mode: ``"min"``, ``"max"``, one of these per metric, or ``None``.

    Raises:
        InvalidFieldError: one of them is of another kind.
    """
    if metric is None:
        if mode is not None:
            raise InvalidFieldError("mode", mode, "is given without a metric")
        return ()
    names = _several("metric", metric)
    modes = [None] * len(names) if mode is None else _several("mode", mode)
    if len(modes) != len(names):
        raise InvalidFieldError("mode", mode, f"must be one per metric, as for {metric!r}")
    for name in names:
        require_text("metric", name)
    if len(set(names)) < len(names):
        raise InvalidFieldError("metric", metric, "names a metric twice")
    for each in modes:
        if each is not None:
            require_one_of("mode", each, ("min", "max"))
    return tuple(
        Goal(str(name), less_is_better(str(name)) if each is None else each == "min")
        for name, each in zip(names, modes, strict=True)
    )


def _several(field: str, value: object) -> list[object]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Sequence) or not value:
        raise InvalidFieldError(field, value, "must be a string, or several in a list")
    return list(value)


def pareto_front(points: Sequence[Sequence[float]], goals: Sequence[Goal]) -> list[int]:
    """Positions of the points that no other one beats: is as good in each goal, and better in one.

    Of equal points the first counts.

    Args:
        points: (points, goals) values.
        goals: what each column is.
    """
    signs = [1.0 if goal.less else -1.0 for goal in goals]
    signed = [tuple(sign * value for sign, value in zip(signs, point, strict=True)) for point in points]
    front: list[int] = []
    for position in sorted(range(len(signed)), key=lambda i: signed[i]):
        point = signed[position]
        if not any(all(a <= b for a, b in zip(signed[other], point, strict=True)) for other in front):
            front.append(position)
    return front
