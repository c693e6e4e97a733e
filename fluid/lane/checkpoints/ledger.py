"""How much host memory the checkpoints of a session take on this machine: one file, which all its processes change.

A lane reserves room before it writes a checkpoint there, and gives back what it deletes. The file is locked for the few
microseconds of a change; the lock ends with its process. What a killed lane had reserved is counted until the host
counts the checkpoints anew.

Lanes also tell their host, by a pipe with a name, that they want room, and how long restores took. The host keeps some
room free, so that a lane seldom has to wait for it. A lane waits only while the host makes room, which takes as long as
the lane would need to write its checkpoint to disk itself; where the host refuses, or does not answer, it does that.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fluid._clock import MonotonicClock

_FILE, _PIPE = ".ledger", ".wishes"
_RECORD = struct.Struct("<qqqq")
#: Most bytes that are read from the pipe at once.
_MOST = 1 << 16
#: Seconds that a lane waits for its host to make room: in any case, and per byte of the checkpoint.
_PATIENCE_S, _PATIENCE_PER_BYTE_S = 1.0, 2e-8
#: Seconds between two looks whether there is room.
_LOOK_S = 0.002


class StoreUse(NamedTuple):
    """What the ledger says.

    Attributes:
        used: bytes of the checkpoints in host memory, and of what is reserved.
        limit: most bytes that they may take.
        full_at: bytes above which the host moves checkpoints to disk, so that room is left for the next ones.
        turns: twice the number of times that the host has read the pipe and done what was wanted; odd while it does.
    """

    used: int = 0
    limit: int = 0
    full_at: int = 0
    turns: int = 0


class RestoreSample(NamedTuple):
    """How long reading and loading a checkpoint took in a lane: of so many bytes, from memory or else from disk."""

    in_memory: bool
    bytes: int
    seconds: float


class RoomWish(NamedTuple):
    """A lane wants room for a checkpoint of so many bytes, of the trial of that folder."""

    bytes: int
    trial: str


class StoreLedger:
    """The ledger of a session's folder in host memory; its methods may be called in any thread.

    Args:
        folder: the folder; empty if there is none, which has no room.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._descriptor = -1
        self._clock = MonotonicClock()
        #: The lock of the file excludes other processes, and not other threads of this one.
        self._turn = threading.Lock()

    def create(self, limit: int, full_at: int) -> None:
        """Makes the ledger and the pipe, if they are not there, and sets the limits.

        Raises:
            OSError: host memory is full.
        """
        self._descriptor = os.open(os.path.join(self._folder, _FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(FileExistsError):
            os.mkfifo(os.path.join(self._folder, _PIPE), 0o600)
        self._change(lambda use: use._replace(limit=limit, full_at=full_at))

    def read(self) -> StoreUse:
        """Returns what it says; no room if it is not there."""
        return self._read() if self._opened() else StoreUse()

    # -- for lanes -------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> bool:
        """Reserves room, if there is enough; returns whether it did."""
        if not self._opened():
            return False
        reserved = False

        def change(use: StoreUse) -> StoreUse:
            nonlocal reserved
            reserved = use.used + size <= use.limit
            return use._replace(used=use.used + size) if reserved else use

        self._ask_if_full(self._change(change))
        return reserved

    def correct(self, change: int) -> bool:
        """Counts bytes that are there though not reserved, or that have gone; returns whether all have room."""
        if not self._opened():
            return False
        use = self._change(lambda use: use._replace(used=max(0, use.used + change)))
        if change > 0:
            self._ask_if_full(use)
        return use.used <= use.limit

    def await_room(self, has_room: Callable[[], bool], size: int, trial: str = "") -> bool:
        """Waits until there is room, as long as the host makes some; returns whether there is.

        Args:
            has_room: tells whether there is, and takes it.
            size: bytes of the checkpoint.
            trial: name of the folder of its trial, if it is to be written; empty if it has been, so that the host may
                move it.
        """
        deadline = self._clock.now() + _PATIENCE_S + _PATIENCE_PER_BYTE_S * size
        while not has_room():
            if size > self.read().limit or not self._tell(f"w {size} {trial}\n" if trial else "\n"):
                return False
            turns = self.read().turns
            end = turns + 2 - turns % 2  # Of the turn that reads the wish; if one is under way, that may have read it.
            while self._clock.now() < deadline and self.read().turns < end:
                if has_room():
                    return True
                threading.Event().wait(_LOOK_S)
            if self._clock.now() >= deadline or turns % 2 == 0:
                return has_room()
        return True

    def tell_restore(self, sample: RestoreSample) -> None:
        """Tells the host how long a restore took."""
        self._tell(f"r {int(sample.in_memory)} {sample.bytes} {sample.seconds!r}\n")

    # -- for the host ----------------------------------------------------------------------------------------

    def recount(self, count: Callable[[], int]) -> StoreUse:
        """Sets the bytes used to what a function counts, while nothing else changes; returns what it says then."""
        return self._change(lambda use: use._replace(used=count()))

    def limit(self, limit: int, full_at: int) -> StoreUse:
        """Sets the limits; returns what it says then."""
        return self._change(lambda use: use._replace(limit=limit, full_at=full_at))

    def begin_turn(self) -> None:
        """Called before the host reads the pipe."""
        self._change(lambda use: use._replace(turns=use.turns | 1))

    def end_turn(self) -> None:
        """Called when the host has done what was wanted, as far as it could."""
        self._change(lambda use: use._replace(turns=use.turns + use.turns % 2))

    def wake_host(self) -> None:
        """Has the host look at the ledger."""
        self._tell("\n")

    def open_pipe(self) -> int:
        """Opens the pipe for the host; returns a descriptor that is readable when a lane has told something.

        Raises:
            OSError: the ledger was not made.
        """
        # For writing, too: else it would be at its end whenever no lane has it open.
        return os.open(os.path.join(self._folder, _PIPE), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    @staticmethod
    def read_pipe(descriptor: int) -> list[RestoreSample | RoomWish]:
        """Returns what lanes have told, without waiting."""
        try:
            data = os.read(descriptor, _MOST)
        except BlockingIOError:
            return []
        told: list[RestoreSample | RoomWish] = []
        for line in data.decode(errors="replace").split("\n"):
            with suppress(ValueError):  # The last line may be a part of one, if the pipe was full.
                kind, *parts = line.split(" ", 2)
                if kind == "w":
                    told.append(RoomWish(int(parts[0]), parts[1]))
                elif kind == "r":
                    size, seconds = parts[1].split()
                    told.append(RestoreSample(parts[0] == "1", int(size), float(seconds)))
        return told

    def close(self) -> None:
        """Closes the ledger."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _ask_if_full(self, use: StoreUse) -> None:
        if use.used > use.full_at:
            self.wake_host()

    def _tell(self, text: str) -> bool:
        """Writes to the pipe; returns whether a host will read it."""
        try:
            descriptor = os.open(os.path.join(self._folder, _PIPE), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # There is no host.
            return False
        try:
            os.write(descriptor, text.encode())
        except OSError:  # It is full: the host has enough to do.
            return False
        finally:
            os.close(descriptor)
        return True

    def _opened(self) -> bool:
        with self._turn, suppress(OSError):  # No host keeps checkpoints in memory.
            if self._descriptor < 0 and self._folder:
                self._descriptor = os.open(os.path.join(self._folder, _FILE), os.O_RDWR | os.O_CLOEXEC)
        return self._descriptor >= 0

    def _read(self) -> StoreUse:
        data = os.pread(self._descriptor, _RECORD.size, 0)
        return StoreUse(*_RECORD.unpack(data)) if len(data) == _RECORD.size else StoreUse()

    def _change(self, changed: Callable[[StoreUse], StoreUse]) -> StoreUse:
        """Changes what it says; returns what it says then."""
        with self._turn:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                before = self._read()
                after = changed(before)
                if after != before:
                    os.pwrite(self._descriptor, _RECORD.pack(*after), 0)
                return after
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
