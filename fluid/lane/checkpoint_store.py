"""Where a lane keeps checkpoints: host memory first, disk where that is full.

Host memory is a folder on a RAM disk, so that a checkpoint outlives the lane that wrote it. Where it is full, those
that were written longest ago go to disk, and whoever looks for one finds it there. A checkpoint is written under
another name and then renamed: a lane killed while it saves leaves the older one untouched. The last two of a trial
are kept, because the driver may act on the last but one while it has not heard of the last.

A trial may go on in another lane before the one it leaves has heard of it, which may save it once more then: after
calls that are made again elsewhere. So what is of a later iteration, or being read, is not deleted; and where a
checkpoint is gone, another one of the same iteration will do.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from fluid.lane.messages import folder_name, trials_folder

#: Free share of the RAM disk that checkpoints leave to others, such as data loaders.
_RESERVE = 0.1


class Stored(NamedTuple):
    """A checkpoint that was written."""

    path: str
    in_memory: bool


class CheckpointStore:
    """The checkpoints of one lane.

    Args:
        lane_id: makes names unique among lanes.
        run_folder: folder of the run, on disk.
        memory_folder: folder on a RAM disk; empty if there is none.
        memory_bytes: most bytes this lane keeps there.
    """

    def __init__(self, lane_id: int, run_folder: str, memory_folder: str = "", memory_bytes: float = 0.0) -> None:
        self._lane_id = lane_id
        self._run_folder = run_folder
        self._memory_folder = memory_folder
        self._memory_bytes = memory_bytes
        self._written = 0
        #: Bytes of what this lane wrote to memory, by path, oldest first; other lanes may have deleted some of it.
        self._in_memory: dict[str, int] = {}
        #: Bytes of each trial's last checkpoint: what its next one is expected to need.
        self._sizes: dict[str, int] = {}
        #: Name of the checkpoint a trial would go back to; where it is may change.
        self._last: dict[str, str] = {}

    def save(self, trial_id: str, iteration: int, write: Callable[[str], None]) -> Stored:
        """Writes a checkpoint and deletes those of the trial that nobody can need any more.

        Args:
            trial_id: whose.
            iteration: iterations it has done.
            write: fills the empty folder it is given; called again if memory turns out to be too small.

        Raises:
            Exception: what ``write`` raised when writing to disk.
        """
        self._written += 1
        name = f"{iteration:08d}-{self._lane_id}-{self._written}"
        stored = self._save_in_memory(trial_id, name, write)
        if stored is None:
            folder, _ = _fill(self._disk(trial_id), name, write)
            stored = Stored(folder, False)
        self._delete_older(trial_id, iteration, {name, self._last.get(trial_id, "")})
        self._last[trial_id] = name
        return stored

    @contextmanager
    def reading(self, path: str) -> Iterator[str]:
        """Gives the folder of a checkpoint, which stays where it is meanwhile.

        One in memory goes to disk where others need the room, or when its driver ends, see :func:`settle`.
        """
        on_disk = settled_path(path, self._run_folder)
        for place in _as_good_as(path, on_disk):
            with hold(place) as held:
                if held:
                    yield place
                    return
        yield on_disk  # whoever reads it says what is missing

    def restored(self, trial_id: str, path: str) -> None:
        """Notes that a trial was restored from ``path``, which must outlive its next save."""
        self._last[trial_id] = os.path.basename(path)

    def released(self, trial_id: str) -> None:
        """Forgets what is only of use while the trial is resident; its checkpoints stay."""
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
        self.released(trial_id)

    def _save_in_memory(self, trial_id: str, name: str, write: Callable[[str], None]) -> Stored | None:
        """Returns None if it does not fit."""
        if not self._make_room(self._sizes.get(trial_id, 0)):
            return None
        try:
            path, size = _fill(self._memory(trial_id), name, write)
        except Exception:
            # Out of space shows as one error or another. If it was not that, writing to disk raises it again.
            return None
        self._sizes[trial_id] = size
        if not self._make_room(size, of_which_written=size):
            shutil.rmtree(path, ignore_errors=True)
            return None
        self._in_memory[path] = size
        return Stored(path, True)

    def _make_room(self, size: int, of_which_written: int = 0) -> bool:
        """Has the oldest checkpoints of this lane go to disk until there is room in memory for one of that size."""
        if self._memory_folder and size <= self._memory_bytes:
            for path in list(self._in_memory):
                if self._has_room(size, of_which_written):
                    return True
                if not self._spill(path):
                    break
        return self._has_room(size, of_which_written)

    def _spill(self, path: str) -> bool:
        """Moves a checkpoint to disk; returns whether it is not in memory any more."""
        target = os.path.dirname(settled_path(path, self._run_folder))
        if not _delete(path, first=lambda: _copy(path, target)):  # Somebody reads it, or the disk is full.
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
        """The folders where checkpoints of a trial are."""
        return [self._memory(trial_id)] * bool(self._memory_folder) + [self._disk(trial_id)]

    def _delete_older(self, trial_id: str, iteration: int, kept: set[str]) -> None:
        """Deletes what a trial has of iterations up to that one, but for what is kept or being read."""
        for root in self._roots(trial_id):
            for path in _within(root):
                if os.path.basename(path) not in kept and _iteration_of(path) <= iteration and _delete(path):
                    self._in_memory.pop(path, None)


def settle(memory_folder: str, run_folder: str, *, temporary: bool) -> None:
    """Empties host memory once no lane runs any more: the last checkpoint of each trial goes to disk.

    Args:
        memory_folder: the run's folder in host memory; empty if it has none.
        run_folder: the run's folder on disk.
        temporary: nobody will go on with this run; both folders are deleted.
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


