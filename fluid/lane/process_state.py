"""The process state of each resident: settings, random number generators, working directory, standard output.

The residents of a lane share one process. The lane swaps this state when it switches from one to another, so that
each sees the process as its own; :mod:`fluid.lane.process_settings` says what can be swapped, and what not. A resident
that asks for a number of CPU threads, or sets one, has it while it runs. Modules are looked up in ``sys.modules`` and
never imported: a trial has no state in a module that it has not loaded. (The standard library's ``redirect_stdout``
replaces ``sys.stdout``, of which logging handlers keep references; hence :class:`fluid.lane.output.Output`.)
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from typing import Any

from fluid.lane.output import LaneStreams
from fluid.lane.process_settings import TIMERS, ProcessSettings, Settings, go_on_with_timers, hold_timers
from fluid.lane.threads import LaneThreads

_SEED_BYTES = 16


def read_random_state() -> dict[str, Any]:
    """Returns the states of the global random number generators that are loaded, by module."""
    states: dict[str, Any] = {}
    if (module := sys.modules.get("random")) is not None:
        states["random"] = module.getstate()
    if (module := sys.modules.get("numpy.random")) is not None:
        states["numpy.random"] = module.get_state()
    if (torch := _torch()) is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["torch.cuda"] = torch.cuda.get_rng_state()
    return states


def write_random_state(states: dict[str, Any]) -> None:
    """Sets the generators to these states; those without one get a fresh seed.

    All lanes are forked from one process: without a fresh seed, trials would draw the same random numbers.
    """
    seed = int.from_bytes(os.urandom(_SEED_BYTES), "little")
    if (module := sys.modules.get("random")) is not None:
        if "random" in states:
            module.setstate(states["random"])
        else:
            module.seed(seed)
    if (module := sys.modules.get("numpy.random")) is not None:
        if "numpy.random" in states:
            module.set_state(states["numpy.random"])
        else:
            module.seed(seed % 2**32)
    if (torch := _torch()) is not None:
        if "torch" in states:
            torch.set_rng_state(states["torch"])
        else:
            # Not torch.manual_seed: it also looks for every kind of accelerator, which takes longer.
            torch.default_generator.manual_seed(seed % 2**63)
        if torch.cuda.is_initialized():
            if "torch.cuda" in states:
                torch.cuda.set_rng_state(states["torch.cuda"])
            else:
                torch.cuda.manual_seed(seed % 2**63)


def restore_random_state(states: dict[str, Any]) -> None:
    """Sets the generators to the states that they had in another process.

    Imports their modules if they are not loaded: the trial has drawn from them before, and may do so again.
    """
    for name in states:
        importlib.import_module(name)
    write_random_state(states)


def _torch() -> Any:
    torch = sys.modules.get("torch")
    # A trial that failed to import it leaves a partial module without a generator.
    return torch if hasattr(torch, "default_generator") else None


class ProcessState:
    """The process state of one resident.

    Attributes:
        log_path: the file that receives its output.
        name: its trainable's; empty before that is loaded.

    Args:
        log_path: as above.
        folder: its working directory at first.
        settings: the lane's.
        threads: the lane's CPU threads.
        asked_threads: those that it asks for; ``None`` for the lane's own.
    """

    def __init__(
        self,
        log_path: str,
        folder: str,
        settings: ProcessSettings,
        threads: LaneThreads,
        asked_threads: int | None = None,
    ) -> None:
        self.log_path = log_path
        self.name = ""
        self._home = self._folder = folder
        self._all_settings = settings
        #: ``None`` before it has run.
        self._settings: Settings | None = None
        self._threads = threads
        self._asked_threads = asked_threads
        self._random: dict[str, Any] = {}
        #: Its signal timers while its code does not run.
        self._timers: tuple[tuple[float, float], ...] | None = None

    def enter(self, output: LaneStreams) -> None:
        """Restores the state in which the resident left the process."""
        self._all_settings.put(self._settings)
        write_random_state(self._random)
        with suppress(OSError):  # The folder may have been deleted since.
            os.chdir(self._folder)
        output.switch(self.log_path, self.name)
        self._threads.enter(self._asked_threads)

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
        """Puts the process back to the state in which the resident, whose first code is gone, found it."""
        self._all_settings.put_back()
        os.chdir(self._home)

    def give_back(self, output: LaneStreams) -> list[str]:
        """Sets the lane's own state, as the resident is gone; returns the names of what cannot be put back."""
        output.switch(None)
        self._threads.leave()
        return self._all_settings.put_back()

    def leave(self) -> None:
        """Records the state in which the resident leaves the process."""
        self._settings = self._all_settings.take()
        if self._timers is not None:
            self._settings = {**self._settings, TIMERS: self._timers}
            self._timers = None
        self._random = read_random_state()
        with suppress(OSError):
            self._folder = os.getcwd()
        self._asked_threads = self._threads.leave()
