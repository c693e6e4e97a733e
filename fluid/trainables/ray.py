"""Trainables written for Ray Tune, run without a Ray cluster.

They run through Ray Tune's public methods (``train``, ``save``, ``restore``, ``stop``). Of a cluster these need only a
place for files; :class:`_Folder` gives them the trial's own folder.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from fluid.trainables.resident import STATE_FOLDER, HeldFolder, NotSavableError, Step, step_of, stray_stop_iteration
from fluid.trainables.trial_code import TrialCode, current_trial, trial_of_thread

#: A key in the result that Ray Tune reports when a function has returned without a last result.
_DUPLICATE = "__duplicate__"
#: The config entry with the trial's name; Ray Tune removes it before the user's code sees the config.
_TRIAL_INFO = "__trial_info__"
#: The file, within a checkpoint, that ``restore`` needs besides the trainable's own files.
RESULT_FILE = "ray_result.pkl"


class RayClassResident:
    """A subclass of ``ray.tune.Trainable``."""

    reports_states = False

    def __init__(self, cls: type, trial_id: str, folder: str) -> None:
        self._class: Any = cls
        self._trial_id = trial_id
        self._storage = _Folder(trial_id, folder, copies=False)
        self._session = SessionSlot()
        self.trainable: Any = None

    def setup(self, config: dict[str, Any]) -> None:
        with self._session.in_force():
            self._make(config)

    def _make(self, config: dict[str, Any]) -> None:
        os.makedirs(self._storage.trial_working_directory, exist_ok=True)
        parameters = inspect.signature(self._class).parameters
        takes_storage = "storage" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        options = {"storage": self._storage} if takes_storage else {}
        names = SimpleNamespace(trial_id=self._trial_id, trial_name=self._trial_id, trial_resources=None)
        self.trainable = self._class(config={**config, _TRIAL_INFO: names}, **options)

    def step(self) -> Step:
        try:
            with self._session.in_force():
                result = self.trainable.train()
        except StopIteration as error:
            raise stray_stop_iteration("step") from error
        if _DUPLICATE in result:
            return Step(None, True)
        # The config may be large, and the driver has it.
        return step_of({name: value for name, value in result.items() if name != "config"}, "train()")

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = getattr(self.trainable, method)
        if method == "reset" and "storage" in inspect.signature(function).parameters:
            kwargs = {"storage": self._storage, **kwargs}  # Without it, reset() leaves the trainable without storage.
        with self._session.in_force():
            return function(*args, **kwargs)

    def save(self, path: str) -> None:
        with self._session.in_force():
            saved = self.trainable.save(os.path.join(path, STATE_FOLDER))
        metrics = {name: value for name, value in saved.metrics.items() if name != "config"}
        with open(os.path.join(path, RESULT_FILE), "wb") as file:
            # These classes are private to Ray and differ between its releases: pickle refers to the ones in use.
            pickle.dump((type(saved), type(saved.checkpoint), metrics), file)

    def unsaved_iterations(self) -> int | None:
        return 0

    def restore(self, path: str) -> None:
        result, _, metrics = _saved(path)
        self.restore_from(result(checkpoint=saved_checkpoint(path), metrics=metrics))

    def restore_from(self, result: Any) -> None:
        """Restores the trainable from a result of Ray's, which has a checkpoint."""
        with self._session.in_force():
            self.trainable.restore(result)

    def watch(self, reported: ReportedCheckpoint) -> None:
        """Has a function's checkpoints observed; to be called after the set-up."""
        with self._session.in_force() as session:
            reported.watch(session)

    def cleanup(self) -> None:
        if self.trainable is not None:
            self._session.refuse_reports()
            try:
                with self._session.in_force():
                    self.trainable.stop()
            finally:
                self._session.await_function()


