"""Tests between machines what a shared folder shows: each runs ``fluid doctor --shared`` at the same time.

They find each other by a log in the folder, and answer each other there: an entry of one, an entry of each other one.
Only the one that began measures, on its own clock. Then they do the same with files that each rewrites, as drivers do
for a sign of life; and at last all append at once, and compare what they have read.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from fluid._clock import MonotonicClock, nap, read_clock
from fluid._private_files import FILE_MODE, make_folder
from fluid.errors import FluidError
from fluid.joint.log import SharedLog

#: The folder where they meet, in the shared one.
MEETING = ".fluid-doctor"
#: Seconds between two looks.
_LOOKS_S = 0.002
#: Seconds between two signs of life; since the last newcomer until they begin; for which an answer is waited for; and
#: after which a sign that stays the same is that of a process which was killed.
_BEATS_S, _SETTLES_S, _ANSWERS_S, _DEAD_S = 0.1, 2.0, 30.0, 10.0
#: How often they answer each other, and how often each appends as all do at once.
_ROUNDS, _RACES = 10, 25


@dataclass(frozen=True)
class Spread:
    """Seconds that something took.

    Attributes:
        times: how often it was measured.
    """

    median_s: float
    p95_s: float
    worst_s: float
    times: int

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """Sums up what was measured, at least once."""
        p95_s = quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
        return cls(median(seconds), p95_s, max(seconds), len(seconds))


@dataclass(frozen=True)
class Other:
    """Another process that tests the folder.

    Attributes:
        is_here: whether it is of this machine.
        entry: seconds from appending an entry until the other one's was read.
        content: the same by files that are rewritten.
    """

    host: str
    pid: int
    is_here: bool
    entry: Spread
    content: Spread


@dataclass(frozen=True)
class Meeting:
    """What several machines have found.

    Attributes:
        others: those with which all was tested.
        problems: why they cannot share the folder.
    """

    others: tuple[Other, ...] = ()
    problems: list[str] = field(default_factory=list)


class Unfit(FluidError):
    """The folder does not give what drivers need."""


class _Here(NamedTuple):
    host: str
    pid: int
    boot: str


def meet(folder: Path, wait_s: float) -> Meeting:
    """Waits for others that do the same, tests the folder with them, and removes all that was written there.

    Args:
        folder: the shared one.
        wait_s: seconds for which they are waited for.
    """
    room = _Room(folder / MEETING)
    try:
        return Meeting(room.hold(wait_s))
    except (FluidError, OSError) as error:
        return Meeting((), [f"{error}."])
    finally:
        room.leave()


class _Room:
    """Where they meet, as one process sees it."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._clock = MonotonicClock()
        self._name = secrets.token_hex(4)
        make_folder(place)
        self._log = SharedLog(place, self._name)
        self._here: dict[str, _Here] = {}
        #: Who takes part, once that is known.
        self._names: list[str] = []
        self._met: set[str] = set()
        self._answers: dict[str, int] = {}
        self._raced: list[bytes] = []
        self._views: dict[str, str] = {}
        #: The others' signs of life, when each was first seen, and which have changed since.
        self._signs: dict[str, tuple[str, float]] = {}
        self._alive: set[str] = set()
        self._beats = self._number = 0

    def hold(self, wait_s: float) -> tuple[Other, ...]:
        self._sign()
        own = _Here(socket.gethostname(), os.getpid(), read_clock().name.replace(" ", "") or self._name)
        self._say(f"here {own.host} {own.pid} {own.boot}")
        self._gather(wait_s)
        others = [name for name in self._names if name != self._name]
        by_entry = self._exchange(lambda number: self._say(f"answer {number}"), self._answers_in_log)
        by_content = self._exchange(self._sign, self._answers_in_signs)
        self._race()
        return tuple(
            Other(
                host=self._here[name].host,
                pid=self._here[name].pid,
                is_here=self._here[name].boot == own.boot,
                entry=Spread.of(by_entry[name]),
                content=Spread.of(by_content[name]),
            )
            for name in others
        )

    def leave(self) -> None:
        """Removes what this process wrote; the last one removes the folder."""
        with suppress(OSError):
            os.unlink(self._path(self._name))
        now = self._clock.now()
        for name, (_, since) in self._signs.items():
            if name not in self._alive and now > since + _DEAD_S:
                with suppress(OSError):
                    os.unlink(self._path(name))
        with suppress(OSError):
            if not any(name.endswith(".sign") for name in os.listdir(self._place)):
                shutil.rmtree(self._place, ignore_errors=True)

    # -- finding each other --------------------------------------------------------------------------------

    def _gather(self, wait_s: float) -> None:
        began = newest_at = beaten_at = self._clock.now()
        known = 0
        while not self._names:
            nap(_LOOKS_S * 10)
            self._read()
            now = self._clock.now()
            if now >= beaten_at + _BEATS_S:
                beaten_at = now
                self._sign()
                self._watch(now)
            if len(self._alive) > known:
                known, newest_at = len(self._alive), now
            if known and now > newest_at + _SETTLES_S:
                self._say(" ".join(["begin", *sorted([self._name, *self._alive])]))
            elif not known and now > began + wait_s:
                raise Unfit(
                    f"no other fluid doctor was seen in {self._place.parent} within {wait_s:g} s. If one ran on "
                    "another machine meanwhile, the two do not have the same folder, or one does not see what the "
                    "other writes"
                )

    def _watch(self, now: float) -> None:
        for name in self._here.keys() - {self._name} - self._met - self._alive:
            sign = self._sign_of(name)
            first, _ = self._signs.setdefault(name, (sign, now))
            if sign != first and sign:
                self._alive.add(name)

    # -- what they say -------------------------------------------------------------------------------------

    def _say(self, words: str) -> None:
        self._take(self._log.append(f"{self._name} {words}".encode()))

    def _read(self) -> None:
        self._take(self._log.read())

    def _take(self, entries: Iterable[tuple[int, bytes]]) -> None:
        for number, content in entries:
            name, word, *rest = content.decode().split(" ")
            if word == "here":
                self._here[name] = _Here(rest[0], int(rest[1]), rest[2])
            elif word == "begin":
                if not self._met.intersection(rest):  # Of two that began at once, the first counts.
                    self._met.update(rest)
                    if self._name in rest:
                        self._names = rest
            elif word == "answer":
                self._answers[name] = int(rest[0])
            elif word == "race":
                if name in self._names:
                    self._raced.append(b"%d %s" % (number, content))
            elif word == "view":
                self._views[name] = rest[0]

    def _path(self, name: str) -> Path:
        return self._place / f"{name}.sign"

    def _sign(self, number: int | None = None) -> None:
        """Rewrites this process's sign, in place."""
        self._number = self._number if number is None else number
        self._beats += 1
        file = os.open(self._path(self._name), os.O_WRONLY | os.O_CREAT, FILE_MODE)
        try:
            os.pwrite(file, b"%08d %012d" % (self._number, self._beats), 0)
        finally:
            os.close(file)

    def _sign_of(self, name: str) -> str:
        try:
            return self._path(name).read_text(encoding="ascii")
        except OSError:
            return ""

    # -- what they test ------------------------------------------------------------------------------------

    def _answers_in_log(self) -> dict[str, int]:
        self._read()
        return self._answers

    def _answers_in_signs(self) -> dict[str, int]:
        return {name: int(self._sign_of(name).partition(" ")[0] or 0) for name in self._names}

    def _exchange(self, put: Callable[[int], None], answers: Callable[[], dict[str, int]]) -> dict[str, list[float]]:
        """Has each in turn begin a round, which all others answer; returns the seconds of those that it began."""
        taken: dict[str, list[float]] = {name: [] for name in self._names}
        for number in range(1, _ROUNDS * len(self._names) + 1):
            first = self._names[number % len(self._names)]
            answered = self._round(number, first, put, answers)
            if first == self._name:
                for name, seconds in answered.items():
                    taken[name].append(seconds)
        return taken

    def _round(
        self, number: int, first: str, put: Callable[[int], None], answers: Callable[[], dict[str, int]]
    ) -> dict[str, float]:
        """Begins a round, or answers; returns when each other's answer was seen, seconds after the own one."""
        if first != self._name:
            self._await(lambda: [] if answers().get(first, 0) >= number else [first])
        began = self._clock.now()
        put(number)
        answered: dict[str, float] = {}

        def missing() -> list[str]:
            found = answers()
            for name in self._names:
                if name != self._name and found.get(name, 0) >= number:
                    answered.setdefault(name, self._clock.now() - began)
            return [name for name in self._names if name != self._name and name not in answered]

        self._await(missing)
        return answered

    def _race(self) -> None:
        for number in range(_RACES):
            self._say(f"race {number}")

        def still_missing() -> list[str]:
            self._read()
            return [] if len(self._raced) >= _RACES * len(self._names) else self._names

        self._await(still_missing)
        self._say(f"view {zlib.crc32(b' '.join(self._raced)):08x}")

        def unseen_views() -> list[str]:
            self._read()
            return [name for name in self._names if name not in self._views]

        self._await(unseen_views)
        if len({self._views[name] for name in self._names}) > 1:
            raise Unfit(f"{self._place.parent} does not have the same entries for all machines, in the same order")

    def _await(self, missing: Callable[[], list[str]]) -> None:
        until = self._clock.now() + _ANSWERS_S
        while unseen := missing():
            if self._clock.now() > until:
                hosts = ", ".join(sorted({self._here[name].host for name in unseen if name != self._name}))
                raise Unfit(
                    f"nothing new of {hosts or 'another process'} was seen in {self._place.parent} for "
                    f"{_ANSWERS_S:.0f} s: it ended, or this machine does not see what it writes. On NFS, mount the "
                    "folder without nocto"
                )
            nap(_LOOKS_S)
