"""Where the lanes on a machine keep what they write, and which process clears it.

Checkpoints are kept in host memory or on disk; see :mod:`fluid.lane.checkpoints.paths`. The driver's machine uses the
run's folder itself; so do others that share it with the driver.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tarfile
import tempfile
from contextlib import suppress
from io import BytesIO
from typing import NamedTuple

from fluid._logs import logger_of
from fluid._private_files import make_folder
from fluid.backends.hosts import memory as host_memory
from fluid.lane.checkpoints.files import checkpoints_like, locked_for_reading
from fluid.lane.checkpoints.paths import (
    FOLDER_PREFIX,
    checkpoints_folder,
    folder_name,
    folder_of_host,
    open_folder,
    settled_path,
)
from fluid.lane.checkpoints.seal import damage_of
from fluid.lane.checkpoints.store import persist_checkpoints
from fluid.lane.payloads import payloads_in_memory, payloads_on_disk
from fluid.processes.own_folders import is_file_of_user, require_own, temporary_folder
from fluid.processes.session_mark import kill_marked

#: The driver's machine; also the ``host`` of lanes that share its clock.
HERE = "localhost"
_log = logger_of(__name__)
_PREFIX = FOLDER_PREFIX
_NOTES = ".notes"
#: Seconds that processes which were killed have to be gone.
_LEAVE_S = 3.0


class SessionFolders(NamedTuple):
    """The folder that the processes of a session have in common.

    Attributes:
        token: its name, in hexadecimal digits.
        run_folder: folder of the run, on the driver's machine.
        temporary: whether it is deleted after the session.
    """

    token: str
    run_folder: str
    temporary: bool

    @property
    def marker(self) -> str:
        """A file that the driver makes; a machine that sees it shares the run's folder."""
        return os.path.join(self.run_folder, f".{_PREFIX}{self.token}")

    def mark(self, host: str) -> str:
        """Marks the session's processes on a machine; see :mod:`fluid.processes.session_mark`."""
        return f"{self.token}-{host}"


class HostFolders:
    """The folders of a session on this machine, in use by this process.

    Attributes:
        run_folder: for trials' output and checkpoints on disk.
        memory_folder: for checkpoints in host memory; empty if there can be none.
        payloads: for payloads that lanes read, in host memory, if there is any, and on disk.
        temporary: whether they are deleted after the session.
    """

    def __init__(self, session: SessionFolders, host: str) -> None:
        mark = session.mark(host)
        name = f"{_PREFIX}{mark}"
        shared = host == HERE or is_file_of_user(session.marker)
        self.run_folder = session.run_folder if shared else folder_of_host(session.run_folder, name)
        #: A run's folder that is shared is the driver's to delete.
        self.temporary = session.temporary and (host == HERE or not shared)
        try:
            os.makedirs(self.run_folder, mode=0o700, exist_ok=True)
            if not shared:
                _require_unplanted(session.run_folder, self.run_folder)
        except OSError as error:
            self.run_folder = temporary_folder(name)
            _log.warning("what trials write on this machine goes to %s: %s", self.run_folder, error)
        self.memory_folder = ""
        self._lock = self._run = -1
        folder = os.path.join(host_memory.RAM_DISK, name)
        if not os.path.isdir(folder):
            host_memory.sweep()
        with suppress(OSError):
            self._lock = host_memory.enter(folder, self.run_folder, mark, temporary=self.temporary)
            self.memory_folder = folder
            self._run = open_folder(self.run_folder)
        self.payloads: tuple[str, ...] = (payloads_on_disk(self.run_folder, name),)
        if self.memory_folder:
            self.payloads = (payloads_in_memory(self.memory_folder), *self.payloads)

    def note(self, lane_id: int) -> str:
        """The file that names the trial whose code a lane runs."""
        folder = os.path.join(self.memory_folder or self.run_folder, _NOTES)
        make_folder(folder)
        return os.path.join(folder, f"lane-{lane_id}")

    def place_for(self, trial_id: str, name: str, size: int) -> str:
        """Where to put a checkpoint of so many bytes that comes from another machine."""
        if host_memory.free_bytes(self.memory_folder) > 4 * size:
            return os.path.join(self.memory_folder, folder_name(trial_id), name)
        return os.path.join(checkpoints_folder(self.run_folder, folder_name(trial_id)), name)

    def leave(self, *, clear: bool) -> None:
        """Stops using the folders.

        Args:
            clear: whether the session is over; then the last one to leave empties host memory.
        """
        if self._lock >= 0:
            if clear and host_memory.is_last(self._lock, _LEAVE_S):
                host_memory.settle(self.memory_folder, self._lock, self._run)
            os.close(self._lock)
            if self._run >= 0:
                os.close(self._run)
            self._lock = self._run = -1
        elif clear:
            for folder in (os.path.join(self.run_folder, _NOTES), *self.payloads):
                shutil.rmtree(folder, ignore_errors=True)
            persist_checkpoints("", self.run_folder, temporary=self.temporary)


