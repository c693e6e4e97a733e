"""Reads the run folder of a killed session, so that another session can resume it."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from fluid.engine.events import Checkpoint, GroupRecovered
from fluid.engine.journal import Recovered, replay
from fluid.errors import InvalidFieldError
from fluid.lane.checkpoint_store import disk_path
from fluid.session.run_folder import read_trials
from fluid.trialgroup import Trial

#: Seconds to wait for the processes of the killed session to move their checkpoints to disk.
_PATIENCE = 10.0
_PAUSE = 0.05


@dataclass(frozen=True)
class LeftSession:
    """A session that was killed, as its run folder tells.

    Attributes:
        folder: its run folder.
        recovered: how its trials stood, by its journal.
        groups: name and trials of each group, by group id.
    """

    folder: Path
    recovered: Recovered
    groups: dict[str, tuple[str, dict[str, Trial]]]

    def events(self, at: float) -> list[GroupRecovered]:
        """The events that bring a new engine to where the session was.

        Args:
            at: seconds, on the clock of the session that goes on.
        """
        found: dict[Checkpoint, Checkpoint | None] = {}

        def standing(checkpoint: Checkpoint | None) -> Checkpoint | None:
            if checkpoint is not None and checkpoint not in found:
                found[checkpoint] = self._find(checkpoint)
            return found[checkpoint] if checkpoint is not None else None

        recovered = replace(
            self.recovered,
            groups={
                group_id: {
                    trial_id: replace(history, checkpoint=standing(history.checkpoint))
                    for trial_id, history in trials.items()
                }
                for group_id, trials in self.recovered.groups.items()
            },
        )
        return recovered.events(at, lambda checkpoint: os.path.exists(checkpoint.path))

    def _find(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """The checkpoint at its present path: one in host memory is moved to disk once no lane runs."""
        on_disk = disk_path(checkpoint.path, str(self.folder)) if checkpoint.in_memory else checkpoint.path
        if os.path.exists(on_disk):
            return replace(checkpoint, path=on_disk, in_memory=False)
        return checkpoint if os.path.exists(checkpoint.path) else None


def read_session(run_dir: str | Path) -> LeftSession:
    """Reads the folder of a session that was killed.

    Raises:
        InvalidFieldError: it is not the folder of a session, or its files cannot be read.
    """
    folder = Path(run_dir).expanduser().absolute()
    if not (folder / "journal.jsonl").is_file():
        raise InvalidFieldError("run_dir", str(run_dir), "is not the folder of a session: it has no journal.jsonl")
    recovered = replay((folder / "journal.jsonl").read_text(encoding="utf-8").splitlines())
    groups: dict[str, tuple[str, dict[str, Trial]]] = {}
    for group_id, name, trial in read_trials(folder):
        # A trial that was forgotten is not in the journal.
        if group_id in recovered.groups:
            trials = groups.setdefault(group_id, (name, {}))[1]
            if trial.id in recovered.groups[group_id]:
                trials[trial.id] = trial
    _wait_until_settled(recovered)
    return LeftSession(folder, recovered, groups)


def _wait_until_settled(recovered: Recovered) -> None:
    """Waits while the killed session's processes still move checkpoints to disk."""
    in_memory = {
        os.path.dirname(os.path.dirname(history.checkpoint.path))
        for trials in recovered.groups.values()
        for history in trials.values()
        if history.checkpoint is not None and history.checkpoint.in_memory
    }
    waiter, waited = threading.Event(), 0.0
    while waited < _PATIENCE and any(map(os.path.exists, in_memory)):
        waiter.wait(_PAUSE)
        waited += _PAUSE
