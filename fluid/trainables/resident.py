"""The interface between a lane and a trial, the same for all forms of trainables."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from fluid.errors import FluidError

#: The folder, within a checkpoint, that holds the user's part of the state: what ``save_checkpoint`` wrote.
STATE_FOLDER = "state"


class NoIterationLeftError(Exception):
    """Raised by the ``step`` of a class of Fluid's own that wraps another trainable: that one had no iteration left."""


class NotSavableError(FluidError):
    """The state of a trial cannot be saved as it is; the trial can go on. The message is the reason."""


class Step(NamedTuple):
    """The result of one call of :meth:`Resident.step`.

    Attributes:
        metrics: what the trial reported; ``None`` if it was done before and ran no iteration.
        finished: whether the trial is done.
    """

    metrics: Mapping[str, Any] | None
    finished: bool


class Resident(Protocol):
    """A trial within a lane. Every method may raise what the user's code raises, but for ``StopIteration``.

    That one becomes a ``RuntimeError``, as in Python's generators: it comes from a ``next()`` that the user forgot to
    guard, and does not mean that the trial is done.

    Attributes:
        reports_states: whether only states that the trial reports can be saved, not the one that it is in.
    """

    reports_states: bool

    def setup(self, config: dict[str, Any]) -> None:
        """Prepares the trial for its first iteration; called once, before all other methods."""
        ...

    def step(self) -> Step:
        """Runs one iteration."""
        ...

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the trainable and returns what it returned.

        Raises:
            FluidError: the trainable is a function, which has no methods.
        """
        ...

    def save(self, path: str) -> None:
        """Writes the trial's state into the empty folder ``path``.

        Raises:
            NotSavableError: it cannot be saved now; the trial is as before.
        """
        ...

    def unsaved_iterations(self) -> int | None:
        """Iterations done since the state that :meth:`save` writes; ``None`` while there is no state to write.

        Only asked where :attr:`reports_states` is set.
        """
        ...

    def restore(self, path: str) -> None:
        """Reads the state that :meth:`save` wrote; the folder may have been moved since."""
        ...

    def cleanup(self) -> None:
        """Releases the trial's resources; called once, at the end."""
        ...


def stray_stop_iteration(method: str) -> RuntimeError:
    """Makes the error that stands for a ``StopIteration`` that a method of the user's raised."""
    return RuntimeError(f"{method}() raised StopIteration, as next() does at the end of an iterator")


class TrainableFormError(FluidError, TypeError):
    """The code of a trainable has a form that Fluid cannot run, with any config: no further try can succeed."""


def step_of(metrics: Any, source: str, verb: str = "return") -> Step:
    """Makes a Step of the metrics that a trial reported; ``done: True`` in them means that it is done.

    Args:
        metrics: what the trial reported.
        source: what did, as in ``train()``.
        verb: how it gives its metrics.

    Raises:
        TrainableFormError: they are no mapping.
    """
    if not isinstance(metrics, (dict, Mapping)):  # dict first: the check of an abstract class is slow.
        what, how = type(metrics).__name__, _how_to_give(metrics)
        raise TrainableFormError(f"{source} must give a dict of metrics per iteration, not {what}: {verb} {how}")
    return Step(metrics, bool(metrics.get("done", False)))


def _how_to_give(value: Any) -> str:
    """A dict that a user may have meant by something else."""
    if isinstance(value, (tuple, list)):
        return "{'loss': ..., 'accuracy': ...}, a name for each"
    is_number = not isinstance(value, bool) and (isinstance(value, (int, float)) or hasattr(value, "item"))
    return f"{{'loss': {' '.join(repr(value).split())[:40] if is_number else '...'}}}, say"


# -- held folder ---------------------------------------------------------------------------------
#
# A folder with a checkpoint that the code of a trial may still read.


class HeldFolder:
    """Holds a checkpoint's folder by a lock: until it is let go, lanes neither move nor delete the folder.

    Args:
        folder: of a checkpoint.
    """

    def __init__(self, folder: str) -> None:
        self._descriptor: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # A disk without locks, on which checkpoints do not move.
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def let_go(self) -> None:
        """Lets the folder go; may be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
