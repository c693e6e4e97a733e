"""The folders of checkpoints: names, atomic writing and copying, locks for reading, deletion."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from fluid._private_files import close_to_others, make_folder
from fluid.keeping import FACTS
from fluid.lane.checkpoints.paths import checkpoints_folder, trial_folder_name
from fluid.lane.checkpoints.seal import (
    LANE_STATE,
    SEAL,
    complete_seal,
    damage_by_lengths,
    damage_of,
    is_of_the_process,
    is_shared,
    seal,
    unseal,
)

T = TypeVar("T")


def checkpoints_like(path: str, roots: Iterable[str], disk: str) -> Iterator[str]:
    """Yields a checkpoint's folder, and those of others that can replace it, the best first.

    Args:
        path: where the checkpoint was written.
        roots: the folders in which checkpoints of its trial may be.
        disk: the one to which those in memory move.

    Raises:
        OSError: this process cannot open files at the moment.
    """
    name, iteration = os.path.basename(path), iteration_of(path)
    roots = tuple(roots)
    yield from dict.fromkeys((path, os.path.join(disk, name), *(os.path.join(root, name) for root in roots)))
    others = [other for root in roots for other in entries_of(root) if os.path.basename(other)[:1].isdigit()]
    for other in sorted(others, key=iteration_of, reverse=True):
        if os.path.basename(other) != name and iteration_of(other) <= iteration:
            yield from dict.fromkeys((other, os.path.join(disk, os.path.basename(other))))


def checkpoint_name(iteration: int, lane_id: int, number: int) -> str:
    """Returns the name of a checkpoint's folder.

    Args:
        iteration: iterations done by its state.
        lane_id: the lane that wrote it.
        number: how many that lane had written then, which makes names unique.
    """
    return f"{iteration:08d}-{lane_id}-{number}"


@contextmanager
def locked_for_reading(path: str) -> Iterator[bool]:
    """Keeps a checkpoint from being moved or deleted; yields whether it exists.

    Args:
        path: its folder.

    Raises:
        OSError: this process cannot open files at the moment.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if is_of_the_process(error):
            raise
        yield False
        return
    try:
        with suppress(OSError):  # A disk without locks; checkpoints on disk do not move.
            fcntl.flock(folder, fcntl.LOCK_SH)
        yield os.path.isdir(path)  # It may have moved before it was locked.
    finally:
        os.close(folder)


def discard_kept(path: str, *, demote: bool) -> None:
    """Removes a checkpoint from those that outlive the run.

    Args:
        path: its folder.
        demote: whether it stays a checkpoint from which the trial can be restored.
    """
    kept, name = os.path.split(path)
    if demote:
        folder = checkpoints_folder(os.path.dirname(os.path.dirname(os.path.dirname(kept))), trial_folder_name(path))
        with suppress(OSError):
            make_folder(folder)
            os.rename(path, os.path.join(folder, name))
    else:
        delete_unread(path)
    with suppress(OSError):
        os.rmdir(kept)


def delete_unread(path: str, freed: Callable[[], object] = lambda: None) -> bool:
    """Deletes a checkpoint, unless it is being read; returns whether it no longer exists.

    Args:
        path: its folder.
        freed: called if this process has deleted it, and not another one at the same time.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return not os.path.isdir(path)  # Another lane has deleted it, or it cannot be opened at the moment.
    try:
        with suppress(OSError):  # A disk without locks: readers have none either.
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        if delete_at_once(path):
            freed()
        return True
    finally:
        os.close(folder)


def delete_at_once(path: str) -> bool:
    """Deletes a checkpoint or a draft; returns whether this process did, and not another one at the same time."""
    # Renamed first, so that readers find it whole or not at all: names with a dot are those of drafts.
    head, name = os.path.split(path)
    dying = os.path.join(head, f".{name.lstrip('.')}.deleted")
    try:
        os.rename(path, dying)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        dying = path
    shutil.rmtree(dying, ignore_errors=True)
    return True


#: Most files of which a process remembers where their copies are.
_MOST_COPIES = 10_000


def _link_unchanged(folder: str, path: str, target: str, original: os.stat_result) -> None:
    """Links to a file of a checkpoint, if the code of a trial that it was given to has not changed it.

    Raises:
        OSError: it has, or may be about to; or there can be no link.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.stat(path)
        if (found.st_size, found.st_mtime_ns) != (original.st_size, original.st_mtime_ns):
            raise FileNotFoundError(path)
        os.link(path, target)
    finally:
        os.close(descriptor)


