"""A trial whose trainable is a class with a ``step`` method."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle

from fluid.errors import FluidError
from fluid.trainables.hints import add_hint
from fluid.trainables.json_form import message_of
from fluid.trainables.resident import (
    STATE_FOLDER,
    NoIterationLeftError,
    Step,
    TrainableFormError,
    step_of,
    stray_stop_iteration,
)

#: The file, within a checkpoint, with what ``save_checkpoint`` returned.
RETURNED_FILE = "returned.pkl"


class ClassResident:
    """A class with ``step`` and, optionally, ``setup``, ``save_checkpoint``, ``load_checkpoint`` and ``cleanup``.

    Without ``setup`` the config goes to ``__init__``.
    """

    def __init__(self, cls: type) -> None:
        self._class = cls
        self.reports_states = says_it_reports_states(cls)
        self.trainable: Any = None
        self._config: dict[str, Any] = {}

    @property
    def hands_out_folder(self) -> bool:
        """Whether code of the user's is given the folder from which it is restored: not by classes of Fluid's own."""
        reads = getattr(self.trainable, "fluid_reads_checkpoint", None)
        return reads is None or not reads()

    def setup(self, config: dict[str, Any]) -> None:
        self._config = config
        try:
            if hasattr(self._class, "setup"):
                self.trainable = self._class()
                self.trainable.setup(config)
            else:
                self.trainable = self._class(config)
        except StopIteration as error:
            raise stray_stop_iteration("setup") from error
        except Exception as error:
            is_own = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if isinstance(error, TypeError) and not is_own:  # The call has failed, none of the class's code.
                how = "setup(self, config), or only __init__(self, config)"
                text = f"a class is made without arguments, and set up with its config, a dict: {how}"
                raise TrainableFormError(f"{text}; {message_of(error)}") from None
            add_hint(error, config)
            raise

    def set_up_by(self, method: str, config: dict[str, Any]) -> None:
        """Sets the trial up by a method of Fluid's own classes, which others lack: these are set up as usual."""
        if not hasattr(self._class, method):
            self.setup(config)
            return
        self.trainable = self._class()
        getattr(self.trainable, method)(config)

    def step(self) -> Step:
        try:
            metrics = self.trainable.step()
        except NoIterationLeftError:
            return Step(None, True)
        except StopIteration as error:
            raise stray_stop_iteration("step") from error
        except Exception as error:
            add_hint(error, self._config)
            raise
        return step_of(metrics, "step()")

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.trainable, method)(*args, **kwargs)

    def save(self, path: str) -> None:
        _save(path, self.trainable.save_checkpoint)

    def begin_save(self) -> Callable[[str], None] | None:
        """Takes the state as it is now; returns what does the rest of :meth:`save`, in any thread.

        Returns:
            ``None`` if it has to be saved at once: only classes of Fluid's own can do otherwise.
        """
        begin = getattr(self.trainable, "fluid_begin_checkpoint", None)
        write = None if begin is None else begin()
        return None if write is None else lambda path: _save(path, write)

    def unsaved_iterations(self) -> int | None:
        count: int | None = self.trainable.unsaved_iterations() if self.reports_states else 0
        return count

    def restore(self, path: str) -> None:
        with open(os.path.join(path, RETURNED_FILE), "rb") as file:
            returned = pickle.load(file)
        if isinstance(returned, _Relative):
            returned = os.path.normpath(os.path.join(path, STATE_FOLDER, returned.path))
        try:
            self.trainable.load_checkpoint(returned)
        except StopIteration as error:
            raise stray_stop_iteration("load_checkpoint") from error

    def cleanup(self) -> None:
        cleanup = getattr(self.trainable, "cleanup", None)
        if cleanup is not None:
            cleanup()


def _save(path: str, save_checkpoint: Callable[[str], Any]) -> None:
    folder = os.path.join(path, STATE_FOLDER)
    os.mkdir(folder)
    try:
        returned = save_checkpoint(folder)
    except StopIteration as error:
        raise stray_stop_iteration("save_checkpoint") from error
    if returned is None or isinstance(returned, (str, os.PathLike)):
        returned = _Relative(_relative("" if returned is None else os.fspath(returned), folder))
    with open(os.path.join(path, RETURNED_FILE), "wb") as file:
        cloudpickle.dump(returned, file)


def says_it_reports_states(cls: Any) -> bool:
    """Whether a class says that not its present state is saved, but the newest that its ``unsaved_iterations`` counts.

    Classes of Fluid's own that wrap a function for Ray Tune do.
    """
    return bool(getattr(cls, "fluid_reports_states", False))


class _Relative(NamedTuple):
    """Marks a checkpoint that is a path within the trainable's folder, not an object."""

    path: str


def _relative(path: str, folder: str) -> str:
    relative = os.path.relpath(os.path.join(folder, path), folder)
    if relative.split(os.sep)[0] == os.pardir:
        raise FluidError(f"save_checkpoint returned {path!r}, which is outside the folder it was given")
    return relative
