"""Child processes: adopted, watched by descriptor, named, and killed with all below them (prctl(2), pidfd_open(2)).

The fork server of lanes and the supervisor of an MPS daemon use it. Both have one thread, so what is done between a
fork and what follows it is safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from contextlib import suppress

from fluid._clock import MonotonicClock

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
#: Longest name of a process, bytes.
_LONGEST_NAME = 15
#: Seconds to wait for killed processes to vanish.
_KILL_WAIT_S = 2.0

_libc = ctypes.CDLL(None, use_errno=True)


def set_process_name(name: str) -> None:
    """Sets the name of this process, as lists of processes show it; cut to 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:_LONGEST_NAME], 0, 0, 0)


def process_name(process: int) -> str:
    """Returns the name of a process, as :func:`set_process_name` cut it; empty if there is no such process."""
    try:
        with open(f"/proc/{process}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return ""


def adopt_orphans() -> None:
    """Becomes the parent of every process below this one whose own parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process with its parent; to be called right after the fork, in the child.

    Args:
        parent: the process that forked. If it has died already, this process ends at once.
    """
    if not signal_parents_death(parent, signal.SIGKILL):
        os._exit(1)


def signal_parents_death(parent: int, number: int) -> bool:
    """Lets the kernel send this process a signal when its parent dies; returns whether the parent still lives.

    Args:
        parent: the process that forked this one.
        number: the signal.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    return os.getppid() == parent  # If not, it died before its death could be signalled.


def open_process(process: int) -> int | None:
    """Returns a descriptor that becomes readable when a process ends; ``None`` if it has, or the kernel is too old."""
    try:
        return os.pidfd_open(process)
    except (OSError, AttributeError):
        return None


def children(process: int | None = None) -> list[int]:
    """Returns the children of this process, the adopted ones too; none where the kernel does not list them.

    Args:
        process: another one, whose children are those of its main thread.
    """
    process = process or os.getpid()
    try:
        with open(f"/proc/{process}/task/{process}/children", encoding="ascii") as file:
            return [int(process) for process in file.read().split()]
    except OSError:
        return []


def ancestors() -> set[int]:
    """Returns the process that started this one, the one that started that, and so on, as far as they are seen."""
    found: set[int] = set()
    process = os.getppid()
    while process > 0 and process not in found:
        found.add(process)
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                process = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            break
    return found


def is_stopped(process: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP); one that a debugger holds is not."""
    return state_of(process) == b"T"


def state_of(thread: int) -> bytes:
    """The letter of a thread's state, of the main one for a process (proc(5)); empty if there is none."""
    try:
        with open(f"/proc/{thread}/stat", "rb") as file:
            # The name, in brackets, may hold anything.
            return file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return b""


def kill(processes: Iterable[int]) -> None:
    """Kills processes, if they are there."""
    for process in processes:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def kill_children(known: Iterable[int] = ()) -> None:
    """Kills every process below this one, and waits until they are gone, at most two seconds.

    Args:
        known: children to kill even where the kernel does not list any.
    """
    known = list(known)
    kill(known)
    clock = MonotonicClock()
    deadline = clock.now() + _KILL_WAIT_S
    while clock.now() < deadline:
        found = children()
        if not found and not known:
            return
        kill(found)
        try:
            os.waitpid(-1, 0)  # Its children are adopted, and found the next time.
        except ChildProcessError:
            return


def describe_exit(code: int) -> str:
    """Says how a process ended, to be read after its name; ``code`` is negative for a signal."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
