"""The end of a shared run, as its code may find it: a schedule asked for a value that the run is not to know.

Trials that agree up to an iteration are one run until then, and that run has schedules with the common values only
(:meth:`fluid.search.schedules.Schedule.until`). Code that asks for more would compute what depends on the future of one
trial. It gets an error; and as it may catch that, the ask is noted besides, for the lane to read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from fluid.errors import PrefixEndedError

#: Bytes that a pipe takes in one piece.
_MOST = 4096
#: Stands between a run and its ask.
_BETWEEN = "\0"

#: The first ask of each shared run, by its id.
_asked: dict[str, str] = {}
#: The trial whose code runs, and the schedules of its config, by the keys that lead to them.
_current: tuple[str, Mapping[tuple[Any, ...], Any]] = ("", {})


class Address(NamedTuple):
    """Where other processes tell a lane's process what they ask: a pipe, as the system shows it, and its inode."""

    path: str
    inode: int


class _Pipe:
    """Where processes that this one has started tell their asks."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.address = Address(f"/proc/{self.process}/fd/{self._write}", os.fstat(self._write).st_ino)

    def told(self) -> list[str]:
        found = b""
        try:
            while data := os.read(self.read, 1 << 16):
                found += data
        except OSError:  # All was read.
            pass
        return found.decode(errors="replace").splitlines()


_pipe: _Pipe | None = None
#: In a process that was spawned by a lane's: where that is told.
_above: Address | None = None


def enter_trial(trial_id: str, schedules: Mapping[tuple[Any, ...], Any]) -> None:
    """Called in a lane where the code of a trial is about to run; from then on, asks of shared runs count.

    Args:
        trial_id: the trial.
        schedules: those of its config, by the keys that lead to them.
    """
    global _current, _pipe
    _current = trial_id, schedules
    if _pipe is None:
        _pipe = _Pipe()


def own_schedule(run: str, place: tuple[Any, ...]) -> Any:
    """What a trial has in its config where a shared run has a schedule, which a saved state of the run holds.

    ``None`` if the run's code runs itself, or no such trial's does.
    """
    trial_id, schedules = _current
    return None if trial_id in ("", run) else schedules.get(place)


def asks_address() -> Address | None:
    """Where a process is to tell its asks that gets a schedule of this one; ``None`` if they do not matter."""
    return _above if _pipe is None else _pipe.address


def take_address(address: Address) -> None:
    """Has this process tell its asks there, unless it is a lane's itself."""
    global _above
    if _pipe is None:
        _above = address


def _tell(address: Address, run: str, text: str) -> None:
    data = f"{run}{_BETWEEN}{text}".encode(errors="replace")[: _MOST - 1] + b"\n"
    try:
        if os.stat(address.path).st_ino != address.inode:  # Of a process that has the number of one that is gone.
            return
        pipe = os.open(address.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, data)
        finally:
            os.close(pipe)
    except OSError:  # The process is gone; or the pipe is full, so that it knows of others.
        pass


def note_ask(run: str, text: str) -> PrefixEndedError:
    """Notes that a shared run asked for more than it is to know; returns the error to raise."""
    line = " ".join(text.split())
    _asked.setdefault(run, line)
    if (address := asks_address()) is not None and (_pipe is None or _pipe.process != os.getpid()):
        _tell(address, run, line)
    return PrefixEndedError(line)


def asked_beyond(run: str = "") -> str | None:
    """Tells what a shared run has asked for beyond its end; ``None`` if nothing. It stays so for this process.

    Asks count from every thread, of every copy of the run's schedules, and of processes that this one has started.

    Args:
        run: the id with which the schedules were made.
    """
    if _pipe is not None and _pipe.process == os.getpid():
        for line in _pipe.told():
            name, _, text = line.partition(_BETWEEN)
            _asked.setdefault(name, text)
    return _asked.get(run)
