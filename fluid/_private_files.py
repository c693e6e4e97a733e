"""Files and folders for their owner only, and files that are replaced as a whole.

A run folder has configs and data, which may be secret. The umask cannot see to it: it is the whole process's, and the
process is the user's.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

FOLDER_MODE, FILE_MODE = 0o700, 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_private(path: str | os.PathLike[str], mode: str, **options: Any) -> IO[Any]:
    """As :func:`open`, of a file for its owner only, also if it was there with another mode."""
    return open(path, mode, opener=open_descriptor, **options)


def open_descriptor(path: str | os.PathLike[str], flags: int) -> int:
    """As :func:`os.open`, of a file for its owner only; an ``opener`` for :func:`open`."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
    found = os.fstat(descriptor)
    if found.st_mode & _OTHERS and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
        with suppress(OSError):  # A file system without modes.
            os.fchmod(descriptor, FILE_MODE)
    return descriptor


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder, and those above it that are missing, for their owner only; one that is there stays as it is.

    Raises:
        FileExistsError: there is a file of that name.
        OSError: it cannot be made.
    """
    # os.makedirs gives its mode to the last folder only, and the umask's to those above.
    path = os.path.abspath(path)
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileNotFoundError:
        above = os.path.dirname(path)
        if not os.path.isdir(above):
            make_folder(above)
        with suppress(FileExistsError):  # Another process may have made them at this instant.
            os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def close_to_others(folder: str | os.PathLike[str]) -> None:
    """Makes all in a folder, which other libraries have written, for its owner only."""
    for place, _, names in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in names)):
            with suppress(OSError):  # It was removed meanwhile, or is another user's.
                found = os.lstat(path)
                is_linked = stat.S_ISLNK(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink > 1)
                if found.st_mode & _OTHERS and not is_linked:  # What is linked may be another's.
                    os.chmod(path, stat.S_IMODE(found.st_mode) & ~_OTHERS)


@contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = True) -> Iterator[Path]:
    """Gives an empty draft to write, which takes the file's place once the block has ended: never a part of a file.

    The draft is beside the file and has its suffix. A file that was there keeps its mode.

    Args:
        path: the file. What is no regular file, such as ``/dev/stdout``, is given itself.
        private: whether a new file is for its owner only; if not, its mode is the umask's.

    Raises:
        OSError: the draft cannot be made or moved; the file is as it was. So it is if the block raises.
    """
    target = Path(os.path.realpath(path))
    mode = None
    with suppress(FileNotFoundError):
        mode = target.stat().st_mode
    if mode is not None and not stat.S_ISREG(mode):
        yield target
        return
    draft = target.with_name(f".{target.stem}.{uuid.uuid4().hex}.tmp{target.suffix}")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE if private else 0o666))
    try:
        yield draft
        if mode is not None:
            os.chmod(draft, stat.S_IMODE(mode))
        os.replace(draft, target)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