class LinkedCopies:
    """Copies files, one of several checkpoints once: the copies have it in common, too."""

    def __init__(self) -> None:
        #: By what tells the file from all others, also from a later one in its place: folder and path of its copy.
        self._copies: dict[tuple[int, ...], tuple[str, str]] = {}
        self._new: dict[tuple[int, ...], str] = {}

    def copy(self, source: str, target: str) -> None:
        """Copies a file; to be given to :func:`copy_checked` or :func:`move`."""
        found = os.stat(source)
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if key in self._copies:  # Also the last one, which has it in common with none any more.
            with suppress(OSError):  # The first copy is gone or being read, or there can be no links.
                _link_unchanged(*self._copies[key], target, found)
                return
        if found.st_nlink > 1:
            self._new[key] = target
        shutil.copy2(source, target)

    def begin(self) -> None:
        """Begins a further checkpoint; the one before may have failed."""
        self._new.clear()

    def made(self, draft: str, path: str) -> None:
        """Takes note that what was copied to a draft has its own name now."""
        if len(self._copies) > _MOST_COPIES:
            self._copies.clear()
        self._copies |= {key: (path, path + copy[len(draft) :]) for key, copy in self._new.items()}


def move(path: str, folder: str, copies: LinkedCopies | None = None) -> bool:
    """Moves a checkpoint to a folder on another disk, which lanes can read meanwhile; returns whether it has gone.

    If it is being read in the end, it is in both places.

    Raises:
        OSError, shutil.Error: it cannot be copied, as the disk is full or it is deleted meanwhile.
    """
    with locked_for_reading(path) as exists:
        if not exists:
            return False
        copy_checked(path, folder, damage_by_lengths, copies)  # Lanes may be waiting for the room.
    deleted: list[str] = []
    has_gone = delete_unread(path, lambda: deleted.append(path))
    if has_gone and not deleted:  # Its trial needs it no longer, and so not the copy, which its lane may not have seen.
        shutil.rmtree(os.path.join(folder, os.path.basename(path)), ignore_errors=True)
    return bool(deleted)


def entries_of(root: str) -> list[str]:
    """The paths of a folder's entries, newest first; none if the folder does not exist."""
    try:
        with os.scandir(root) as entries:
            return [entry.path for entry in sorted(entries, key=_written_at, reverse=True)]
    except OSError as error:
        if is_of_the_process(error):
            raise
        return []


