"""The logs that Tune keeps of a trial, and may lose."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow.fs

from fluid.integrations.ray_tune.private_api import Trial

_log = logging.getLogger(__name__)
#: What Tune replaces by its uploaded copies whenever a trial with a checkpoint starts.
_LOGS = ("result.json", "progress.csv")


def save_logs(trial: Trial) -> None:
    """To be called before Tune replaces a trial's logs by what was uploaded, or it would lose lines.

    It uploads them where they have more than what was uploaded. Where files are written in place, an upload that runs
    has emptied some: it is waited for. An object store has the old ones till the new ones are complete.
    """
    if trial.checkpoint is None:
        return
    files, folder = trial.storage.storage_filesystem, trial.storage.trial_fs_path
    if files.type_name == "local":
        try:
            trial.storage.syncer.wait()
        except Exception as error:  # Tune would not have heard of it before its next upload.
            _log.warning("Uploading what Tune knows to %s failed: %s", trial.storage.experiment_fs_path, error)
    for name in _LOGS:
        local, remote = Path(trial.local_path, name), Path(folder, name).as_posix()
        if not local.exists():
            continue
        uploaded = files.get_file_info(remote)
        if uploaded.type == pyarrow.fs.FileType.File and uploaded.size < local.stat().st_size:
            pyarrow.fs.copy_files(str(local), remote, destination_filesystem=files)
