"""Trials as they were submitted, pickled, so that a session whose driver was killed can be resumed."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fluid.errors import InvalidFieldError
from fluid.trainables.pickling import dump_config, dump_trainable
from fluid.trialgroup import Trial

FILE_NAME = "payloads.pkl"


@dataclass(frozen=True, slots=True)
class _Payload:
    """One trial; its trainable is written once, before the first trial that has it."""

    group_id: str
    group_name: str
    trainable: int
    config: bytes
    fields: dict[str, Any]


class PayloadWriter:
    """Appends trials to a file of pickles.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] = (folder / FILE_NAME).open("ab")
        #: trainables written so far; held, so that an id is not used again for another one
        self._known: dict[int, tuple[int, Any]] = {}

    def write(self, group_id: str, group_name: str, trials: list[Trial]) -> None:
        """Appends trials of a group.

        Raises:
            InvalidFieldError: a trainable or config cannot be pickled; nothing is written then.
        """
        frames: list[object] = []
        known = dict(self._known)
        for trial in trials:
            key = id(trial.trainable)
            if key not in known:
                known[key] = (len(known), trial.trainable)
                frames.append((known[key][0], dump_trainable(trial.trainable)))
            fields = {
                "budget": trial.budget,
                "priority": trial.priority,
                "trial_id": trial.id,
                "profile_key": trial.profile_key,
                "max_width": trial.max_width,
                "memory": trial.memory,
                "retry_errors": trial.retry_errors,
                "follow_up_iterations": trial.follow_up_iterations,
            }
            frames.append(_Payload(group_id, group_name, known[key][0], dump_config(trial.config), fields))
        self._known = known
        self._file.write(b"".join(map(pickle.dumps, frames)))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_payloads(folder: Path) -> Iterator[tuple[str, str, Trial]]:
    """Gives (group id, group name, trial) in the order written; a last one that is cut off is passed over.

    Raises:
        InvalidFieldError: the folder has no such file.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise InvalidFieldError("run_dir", str(folder), f"has no {FILE_NAME}, so it cannot be resumed")
    trainables: dict[int, Any] = {}
    with path.open("rb") as file:
        while True:
            try:
                frame = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return
            if isinstance(frame, _Payload):
                config = pickle.loads(frame.config)
                trial = Trial(trainables[frame.trainable], config, **frame.fields)
                yield frame.group_id, frame.group_name, trial
            else:
                key, pickled = frame
                trainables[key] = pickle.loads(pickled)
