"""Where a trial's newest checkpoint is that another member of a shared folder has written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fluid.backends.hosts import memory as host_memory
from fluid.engine.events import Checkpoint
from fluid.joint.membership import MEMBERS
from fluid.joint.state import Tenure
from fluid.lane.checkpoints.files import entries_of, iteration_of
from fluid.session.folder.resume import CheckpointFolders

#: Seconds to wait for the processes of a driver that was killed to move its checkpoints from memory to disk.
_PATIENCE_S = 5.0


def find_checkpoint(
    shared: Path, trial_id: str, tenures: Sequence[Tenure], folders: Mapping[str, str], left: Iterable[str] = ()
) -> Checkpoint | None:
    """The newest checkpoint of a trial that those have written who had it before; ``None`` if there is none.

    What a member has saved counts as far as its iterations count: it may have gone on after it was taken for dead.

    Args:
        shared: the shared folder.
        trial_id: the trial.
        tenures: whose it was.
        folders: the members' folders, by their names.
        left: those of members whose processes have ended on this machine, and may have left checkpoints in its memory.
    """
    best: Checkpoint | None = None
    for folder in left:
        host_memory.reclaim_of(str(shared / MEMBERS / folder), _PATIENCE_S)
    for tenure in reversed(tenures):
        # What is kept for its value may make way for a better one meanwhile: it comes last.
        for root in reversed(CheckpointFolders(str(shared / MEMBERS / folders[tenure.member])).of(trial_id)):
            for path in entries_of(root):
                iteration = iteration_of(path) if os.path.basename(path)[:1].isdigit() else 0
                if 0 < iteration <= tenure.reported and (best is None or iteration > best.iteration):
                    best = Checkpoint(iteration, path)
    return best
