"""How a process takes part in a shared folder: a thread that reads and writes the log, and looks who is alive.

A member that runs rewrites its file ``alive`` every second with another number. Another member that has looked at it
again and again, and has seen no other number for :data:`LEASE_S` seconds of its own clock, tells that in the log, and
so all know it at one place of the order. No two machines' clocks are compared, and no time of a file is read. On the
machine of a member, others see at once that its process has ended.

A member that was only slow or cut off finds that it was taken for dead, gives up what it had, and takes part again by
another name.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fluid._clock import Clock, MonotonicClock
from fluid._private_files import FILE_MODE, make_folder
from fluid._version import __version__
from fluid.errors import FluidError
from fluid.joint.entries import (
    Extended,
    Founded,
    Item,
    Iterated,
    Joined,
    Left,
    Lost,
    OtherCode,
    StopAsked,
    Submitted,
    entry_of,
    read_entry,
)
from fluid.joint.log import LogError, SharedLog
from fluid.processes.identity import has_ended, own_process
from fluid.waiting.waits import AwaitedThread

#: The folder of the members' folders, in the shared one, and a member's sign of life in its own.
MEMBERS, ALIVE = "members", "alive"
#: Seconds between two signs of life, and without one until a member is taken for dead.
BEAT_S, LEASE_S = 1.0, 15.0
#: Members that each one watches, of those that joined after it: in a ring, so that all are watched, and many members
#: cost a file server no more than few do.
WATCHED = 3
#: Seconds between two looks at the log: while there is something new, and while there is not.
BUSY_S, QUIET_S = 0.02, 0.2
#: So many members look so often while there is something new; more of them look less often.
_BUSY_MEMBERS = 8
#: Seconds since something was new until it is quiet.
_SETTLES_S = 2.0
#: Seconds for which iterations wait, so that several make one entry: at least; and for each entry of the log, so that
#: their number grows with the root of the time only.
GATHER_S, GATHER_S_PER_ENTRY = 0.25, 1.0 / 5000
#: What a member that was taken for dead tells all the same; all else is about a lease, or asks for one.
_LASTING = (Founded, Submitted, OtherCode, Extended, StopAsked)
#: Seconds that the last entries have as the member leaves.
_LAST_S = 20.0


class Entry(NamedTuple):
    """An entry of the log as it was read."""

    number: int
    writer: str
    items: Sequence[Any]


class _Watched:
    """What was seen of a member's sign of life.

    Attributes:
        number: its place among all that joined.
        sign: the last one.
        silent_s: seconds for which it was looked at and stayed the same.
    """

    def __init__(self, joined: Joined, number: int) -> None:
        self.joined = joined
        self.number = number
        self.sign = b""
        self.silent_s = 0.0


class Membership:
    """Takes part in a shared folder.

    Args:
        shared: the folder.
        clock: of this process.

    Attributes:
        shared: the folder.
        folder: the member's own folder.
    """

    def __init__(
        self,
        shared: Path,
        clock: Clock | None = None,
    ) -> None:
        self.shared = shared
        self._deliver: Callable[[list[Entry]], None] = lambda entries: None
        self._broken: Callable[[BaseException], None] = lambda error: None
        self._clock = clock or MonotonicClock()
        host = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in socket.gethostname())
        self._base = f"{host or 'host'}-{os.getpid()}-{secrets.token_hex(3)}"
        make_folder(shared)
        self.folder = shared / MEMBERS / self._base
        make_folder(self.folder)
        self._devices: dict[int, str] = {}
        self._names = 0
        #: This member's name of now; empty before it has joined.
        self._name = ""
        self._log: SharedLog | None = None
        self._entries = 0
        self._watched: dict[str, _Watched] = {}
        #: How many members have joined so far, and this one's place among them.
        self._joined = self._number = 0
        self._outbox: deque[Item] = deque()
        self._gathering_since: float | None = None
        self._woken = threading.Event()
        self._beats = 0
        self._beat_at = self._looked_at = self._new_at = self._clock.now()
        self._closing = False
        self._thread: AwaitedThread | None = None
        self._finder = ThreadPoolExecutor(1, "fluid-finder")

    def hear(self, deliver: Callable[[list[Entry]], None], broken: Callable[[BaseException], None]) -> None:
        """Says who hears of the log; to be called before :meth:`start`.

        Args:
            deliver: called in the membership's thread, with the entries that are new, in order.
            broken: called there once, with what keeps it from going on.
        """
        self._deliver, self._broken = deliver, broken

    def start(self, devices: Mapping[int, str]) -> None:
        """Joins: reads the log from its beginning, and takes part; ``devices`` are the kinds of this member's."""
        self._devices = dict(devices)
        self._thread = AwaitedThread("fluid-member", self._run)
        self._thread.start()

    def post(self, *items: Item) -> None:
        """Has items appended to the log, in order; from any thread."""
        self._outbox.extend(items)
        self._woken.set()

    def call(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Has something looked for in the shared folder, in a thread of its own; ``then`` takes what that returns.

        An error there breaks it off, as one of the log does. A member that leaves looks for nothing any more.
        """

        def find() -> None:
            try:
                then(work())
            except Exception as error:
                self._broken(error)

        if not self._closing:
            self._finder.submit(find)

    def break_off(self, error: BaseException) -> None:
        """Ends what is done in the folder with an error; from any thread."""
        self._broken(error)

    def close(self) -> None:
        """Appends what is left, and leaves; waits for that, but not for ever."""
        self._closing = True
        self._woken.set()
        self._finder.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LAST_S)

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._beat()
            self._log = SharedLog(self.shared, self._base)
            self._read()
            self._join()
            while not self._closing:
                self._turn()
            if self._outbox:
                self._append()
            self._outbox.append(Left())
            self._append()
        except BaseException as error:
            if not self._closing:
                self._broken(error)
        finally:
            with suppress(OSError):
                os.unlink(self.folder / ALIVE)

    def _join(self) -> None:
        self._names += 1
        self._name = self._base if self._names == 1 else f"{self._base}~{self._names}"
        for _ in range(len(self._outbox)):
            item = self._outbox.popleft()
            if self._names == 1 or isinstance(item, _LASTING):
                self._outbox.append(item)
        self._outbox.appendleft(
            Joined(
                folder=self._base,
                host=socket.gethostname(),
                pid=os.getpid(),
                process=own_process(),
                devices=self._devices,
                version=__version__,
            )
        )
        self._append()

    def _turn(self) -> None:
        now = self._clock.now()
        if now >= self._beat_at + BEAT_S:
            self._beat()
            self._look(now - self._looked_at)
            self._looked_at = now
        self._read()
        wait_s = QUIET_S
        if self._clock.now() < self._new_at + _SETTLES_S:
            wait_s = min(QUIET_S, BUSY_S * max(1.0, len(self._watched) / _BUSY_MEMBERS))
        if self._outbox:
            left_s = self._gathering_left()
            if left_s <= 0.0:
                self._append()
                return
            wait_s = min(wait_s, left_s)
        self._woken.wait(wait_s)
        self._woken.clear()

    def _gathering_left(self) -> float:
        """Seconds for which what is to be appended may wait."""
        now = self._clock.now()
        if not all(isinstance(item, Iterated) for item in list(self._outbox)):
            return 0.0
        if self._gathering_since is None:
            self._gathering_since = now
        return self._gathering_since + max(GATHER_S, self._entries * GATHER_S_PER_ENTRY) - now

    def _read(self) -> None:
        assert self._log is not None
        self._take(self._log.read())

    def _append(self) -> None:
        assert self._log is not None
        items = [self._outbox.popleft() for _ in range(len(self._outbox))]
        self._gathering_since = None
        name = self._name
        for number, content in self._log.append(entry_of(name, self._log.appended, items)):
            self._take([(number, content)])
            if self._name != name:  # It was taken for dead, and what it was about to tell does not count.
                self._outbox.extend(item for item in items if isinstance(item, _LASTING))
                return

    def _take(self, entries: list[tuple[int, bytes]]) -> None:
        """Takes new entries of the log."""
        if not entries:
            return
        self._new_at = self._clock.now()
        found = []
        was_lost = False
        for number, content in entries:
            try:
                writer, items = read_entry(content)
            except ValueError as error:
                text = f"entry {number} of the log in {self.shared} is not of Fluid {__version__}: {error}"
                raise LogError(text) from error
            found.append(Entry(number, writer, items))
            for item in items:
                self._follow(writer, item)
                was_lost |= isinstance(item, Lost) and item.member == self._name and bool(self._name)
        self._entries = entries[-1][0] + 1
        self._deliver(found)
        if was_lost:
            self._join()

    def _follow(self, writer: str, item: Any) -> None:
        if isinstance(item, Joined):
            self._joined += 1
            if item.folder == self._base:
                self._number = self._joined
            else:
                self._watched[writer] = _Watched(item, self._joined)
        elif isinstance(item, Left):
            self._watched.pop(writer, None)
        elif isinstance(item, Lost):
            self._watched.pop(item.member, None)

    # -- signs of life -------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._beats += 1
        self._beat_at = self._clock.now()
        with suppress(OSError):  # Others see it the next time; if the folder is gone, so is the log.
            file = os.open(self.folder / ALIVE, os.O_WRONLY | os.O_CREAT, FILE_MODE)
            try:
                os.pwrite(file, b"%020d" % self._beats, 0)
            finally:
                os.close(file)  # On NFS this writes it, and opening reads it anew.

    def _look(self, since_s: float) -> None:
        """Looks for the others' signs of life; ``since_s`` is how long ago it did so last."""
        # A member that was held up itself has not watched meanwhile. It watches a lost member until the log tells of
        # the loss: what it is about to append is dropped if it is taken for dead meanwhile.
        seen_s = min(since_s, 2.0 * BEAT_S)
        ring = sorted(self._watched, key=lambda name: (self._watched[name].number - self._number) % (self._joined + 1))
        for name in ring[:WATCHED]:
            watched = self._watched[name]
            if has_ended(watched.joined.process):
                self._outbox.append(Lost(name, "its process has ended"))
                continue
            try:
                sign = (self.shared / MEMBERS / watched.joined.folder / ALIVE).read_bytes()
            except OSError:
                sign = b""
            if sign != watched.sign:
                watched.sign, watched.silent_s = sign, 0.0
                continue
            watched.silent_s += seen_s
            if watched.silent_s >= LEASE_S:
                self._outbox.append(Lost(name, f"it gave no sign of life for {watched.silent_s:.0f} s"))


def lost_error(error: BaseException) -> FluidError:
    """What ends the session of a member that cannot take part any more."""
    if isinstance(error, FluidError):
        return error
    return FluidError(f"the shared folder cannot be used any more: {type(error).__name__}: {error}")
