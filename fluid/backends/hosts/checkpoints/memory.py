"""The checkpoints in a session's folder in host memory: finds them, and moves them to disk and back."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from fluid.backends.hosts.checkpoints.values import StoredCheckpoint
from fluid.lane.checkpoints.files import (
    LinkedCopies,
    copy_atomically,
    delete_at_once,
    iteration_of,
    locked_for_reading,
    move,
    newest_in,
)
from fluid.lane.checkpoints.paths import checkpoints_folder
from fluid.lane.checkpoints.seal import damage_of, held_bytes, is_shared, sealed_bytes


class MemoryFolder:
    """A session's folder in host memory; only one thread at a time scans it.

    Args:
        memory_folder: the folder.
        run_folder: the run's folder on this machine, on disk.
    """

    def __init__(self, memory_folder: str, run_folder: str) -> None:
        self._memory_folder = memory_folder
        self._run_folder = run_folder
        #: Of those found in the last scan that share their files with none, by path: their bytes never change.
        self._bytes: dict[str, int] = {}
        self._copies = LinkedCopies()

    def scan(self, lost: Collection[int] = ()) -> tuple[list[StoredCheckpoint], int]:
        """Returns the checkpoints that are there, and the bytes that drafts will have, as far as that can be told.

        Args:
            lost: lanes that have ended, whose drafts are deleted.
        """
        found: list[StoredCheckpoint] = []
        sizes: dict[str, int] = {}
        drafts = 0
        for trial in _folders(self._memory_folder):
            if trial.name.startswith("."):
                continue
            saved: list[StoredCheckpoint] = []
            being_written: list[str] = []
            for entry in _folders(trial.path):
                if entry.name.startswith("."):
                    being_written.append(entry.path)
                elif (one := self._read(entry, trial.name, sizes)) is not None:
                    saved.append(one)
            found += saved
            for path in being_written:
                if _lane_of(path) in lost:
                    delete_at_once(path)
                else:
                    drafts += max(_bytes_in(path), self._usual_bytes(trial.name, saved))
        self._bytes = sizes
        return found, drafts

    def _read(self, entry: os.DirEntry[str], trial: str, sizes: dict[str, int]) -> StoredCheckpoint | None:
        """Returns a checkpoint; notes its size among ``sizes`` where that will not change."""
        shared = is_shared(entry.path)
        size = held_bytes(entry.path) if shared else self._bytes.get(entry.path) or sealed_bytes(entry.path)
        if size is None:
            return None
        if not shared:
            sizes[entry.path] = size
        try:
            written = entry.stat().st_mtime_ns
        except OSError:  # It has just been deleted.
            return None
        return StoredCheckpoint(entry.path, trial, iteration_of(entry.path), size, written)

    def _usual_bytes(self, trial: str, saved: Sequence[StoredCheckpoint]) -> int:
        """The bytes of a trial's checkpoints, of which one is being written; 0 if there is none yet."""
        if saved:
            return max(one.bytes for one in saved)
        on_disk = newest_in(checkpoints_folder(self._run_folder, trial))
        return max((sealed_bytes(path) or 0 for path in on_disk), default=0)

    def place(self, trial: str, name: str) -> str:
        """Returns where a checkpoint of a trial, given the name of its folder, is in memory."""
        return os.path.join(self._memory_folder, trial, name)

    def to_disk(self, one: StoredCheckpoint) -> str | None:
        """Moves a checkpoint to disk; returns where, or ``None`` if it is being read, or gone.

        Raises:
            OSError, shutil.Error: the disk is full, or the checkpoint is being deleted.
        """
        folder = checkpoints_folder(self._run_folder, one.trial)
        return os.path.join(folder, os.path.basename(one.path)) if move(one.path, folder, self._copies) else None

    def on_disk(self, trial: str, path: str) -> StoredCheckpoint | None:
        """Finds a checkpoint on this machine's disk, given where it was written."""
        name = os.path.basename(path)
        for place in dict.fromkeys((os.path.join(checkpoints_folder(self._run_folder, trial), name), path)):
            size = sealed_bytes(place)
            if size is not None:
                return StoredCheckpoint(place, trial, iteration_of(name), size)
        return None

    def from_disk(self, path: str, trial: str) -> None:
        """Copies a checkpoint into memory.

        Raises:
            OSError, shutil.Error: it is damaged or gone, or memory is full.
        """

        def require_whole(draft: str) -> None:
            if (damage := damage_of(draft)) is not None:
                raise OSError(f"{path} is damaged: {damage}")

        folder = os.path.join(self._memory_folder, trial)
        with locked_for_reading(path) as exists:
            if not exists:
                raise FileNotFoundError(path)
            copy_atomically(path, folder, require_whole)
        if not os.path.isdir(path):  # Its trial does not need it any more.
            delete_at_once(os.path.join(folder, os.path.basename(path)))
            raise FileNotFoundError(path)


def _folders(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _bytes_in(folder: str) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # It has just been deleted.
                continue
    return total


def _lane_of(draft: str) -> int:
    """The lane that writes a draft; -1 if a host copies it."""
    parts = os.path.basename(draft).lstrip(".").split("-")
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal() else -1
