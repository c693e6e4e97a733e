"""Programs that this process runs on a trial's behalf: what they use counts as used by this process.

A program is its leader and all processes below it. This process adopts those whose parents end, so that they stay
below it; what a program has used that has ended is known as far as its parent has waited for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from fluid._clock import processor_seconds_of

_TICKS = os.sysconf("SC_CLK_TCK")


class ProgramsBelow:
    """The programs of this process.

    Attributes:
        leaders: their first processes, as long as they run.
    """

    def __init__(self) -> None:
        self.leaders: set[int] = set()

    def processes(self) -> list[int]:
        """All processes of the programs."""
        return with_all_below(self.leaders)

    def processor_seconds(self) -> float:
        """CPU seconds that they have used."""
        total = 0.0
        for process in self.processes():
            with suppress(OSError, ValueError, IndexError):
                total += processor_seconds_of(process)
                with open(f"/proc/{process}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                total += (int(fields[13]) + int(fields[14])) / _TICKS  # Of children that were waited for.
        return total

    def run_and_wait(self) -> tuple[float, float]:
        """Seconds that the leaders' main threads ran, and seconds that they waited for a processor."""
        ran = waited = 0
        for process in tuple(self.leaders):
            with suppress(OSError, ValueError), open(f"/proc/{process}/schedstat", "rb") as file:
                fields = file.read().split()
                ran, waited = ran + int(fields[0]), waited + int(fields[1])
        return ran / 1e9, waited / 1e9

    def transferred(self) -> tuple[int, int]:
        """Bytes that they have read and written."""
        read = written = 0
        for process in self.processes():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/io", "rb") as file:
                lines = file.read().split(b"\n", 2)
                read, written = read + int(lines[0].split()[1]), written + int(lines[1].split()[1])
        return read, written

    def memory(self, name: str) -> float:
        """The sum of a memory figure of ``/proc/PID/status``, bytes."""
        return sum(_memory_of(process).get(name, 0.0) for process in self.processes())

    def reset_peaks(self, code: str) -> None:
        """Writes to ``/proc/PID/clear_refs``."""
        for process in self.processes():
            with suppress(OSError), open(f"/proc/{process}/clear_refs", "w", encoding="ascii") as file:
                file.write(code)


def with_all_below(processes: Iterable[int], root: str = "/") -> list[int]:
    """Returns processes and all those below them.

    Args:
        processes: the processes.
        root: folder with ``proc``.
    """
    found = list(processes)
    for process in found:  # It grows.
        found += children_of_all_threads(process, root)
    return found


def children_of_all_threads(process: int, root: str = "/") -> Iterator[int]:
    """Yields the children of a process; none where the kernel does not list them."""
    folder = os.path.join(root, f"proc/{process}/task")
    with suppress(OSError):
        for thread in os.listdir(folder):
            with suppress(OSError), open(os.path.join(folder, thread, "children"), encoding="ascii") as file:
                yield from map(int, file.read().split())


def _memory_of(process: int) -> dict[str, float]:
    with suppress(OSError), open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
        parts = [line.split() for line in file if line.endswith(" kB\n")]
        return {name.rstrip(":"): float(value) * 1024.0 for name, value, _ in parts}
    return {}


#: Those of this process.
BELOW = ProgramsBelow()
