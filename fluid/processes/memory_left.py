"""How much memory is left on this machine, as far as the control group (cgroup) of this process allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

#: A limit of this many bytes or more is none: that is how version 1 says so.
_NO_LIMIT = 1 << 60
#: By version: the files with the limit and the usage, and the entry of ``memory.stat`` that can be dropped at once.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_left(root: str = "/") -> int | None:
    """Returns the bytes that processes here may still take; ``None`` where the system does not say.

    That is the least of what the machine has available and of what each control group of this process leaves below its
    limit. Files in the page cache that are not in use count as left; those on a RAM disk do not.

    Args:
        root: folder with ``proc`` and ``sys``.
    """
    left = [*_available(root), *_below_limits(root)]
    return max(0, min(left)) if left else None


def _available(root: str) -> Iterator[int]:
    for line in _lines(os.path.join(root, "proc/meminfo")):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield 1024 * int(value.split()[0])


def _below_limits(root: str) -> Iterator[int]:
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mounted = 2, "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            version, mounted = 1, "sys/fs/cgroup/memory"
        else:
            continue
        # In a container the group's path is often that on the machine, and its folder is the root.
        group = path.strip("/")
        while True:
            with suppress(OSError, ValueError, IndexError, StopIteration):
                yield from _below_limit(os.path.join(root, mounted, group), version)
            if not group:
                break
            group = os.path.dirname(group)


def _below_limit(folder: str, version: int) -> Iterator[int]:
    limit_file, usage_file, droppable = _FILES[version]
    limit = next(iter(_lines(os.path.join(folder, limit_file))), "max")
    if limit == "max" or int(limit) >= _NO_LIMIT:
        return
    used = int(next(iter(_lines(os.path.join(folder, usage_file)))))
    for line in _lines(os.path.join(folder, "memory.stat")):
        name, value = line.split()
        if name == droppable:
            used -= int(value)
    yield int(limit) - used


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().splitlines()
    except OSError:
        return []
