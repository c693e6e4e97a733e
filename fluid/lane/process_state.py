"""The process state of each resident: random number generators, working directory, standard output.

The residents of a lane share one process. The lane swaps this state when it switches from one to another, so that
each sees the process as its own. A resident that asks for a number of CPU threads has them while it runs. Not swapped
are PyTorch's global flags, the rest of the environment, class attributes, and threads that a trial left running. (The
standard library's ``redirect_stdout`` replaces ``sys.stdout``, of which logging handlers keep references; hence
:class:`fluid.lane.output.Output`.)
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from fluid.lane.output import LaneStreams
from fluid.lane.threads import LaneThreads
from fluid.random_state import Seeds, put_in_force, read_random_state, write_random_state
from fluid.trial_fields import TrialProcess


class ProcessState:
    """The process state of one resident.

    Attributes:
        log_path: the file that receives its output.
        name: its trainable's; empty before that is loaded.

    Args:
        log_path: as above.
        folder: its working directory at first.
        threads: the lane's CPU threads.
        asked: what it asks of the process; without seeds, its random numbers are others every time.
    """

    def __init__(self, log_path: str, folder: str, threads: LaneThreads, asked: TrialProcess) -> None:
        self.log_path = log_path
        self.name = ""
        self._first_folder = self._folder = folder
        self._threads = threads
        self._asked_threads = asked.threads
        self._seeds = asked.seeds or Seeds.fresh()
        self._random: dict[str, Any] = {}

    def begin(self) -> None:
        """Brings the process to where the resident's set-up begins, which may have been tried before."""
        write_random_state({})
        with suppress(OSError):
            os.chdir(self._first_folder)

    def enter(self, output: LaneStreams) -> None:
        """Restores the state in which the resident left the process."""
        put_in_force(self._seeds)
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

    def give_back(self, output: LaneStreams) -> None:
        """Sets the lane's own output and number of threads, as the resident is gone."""
        output.switch(None)
        self._threads.leave()

    def leave(self) -> None:
        """Records the state in which the resident leaves the process."""
        self._random = read_random_state()
        with suppress(OSError):
            self._folder = os.getcwd()
        self._threads.leave()
