"""Faults of single writes in any process of a session: EIO, short writes, and a disk that is full in the middle."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

#: Where a preloaded library finds its page.
PAGE_VARIABLE = "FLUID_TORTURE_IO"
#: The faults, in the order of the library.
IO_FAULTS = ("eio", "short_write", "enospc")
#: The page: the armed fault, writes to skip, whether half is written, and hits of "none" and of each fault.
_HEAD = struct.Struct("=IiI4I")
_PREFIX_BYTES, _PART_BYTES = 512, 64
#: Parts of paths whose writes are to fail, and how often each is drawn; the first is in all.
PARTS = {
    "": 4, "results.jsonl": 2, "journal.jsonl": 2, "/trials/": 2,
    "trials.jsonl": 1, "payloads.pkl": 1, "session.json": 1, "forecasts": 1, "/logs/": 1,
}  # fmt: skip


def compile_library(folder: Path) -> Path | None:
    """Compiles the library into a folder; ``None`` if there is no C compiler, or it fails."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "torture_io.so"
    source = Path(__file__).resolve().with_suffix(".c")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    return library if subprocess.run(command, capture_output=True, check=False).returncode == 0 else None


class WriteFaults:
    """Arms faults of writes in the processes that have the library.

    Args:
        page: path of the page, which is made.
        below: the folder of the files whose writes may fail.
    """

    def __init__(self, page: Path, below: Path) -> None:
        self.path = page
        prefix = f"{below}/".encode()
        assert len(prefix) < _PREFIX_BYTES, "the folder's path is too long"
        content = bytes(_HEAD.size) + prefix.ljust(_PREFIX_BYTES, b"\0") + bytes(_PART_BYTES)
        page.write_bytes(content.ljust(mmap.PAGESIZE, b"\0"))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self._counted: Counter[str] = Counter()

    def environment(self, library: Path) -> dict[str, str]:
        """The variables of the processes that are to have the library."""
        return {"LD_PRELOAD": str(library), PAGE_VARIABLE: str(self.path)}

    def arm(self, fault: str, part: str, *, skip: int, half: bool) -> None:
        """Lets a write fail: the one after so many to files that have the part in their paths."""
        place = _HEAD.size + _PREFIX_BYTES
        self._page[place : place + _PART_BYTES] = part.encode().ljust(_PART_BYTES, b"\0")
        self._page[4:12] = struct.pack("=iI", skip, half)
        self._page[0:4] = struct.pack("=I", 1 + IO_FAULTS.index(fault))

    @property
    def is_armed(self) -> bool:
        """Whether the fault has still to happen."""
        return self._page[0:4] != bytes(4)

    def disarm(self) -> None:
        """Takes back a fault that has not happened."""
        self._page[0:4] = bytes(4)

    def new_hits(self) -> list[str]:
        """Returns the faults that have happened since the last call."""
        counts = _HEAD.unpack(self._page[: _HEAD.size])[4:]
        now = Counter(dict(zip(IO_FAULTS, counts, strict=True)))
        new, self._counted = now - self._counted, now
        return list(new.elements())
