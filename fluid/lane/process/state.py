"""The process state of each resident: settings, random number generators, working directory, standard output.

The residents of a lane share one process. The lane swaps this state when it switches from one to another, so that
each sees the process as its own; :mod:`fluid.lane.process.settings` says what can be swapped, and what not. A resident
that asks for a number of CPU threads, or sets one, has it while it runs. Modules are looked up in ``sys.modules`` and
never imported: a trial has no state in a module that it has not loaded. (The standard library's ``redirect_stdout``
replaces ``sys.stdout``, of which logging handlers keep references; hence :class:`fluid.lane.output.Output`.)
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from fluid._late_imports import LateImports
from fluid._private_files import make_folder
from fluid.lane.output import LaneStreams
from fluid.lane.process.settings import TIMERS, ProcessSettings, Settings, go_on_with_timers, hold_timers
from fluid.lane.process.threads import LaneThreads, ThreadNumbers
from fluid.random_state import MODULES, Seeds, put_in_force, read_random_state, seed_loaded, write_random_state
from fluid.trial_fields import TrialProcess

_LATE = LateImports()


def seed_late_modules() -> None:
    """Has the generators seeded whose modules a trial loads later, from the seeds that are in force then."""
    for name in MODULES:
        if name not in sys.modules and name not in _LATE.calls:
            _LATE.when_loaded(name, partial(seed_loaded, name))


class ProcessState:
    """The process state of one resident.

    Attributes:
        log_path: the file that receives its output.
        name: its trainable's; empty before that is loaded.

    Args:
        log_path: as above.
        folder: its working directory at first.
        settings: the lane's; ``None`` if no other resident sees what this one sets.
        threads: the lane's CPU threads.
        asked: what it asks of the process; without seeds, its random numbers are others every time.
    """

    def __init__(
        self, log_path: str, folder: str, settings: ProcessSettings | None, threads: LaneThreads, asked: TrialProcess
    ) -> None:
        self.log_path = log_path
        self.name = ""
        self._home = self._folder = folder
        self._all_settings = settings
        #: ``None`` before it has run.
        self._settings: Settings | None = None
        self._threads = threads
        self._asked_threads = asked.threads
        #: Its numbers of threads while it does not run; ``None`` while it does, and before.
        self._left_threads: ThreadNumbers | None = None
        self._seeds = asked.seeds or Seeds.fresh()
        self._random: dict[str, Any] = {}
        #: Its signal timers while its code does not run.
        self._timers: tuple[tuple[float, float], ...] | None = None

    @property
    def asked_threads(self) -> int | None:
        """CPU threads that the resident has asked for or set, if it has run; ``None`` for the lane's."""
        asked, now = self._asked_threads, self._left_threads or ThreadNumbers.in_force()
        return asked if now.torch in (None, self._threads.own if asked is None else asked) else now.torch

    def begin(self) -> None:
        """Brings the process to where the resident's set-up begins, which may have been tried before."""
        write_random_state({})
        with suppress(OSError):
            os.chdir(self._home)

    def enter(self, output: LaneStreams) -> None:
        """Restores the state in which the resident left the process."""
        if self._all_settings is not None:
            self._all_settings.put(self._settings)
        put_in_force(self._seeds)
        seed_late_modules()
        write_random_state(self._random)
        with suppress(OSError):  # The folder may have been deleted since.
            os.chdir(self._folder)
        output.switch(self.log_path, self.name)
        self._threads.enter(self._asked_threads, self._left_threads)
        self._left_threads = None

    def announce(self, name: str, output: LaneStreams) -> None:
        """Names the trainable of the resident, which is in force, to those who read the output."""
        self.name = name
        output.switch(self.log_path, name)
        output.mark()

    def rest(self) -> None:
        """Stops the signal timers of the resident, which is in force, while the lane waits: they are of its code."""
        if self._timers is None:
            self._timers = hold_timers()

    def wake(self) -> None:
        """Lets timers go on that :meth:`rest` has stopped."""
        if self._timers is not None:
            go_on_with_timers(self._timers)
            self._timers = None

    def renew(self) -> None:
        """Puts the settings back with which the resident, whose first code is gone, began."""
        if self._all_settings is not None:
            self._all_settings.put_back()

    def give_back(self, output: LaneStreams) -> list[str]:
        """Sets the lane's own state, as the resident is gone; returns the names of what cannot be put back."""
        output.switch(None)
        self._threads.leave()
        if self._all_settings is not None:
            return self._all_settings.put_back()
        hold_timers()  # The lane's own code still runs.
        return []

    def leave(self) -> None:
        """Records the state in which the resident leaves the process."""
        if self._all_settings is not None:
            self._settings = self._all_settings.take()
            if self._timers is not None:
                self._settings = {**self._settings, TIMERS: self._timers}
                self._timers = None
        self._random = read_random_state()
        with suppress(OSError):
            self._folder = os.getcwd()
        self._left_threads = self._threads.leave()


# -- culprit note --------------------------------------------------------------------------------
#
# A file in shared memory that names the trial whose code a lane runs: the culprit if the lane dies.


_LENGTH = struct.Struct("<H")
_BYTES = 4096


class RunningTrialNote:
    """The lane's end of the note.

    Args:
        path: the file, best on a RAM disk; empty for no note. Without space for it there is none either.
    """

    def __init__(self, path: str) -> None:
        self._text: str | None = None
        self._map: mmap.mmap | None = None
        if path:
            with suppress(OSError):  # The RAM disk is full, or was emptied: a lane does without a note.
                self._map = _map(path)

    def write(self, trial_id: str | None) -> None:
        """Names the trial whose code runs now; ``None`` for none."""
        if trial_id == self._text or self._map is None:
            return
        text = (trial_id or "").encode("utf-8", "surrogatepass")[: _BYTES - _LENGTH.size]
        self._map[: _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text
        self._text = trial_id


def _map(path: str) -> mmap.mmap:
    make_folder(os.path.dirname(path))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _BYTES)  # To write to a page that a full RAM disk cannot give is fatal.
        return mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)


def read_running_trial(path: str) -> str | None:
    """Returns the trial that the note at ``path`` names; ``None`` if it names none or does not exist."""
    try:
        with open(path, "rb") as file:
            data = file.read(_BYTES)
    except OSError:
        return None
    if len(data) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(data)
    return data[_LENGTH.size : _LENGTH.size + length].decode("utf-8", "surrogatepass") or None