class SessionSlot:
    """Ray's session of one resident.

    Ray keeps one session per process, that of a function, also where a class wraps the function: a resident's is put
    there while the lane's thread runs its code, and only then. All other threads find that of their own trial, at any
    time: Ray's ``get_session``, through which all of Ray and its users look it up, asks for the caller's.
    """

    def __init__(self) -> None:
        self._session: Any = None
        self._code = trial_of_thread() or TrialCode()
        self._module: Any = importlib.import_module("ray.train._internal.session")
        if not hasattr(self._module, _FIND):
            setattr(self._module, _FIND, _session_of_caller)
            # Other modules of Ray have imported the function by name: it stays the same one.
            self._module.get_session.__code__ = _get_session.__code__

    @contextmanager
    def in_force(self) -> Iterator[Any]:
        """Puts the session in place, and takes it back, or a new one that was made meanwhile; yields it."""
        module = self._module
        outer, module._session = module._session, self._session
        outer_thread, _PlacedBy.thread = _PlacedBy.thread, threading.get_ident()
        try:
            yield module._session
        finally:
            self._session, module._session = module._session, outer
            _PlacedBy.thread = outer_thread
            if self._session is not None:
                self._code.attached[_SESSION] = self._session

    def refuse_reports(self) -> None:
        """Refuses what the trial's function reports from now on; Ray ends the report in which it waits."""
        self._code.end()
        if (session := self._code.attached.get(_SESSION)) is not None:
            session.report = self._code.refuse
            self._code.function = session.training_thread

    def await_function(self) -> None:
        """Waits until the trial's function, which was told to stop, has unwound, or seems not to."""
        self._code.await_function()


#: What a trial's code has attached, and the name by which Ray's module finds it.
_SESSION, _FIND = "ray session", "_fluid_session_of_caller"


class _PlacedBy:
    """The thread that has put a session in place; ``None`` while none has."""

    thread: int | None = None


def _session_of_caller(in_place: Any) -> Any:
    """Ray's session of the trial whose code the calling thread runs; outside trials, the one of the process."""
    code = None if _PlacedBy.thread == threading.get_ident() else current_trial()
    return in_place if code is None else code.attached.get(_SESSION)


def _get_session() -> Any:
    """The code of Ray's function, in whose module both names are."""
    return _fluid_session_of_caller(_session)  # type: ignore[name-defined] # noqa: F821


class RayFunctionResident:
    """A function that calls ``ray.tune.report``. Ray runs it in a thread.

    The newest checkpoint that it reported is the state that can be saved, if the function asked for a checkpoint to go
    on from before its first report: one that does not would begin again and count on.
    """

    reports_states = True

    def __init__(self, function: Any, trial_id: str, folder: str) -> None:
        self._function = function
        self._trial_id = trial_id
        self._folder = folder
        self._resident: RayClassResident | None = None
        self._reported = ReportedCheckpoint()

    def setup(self, config: dict[str, Any]) -> None:
        wrap_function = importlib.import_module("ray.tune.trainable.function_trainable").wrap_function
        function = _without_stop_iteration(self._function)
        self._resident = RayClassResident(wrap_function(function), self._trial_id, self._folder)
        self._resident._storage.copies = True
        self._resident.setup(config)
        self._resident.watch(self._reported)

    def step(self) -> Step:
        assert self._resident is not None
        step = self._resident.step()
        if step.metrics is not None:
            before = self._reported.result
            self._reported.note(self._resident.trainable)
            if before is not None and before is not self._reported.result:
                self._delete(before.checkpoint)
        return step

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._resident is not None
        if method == "reset":
            self._reported.forget()  # It is of another config.
        return self._resident.call(method, args, kwargs)

    def unsaved_iterations(self) -> int | None:
        return self._reported.unsaved_iterations

    def save(self, path: str) -> None:
        if self._reported.result is None:
            raise NotSavableError("it has reported no checkpoint")
        checkpoint, metrics = self._reported.result.checkpoint, self._reported.result.metrics
        checkpoint.to_directory(os.path.join(path, STATE_FOLDER))
        with open(os.path.join(path, RESULT_FILE), "wb") as file:
            pickle.dump((type(self._reported.result), type(checkpoint), metrics), file)

    def restore(self, path: str) -> None:
        assert self._resident is not None
        result, _, metrics = _saved(path)
        self._reported.restored(result(checkpoint=saved_checkpoint(path), metrics=metrics), path)
        self._resident.restore_from(self._reported.result)

    def cleanup(self) -> None:
        self._reported.forget()
        # cleanup() raises what the thread raised once more; it has been reported.
        if self._resident is not None:
            with suppress(Exception):
                self._resident.cleanup()

    def _delete(self, checkpoint: Any) -> None:
        """Deletes a copy of a checkpoint that a newer one replaces."""
        if os.path.dirname(str(checkpoint.path)) == self._folder:
            shutil.rmtree(checkpoint.path, ignore_errors=True)