def _written_at(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_mtime_ns
    except OSError:  # It has just been deleted.
        return 0


def iteration_of(path: str) -> int:
    """Returns the iteration of a checkpoint or its draft, which its name tells; 0 for anything else."""
    number = os.path.basename(path).lstrip(".").partition("-")[0]
    return int(number) if number.isdecimal() else 0


def copy_atomically(
    checkpoint: str,
    target: str,
    check: Callable[[str], None] = lambda draft: None,
    copies: LinkedCopies | None = None,
) -> None:
    """Copies a checkpoint to a folder, atomically, unless it is there.

    Args:
        checkpoint: its folder.
        target: the folder that is to hold it.
        check: called with the copy before that has its name; what it raises ends the copy.
        copies: copies the files; ``None`` for each one by itself.
    """
    name = os.path.basename(checkpoint)
    path = os.path.join(target, name)
    if os.path.isdir(path):
        return
    # Each copy has a draft of its own: a lane and the host may copy the same checkpoint at the same time.
    draft = _made_in(target, lambda: tempfile.mkdtemp(prefix=f".{name}.", dir=target))
    try:
        complete_seal(checkpoint)
        copies = copies or LinkedCopies()
        copies.begin()
        shutil.copytree(checkpoint, draft, dirs_exist_ok=True, copy_function=copies.copy)
        check(draft)
        os.rename(draft, path)
        copies.made(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        if not os.path.isdir(path):
            raise


def share(checkpoint: str, root: str, name: str) -> str:
    """Makes another checkpoint of the same state, atomically, which has its files in common; returns its path.

    The one stays whole whatever becomes of the other, as files of checkpoints are not changed: code that could do so
    gets files of its own (:func:`unshare`).

    Args:
        checkpoint: the folder of the one that there is.
        root: the folder that is to hold the other.
        name: the other's name, which is not taken.

    Raises:
        OSError, shutil.Error: the two cannot have files in common: they are on different disks, say, or the one is
            being read, by code that may have been given its own files.
    """
    folder = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Who reads it from now on finds that they are shared.
        return _make_alike(checkpoint, root, name, _link)
    finally:
        os.close(folder)


def copy_as(checkpoint: str, root: str, name: str) -> str:
    """As :func:`share`, with files of its own.

    Raises:
        OSError, shutil.Error: it cannot be copied, as the disk is full, say.
    """
    complete_seal(checkpoint)
    return _make_alike(checkpoint, root, name, shutil.copy2)


def _make_alike(checkpoint: str, root: str, name: str, copy: Callable[[str, str], object]) -> str:
    path, draft = os.path.join(root, name), os.path.join(root, f".{name}")
    try:
        _made_in(root, lambda: os.mkdir(draft, 0o700))
        shutil.copytree(checkpoint, draft, copy_function=copy, dirs_exist_ok=True)
        unseal(draft, FACTS)  # The other is not kept.
        os.rename(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return path


def _link(source: str, target: str) -> None:
    if os.path.islink(source):
        shutil.copy2(source, target)  # The link counts as the file.
    else:
        os.link(source, target)


def unshare(checkpoint: str) -> None:
    """Gives a checkpoint files of its own, so that code that writes to them changes no other one.

    Each file is replaced as a whole, so that others may read it meanwhile.

    Raises:
        OSError: there is no room.
    """
    if not is_shared(checkpoint):
        return
    paths = [os.path.join(place, name) for place, _, names in os.walk(checkpoint) for name in names]
    # Those by which it is known that files are shared come last.
    for path in sorted(paths, key=lambda path: os.path.basename(path) in (SEAL, LANE_STATE)):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            descriptor, draft = tempfile.mkstemp(prefix=".", dir=os.path.dirname(checkpoint))
            os.close(descriptor)
            try:
                shutil.copy2(path, draft)
                os.replace(draft, path)
            except BaseException:
                os.unlink(draft)
                raise


def copy_checked(
    checkpoint: str,
    target: str,
    damage_in: Callable[[str], str | None] = damage_of,
    copies: LinkedCopies | None = None,
) -> None:
    """Copies a checkpoint whose original is then to be deleted; a copy that is damaged, though it is not, is none.

    Args:
        checkpoint: its folder.
        target: the folder that is to hold it.
        damage_in: says what is wrong with a checkpoint.
        copies: copies the files; ``None`` for each one by itself.

    Raises:
        OSError, shutil.Error: it cannot be copied whole, as the disk is full.
    """

    def require_whole(copy: str) -> None:
        damage = damage_in(copy)
        if damage is not None and damage_in(checkpoint) is None:
            raise OSError(f"its copy in {target} is damaged: {damage}")

    path = os.path.join(target, os.path.basename(checkpoint))
    if os.path.isdir(path):
        try:
            require_whole(path)
        except OSError:
            delete_at_once(path)
    copy_atomically(checkpoint, target, require_whole, copies)


def write_atomically(root: str, name: str, write: Callable[[str], None], *, summed: bool = True) -> tuple[str, int]:
    """Writes a checkpoint's folder, atomically, sealed as :func:`seal` says; returns its path and size in bytes."""
    path = os.path.join(root, name)
    draft = os.path.join(root, f".{name}")
    try:
        _made_in(root, lambda: os.mkdir(draft, 0o700))
        write(draft)
        close_to_others(draft)
        size = seal(draft, summed=summed)
        os.rename(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return path, size


def _made_in(folder: str, make: Callable[[], T]) -> T:
    """Makes something in a folder that another process removes whenever it is empty, perhaps right now."""
    while True:
        try:
            make_folder(folder)
        except FileExistsError:
            if os.path.lexists(folder) and not os.path.isdir(folder):
                raise
            continue  # It was there, and is gone.
        with suppress(FileNotFoundError):
            return make()


def newest_in(folder: str) -> list[str]:
    """The checkpoints in a folder, the last that was written first."""
    return [path for path in entries_of(folder) if not os.path.basename(path).startswith(".")]