def settled_path(path: str, run_folder: str) -> str:
    """Where a checkpoint that was in host memory is once it has gone to disk.

    Args:
        path: of the checkpoint in host memory.
        run_folder: the run's folder on disk.
    """
    return os.path.join(_on_disk(run_folder, os.path.basename(os.path.dirname(path))), os.path.basename(path))


@contextmanager
def hold(path: str) -> Iterator[bool]:
    """Keeps a checkpoint from going to disk; gives whether it is there.

    Args:
        path: of its folder.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        with suppress(OSError):  # A disk that knows no locks, from which nothing goes anywhere.
            fcntl.flock(folder, fcntl.LOCK_SH)
        yield os.path.isdir(path)  # It may just have gone.
    finally:
        os.close(folder)


def _delete(path: str, first: Callable[[], None] = lambda: None) -> bool:
    """Deletes a checkpoint that nobody reads, when something was done; returns whether it is not there any more."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # Another lane has deleted it.
        return True
    try:
        with suppress(OSError):  # A disk that knows no locks, where nobody reads under one.
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
    """The paths of what is in a folder, newest first; none if it is not there."""
    try:
        with os.scandir(root) as entries:
            return [entry.path for entry in sorted(entries, key=_written_at, reverse=True)]
    except OSError:
        return []


def _written_at(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_mtime_ns
    except OSError:  # it has just gone
        return 0


def _iteration_of(path: str) -> int:
    """The iteration of a checkpoint, or of the draft of one; 0 for anything else."""
    number = os.path.basename(path).lstrip(".").partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _as_good_as(*paths: str) -> Iterator[str]:
    """Gives these paths of one checkpoint, then the others beside them that are of its iteration, newest first."""
    yield from paths
    for path in paths:
        for other in _within(os.path.dirname(path)):
            is_draft = os.path.basename(other).startswith(".")
            if not is_draft and _iteration_of(other) == _iteration_of(path):
                yield other


def _copy(checkpoint: str, target: str) -> None:
    """Copies a checkpoint to a folder, where it appears as a whole."""
    name = os.path.basename(checkpoint)
    os.makedirs(target, mode=0o700, exist_ok=True)
    draft = os.path.join(target, f".{name}")
    shutil.rmtree(draft, ignore_errors=True)  # Of somebody who was killed at this point.
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


def _fill(root: str, name: str, write: Callable[[str], None]) -> tuple[str, int]:
    """Has a folder written and moved to its place; returns its path and size in bytes."""
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
