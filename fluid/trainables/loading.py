"""Loads what a trial saved, outside of a lane."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fluid.errors import InvalidFieldError
from fluid.trainables.class_resident import RETURNED_FILE
from fluid.trainables.function_resident import STATE_FILE
from fluid.trainables.ray import RESULT_FILE, saved_checkpoint
from fluid.trainables.reporting_resident import REPORTED_FILE
from fluid.trainables.resident import STATE_FOLDER
from fluid.trainables.trainable import kind_of, make_resident

#: Files of checkpoints of classes, of functions for Ray Tune and of functions that report.
_OF_OTHER_FORMS = {RETURNED_FILE, RESULT_FILE, REPORTED_FILE}


def load_saved(
    checkpoint: str, source: Callable[[], tuple[Any, Mapping[str, Any]]], *, trial_id: str, folder: str
) -> Any:
    """Returns what a checkpoint holds.

    Args:
        checkpoint: folder that :meth:`~fluid.trainables.resident.Resident.save` filled.
        source: gives the trial's trainable and config; not called for a function, but for one for Ray Tune.
        trial_id: passed on to Ray Tune's trainables.
        folder: the trial's own folder.

    Returns:
        Of a class: an object of it, set up and restored. Of a function with a state: that state. Of a function that
        reports by :func:`fluid.report`: the ``Path`` of the folder that its ``save`` filled. Of a function for Ray
        Tune: the ``ray.tune.Checkpoint`` that it reported. Of a script: the ``Path`` of the file or folder that it
        wrote.

    Raises:
        InvalidFieldError: the trainable cannot be saved.
    """
    state = os.path.join(checkpoint, STATE_FOLDER, STATE_FILE)
    if os.path.isfile(state) and not _OF_OTHER_FORMS & set(os.listdir(checkpoint)):
        with open(state, "rb") as file:
            return pickle.load(file)
    if os.path.isfile(os.path.join(checkpoint, REPORTED_FILE)):
        return Path(checkpoint, STATE_FOLDER)
    trainable, config = source()
    kind = kind_of(trainable)
    if kind == "ray_function":
        return saved_checkpoint(checkpoint)
    if kind not in ("class", "ray_class"):
        raise InvalidFieldError("trainable", trainable, "has no state, so it has no checkpoint to load")
    saved_path = getattr(trainable, "fluid_saved_path", None)
    if saved_path is not None:
        return saved_path(os.path.join(checkpoint, STATE_FOLDER))
    resident: Any = make_resident(trainable, trial_id=trial_id, folder=folder)
    resident.setup(dict(config))
    resident.restore(checkpoint)
    return resident.trainable
