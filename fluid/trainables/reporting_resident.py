"""Trials whose trainable is a function that reports by :func:`fluid.report`, or returns metrics or an iterator of them.

The function runs in a thread of its own, as it may be in the midst of a framework's training loop when an iteration
ends. It runs while the lane waits for it, and waits while the lane does anything else.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fluid.trainables.function_resident import called, iterator_of, name_of, next_step, no_methods
from fluid.trainables.hints import add_hint
from fluid.trainables.resident import STATE_FOLDER, HeldFolder, NotSavableError, Step, step_of, stray_stop_iteration
from fluid.trainables.trial_code import Save, TrialCode, bind, trial_of_thread

#: Marks a checkpoint of this form; the function's own files are in the state's folder.
REPORTED_FILE = "reported"


class ReportingResident:
    """A function that may report; what its last report's ``save`` writes is the state."""

    reports_states = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._name = name_of(function)
        self._config: dict[str, Any] = {}
        self._thread: _FunctionThread | None = None
        self._iterator: Iterator[Any] | None = None
        self._save: Save | None = None
        self._restored: _RestoredState | None = None

    def setup(self, config: dict[str, Any]) -> None:
        # The function's code begins with the first iteration, as that of a generator function does.
        self._config = config

    def step(self) -> Step:
        try:
            return self._step()
        except Exception as error:
            add_hint(error, self._config)
            raise

    def _step(self) -> Step:
        if self._iterator is not None:
            return next_step(self._iterator, self._name)
        checkpoint = None if self._restored is None else self._restored.state
        if self._thread is None:
            self._thread = _FunctionThread(self._function, self._config, checkpoint)
        event = self._thread.run()
        if isinstance(event, _ReportMade):
            self._save = event.save
            self._forget_restored()
            return step_of(event.metrics, "fluid.report()", "report")
        if isinstance(event, _HasRaised):
            raise self._to_raise(event.error)
        if isinstance(event.value, Mapping):
            self._save = None  # Its last iteration was not reported with one.
            return Step(event.value, True)
        if event.value is None and (self._thread.has_reported or checkpoint is not None):
            return Step(None, True)
        self._iterator = iterator_of(event.value, self._name)
        return next_step(self._iterator, self._name)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise no_methods(method)

    def unsaved_iterations(self) -> int | None:
        return None if self._save is None and self._restored is None else 0

    def save(self, path: str) -> None:
        folder = os.path.join(path, STATE_FOLDER)
        if self._save is None:
            if self._restored is None:
                raise NotSavableError(f"{self._name}() has not reported a state: fluid.report(metrics, save=...)")
            shutil.copytree(self._restored.state, folder)
        else:
            assert self._thread is not None
            os.mkdir(folder)
            self._thread.save(self._save, Path(folder))
        with open(os.path.join(path, REPORTED_FILE), "w", encoding="ascii"):
            pass

    def restore(self, path: str) -> None:
        self._forget_restored()
        self._restored = _RestoredState(Path(path, STATE_FOLDER), HeldFolder(path))

    def cleanup(self) -> None:
        self._forget_restored()
        self._save = None
        if self._thread is not None:
            self._thread.end()
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()

    def _forget_restored(self) -> None:
        if self._restored is not None:
            self._restored.held.let_go()
            self._restored = None

    def _to_raise(self, error: BaseException) -> BaseException:
        if isinstance(error, StopIteration):
            return stray_stop_iteration(self._name).with_traceback(error.__traceback__)
        return error


class _RestoredState(NamedTuple):
    """The state that the function goes on from; it reads the folder in its next iteration."""

    state: Path
    held: HeldFolder


class _ReportMade(NamedTuple):
    metrics: Mapping[str, Any]
    save: Save | None


class _HasReturned(NamedTuple):
    value: Any


class _HasRaised(NamedTuple):
    error: BaseException


class _ThreadOrder(NamedTuple):
    """What a function that waits in a report does next: save, or return from the report if ``save`` is None."""

    save: Save | None = None
    folder: Path | None = None


class _FunctionThread:
    """Runs a function in a thread, one iteration at a time.

    Attributes:
        checkpoint: the folder from which the function goes on.
        has_reported: whether it has reported an iteration.
    """

    def __init__(self, function: Callable[..., Any], config: dict[str, Any], checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        self.has_reported = False
        self._function = function
        self._config = config
        #: From the function to the lane: how its iterations end, and how a save does.
        self._events: queue.SimpleQueue[_ReportMade | _HasReturned | _HasRaised] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        #: From the lane to the thread that waits in a report.
        self._orders: queue.SimpleQueue[_ThreadOrder] = queue.SimpleQueue()
        self._one_report = threading.Lock()
        #: The trial's in a lane; elsewhere of its own.
        self._code = trial_of_thread() or TrialCode()
        # In a lane, threads that it starts are no daemons either, as in a script; a lane does not wait for its own.
        self._thread = threading.Thread(target=self._main, name="fluid-trial", daemon=self._code.link is None)
        self._code.reporter, self._code.function = self, self._thread
        bind(self._thread, self._code)

    def run(self) -> _ReportMade | _HasReturned | _HasRaised:
        """Runs the function until it reports, returns or raises; called by the lane."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._orders.put(_ThreadOrder())
        return self._events.get()

    def save(self, save: Save, folder: Path) -> None:
        """Saves, in the function's thread while that waits in a report; called by the lane."""
        if not self._thread.is_alive():
            save(folder)  # The function has returned.
            return
        self._orders.put(_ThreadOrder(save, folder))
        if (error := self._saves.get()) is not None:
            raise error

    def end(self) -> None:
        """Makes the report that the function waits in raise, and later ones; waits until the function has unwound."""
        self._code.end()
        if self._thread.ident is not None:
            self._orders.put(_ThreadOrder())
            self._code.await_function()

    def report(self, metrics: Mapping[str, Any], save: Save | None) -> None:
        """Called by the function, in any of its threads."""
        with self._one_report:
            self._code.check()
            self.has_reported = True
            self._events.put(_ReportMade(metrics, save))
            while True:
                order = self._orders.get()
                self._code.check()
                if order.save is None:
                    return
                assert order.folder is not None
                self._saves.put(_error_of(order.save, order.folder))

    def _main(self) -> None:
        try:
            event: _HasReturned | _HasRaised = _HasReturned(
                called(self._function, name_of(self._function), self._config)
            )
        except BaseException as error:
            event = _HasRaised(error)
        self._events.put(event)


def _error_of(save: Save, folder: Path) -> BaseException | None:
    try:
        save(folder)
    except StopIteration as error:
        return stray_stop_iteration("save").with_traceback(error.__traceback__)
    except BaseException as error:
        return error
    return None
