"""A lane's store of checkpoints: in host memory, and on disk where that is full.

Host memory is a folder on a RAM disk, so that a checkpoint outlives the lane that wrote it. When it is full, the oldest
checkpoints move to disk, and readers find them there. A checkpoint is written under a temporary name and then renamed:
a lane that is killed while it saves leaves the older one intact. The last two of a trial are kept, because the driver
may use the last but one until the message about the last has arrived.

A trial may continue in another lane while the lane it leaves saves it once more, after calls that are repeated in the
new lane. So a checkpoint of a later iteration, or one that is being read, is not deleted; and a reader whose checkpoint
is gone takes another one of the same iteration.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fluid.lane.messages import folder_name, trials_folder

#: Share of the RAM disk that checkpoints leave free for other uses, such as data loaders.
_RESERVE = 0.1


class Stored(NamedTuple):
    """Where a checkpoint was written."""

    path: str
    in_memory: bool


class CheckpointStore:
    """Writes, finds and deletes the checkpoints of one lane's trials.

    Args:
        lane_id: part of the checkpoints' names, which are unique among lanes.
        run_folder: folder of the run, on disk.
        memory_folder: folder on a RAM disk; empty if there is none.
        memory_bytes: most bytes that this lane keeps there.
    """

    def __init__(self, lane_id: int, run_folder: str, memory_folder: str = "", memory_bytes: float = 0.0) -> None:
        self._lane_id = lane_id
        self._run_folder = run_folder
        self._memory_folder = memory_folder
        self._memory_bytes = memory_bytes
        self._written = 0
        #: Bytes of the checkpoints that this lane wrote to memory, by path, oldest first; some may be deleted by now.
        self._in_memory: dict[str, int] = {}
        #: Bytes of each trial's last checkpoint, the estimate for its next one.
        self._sizes: dict[str, int] = {}
        #: Name of the checkpoint from which each trial would be restored; its folder may change.
        self._last: dict[str, str] = {}

    def save(self, trial_id: str, iteration: int, write: Callable[[str], None], *, durable: bool = False) -> Stored:
        """Writes a checkpoint and deletes the trial's obsolete ones.

        Args:
            trial_id: the trial.
            iteration: iterations it has done.
            write: fills the empty folder it is given; called a second time, for disk, if memory is too small.
            durable: whether to write to disk at once.

        Raises:
            Exception: what ``write`` raised when writing to disk.
        """
        self._written += 1
        name = f"{iteration:08d}-{self._lane_id}-{self._written}"
        stored = None if durable else self._save_in_memory(trial_id, name, write)
        if stored is None:
            folder, _ = _write_atomically(self._disk(trial_id), name, write)
            stored = Stored(folder, False)
        self._delete_older(trial_id, iteration, {name, self._last.get(trial_id, "")})
        self._last[trial_id] = name
        return stored

    def persist(self, path: str) -> str:
        """Copies a checkpoint from host memory, of whichever lane, to disk; returns its path there.

        Raises:
            OSError: it is gone, or the disk is full, or it is not in host memory.
        """
        if not self._memory_folder or not path.startswith(os.path.join(self._memory_folder, "")):
            raise FileNotFoundError(path)
        on_disk = disk_path(path, self._run_folder)
        with locked_for_reading(path) as held:
            if held:
                _copy(path, os.path.dirname(on_disk))
        if not os.path.isdir(on_disk):
            raise FileNotFoundError(path)
        return on_disk

    @contextmanager
    def reading(self, path: str) -> Iterator[str]:
        """Yields the folder of a checkpoint, and keeps it in place meanwhile.

        Checkpoints in memory move to disk when space is needed and when the driver ends, see
        :func:`persist_checkpoints`.
        """
        on_disk = disk_path(path, self._run_folder)
        for place in _equivalent_paths(path, on_disk):
            with locked_for_reading(place) as held:
                if held:
                    yield place
                    return
        yield on_disk  # The reader raises an error that names the missing file.

    def protect(self, trial_id: str, path: str) -> None:
        """Keeps the checkpoint from which a trial was restored until after its next save."""
        self._last[trial_id] = os.path.basename(path)

    def forget_resident(self, trial_id: str) -> None:
        """Drops the records that matter only while the trial is resident; its checkpoints stay."""
        self._sizes.pop(trial_id, None)
        self._last.pop(trial_id, None)

    def delete(self, trial_id: str) -> None:
        """Deletes every checkpoint of a trial."""
        for root in self._roots(trial_id):
            for path in _within(root):
                shutil.rmtree(path, ignore_errors=True)
                self._in_memory.pop(path, None)
            with suppress(OSError):
                os.rmdir(root)
        self.forget_resident(trial_id)

    def _save_in_memory(self, trial_id: str, name: str, write: Callable[[str], None]) -> Stored | None:
        """Writes a checkpoint to memory; returns ``None`` if it does not fit."""
        if not self._make_room(self._sizes.get(trial_id, 0)):
            return None
        try:
            path, size = _write_atomically(self._memory(trial_id), name, write)
        except Exception:
            # Lack of space raises various errors. Any other error is raised again by writing to disk.
            return None
        self._sizes[trial_id] = size
        if not self._make_room(size, of_which_written=size):
            shutil.rmtree(path, ignore_errors=True)
            return None
        self._in_memory[path] = size
        return Stored(path, True)

    def _make_room(self, size: int, of_which_written: int = 0) -> bool:
        """Moves the oldest checkpoints of this lane to disk until one of that size fits; returns whether it does."""
        if self._memory_folder and size <= self._memory_bytes:
            for path in list(self._in_memory):
                if self._has_room(size, of_which_written):
                    return True
                if not self._spill(path):
                    break
        return self._has_room(size, of_which_written)

    def _spill(self, path: str) -> bool:
        """Moves a checkpoint to disk; returns whether it has left memory."""
        target = os.path.dirname(disk_path(path, self._run_folder))
        if not _delete(path, first=lambda: _copy(path, target)):  # It is being read, or the disk is full.
            return False
        self._in_memory.pop(path, None)
        return True

    def _has_room(self, size: int, of_which_written: int = 0) -> bool:
        if not self._memory_folder:
            return False
        if sum(self._in_memory.values()) + size > self._memory_bytes:
            self._in_memory = {path: bytes_ for path, bytes_ in self._in_memory.items() if os.path.isdir(path)}
            if sum(self._in_memory.values()) + size > self._memory_bytes:
                return False
        try:
            disk = shutil.disk_usage(self._memory_folder)
        except OSError:
            return False
        return disk.free - (size - of_which_written) >= _RESERVE * disk.total

    def _memory(self, trial_id: str) -> str:
        return os.path.join(self._memory_folder, folder_name(trial_id))

    def _disk(self, trial_id: str) -> str:
        return _on_disk(self._run_folder, folder_name(trial_id))

    def _roots(self, trial_id: str) -> list[str]:
        """The folders that may hold checkpoints of a trial."""
        return [self._memory(trial_id)] * bool(self._memory_folder) + [self._disk(trial_id)]

    def _delete_older(self, trial_id: str, iteration: int, kept: set[str]) -> None:
        """Deletes a trial's checkpoints up to an iteration, except those kept and those being read."""
        for root in self._roots(trial_id):
            for path in _within(root):
                if os.path.basename(path) not in kept and _iteration_of(path) <= iteration and _delete(path):
                    self._in_memory.pop(path, None)


