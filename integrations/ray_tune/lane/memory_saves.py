"""Checkpoints of Tune that a lane writes to host memory; the driver copies them to Tune's storage in the background.

With population based training, trials go on from the states of others. On the driver's machine a lane reads such a
state from the memory to which another lane has written it. Everywhere else, and where memory is full, checkpoints are
written to and read from Tune's storage, as without Fluid. So are those of functions, which report their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fluid.integrations.ray_tune.private_api import Checkpoint, FunctionTrainable, TrainingResult
from fluid.lane.checkpoints.files import locked_for_reading
from fluid.lane.checkpoints.store import own_store
from fluid.trainables.driver_link import driver_link

#: The folder, within a checkpoint, of what the trainable has written.
FILES = "state"


class SavedInMemory(NamedTuple):
    """In place of the result of ``save``: one whose checkpoint is not in Tune's storage yet.

    Attributes:
        result: that result; its checkpoint has the path in Tune's storage.
        places: where the checkpoint may be on this machine.
    """

    result: Any
    places: tuple[str, ...]

    @property
    def checkpoint(self) -> Any:
        """The checkpoint in Tune's storage."""
        return self.result.checkpoint

    @property
    def metrics(self) -> dict[str, Any]:
        """The trial's last result."""
        metrics: dict[str, Any] = self.result.metrics
        return metrics


class CheckpointWanted(NamedTuple):
    """A trial's request to its driver: to have a checkpoint copied to Tune's storage, where it has that path."""

    path: str


def save_in_memory(trainable: Any, trial_id: str) -> SavedInMemory | None:
    """Saves a trainable of Tune in host memory, with the path of its next checkpoint in Tune's storage.

    Args:
        trainable: that.
        trial_id: Tune's id of the trial.

    Returns:
        The result; ``None`` if memory has no room or the driver cannot read it, or the trainable could not be saved:
        then the trial is to be saved as without Fluid.
    """
    own, storage = own_store(), trainable._storage
    if own is None or not own.is_of_driver or storage is None or isinstance(trainable, FunctionTrainable):
        return None
    saved: list[Any] = []

    def write(folder: str) -> None:
        saved.append(trainable.save(os.path.join(folder, FILES)))

    trainable._storage = None  # So that Tune's Trainable leaves the files where they are.
    try:
        stored = own.store.save_in_memory(f"{trial_id}+tune", storage.current_checkpoint_index + 1, write)
    finally:
        trainable._storage = storage
    if stored is None:
        return None
    metrics = saved[-1].metrics
    storage._update_checkpoint_index(metrics)
    checkpoint = Checkpoint(storage.checkpoint_fs_path, filesystem=storage.storage_filesystem)
    storage.persist_artifacts(force=storage.sync_config.sync_artifacts_on_checkpoint)
    return SavedInMemory(TrainingResult(checkpoint=checkpoint, metrics=metrics), own.places_of(stored.path))


@contextmanager
def opened(saved: SavedInMemory) -> Iterator[str | None]:
    """Yields the folder that the trainable wrote, which is not deleted meanwhile; ``None`` if it is not here."""
    for place in saved.places:
        with locked_for_reading(place) as exists:
            if exists:
                yield os.path.join(place, FILES)
                return
    yield None


def restore(restore_from: Callable[[Any], None], saved: Any) -> None:
    """Restores a trainable from the result of ``save``, or from what a lane has written to host memory."""
    if not isinstance(saved, SavedInMemory):
        restore_from(saved)
        return
    with opened(saved) as folder:
        if folder is not None:
            restore_from(TrainingResult(checkpoint=Checkpoint.from_directory(folder), metrics=saved.metrics))
            return
    # It is in the memory of another machine, or was deleted there since it is in Tune's storage.
    driver_link().ask(CheckpointWanted(str(saved.checkpoint.path)))
    restore_from(saved.result)
