"""A trial within a lane, as the lane sees it whatever form its trainable has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class Step(NamedTuple):
    """What one call of :meth:`Resident.step` did.

    Attributes:
        metrics: what the trial reported; ``None`` if it had nothing left to do and ran no iteration.
        finished: the trial has no more to do.
    """

    metrics: Mapping[str, Any] | None
    finished: bool


class Resident(Protocol):
    """A trial within a lane. Any method may raise what the user's code raises."""

    def setup(self, config: dict[str, Any]) -> None:
        """Makes the trial ready for its first iteration; called once, before anything else."""
        ...

    def step(self) -> Step:
        """Runs one iteration."""
        ...

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the trainable and returns what it returned.

        Raises:
            FluidError: the trainable is a generator, which has no methods.
        """
        ...

    def save(self, path: str) -> None:
        """Writes the trial's state into the empty folder ``path``."""
        ...

    def restore(self, path: str) -> None:
        """Reads the state that :meth:`save` wrote; the folder may have been moved since."""
        ...

    def cleanup(self) -> None:
        """Releases what the trial holds; called once, at the end."""
        ...


def step_of(metrics: Any, source: str) -> Step:
    """Reads what a trial reported; ``done: True`` says that it has finished.

    Raises:
        TypeError: it is no mapping.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{source} must give a dict of metrics per iteration, not {type(metrics).__name__}")
    return Step(metrics, bool(metrics.get("done", False)))