def persist_checkpoints(memory_folder: str, run_folder: str, *, temporary: bool) -> None:
    """Empties host memory after the last lane has ended: the last checkpoint of each trial moves to disk.

    Args:
        memory_folder: the run's folder in host memory; empty if it has none.
        run_folder: the run's folder on disk.
        temporary: whether the run will not be resumed: both folders are then deleted.
    """
    if temporary:
        shutil.rmtree(run_folder, ignore_errors=True)
    elif memory_folder:
        for trial in _entries(memory_folder):
            checkpoints = [entry for entry in _entries(trial.path) if not entry.name.startswith(".")]
            if checkpoints:
                last = max(checkpoints, key=lambda entry: entry.stat().st_mtime_ns)
                with suppress(OSError, shutil.Error):
                    _copy(last.path, _on_disk(run_folder, trial.name))
    if memory_folder:
        shutil.rmtree(memory_folder, ignore_errors=True)


def disk_path(path: str, run_folder: str) -> str:
    """Returns the path that a checkpoint in host memory has once it has moved to disk.

    Args:
        path: of the checkpoint in host memory.
        run_folder: the run's folder on disk.
    """
    return os.path.join(_on_disk(run_folder, os.path.basename(os.path.dirname(path))), os.path.basename(path))


@contextmanager
def locked_for_reading(path: str) -> Iterator[bool]:
    """Keeps a checkpoint from being moved or deleted; yields whether it exists.

    Args:
        path: its folder.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        with suppress(OSError):  # A disk without locks; checkpoints on disk do not move.
            fcntl.flock(folder, fcntl.LOCK_SH)
        yield os.path.isdir(path)  # It may have moved before it was locked.
    finally:
        os.close(folder)


def _delete(path: str, first: Callable[[], None] = lambda: None) -> bool:
    """Calls ``first`` and deletes a checkpoint, unless it is being read; returns whether it no longer exists."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # Another lane has deleted it.
        return True
    try:
        with suppress(OSError):  # A disk without locks: readers have none either.
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        first()
    except (OSError, shutil.Error):
        return False
    else:
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(folder)


