"""Uploads the logs that Tune keeps of a trial before Tune replaces them by older copies."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow.fs

from fluid.integrations.ray_tune.private_api import Trial

_log = logging.getLogger(__name__)
#: Files that Tune replaces by their uploaded copies whenever a trial with a checkpoint starts.
_LOGS = ("result.json", "progress.csv")


def save_logs(trial: Trial) -> None:
    """Uploads a trial's logs where they are longer than the uploaded copies, so that Tune loses no lines.

    To be called before Tune replaces the logs. A local file system is written in place, so an upload in progress may
    have emptied some of the copies: this function waits for it. An object store keeps the old copies until the new
    ones are complete.
    """
    if trial.checkpoint is None:
        return
    files, folder = trial.storage.storage_filesystem, trial.storage.trial_fs_path
    if files.type_name == "local":
        try:
            trial.storage.syncer.wait()
        except Exception as error:  # Tune would notice this failure only at its next upload.
            _log.warning("Uploading the experiment's state to %s failed: %s", trial.storage.experiment_fs_path, error)
    for name in _LOGS:
        local, remote = Path(trial.local_path, name), Path(folder, name).as_posix()
        if not local.exists():
            continue
        uploaded = files.get_file_info(remote)
        if uploaded.type == pyarrow.fs.FileType.File and uploaded.size < local.stat().st_size:
            pyarrow.fs.copy_files(str(local), remote, destination_filesystem=files)
