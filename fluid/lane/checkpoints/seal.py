"""The seal of a checkpoint: the length and checksum of each of its files, by which damage is found before use.

The sums are CRC-32, which finds every burst of up to 32 wrong bits and misses other damage once in 4 billion times.
They take 0.3 s for a GB that was just written; to write it to host memory takes 0.5 s at least.

A checkpoint in host memory is read with its lengths checked only: it appears under its name once it is whole, and no
power loss leaves it damaged. To sum 200 MB would take several times as long as to copy them. The one from which another
trial is about to start is sealed there by its lengths, and summed before it leaves host memory.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from fluid._private_files import open_private

#: The file, within a checkpoint, that holds the seal: ``{"files": {path: [bytes, CRC-32]}}``, ``null`` for no sum yet.
SEAL = "seal.json"
#: The file, within a checkpoint, with the lane's part of a trial's state.
LANE_STATE = "lane.pkl"
#: Bytes read at a time: first, and then.
_SMALL, _BUFFER = 1 << 14, 1 << 18
#: Errors of opening or reading a file that say nothing about the file.
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def seal(folder: str, *, summed: bool = True) -> int:
    """Writes the seal of a checkpoint that is complete.

    Args:
        folder: the checkpoint's.
        summed: whether with sums; else :func:`complete_seal` adds them.

    Returns:
        Bytes of its files.
    """
    of = _sum if summed else _length
    sums = {path: of(os.path.join(folder, path)) for path in sorted(_files(folder)) if path != SEAL}
    with open_private(os.path.join(folder, SEAL), "w", encoding="utf-8") as file:
        json.dump({"files": sums}, file)
    return sum(length for length, _ in sums.values())


def complete_seal(folder: str) -> None:
    """Adds the sums to a seal that has none, before the checkpoint is copied elsewhere; others may read it meanwhile.

    What cannot be done is left: then lengths alone tell of damage.
    """
    draft = ""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        with open(os.path.join(folder, SEAL), encoding="utf-8") as file:
            sealed = json.load(file)["files"]
        if all(crc is not None for _, crc in sealed.values()):
            return
        sums = {path: _sum(os.path.join(folder, path)) for path in sealed}
        if any(sums[path][0] != length for path, (length, _) in sealed.items()):
            return  # It is damaged, and is to be known for that.
        descriptor, draft = tempfile.mkstemp(prefix=".", dir=os.path.dirname(folder))
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"files": sums}, file)
        os.replace(draft, os.path.join(folder, SEAL))
        return
    if draft:
        with suppress(OSError):
            os.unlink(draft)


def unseal(folder: str, name: str) -> None:
    """Removes a file from a checkpoint, and from its seal, if it is there; no other checkpoint changes.

    Raises:
        OSError, ValueError: the seal cannot be read or written.
    """
    path = os.path.join(folder, name)
    if os.path.lexists(path):
        with open(os.path.join(folder, SEAL), encoding="utf-8") as file:
            sums = json.load(file)["files"]
        os.unlink(path)
        os.unlink(os.path.join(folder, SEAL))  # It may be another one's, too.
        sums.pop(name, None)
        with open_private(os.path.join(folder, SEAL), "w", encoding="utf-8") as file:
            json.dump({"files": sums}, file)


def sealed_bytes(folder: str) -> int | None:
    """Returns the bytes of a checkpoint's files, which are not read; ``None`` if it has no seal that can be read."""
    try:
        with open(os.path.join(folder, SEAL), encoding="utf-8") as file:
            return sum(int(length) for length, _ in json.load(file)["files"].values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def is_shared(folder: str) -> bool:
    """Whether a checkpoint has its files in common with others: see :func:`fluid.lane.checkpoints.files.share`."""
    return _sharers(folder) > 1


def held_bytes(folder: str) -> int | None:
    """Returns the part of :func:`sealed_bytes` that falls to a checkpoint, among those that share its files."""
    size = sealed_bytes(folder)
    return None if size is None else size // _sharers(folder)


def freed_bytes(folder: str) -> int:
    """Returns the bytes that the deletion of a checkpoint frees: none while others share its files."""
    return 0 if is_shared(folder) else sealed_bytes(folder) or 0


def _sharers(folder: str) -> int:
    # All files are shared, or none, but for the seal of one that was kept: these stand for them.
    found = 1
    for name in (SEAL, LANE_STATE):
        with suppress(OSError):
            found = max(found, os.stat(os.path.join(folder, name)).st_nlink)
    return found


def damage_of(folder: str) -> str | None:
    """Reads a checkpoint and returns what is wrong with it, for people; ``None`` if it is as it was sealed.

    Raises:
        OSError: this process cannot open files at the moment.
    """
    return _damage(folder, lambda path: _sum(os.path.join(folder, path)))


def damage_by_lengths(folder: str) -> str | None:
    """Returns what is wrong with the lengths of a checkpoint's files, which are not read; as :func:`damage_of`.

    Raises:
        OSError: this process cannot open files at the moment.
    """

    return _damage(folder, lambda path: _length(os.path.join(folder, path)))


def damage_by_sums(folder: str, sums: Mapping[str, tuple[int, int]]) -> str | None:
    """Returns what :func:`damage_of` does, of a checkpoint whose files were summed as they were written.

    Args:
        folder: the checkpoint's; only its seal is read.
        sums: length and CRC-32 of each of its files, by path relative to the folder.

    Raises:
        OSError: this process cannot open files at the moment.
    """

    def sum_of(path: str) -> tuple[int, int]:
        if path not in sums:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.path.join(folder, path))
        return sums[path]

    return _damage(folder, sum_of)


def _damage(folder: str, sum_of: Callable[[str], tuple[int, int | None]]) -> str | None:
    try:
        with open(os.path.join(folder, SEAL), encoding="utf-8") as file:
            sums: Any = json.load(file)["files"].items()
        for path, (length, crc) in sums:
            found = sum_of(path)
            if found[0] != length:
                return f"{path} has {found[0]} bytes instead of {length}"
            if crc is not None and found[1] not in (crc, None):
                return f"{path} has changed since it was written"
    except FileNotFoundError as error:
        return f"{os.path.relpath(error.filename, folder)} is missing"
    except OSError as error:
        if is_of_the_process(error):
            raise
        return f"it cannot be read: {error}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{SEAL} has changed since it was written"
    return None


def is_of_the_process(error: BaseException) -> bool:
    """Whether an error says that the process lacks descriptors or memory, and nothing about the file at hand."""
    return isinstance(error, OSError) and error.errno in _OF_THE_PROCESS


def _files(folder: str, prefix: str = "") -> Iterator[str]:
    """Paths of the regular files within a folder, relative to it; a link to a file counts as the file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file():
                yield prefix + entry.name


def _length(path: str) -> tuple[int, None]:
    """The length of a file, and no sum."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return status.st_size, None


def _sum(path: str) -> tuple[int, int]:
    """The length and the CRC-32 of a file."""
    with open(path, "rb", buffering=0) as file:
        start = file.read(_SMALL)
        length, crc = len(start), zlib.crc32(start)
        if length == _SMALL:
            buffer = bytearray(_BUFFER)
            view = memoryview(buffer)
            while count := file.readinto(buffer):
                length, crc = length + count, zlib.crc32(view[:count], crc)
    return length, crc
