"""The end of a shared run, as its code may find it: a schedule asked for a value that the run is not to know.

Trials that agree up to an iteration are one run until then, and that run has schedules with the common values only
(:meth:`fluid.search.schedules.Schedule.until`). Code that asks for more would compute what depends on the future of one
trial. It gets an error; and as it may catch that, the ask is noted besides, for the lane to read.
"""

from __future__ import annotations

import os

from fluid.errors import PrefixEndedError

#: Bytes that a pipe takes in one piece.
_MOST = 4096
#: Stands between a run and its ask.
_BETWEEN = "\0"

#: The first ask of each shared run, by its id.
_asked: dict[str, str] = {}


class _Pipe:
    """Where processes forked by this one tell their asks."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.read, self.write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._inode = os.fstat(self.write).st_ino

    def tell(self, run: str, text: str) -> None:
        data = f"{run}{_BETWEEN}{text}".encode(errors="replace")[: _MOST - 1] + b"\n"
        try:
            if os.fstat(self.write).st_ino == self._inode:  # A child may have closed it, and opened something else.
                os.write(self.write, data)
        except OSError:  # It is closed, or full: then the process that forked knows of others.
            pass

    def told(self) -> list[str]:
        found = b""
        try:
            while data := os.read(self.read, 1 << 16):
                found += data
        except OSError:  # All was read.
            pass
        return found.decode(errors="replace").splitlines()


_pipe: _Pipe | None = None


def expect_asks() -> None:
    """Called where a process takes over schedules of a shared run: it learns of what processes forked from it ask."""
    global _pipe
    if _pipe is None:
        _pipe = _Pipe()


def note_ask(run: str, text: str) -> PrefixEndedError:
    """Notes that a shared run asked for more than it is to know; returns the error to raise."""
    line = " ".join(text.split())
    _asked.setdefault(run, line)
    if _pipe is not None and _pipe.process != os.getpid():
        _pipe.tell(run, line)
    return PrefixEndedError(line)


def asked_beyond(run: str = "") -> str | None:
    """Tells what a shared run has asked for beyond its end; ``None`` if nothing. It stays so for this process.

    Asks count from every thread, of every copy of the run's schedules, and of processes that this one has forked since
    it took the schedules over; not of processes that were spawned, which hand the error on or not.

    Args:
        run: the id with which the schedules were made.
    """
    if _pipe is not None and _pipe.process == os.getpid():
        for line in _pipe.told():
            name, _, text = line.partition(_BETWEEN)
            _asked.setdefault(name, text)
    return _asked.get(run)
