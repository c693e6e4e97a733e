"""The folders of a run folder that lanes write to."""

from __future__ import annotations

import os
from urllib.parse import quote, unquote

#: Longest file name that every file system accepts, less room for suffixes, bytes.
_LONGEST_NAME = 200


def folder_name(trial_id: str) -> str:
    """Returns the name of a trial's folder: its id, escaped and shortened where needed; distinct for distinct ids."""
    name = quote(trial_id, safe=" +=,@#()[]{}").replace(".", "%2E")
    if len(name) <= _LONGEST_NAME:
        return name
    import hashlib

    return f"{name[:_LONGEST_NAME]}%{hashlib.sha256(trial_id.encode()).hexdigest()[:32]}"


def trial_of_folder(name: str) -> str | None:
    """Returns the id of the trial that has a folder of that name; ``None`` if the name was shortened."""
    trial_id = unquote(name)
    return trial_id if folder_name(trial_id) == name else None


def folder_of_host(run_folder: str, name: str) -> str:
    """Returns the folder, within a run's folder, of a machine that shares the disk but not the run's folder itself.

    Args:
        run_folder: the run's folder.
        name: the machine's; ``"*"`` for a pattern that matches the folders of all.
    """
    return os.path.join(run_folder, "hosts", name)


def trials_folder(run_folder: str) -> str:
    """Returns the folder that holds the trials' folders."""
    return os.path.join(run_folder, "trials")


def trial_folder(run_folder: str, trial_id: str) -> str:
    """Returns the folder of a trial's output and checkpoints on disk."""
    return os.path.join(trials_folder(run_folder), folder_name(trial_id))


def open_folder(folder: str) -> int:
    """Opens a folder, so that :func:`path_now` can tell where it is.

    Raises:
        OSError: it is not there, or this process has no descriptors left.
    """
    return os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def path_now(descriptor: int) -> str | None:
    """Returns the present path of a folder, which may have been moved; ``None`` if it was deleted.

    Args:
        descriptor: as :func:`open_folder` returned it.

    Raises:
        OSError: that cannot be told: its disk was unmounted, or does not answer.
    """
    folder = os.fstat(descriptor)
    if not folder.st_nlink:
        return None
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if not os.path.samestat(os.stat(path), folder):
        raise FileNotFoundError(path)
    return path


def own_folder(run_folder: str, trial_id: str) -> str:
    """Returns the folder of what a trial's own code writes, in which no name is taken."""
    return os.path.join(trial_folder(run_folder, trial_id), "files")
