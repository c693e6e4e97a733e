"""An MPS daemon that Fluid did not start. It is asked for the state of its servers, and told nothing."""

from __future__ import annotations

import os
from collections.abc import Callable

from fluid._clock import MonotonicClock, nap
from fluid._logs import logger_of
from fluid.gpu.mps_control import PIPE_VARIABLE, Control, MpsError, search_paths

_log = logger_of(__name__)

#: Longest wait for a server in FAULT to accept clients again, and how often it is asked, seconds. It does once the last
#: client that the fault has ended is gone; some of them may be other programs.
_MOST_WAIT_S = 60.0
_LOOK_S = 0.5
#: Longest that the daemon may take to answer, seconds.
_ANSWER_S = 5.0


class ForeignDaemon:
    """Asks a daemon that Fluid did not start.

    It may belong to another user and not answer, and then nothing is known of its faults.

    Args:
        program: the control program.
        pipe_folder: folder of the daemon's sockets.
    """

    def __init__(self, program: str, pipe_folder: str) -> None:
        environment = {**os.environ, **search_paths(program, os.environ), PIPE_VARIABLE: pipe_folder}
        self._folder = pipe_folder
        self._control = Control(program, environment, _ANSWER_S)
        self._clock = MonotonicClock()
        self._answered = True

    def problem(self) -> str:
        """Returns the fault that one of its servers is in, as a sentence; empty if there is none, or it is unknown."""
        try:
            faulty = [server for server, state in self._control.servers().items() if state == "FAULT"]
        except MpsError as error:
            if self._answered:
                _log.warning("faults of the MPS daemon in %s cannot be noticed: %s", self._folder, error)
            self._answered = False
            return ""
        self._answered = True
        if faulty:
            return f"server {faulty[0]} of the MPS daemon in {self._folder} is in FAULT: a client failed"
        return ""

    def await_recovery(self, is_cancelled: Callable[[], bool]) -> None:
        """Waits until it reports no fault; at most a minute, as clients of other programs may keep it in FAULT.

        Args:
            is_cancelled: called meanwhile; once it returns True, the wait ends.
        """
        deadline = self._clock.now() + _MOST_WAIT_S
        while self.problem() and not is_cancelled():
            if self._clock.now() >= deadline:
                _log.warning("the MPS daemon in %s has been in FAULT for %g s", self._folder, _MOST_WAIT_S)
                return
            nap(_LOOK_S)
