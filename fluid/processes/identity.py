"""Which process of which machine: a name for others, and whether that process has ended."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple


class Machine(NamedTuple):
    """What two processes must have in common to know each other by their ids.

    Attributes:
        boot: of the machine.
        pids: the namespace of the ids, as each container has one of its own.
    """

    boot: str
    pids: str


@lru_cache(maxsize=1)
def own_machine() -> Machine:
    """The machine of this process.

    Raises:
        OSError: the kernel does not tell.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return Machine(file.read().strip(), os.readlink("/proc/self/ns/pid"))


def begun_at(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since the boot; ``None`` if it has ended.

    Raises:
        OSError: the kernel does not tell.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # The process name, in parentheses, may hold anything.
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def own_process() -> str:
    """Names this process: its machine, its id and when it began; empty where the kernel does not tell."""
    pid = os.getpid()
    try:
        return " ".join((*own_machine(), str(pid), str(begun_at(pid))))
    except OSError:
        return ""


def has_ended(process: str) -> bool:
    """Whether the process of that name is known to have ended; ``False`` for one of another machine."""
    if not process:
        return False
    *machine, pid, begun = process.split(" ")
    try:
        return tuple(machine) == own_machine() and str(begun_at(int(pid))) != begun
    except OSError:
        return False
