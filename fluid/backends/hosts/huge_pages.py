"""Joins the memory of a process that forks often into huge pages: a fork copies one entry for each of them, not 512.

A process that has loaded PyTorch has 40,000 pages, which takes each fork 3 ms, and each end of a lane about as much.
The kernel splits a huge page when a lane writes to it, and copies the small page only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import suppress

#: Advice of madvise(2), since Linux 6.1.
_MADV_COLLAPSE = 25
_HUGE = 2 << 20
_SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"


def join_memory() -> Iterator[None]:
    """Joins one huge page after the other, each of which takes milliseconds; nothing where the system does not."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        with open(_SETTING, encoding="ascii") as file:
            if "[never]" in file.read():
                return
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            places = list(huge_places(file))
    except OSError:
        return
    for place in places:
        with suppress(AttributeError):
            libc.madvise(place, _HUGE, _MADV_COLLAPSE)  # Where it is refused, the place stays as it is.
        yield


def huge_places(maps: Iterable[str]) -> Iterator[int]:
    """Yields where whole huge pages fit into memory that is the process's own, and no file's.

    Args:
        maps: lines of /proc/PID/maps.
    """
    for line in maps:
        fields = line.split(maxsplit=5)
        begin, _, end = fields[0].partition("-")
        is_own = fields[1].startswith("rw") and fields[1].endswith("p") and fields[4] == "0"
        if is_own and (len(fields) == 5 or fields[5].startswith(("[heap]", "[anon:"))):
            first = -(-int(begin, 16) // _HUGE) * _HUGE
            yield from range(first, int(end, 16) - _HUGE + 1, _HUGE)
