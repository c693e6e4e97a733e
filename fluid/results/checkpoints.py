"""The checkpoints of a run folder: which there are, and how one is loaded."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fluid.errors import FluidError, InvalidFieldError
from fluid.lane.checkpoints.files import iteration_of
from fluid.lane.checkpoints.paths import checkpoints_folder, folder_name, folder_of_host, kept_folder, trial_folder
from fluid.lane.checkpoints.seal import damage_of
from fluid.results.folder_files import PAYLOADS
from fluid.results.payload_file import read_payloads
from fluid.trainables.loading import load_saved
from fluid.trainables.resident import STATE_FOLDER


class KeptCheckpoint(NamedTuple):
    """A checkpoint of a trial on disk.

    Example:
        >>> from pathlib import Path
        >>> from fluid import KeptCheckpoint
        >>> found = KeptCheckpoint(27, Path("run/trials/a/checkpoints/27-0-3/state"))
        >>> found.iteration, found.path.name
        (27, 'state')

    Attributes:
        iteration: iterations that the trial had done.
        path: the folder that ``save_checkpoint`` filled; of a generator function with a state, the one
            with ``state.pkl``.
    """

    iteration: int
    path: Path


def kept_checkpoints(run_dir: str | Path, trial_id: str) -> tuple[KeptCheckpoint, ...]:
    """Finds the checkpoints of a trial in a run folder, by the files alone; the newest is last.

    Beside those that ``FluidExecutor(keep=)`` kept, there may be some from which the session can be resumed.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup, kept_checkpoints
        >>> class Counter:
        ...     def setup(self, config):
        ...         self.count = 0
        ...     def step(self):
        ...         self.count += 1
        ...         return {"count": self.count}
        ...     def save_checkpoint(self, folder):
        ...         return {"count": self.count}
        ...     def load_checkpoint(self, state):
        ...         self.count = state["count"]
        >>> with FluidExecutor(backend="local", devices=1, run_dir="run", verbose=0) as executor:
        ...     trial = Trial(Counter, budget=1_000_000, trial_id="a")
        ...     first = next(executor.submit_trialgroup(TrialGroup([trial])).results())
        ...     saved = executor.drain_all(deadline_s=30)
        >>> kept = kept_checkpoints("run", "a")[-1]
        >>> kept.iteration >= 1, kept.path.name
        (True, 'state')

    Args:
        run_dir: the run folder.
        trial_id: the trial, by the id under which it was submitted.
    """
    name = folder_name(trial_id)
    hosts = glob.glob(folder_of_host(glob.escape(str(run_dir)), "*"))
    found: dict[str, tuple[int, int, Path]] = {}
    bases = (*hosts, str(run_dir))
    for folder in [folder_in(base, name) for folder_in in (checkpoints_folder, kept_folder) for base in bases]:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    state = Path(entry.path, STATE_FOLDER)
                    if entry.name[:1].isdigit() and state.is_dir():
                        found[entry.name] = iteration_of(entry.path), entry.stat().st_mtime_ns, state
        except OSError:
            continue  # There is no such folder, or a lane has just deleted a checkpoint.
    return tuple(KeptCheckpoint(iteration, path) for iteration, _, path in sorted(found.values()))


#: Gives the trainable and the config of a trial.
TrainableSource = Callable[[], tuple[Any, Mapping[str, Any]]]


def load_checkpoint(run_dir: Path, trial_id: str, checkpoint: Path, source: TrainableSource) -> Any:
    """Loads a checkpoint: see :meth:`fluid.TrialResult.load_checkpoint`.

    Args:
        run_dir: the run folder.
        trial_id: the trial, by the id under which it was submitted.
        checkpoint: the folder that ``save_checkpoint`` filled.
        source: gives the trial's trainable and config.

    Raises:
        FluidError: the checkpoint is damaged or gone.
        InvalidFieldError: the trainable cannot be read.
    """
    damage = damage_of(str(checkpoint.parent))
    if damage is not None:
        raise FluidError(f"the checkpoint {checkpoint} cannot be loaded: {damage}")
    folder = trial_folder(str(run_dir), trial_id)
    return load_saved(str(checkpoint.parent), source, trial_id=trial_id, folder=folder)


def stored_trainable(run_dir: Path, trial_id: str) -> tuple[Any, Mapping[str, Any]]:
    """Unpickles a trial's trainable and config from ``payloads.pkl``, which runs code that the file names.

    Raises:
        InvalidFieldError: the file is missing or damaged, lacks the trial, or this process cannot unpickle it.
    """
    for stored in reversed(read_payloads(run_dir / PAYLOADS).trials):
        if stored.trial_id == trial_id:
            trial = stored.load({})
            return trial.trainable, trial.config
    raise InvalidFieldError("trial_id", trial_id, f"is unknown in {run_dir / PAYLOADS}")
