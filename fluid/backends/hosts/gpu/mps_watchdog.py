"""Starts the MPS daemon that the lanes of a GPU are clients of, watches it, and recovers from a fault.

The daemon answers through a program that takes a moment to run and may hang, so a thread of its own runs that program.
The host only reads what the thread has found: it ends the lanes, and requests the recovery. The daemons of several
GPUs start in parallel, and the session goes on meanwhile. A fault and the end of the daemon count at once. A missing
answer of a running daemon counts only if it lasts, because a busy machine delays answers.

A daemon that Fluid did not start is asked only when a lane has died, and is not restarted: to recover is to wait until
it accepts clients again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from fluid._clock import MonotonicClock
from fluid._logs import logger_of
from fluid.backends.hosts.forkserver.guardian import MpsControl
from fluid.gpu.mps_control import MpsError
from fluid.gpu.mps_foreign import ForeignDaemon
from fluid.mps import MpsDaemon
from fluid.waiting.waits import BackgroundThread

_log = logger_of(__name__)

#: Seconds between two checks of a daemon without a request.
_CHECK_S = 5.0
#: Unanswered checks in a row after which a running daemon has failed, if a lane has died meanwhile. Without such a
#: death, these seconds must have passed, too.
_MOST_UNANSWERED = 3
_PATIENCE_S = 60.0
#: Seconds between two checks of a daemon that did not answer, if a lane has died.
_RETRY_S = 1.0
#: Most restarts of the daemon; then lanes share GPUs by time slices, where no fault spreads.
_MOST_RESTARTS = 5


class MpsWatchdog:
    """Starts and owns one daemon, or asks one that Fluid did not start. One thread calls it.

    Args:
        devices: UUIDs of the daemon's GPUs.
        start: starts the daemon; its argument is called meanwhile, and returns whether to cancel the start.
        wake: called in another thread whenever one of the properties has changed.
        foreign: whether Fluid does not start the daemon. A fault of it may be one of any of its GPUs.

    Attributes:
        devices: UUIDs of the daemon's GPUs.
        foreign: as above.
    """

    def __init__(
        self,
        devices: Sequence[str],
        start: Callable[[Callable[[], bool]], MpsDaemon | ForeignDaemon],
        wake: Callable[[], None] = lambda: None,
        *,
        foreign: bool = False,
    ) -> None:
        self.devices = tuple(devices)
        self.foreign = foreign
        self._start = start
        self._wake = wake
        self._daemon: MpsDaemon | ForeignDaemon | None = None
        self._condition = threading.Condition()
        self._clock = MonotonicClock()
        self._problem = ""
        #: Checks in a row that the daemon, though it runs, did not answer; and the time of the first, seconds.
        self._unanswered = 0
        self._unanswered_since = 0.0
        #: Checks that were requested and are not done.
        self._wanted = 0
        #: Whether the daemon is to be started, or to recover.
        self._starting = True
        self._closed = False
        self._given_up = ""
        self._thread = BackgroundThread("fluid-mps-watchdog", self._run, self._give_up)
        self._thread.start()

    @property
    def problem(self) -> str:
        """Why no lane can be relied on any more, until :meth:`recover` is called; empty if all is well."""
        return self._problem

    @property
    def is_checking(self) -> bool:
        """Whether a check that was requested is not finished."""
        return self._wanted > 0

    @property
    def is_ready(self) -> bool:
        """Whether lanes may be started: as clients, or, once MPS was given up, without it."""
        return not (self._problem or self._starting or (self.foreign and self.is_checking))

    def covers(self, token: str) -> bool:
        """Whether a lane on these GPUs, UUIDs divided by commas, is or would be a client of this daemon."""
        return set(token.split(",")) <= set(self.devices)

    def await_start(self) -> str:
        """Waits until the daemon has started or failed to; returns why it has failed, or an empty text."""
        with self._condition:
            self._condition.wait_for(lambda: not self._starting)
        return self._given_up

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
            self._condition.notify_all()

    def recover(self) -> None:
        """Requests the recovery from a problem; the lanes that it concerns were ended, or are about to be."""
        with self._condition:
            self._problem = ""
            self._starting = True
            self._condition.notify_all()

    def lane_environment(self, token: str) -> tuple[tuple[str, str], ...]:
        """The environment of a client on GPUs that it covers; empty once MPS was given up."""
        if self._given_up or not isinstance(self._daemon, MpsDaemon):
            return ()
        first = token.partition(",")[0]
        return tuple((self._daemon.lane_environment(first) | {"CUDA_VISIBLE_DEVICES": token}).items())

    @property
    def control(self) -> MpsControl | None:
        """Where the daemon is that ends the work of its clients; ``None`` where no lane is to go on as one."""
        if self._given_up or self._problem or not isinstance(self._daemon, MpsDaemon):
            return None
        return MpsControl(self._daemon.program, self._daemon.pipe_folder)

    def request_end(self) -> None:
        """Begins to end the daemon."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def close(self) -> None:
        """Ends the daemon; nothing of it is left when this returns."""
        self.request_end()
        self._thread.join()

    # -- in its own thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._given_up and self._turn():
            pass
        self._end_daemon()

    def _give_up(self, error: BaseException) -> None:
        """Ends the waiting for its checks: lanes share by time slices, without MPS."""
        _log.warning("MPS is given up on %s: its watch has failed", ", ".join(self.devices))
        with self._condition:
            self._given_up, self._starting, self._wanted = f"its watch has failed: {error}", False, 0
            self._condition.notify_all()
        self._wake()
        self._end_daemon()

    def _end_daemon(self) -> None:
        if isinstance(self._daemon, MpsDaemon):
            self._daemon.close()

    def _turn(self) -> bool:
        """Starts or checks the daemon, when that is due; returns False once the daemon is to be ended."""
        with self._condition:
            if not (self._starting or self._closed):
                if not self._wanted:
                    self._condition.wait(None if self.foreign else _CHECK_S)
                elif self._unanswered:
                    self._condition.wait(_RETRY_S)
            if self._closed:
                return False
            checks, starting = self._wanted, self._starting
        if starting:
            self._start_or_give_up()
            checks = 0  # Of a daemon that has only just started.
        elif not self._problem:
            self._check(lane_died=checks > 0)
            if self._unanswered and not self._problem:
                checks = 0  # Still to be answered.
        with self._condition:
            self._wanted = 0 if self._given_up else max(0, self._wanted - checks)
        if self._problem or starting or checks > 0:
            self._wake()
        return True

    def _check(self, *, lane_died: bool) -> None:
        assert self._daemon is not None
        try:
            problem = self._daemon.problem()
            self._unanswered = 0
        except MpsError as error:
            problem = self._note_unanswered(str(error), lane_died=lane_died)
        if problem and not self._closed:
            _log.warning("MPS has failed, and lanes of %s are started again: %s", ", ".join(self.devices), problem)
            self._problem = problem

    def _note_unanswered(self, why: str, *, lane_died: bool) -> str:
        """Counts a check that the daemon did not answer; returns ``why`` once that is a problem."""
        if self._unanswered == 0:
            self._unanswered_since = self._clock.now()
        self._unanswered += 1
        lasts = lane_died or self._clock.now() - self._unanswered_since >= _PATIENCE_S
        return why if self._unanswered >= _MOST_UNANSWERED and lasts else ""

    def _start_or_give_up(self) -> None:
        why = ""
        self._unanswered = 0
        try:
            if self._daemon is None:
                self._daemon = self._start(lambda: self._closed)
            elif isinstance(self._daemon, ForeignDaemon):
                # A death has to be looked at, too: if the fault is on another GPU as well, lanes there are in the way.
                self._daemon.await_recovery(lambda: self._closed or self.is_checking)
            elif self._daemon.restarts >= _MOST_RESTARTS:
                why = f"it failed {_MOST_RESTARTS + 1} times"
                self._daemon.close()
            else:
                self._daemon.restart()
        except Exception as error:  # Lanes must not wait forever.
            why = str(error) or type(error).__name__
        if why and not self._closed:
            where = ", ".join(self.devices)
            _log.warning("trials share %s by time slices from now on, without MPS: %s", where, why)
        with self._condition:
            self._given_up = why
            self._starting = False
            self._condition.notify_all()
