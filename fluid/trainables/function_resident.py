"""Trials whose trainable is a generator function: it yields metrics, or metrics and its state.

One with a parameter named ``state`` yields ``(metrics, state)``, and is called anew with the state to go on. Other
functions are run by :mod:`fluid.trainables.reporting_resident`.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from fluid.errors import FluidError
from fluid.trainables.hints import add_hint
from fluid.trainables.json_form import message_of
from fluid.trainables.resident import STATE_FOLDER, NotSavableError, Step, TrainableFormError, step_of

#: The file, within the state's folder of a checkpoint, with the pickled state.
STATE_FILE = "state.pkl"
#: Fixed, so that any Python that Fluid supports reads what another wrote; large arrays are not copied.
_PROTOCOL = 5
_NO_MORE = object()
_HOW = "yields a dict of metrics per iteration, or returns one"


class GeneratorResident:
    """A generator function whose state cannot be saved; each item that it yields is an iteration."""

    reports_states = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = name_of(function)
        self._config: dict[str, Any] = {}
        self._iterator: Iterator[Any] | None = None

    def setup(self, config: dict[str, Any]) -> None:
        # A generator function's code begins with the first iteration; that of other functions does the same.
        self._config = config

    def step(self) -> Step:
        try:
            if self._iterator is None:
                self._iterator = iterator_of(called(self._function, self._name, self._config), self._name)
            return next_step(self._iterator, self._name)
        except Exception as error:
            add_hint(error, self._config)
            raise

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise no_methods(method)

    def save(self, path: str) -> None:
        raise FluidError(
            "a function without a state cannot be saved; give it a second parameter named `state`, or write a class"
        )

    def unsaved_iterations(self) -> int | None:
        return None

    def restore(self, path: str) -> None:
        raise FluidError(
            "a function without a state cannot be restored; give it a second parameter named `state`, or write a class"
        )

    def cleanup(self) -> None:
        _close(self._iterator)


class StateFunctionResident:
    """A function with a parameter named ``state``: it yields ``(metrics, state)``, and the newest state is kept.

    The state is referred to, not copied, and pickled only when it is saved, which happens between two iterations.
    """

    reports_states = False
    #: Whether code of the user's is given the folder from which it is restored.
    hands_out_folder = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = name_of(function)
        self._source = f"{self._name}()"
        self._config: dict[str, Any] = {}
        self._state: Any = None
        self._iterator: Iterator[Any] | None = None
        self._began = False

    def setup(self, config: dict[str, Any]) -> None:
        self._config = config

    def step(self) -> Step:
        try:
            if self._iterator is None:
                returned = called(self._function, self._name, self._config, state=self._state)
                self._iterator = iterator_of(returned, self._name)
            item = next(self._iterator, _NO_MORE)
        except Exception as error:
            add_hint(error, self._config)
            raise
        if item is _NO_MORE:
            return Step(None, True)
        if not isinstance(item, tuple) or len(item) != 2:
            what = "a dict" if isinstance(item, Mapping) else f"{type(item).__name__} {_shown(item)}"
            raise TrainableFormError(
                f"{self._name}() has a parameter named state, so it must yield (metrics, state), not {what}"
            )
        metrics, self._state = item
        self._began = True
        return step_of(metrics, self._source, "yield")

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise no_methods(method)

    def save(self, path: str) -> None:
        if self._state is None and self._began:
            raise NotSavableError(f"{self._name}() yielded None as its state, from which it would begin again")
        folder = os.path.join(path, STATE_FOLDER)
        os.mkdir(folder)
        try:
            with open(os.path.join(folder, STATE_FILE), "wb") as file:
                cloudpickle.dump(self._state, file, protocol=_PROTOCOL)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # A __reduce__ may raise anything.
            raise NotSavableError(f"{_unpicklable_part(self._state)} cannot be pickled: {message_of(error)}") from error

    def unsaved_iterations(self) -> int | None:
        return 0

    def restore(self, path: str) -> None:
        with open(os.path.join(path, STATE_FOLDER, STATE_FILE), "rb") as file:
            self._state = pickle.load(file)
        self._began = self._state is not None

    def cleanup(self) -> None:
        self._state = None
        _close(self._iterator)


def iterator_of(returned: Any, name: str) -> Iterator[Any]:
    """Returns what a function returned, if that is an iterator.

    Raises:
        TrainableFormError: it is something else.
    """
    if isinstance(returned, Iterator):
        return returned
    what = "nothing" if returned is None else f"{type(returned).__name__} {_shown(returned)}"
    if returned is None:
        what += (
            ", and has not called fluid.report(); a function for Ray Tune calls ray.tune.report, with an import of ray"
            " that Fluid can see"
        )
    elif isinstance(returned, (int, float)) or hasattr(returned, "item"):
        what += f"; return {{'loss': {_shown(returned)}}}, say"
    elif isinstance(returned, (tuple, list)):
        what += "; return {'loss': ..., 'accuracy': ...}, a name for each"
    elif inspect.iscoroutine(returned) or inspect.isasyncgen(returned):
        close = getattr(returned, "close", None)
        if close is not None:
            close()  # Or Python warns that it was never awaited.
        what += "; an async function cannot be a trainable: make it a plain one that calls asyncio.run()"
    raise TrainableFormError(f"a trainable function {_HOW}; {name}() returned {what}")


def called(function: Callable[..., Any], name: str, config: dict[str, Any], **state: Any) -> Any:
    """Calls a trainable function.

    Raises:
        TrainableFormError: it takes other arguments.
    """
    try:
        return function(config, **state)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # Of its own code.
        how = f"a trainable is called with its config, a dict: def {name}({', '.join(['config', *state])})"
        raise TrainableFormError(f"{how}; {message_of(error)}") from None


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:80]


def next_step(iterator: Iterator[Any], name: str) -> Step:
    """Runs an iteration of an iterator of metrics, which the function of that name made."""
    metrics = next(iterator, _NO_MORE)
    if metrics is _NO_MORE:
        return Step(None, True)
    if isinstance(metrics, tuple) and len(metrics) == 2 and isinstance(metrics[0], Mapping):
        how = f"def {name}(config, state), which gets None at first; or yield the metrics alone"
        raise TrainableFormError(f"{name}() yields (metrics, state), and has no parameter named state: write {how}")
    return step_of(metrics, f"{name}()", "yield")


def no_methods(method: str) -> FluidError:
    """Makes the error of a call of a function's method."""
    return FluidError(f"{method!r} cannot be called: a function has no methods; write a class")


def name_of(function: Any) -> str:
    """Returns the name by which errors call a function."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__).rpartition("<locals>.")[2]


def _close(iterator: Any) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


def _unpicklable_part(state: Any) -> str:
    """Names the entry of a state that cannot be pickled, as in ``state['loader']``."""
    for name, value in state.items() if isinstance(state, dict) else ():
        try:
            cloudpickle.dumps(value, protocol=_PROTOCOL)
        except Exception:
            return f"state[{name!r}]"
    return "the state"
