"""Watches the MPS daemon that a node's lanes are clients of, and starts it again after a fault.

The daemon answers through a program that takes a moment to run and may hang, so a thread of its own does that. The pool
of lanes only reads what the thread has found: it ends the lanes, and requests a restart of the daemon.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fluid.gpu.mps_control import MpsError
from fluid.mps import MpsDaemon

_log = logging.getLogger(__name__)

#: Seconds between two checks of a daemon without a request.
_CHECK_S = 5.0
#: Most restarts of the daemon; then lanes share GPUs by time slices, where no fault spreads.
_MOST_RESTARTS = 5


class MpsWatchdog:
    """Watches one daemon, which it owns from now on. One thread calls it.

    Args:
        daemon: a running one.
    """

    def __init__(self, daemon: MpsDaemon) -> None:
        self._daemon = daemon
        self._condition = threading.Condition()
        self._problem = ""
        #: Checks that were requested and are not done.
        self._wanted = 0
        self._restarting = False
        self._closed = False
        self._given_up = ""
        self._wake: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    def start(self, wake: Callable[[], None]) -> None:
        """Begins to watch.

        Args:
            wake: called in another thread whenever one of the properties has changed.
        """
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name="fluid-mps-watchdog", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why no lane can be relied on any more, until :meth:`restart` is called; empty if all is well."""
        return self._problem

    @property
    def is_checking(self) -> bool:
        """Whether a check that was requested is not finished."""
        return self._wanted > 0

    @property
    def is_ready(self) -> bool:
        """Whether lanes may be started: as clients, or, once MPS was given up, without it."""
        return not self._problem and not self._restarting

    @property
    def given_up(self) -> str:
        """Why lanes are not clients any more; empty as long as they are."""
        return self._given_up

    def request_check(self) -> None:
        """Requests a check from now on, as a lane has died."""
        with self._condition:
            if self._given_up or self._closed:
                return
            self._wanted += 1
            self._condition.notify()

    def restart(self) -> None:
        """Requests a restart of the daemon; all lanes were ended, or are about to be."""
        with self._condition:
            self._problem = ""
            self._restarting = True
            self._condition.notify()

    def lane_environment(self, devices: str) -> tuple[tuple[str, str], ...]:
        """The environment of a client on GPUs, given by UUIDs with commas between; empty once MPS was given up."""
        names = devices.split(",")
        if self._given_up or not set(names) <= set(self._daemon.devices):
            return ()
        return tuple((self._daemon.lane_environment(names[0]) | {"CUDA_VISIBLE_DEVICES": devices}).items())

    def close(self) -> None:
        """Ends the daemon; nothing of it is left when this returns."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()
        self._daemon.close()

    # -- in its own thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                if not (self._wanted or self._restarting or self._closed):
                    self._condition.wait(_CHECK_S)
                if self._closed:
                    return
                checks, restarting = self._wanted, self._restarting
            if restarting:
                self._start_again()
                checks = 0
            elif not self._problem:
                self._check()
            with self._condition:
                self._wanted = max(0, self._wanted - checks)
                changed = bool(self._problem) or restarting or checks > 0
                if self._given_up:
                    self._wanted = 0
            if changed:
                self._wake()
            if self._given_up:
                return

    def _check(self) -> None:
        problem = self._daemon.problem()
        if problem and not self._closed:
            _log.warning("MPS has to be started again, and all lanes with it: %s", problem)
            self._problem = problem

    def _start_again(self) -> None:
        why = ""
        try:
            if self._daemon.restarts >= _MOST_RESTARTS:
                why = f"it failed {_MOST_RESTARTS + 1} times"
                self._daemon.close()
            else:
                self._daemon.restart()
        except MpsError as error:
            why = str(error)
        with self._condition:
            self._given_up = why
            self._restarting = False
        if why:
            _log.warning("trials share GPUs by time slices from now on, without MPS: %s", why)
