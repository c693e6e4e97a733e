"""What the path of a checkpoint tells: which machine wrote it, and where on disk it is once host memory was cleared.

Checkpoints are kept in host memory or on disk (:mod:`fluid.lane.checkpoints.store`). Their paths never occur on two
machines, so a lane finds the very checkpoint that it is to restore, or none.
"""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote

# -- run paths -----------------------------------------------------------------------------------
#
# The folders of a run folder that lanes write to.


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


def own_folder_beside(checkpoint: str) -> str | None:
    """Returns the own folder of a checkpoint's trial, of whichever run; ``None`` if the checkpoint is not on its disk.

    Args:
        checkpoint: its path.
    """
    parent = os.path.dirname(checkpoint)
    return os.path.join(os.path.dirname(parent), "files") if _ON_DISK.search(parent) else None


# -- checkpoint paths ----------------------------------------------------------------------------


#: What the names of a session's folders begin with, in host memory and within the run's folder.
FOLDER_PREFIX = "fluid-"
#: The name of the driver's machine.
_DRIVERS = "localhost"
#: A folder of one machine. Sessions of version 0.1, which may be resumed, have another prefix on Ray.
_FOLDER_OF_HOST = re.compile(rf"/{FOLDER_PREFIX}(?:ray-)?[0-9a-f]{{16,}}-(?P<host>[^/]+)/")
#: The folders of a trial's checkpoints on disk.
_ON_DISK = re.compile(r"/trials/[^/]+/(?:checkpoints|kept)\Z")


def host_of(path: str) -> str:
    """Returns the name of the machine that wrote a checkpoint; ``"localhost"`` for the driver's.

    Args:
        path: where it was written.
    """
    found = _FOLDER_OF_HOST.search(path)
    return _DRIVERS if found is None else found["host"]


def trial_folder_name(path: str) -> str:
    """Returns the name of the folder of a checkpoint's trial, in host memory and on disk."""
    parent = os.path.dirname(path)
    return os.path.basename(os.path.dirname(parent) if _ON_DISK.search(parent) else parent)


def settled_path(path: str, run_folder: str) -> str | None:
    """Returns where, on disk, a checkpoint goes that is in host memory; ``None`` for one that was written to disk.

    Args:
        path: where it was written.
        run_folder: folder of the run, on the driver's machine.
    """
    parent, name = os.path.split(path)
    folder, trial = os.path.split(parent)
    if _ON_DISK.search(parent) or not os.path.basename(folder).startswith(FOLDER_PREFIX):
        return None
    base = run_folder if host_of(path) == _DRIVERS else folder_of_host(run_folder, os.path.basename(folder))
    return os.path.join(checkpoints_folder(base, trial), name)


def checkpoints_folder(run_folder: str, trial: str) -> str:
    """Returns the folder on disk for the checkpoints of a trial.

    Args:
        run_folder: a run's, or that of a machine within it.
        trial: name of the trial's folder.
    """
    return os.path.join(trials_folder(run_folder), trial, "checkpoints")


def kept_folder(run_folder: str, trial: str) -> str:
    """Returns the folder for the checkpoints of a trial that outlive the run: as :func:`checkpoints_folder`."""
    return os.path.join(trials_folder(run_folder), trial, "kept")
