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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from fluid.errors import FluidError
from fluid.trainables.resident import Step, step_of, stray_stop_iteration

#: A key in the result that Ray Tune reports when a function has returned without a last result.
_DUPLICATE = "__duplicate__"
#: The config entry with the trial's name; Ray Tune removes it before the user's code sees the config.
_TRIAL_INFO = "__trial_info__"
#: The file, within a checkpoint, that ``restore`` needs besides the trainable's own files.
_RESULT = "ray_result.pkl"


class RayClassResident:
    """A subclass of ``ray.tune.Trainable``."""

    def __init__(self, cls: type, trial_id: str, folder: str) -> None:
        self._class: Any = cls
        self._trial_id = trial_id
        self._storage = _Folder(trial_id, folder, copies=False)
        self.trainable: Any = None

    def setup(self, config: dict[str, Any]) -> None:
        os.makedirs(self._storage.trial_working_directory, exist_ok=True)
        parameters = inspect.signature(self._class).parameters
        takes_storage = "storage" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        options = {"storage": self._storage} if takes_storage else {}
        names = SimpleNamespace(trial_id=self._trial_id, trial_name=self._trial_id, trial_resources=None)
        self.trainable = self._class(config={**config, _TRIAL_INFO: names}, **options)

    def step(self) -> Step:
        try:
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
        return function(*args, **kwargs)

    def save(self, path: str) -> None:
        saved = self.trainable.save(os.path.join(path, "state"))
        metrics = {name: value for name, value in saved.metrics.items() if name != "config"}
        with open(os.path.join(path, _RESULT), "wb") as file:
            # These classes are private to Ray and differ between its releases: pickle refers to the ones in use.
            pickle.dump((type(saved), type(saved.checkpoint), metrics), file)

    def restore(self, path: str) -> None:
        with open(os.path.join(path, _RESULT), "rb") as file:
            result, checkpoint, metrics = pickle.load(file)
        folder = checkpoint.from_directory(os.path.join(path, "state"))
        self.trainable.restore(result(checkpoint=folder, metrics=metrics))

    def cleanup(self) -> None:
        if self.trainable is not None:
            self.trainable.stop()


class RayFunctionResident:
    """A function that calls ``ray.tune.report``. Ray runs it in a thread; its state cannot be saved."""

    def __init__(self, function: Any, trial_id: str, folder: str) -> None:
        self._function = function
        self._trial_id = trial_id
        self._folder = folder
        self._resident: RayClassResident | None = None
        #: Ray keeps one session per process; each resident's is put there while its code runs.
        self._session: Any = None

    def setup(self, config: dict[str, Any]) -> None:
        wrap_function = importlib.import_module("ray.tune.trainable.function_trainable").wrap_function
        function = _without_stop_iteration(self._function)
        self._resident = RayClassResident(wrap_function(function), self._trial_id, self._folder)
        self._resident._storage.copies = True
        with self._in_session():
            self._resident.setup(config)

    def step(self) -> Step:
        assert self._resident is not None
        with self._in_session():
            return self._resident.step()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._resident is not None
        with self._in_session():
            return self._resident.call(method, args, kwargs)

    def save(self, path: str) -> None:
        raise FluidError("a function trainable cannot be saved exactly; write a class instead")

    def restore(self, path: str) -> None:
        raise FluidError("a function trainable cannot be restored; write a class instead")

    def cleanup(self) -> None:
        # cleanup() raises what the thread raised once more; it has been reported.
        with self._in_session(), suppress(Exception):
            if self._resident is not None:
                self._resident.cleanup()

    @contextmanager
    def _in_session(self) -> Iterator[None]:
        module: Any = importlib.import_module("ray.train._internal.session")
        outer, module._session = module._session, self._session
        try:
            yield
        finally:
            self._session, module._session = module._session, outer


def _without_stop_iteration(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an error of a ``StopIteration`` that a function raises; Ray's thread would take it for a regular end."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except StopIteration as error:
            raise stray_stop_iteration(getattr(function, "__name__", "the function")) from error

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