def _within(root: str) -> list[str]:
    """The paths of a folder's entries, newest first; none if the folder does not exist."""
    try:
        with os.scandir(root) as entries:
            return [entry.path for entry in sorted(entries, key=_written_at, reverse=True)]
    except OSError:
        return []


def _written_at(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_mtime_ns
    except OSError:  # It has just been deleted.
        return 0


def _iteration_of(path: str) -> int:
    """The iteration of a checkpoint or its draft; 0 for anything else."""
    number = os.path.basename(path).lstrip(".").partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _equivalent_paths(*paths: str) -> Iterator[str]:
    """Yields these paths of one checkpoint, then the others of its iteration in the same folders, newest first."""
    yield from paths
    for path in paths:
        for other in _within(os.path.dirname(path)):
            is_draft = os.path.basename(other).startswith(".")
            if not is_draft and _iteration_of(other) == _iteration_of(path):
                yield other


def _copy(checkpoint: str, target: str) -> None:
    """Copies a checkpoint to a folder, atomically."""
    name = os.path.basename(checkpoint)
    os.makedirs(target, mode=0o700, exist_ok=True)
    draft = os.path.join(target, f".{name}")
    shutil.rmtree(draft, ignore_errors=True)  # Left by a process that was killed at this point.
    shutil.copytree(checkpoint, draft)
    os.rename(draft, os.path.join(target, name))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _on_disk(run_folder: str, trial: str) -> str:
    return os.path.join(trials_folder(run_folder), trial, "checkpoints")


def _write_atomically(root: str, name: str, write: Callable[[str], None]) -> tuple[str, int]:
    """Writes a checkpoint's folder, atomically; returns its path and size in bytes."""
    os.makedirs(root, mode=0o700, exist_ok=True)
    path = os.path.join(root, name)
    draft = os.path.join(root, f".{name}")
    try:
        os.mkdir(draft, 0o700)
        write(draft)
        size = _size_of(draft)
        os.rename(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return path, size


def _size_of(folder: str) -> int:
    return sum(os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(folder) for name in names)
