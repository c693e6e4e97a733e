"""Copies of what a script writes as its checkpoint: a file or a folder, which it may be writing at the time."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from fluid._clock import MonotonicClock
from fluid._private_files import make_folder
from fluid.trainables.resident import NotSavableError

#: Name of the copy, in Fluid's checkpoint.
COPY = "script"
#: Seconds that a script has to finish a checkpoint that it is writing, and the slices in which it does.
_PATIENCE_S, _SLICE_S = 10.0, 0.01
#: Of a descriptor's flags, octal, in /proc/PID/fdinfo: opened for writing.
_WRITES = os.O_WRONLY | os.O_RDWR

Signature = tuple[tuple[str, int, int], ...]


def signature_of(path: str) -> Signature | None:
    """What changes if a file or a folder is written: paths, sizes and times; ``None`` if there is none."""
    found = []
    with suppress(OSError):
        for one in [Path(path), *sorted(Path(path).rglob("*"))]:
            status = one.stat()
            found.append((str(one), status.st_size, status.st_mtime_ns))
    return tuple(found) if found and os.path.lexists(path) else None


class Writer(Protocol):
    """The processes that may be writing a checkpoint."""

    def stand_still(self) -> list[int]:
        """Stops them, and returns them once they are."""
        ...

    def let_run(self, seconds: float) -> None:
        """Lets them run for so long."""
        ...


def copy_steady(path: str, folder: str, writer: Writer) -> None:
    """Copies a checkpoint once no process has it open for writing, and again if it has changed meanwhile.

    Args:
        path: the script's checkpoint.
        folder: gets the copy.
        writer: the script.

    Raises:
        NotSavableError: the script does not stop to write it, or there is none.
        OSError: the copy cannot be written.
    """
    clock = MonotonicClock()
    deadline = clock.now() + _PATIENCE_S
    while clock.now() < deadline:
        # One that is just opening the file may have made it empty, and not have its descriptor yet.
        processes = writer.stand_still()
        before = signature_of(path)
        if before is not None and not any(_writes(process, path) for process in processes):
            with suppress(FileNotFoundError):  # Of a file that was replaced meanwhile.
                put(path, os.path.join(folder, COPY))
                if signature_of(path) == before:
                    return
        writer.let_run(_SLICE_S)
    raise NotSavableError(f"the script goes on writing {path}, or has removed it, so that no copy of it is whole")


def put(source: str, target: str) -> None:
    """Puts a copy of a file or a folder where there may be another one; it is for its owner only."""
    remove(target)
    make_folder(os.path.dirname(target))
    if os.path.isdir(source):
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


def remove(path: str) -> None:
    """Removes a file or a folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _writes(process: int, path: str) -> bool:
    """Whether a process has the checkpoint, or something in it, open for writing."""
    real = os.path.realpath(path)
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError, ValueError, IndexError):
                opened = os.readlink(f"/proc/{process}/fd/{descriptor}")
                if opened == real or opened.startswith(f"{real}/"):
                    with open(f"/proc/{process}/fdinfo/{descriptor}", encoding="ascii") as file:
                        flags = next(line for line in file if line.startswith("flags:")).split()[1]
                    if int(flags, 8) & _WRITES:
                        return True
    return False