class ReportedCheckpoint:
    """The newest checkpoint that a function reported to Ray Tune, if the function could go on from it.

    Attributes:
        result: the checkpoint with the metrics that Ray Tune filled in, but the config; ``None`` if there is none.
        unsaved_iterations: iterations done since; ``None`` if there is none.
    """

    def __init__(self) -> None:
        self.result: Any = None
        self.unsaved_iterations: int | None = None
        self._begun = False
        self._goes_on = False
        self._asked: Callable[[], bool] = lambda: False
        #: The folder that :attr:`result` is in; ``None`` for a folder of the function's own.
        self._held: HeldFolder | None = None

    def watch(self, session: Any) -> None:
        """Observes whether the function asks for a checkpoint; its thread has not started."""
        asked = [False]
        kind = type(session)

        class WatchedSession(kind):  # type: ignore[misc, valid-type]
            @property
            def loaded_checkpoint(self) -> Any:
                asked[0] = True
                return self._loaded_checkpoint

            @loaded_checkpoint.setter
            def loaded_checkpoint(self, checkpoint: Any) -> None:
                self._loaded_checkpoint = checkpoint

        loaded = vars(session).pop("loaded_checkpoint", None)
        session.__class__ = WatchedSession
        session.loaded_checkpoint = loaded
        self._asked = lambda: asked[0]

    def note(self, trainable: Any) -> None:
        """Notes what Ray Tune's trainable has reported in an iteration."""
        if not self._begun:
            self._begun, self._goes_on = True, self._asked()
        checkpoint = trainable._last_training_result.checkpoint
        if checkpoint is not None and self._goes_on:
            metrics = {name: value for name, value in trainable._last_result.items() if name != "config"}
            self.result = type(trainable._last_training_result)(checkpoint=checkpoint, metrics=metrics)
            self.unsaved_iterations = 0
            self._let_go()
        elif self.unsaved_iterations is not None:
            self.unsaved_iterations += 1

    def forget(self) -> None:
        """Forgets what was reported."""
        self.result = self.unsaved_iterations = None
        self._let_go()

    def restored(self, result: Any, folder: str) -> None:
        """Notes that the function goes on from a checkpoint of Fluid's, in this folder.

        The function reads it in its first iteration: until there is a newer one, lanes neither move nor delete it.
        """
        self.result, self.unsaved_iterations = result, 0
        self._held = HeldFolder(folder)

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.let_go()
            self._held = None


def saved_checkpoint(path: str) -> Any:
    """Returns the state within a checkpoint of a trial as a ``ray.tune.Checkpoint``."""
    return _saved(path)[1].from_directory(os.path.join(path, STATE_FOLDER))


def _saved(path: str) -> tuple[Any, Any, Any]:
    """Ray's classes of a result and of a checkpoint, and the result's metrics."""
    with open(os.path.join(path, RESULT_FILE), "rb") as file:
        result, checkpoint, metrics = pickle.load(file)
    return result, checkpoint, metrics


def _without_stop_iteration(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an error of a ``StopIteration`` that a function raises, which Ray's thread would take for a regular end.

    Reports what an iterator yields that the function returns, which Ray refuses.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            returned = function(*args, **kwargs)
        except StopIteration as error:
            raise stray_stop_iteration(getattr(function, "__name__", "the function")) from error
        if not isinstance(returned, Iterator):
            return returned
        session = importlib.import_module("ray.train._internal.session").get_session()
        for metrics in returned:
            session.report(step_of(metrics, "the iterator").metrics)
        return None

    return run


class _Folder:
    """Replaces Ray's ``StorageContext``, which tells a trainable where to keep its files, without a cluster.

    Attributes:
        copies: whether checkpoints must be copied, because the user's code deletes them after reporting them.
    """

    def __init__(self, trial_id: str, folder: str, copies: bool) -> None:
        self.copies = copies
        self.trial_dir_name = os.path.basename(folder)
        self.experiment_dir_name = os.path.basename(os.path.dirname(folder))
        self.trial_working_directory = folder
        self.trial_driver_staging_path = folder
        self.trial_local_path = folder  # Its name in Ray 2.9.
        self.trial_fs_path = folder
        self.sync_config = SimpleNamespace(sync_artifacts=False, sync_artifacts_on_checkpoint=False)
        self.current_checkpoint_index = -1

    @property
    def checkpoint_dir_name(self) -> str:
        return f"checkpoint_{self.current_checkpoint_index:06d}"

    def persist_artifacts(self, force: bool = False) -> None:
        """Does nothing: the files are in their final place."""

    def persist_current_checkpoint(self, checkpoint: Any) -> Any:
        if not self.copies:
            return checkpoint
        target = os.path.join(self.trial_fs_path, self.checkpoint_dir_name)
        checkpoint.to_directory(target)
        return type(checkpoint).from_directory(target)

    def _update_checkpoint_index(self, metrics: Mapping[str, Any]) -> None:
        self.current_checkpoint_index += 1
