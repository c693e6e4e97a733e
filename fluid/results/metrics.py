"""What metrics mean: which are numbers, and what is optimized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeGuard

from fluid.directions import direction_text, known_mode, require_mode
from fluid.errors import InvalidFieldError, require_text
from fluid.keeping import finite_number, value_of

#: Bookkeeping entries that Ray Tune or the trainable adds to every result.
_BOOKKEEPING = frozenset(
    {"pid", "timestamp", "time_this_iter_s", "time_total_s", "time_since_restore", "iterations_since_restore"}
    | {"training_iteration", "timesteps_total", "episodes_total", "timesteps_since_restore", "should_checkpoint"}
    | {"done", "step", "epoch", "iteration"}
)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a metric's value can be compared and drawn: a finite number that is not a bool."""
    return isinstance(value, (int, float)) and finite_number(value) is not None


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

    @property
    def direction(self) -> str:
        """``"less is better"`` or ``"more is better"``."""
        return direction_text(self.mode)

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
    """Returns the goals that a caller names; where it says no mode, the direction of the metric counts.

    Args:
        metric: a name, several, or ``None`` for no goal.
        mode: ``"min"``, ``"max"``, one of these per metric, or ``None``.

    Raises:
        InvalidFieldError: one of them is of another kind, or a metric without a mode has a name that leaves its
            direction open.
    """
    return tuple(Goal(name, require_mode(name, said) == "min") for name, said in modes_of(metric, mode))


def known_goals(metric: object, mode: object) -> tuple[Goal, ...]:
    """The same for reports and views, which cannot raise: none if the name of a metric leaves its direction open."""
    known = modes_of(metric, mode)
    return tuple(Goal(name, said == "min") for name, said in known) if all(said for _, said in known) else ()


def modes_of(metric: object, mode: object) -> tuple[tuple[str, str | None], ...]:
    """The metrics of :func:`goals_of`, each with its mode, which is ``None`` where its name leaves it open.

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
    return tuple((str(name), known_mode(str(name), said)) for name, said in zip(names, modes, strict=True))


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