def _require_unplanted(run_folder: str, folder: str) -> None:
    """Refuses a run's folder on a machine that does not share it where another user has made it, or what is in it.

    Args:
        run_folder: the run's folder. Its path is known to all who can list its parent on the driver's machine.
        folder: this machine's folder within it.

    Raises:
        PermissionError: another user has.
    """
    require_own(folder)
    while folder != run_folder:
        folder = os.path.dirname(folder)
        if os.lstat(folder).st_uid not in (os.getuid(), 0):
            raise PermissionError(f"{folder} is another user's")


def clear_host(session: SessionFolders, host: str) -> None:
    """Empties a machine's memory after the session, and kills what its trials have left running. Runs there."""
    kill_marked(session.mark(host))
    HostFolders(session, host).leave(clear=True)


def locate(path: str, run_folder: str) -> str | None:
    """Returns where, on this machine, a checkpoint is; ``None`` if it is not here.

    Args:
        path: where it was written. From host memory it goes to disk when its session ends.
        run_folder: folder of the run, on the driver's machine.
    """
    if os.path.isdir(path):
        return path
    settled = settled_path(path, run_folder)
    return settled if settled is not None and os.path.isdir(settled) else None


def pack(path: str, run_folder: str) -> tuple[str, bytes]:
    """Returns a checkpoint as bytes. Runs on the machine that has it.

    Args:
        path: where it was written.
        run_folder: folder of the run, on the driver's machine.

    Returns:
        The name and the content of the checkpoint, or, if that is damaged or gone, of the best one that can replace it.

    Raises:
        FileNotFoundError: there is none.
    """
    parent, name = os.path.split(path)
    settled = settled_path(path, run_folder)
    disk = parent if settled is None else os.path.dirname(settled)
    for place in checkpoints_like(path, dict.fromkeys((parent, disk)), disk):
        with locked_for_reading(place) as exists:
            if exists and damage_of(place) is None:
                buffer = BytesIO()
                with tarfile.open(fileobj=buffer, mode="w") as archive:
                    archive.add(place, arcname="")
                return os.path.basename(place), buffer.getvalue()
    raise FileNotFoundError(f"the checkpoint {name} is damaged or has been deleted, and there is none before it")


def unpack(data: bytes, path: str) -> None:
    """Writes what :func:`pack` returned to a folder, which appears as a whole."""
    parent, name = os.path.split(path)
    make_folder(parent)
    draft = tempfile.mkdtemp(prefix=f".{name}", dir=parent)
    try:
        with tarfile.open(fileobj=BytesIO(data)) as archive:
            if hasattr(tarfile, "tar_filter"):  # Not in the first releases of Python 3.10 and 3.11.
                archive.extraction_filter = tarfile.tar_filter
            archive.extractall(draft)
        os.rename(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        if not os.path.isdir(path):
            raise


def new_session(run_dir: str | os.PathLike[str] | None) -> SessionFolders:
    """Makes the folder of a run, the one given or a new temporary one, for a new session."""
    folder = tempfile.mkdtemp(prefix="fluid-run-") if run_dir is None else os.path.abspath(run_dir)
    make_folder(folder)
    return SessionFolders(secrets.token_hex(16), folder, temporary=run_dir is None)
