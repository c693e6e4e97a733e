"""Keras 3 on Fluid: ``model.fit`` trains each trial, and an epoch is an iteration.

:func:`fit` replaces ``model.fit`` in the function of a trial, and :class:`KerasCallback` is what it adds: it reports
epochs, or batches, and saves by ``model.save_weights``. ``KERAS_BACKEND`` is the user's choice; PyTorch is tested.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import fluid
from fluid._imports import try_import
from fluid.errors import require_integer
from fluid.random_state import read_random_state, write_random_state
from fluid.trainables.trial_code import Save, TrialEnded

with try_import("Keras", extra="keras") as _imports:
    import keras
    import numpy as np

#: The files of a checkpoint: Keras' own, with model and optimizer, and what it does not save.
WEIGHTS_FILE = "model.weights.h5"
_STATE_FILE = "fluid.pkl"
#: Where Keras' callbacks keep the paths they write to.
_PATHS = ("filepath", "filename", "log_dir", "_weights_path")
_Callback: Any = keras.callbacks.Callback if _imports.available else object


def fit(model: Any, *args: Any, batches: int | None = None, **kwargs: Any) -> Any:
    """Calls ``model.fit`` in the function of a trial: each epoch is reported, and a trial goes on where it was saved.

    Outside a trial it is ``model.fit``, but without a progress bar.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> from fluid.integrations.keras import fit
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> history = fit(model, np.ones((8, 2)), np.ones(8), epochs=2)
        >>> history.epoch
        [0, 1]

    Args:
        model: a compiled Keras model.
        args: further arguments of ``model.fit``.
        batches: see :class:`KerasCallback`.
        kwargs: arguments of ``model.fit`` by name. ``initial_epoch`` is where a trial begins; ``verbose`` is 0 by
            default.

    Returns:
        What ``model.fit`` returns: the history of the epochs that this call has trained.

    Raises:
        TrialEnded: the trial has ended, and ``model.fit``, too, as it does after its last epoch; derives from
            ``BaseException``. Let it pass.
    """
    given = kwargs.pop("callbacks", None) or ()
    others = list(given) if isinstance(given, Sequence) else [given]
    _tell_of_shared_files(others)
    callback = KerasCallback(batches=batches, others=others)
    callback.raises_in_fit = False
    if callback.initial_epoch:
        kwargs["initial_epoch"] = callback.initial_epoch
    history = model.fit(*args, **{"verbose": 0, **kwargs}, callbacks=[*others, callback])
    if callback.ended is not None:
        raise callback.ended
    return history


def _tell_of_shared_files(callbacks: Sequence[Any]) -> None:
    """Warns of relative paths, which are one file for all trials unless each works in a folder of its own."""
    if Path.cwd() == fluid.trial_dir().resolve():
        return
    for callback in callbacks:
        for name in _PATHS:
            path = vars(callback).get(name)
            if isinstance(path, (str, os.PathLike)) and "://" not in str(path) and not os.path.isabs(path):
                text = (
                    f"{type(callback).__name__}: {os.fspath(path)!r} is one file for all trials, which overwrite it; "
                )
                text += f"use fluid.trial_dir() / {os.fspath(path)!r}, or trial_options={{'chdir': True}}"
                warnings.warn(text, stacklevel=3)


class KerasCallback(_Callback):  # type: ignore[misc]
    """A callback for ``model.fit`` in the function of a trial: it reports each epoch to Fluid.

    Put it behind all other callbacks, and pass :attr:`initial_epoch` to ``model.fit``; :func:`fit` does both.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> from fluid.integrations.keras import KerasCallback
        >>> model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> callback = KerasCallback()
        >>> options = {"initial_epoch": callback.initial_epoch, "callbacks": [callback], "verbose": 0}
        >>> model.fit(np.ones((8, 2)), np.ones(8), epochs=2, **options).epoch
        [0, 1]

    Attributes:
        initial_epoch: the epoch that the trial goes on with; 0 if it begins, and outside a trial.
        raises_in_fit: whether the end of the trial is raised at once, as an error within ``model.fit``; otherwise
            ``model.fit`` ends as it does after its last epoch.
        ended: the end of the trial, which the caller of ``model.fit`` raises; ``None`` if it was raised already.

    Args:
        batches: report after each so many batches of an epoch, too, with the means of the epoch so far. Such an
            iteration cannot be saved, as Keras cannot go on within an epoch. ``None``, the default, for epochs alone.
        others: the other callbacks. Their numbers and arrays, such as the patience that is left, are saved, too.
    """

    def __init__(self, batches: int | None = None, others: Sequence[Any] = ()) -> None:
        _imports.check()
        super().__init__()
        self.raises_in_fit = True
        self.ended: TrialEnded | None = None
        self._batches = None if batches is None else require_integer("batches", batches, at_least=1)
        self._others = others
        self._folder = fluid.get_checkpoint()
        #: What is to be restored.
        self._resumed: Mapping[str, Any] = {}
        if self._folder is not None:
            self._resumed = pickle.loads((self._folder / _STATE_FILE).read_bytes())
        self.initial_epoch: int = self._resumed.get("epoch", 0)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restores a trial that goes on: the model is built, and the other callbacks have begun."""
        if self._folder is None:
            return
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self.model.load_weights(str(self._folder / WEIGHTS_FILE))
        for variable, value in zip(_unsaved(self.model), self._resumed["variables"], strict=True):
            variable.assign(value)
        for callback, state in zip(self._others, self._resumed["callbacks"], strict=True):
            vars(callback).update(state)
        write_random_state(self._resumed["random"])
        self._folder = None

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Reports a number of batches."""
        if self._batches is not None and (batch + 1) % self._batches == 0:
            self._report(logs, None)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Reports the epoch."""
        self._report(logs, lambda folder: self._save(folder, epoch + 1))

    def _report(self, logs: Mapping[str, Any] | None, save: Save | None) -> None:
        if self.ended is not None:
            return
        try:
            fluid.report(dict(logs or {}), save)
        except TrialEnded as end:
            if self.raises_in_fit:
                raise
            self.ended = end
            self.model.stop_training = True

    def _save(self, folder: Path, epoch: int) -> None:
        self.model.save_weights(str(folder / WEIGHTS_FILE))
        state = {
            "epoch": epoch,
            "variables": [keras.ops.convert_to_numpy(variable) for variable in _unsaved(self.model)],
            "callbacks": [_plain_state(callback) for callback in self._others],
            "random": read_random_state(),
        }
        (folder / _STATE_FILE).write_bytes(pickle.dumps(state))


def _unsaved(model: Any) -> list[Any]:
    """Returns the variables that are not among a model's weights: the states of its layers' random generators."""
    saved = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in saved]


def _plain_state(callback: Any) -> dict[str, Any]:
    """Returns the attributes of a callback that are numbers, arrays, lists of these, or functions of Keras.

    Such as the patience that is left, the best weights, and whether less is better.
    """
    plain = (bool, int, float, np.generic, np.ndarray)

    def is_plain(value: Any) -> bool:
        if isinstance(value, list):
            return all(isinstance(entry, plain) for entry in value)
        of_keras = isinstance(value, FunctionType) and value.__module__.partition(".")[0] == "keras"
        return value is None or isinstance(value, plain) or of_keras

    return {name: value for name, value in vars(callback).items() if is_plain(value)}
