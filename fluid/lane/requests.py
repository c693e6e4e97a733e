"""A lane's part in requests to the driver: sends what trials ask, and hands each answer to the thread that waits."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

from fluid._clock import Clock
from fluid.engine.commands import Answer, StopLane, StopTrial
from fluid.engine.events import TrialAsked
from fluid.errors import FluidError
from fluid.trainables.driver_link import RequestRefusedError, dump_message
from fluid.trainables.exception_pickle import load_any_exception


class _Waiter:
    """A thread that waits for an answer."""

    __slots__ = ("answer", "arrived", "link")

    def __init__(self, link: LaneDriverLink) -> None:
        self.link = link
        #: ``None`` until it arrives, and if the request is refused.
        self.answer: Answer | None = None
        #: Locked until then.
        self.arrived = threading.Lock()
        self.arrived.acquire()


class DriverRequests:
    """The requests of a lane's trials that were not answered yet.

    Args:
        send: sends the driver a message.
        read_ahead: makes a thread call :meth:`preview` with each message of the driver while trials' code runs.
        clock: measures how long trials wait.
        lane_id: the lane's number.
    """

    def __init__(self, send: Callable[[Any], None], read_ahead: Callable[[], None], clock: Clock, lane_id: int) -> None:
        self._lane_id = lane_id
        self._send = send
        self._read_ahead = read_ahead
        self._clock = clock
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiters: dict[int, _Waiter] = {}
        #: The links of trials in the lane, by trial.
        self._links: dict[str, LaneDriverLink] = {}
        self._shut_down = False
        #: Seconds for which any thread waited, up to when the first of those that wait now began to.
        self._waited = 0.0
        self._waiting_since = 0.0

    def link(self, trial_id: str, folder: str) -> LaneDriverLink:
        """Makes the link of a trial that is set up here; that of an earlier resident of the same id is closed."""
        with self._lock:
            before = self._links.get(trial_id)
            if before is not None:
                self._close(before)
            link = self._links[trial_id] = LaneDriverLink(trial_id, folder, self)
            return link

    def unlink(self, trial_id: str) -> None:
        """Refuses all requests of a trial that has left the lane."""
        with self._lock:
            link = self._links.pop(trial_id, None)
            if link is not None:
                self._close(link)

    @property
    def waited_s(self) -> float:
        """Seconds for which any thread has waited for an answer so far."""
        if not self._waiters:
            return self._waited
        with self._lock:
            return self._waited + (self._clock.now() - self._waiting_since if self._waiters else 0.0)

    def ask(self, link: LaneDriverLink, request: Any) -> Any:
        """Sends a request and waits for the answer: see :meth:`fluid.trainables.trial_code.DriverLink.ask`."""
        if os.getpid() != self._pid:
            raise FluidError("a process that the trial has started has no link to the driver; ask in the trial itself")
        payload = dump_message(request)
        self._read_ahead()
        waiter = _Waiter(link)
        with self._lock:
            if link.closed or self._shut_down:
                raise RequestRefusedError(f"trial {link.trial_id!r} has ended")
            if not self._waiters:
                self._waiting_since = self._clock.now()
            number = next(self._numbers)
            self._waiters[number] = waiter
        try:
            self._send(TrialAsked(self._clock.now(), link.trial_id, self._lane_id, request_id=number, payload=payload))
            waiter.arrived.acquire()
        finally:
            with self._lock:
                del self._waiters[number]
                if not self._waiters:
                    self._waited += self._clock.now() - self._waiting_since
        if waiter.answer is None or waiter.answer.payload is None:
            raise RequestRefusedError(f"trial {link.trial_id!r} has ended")
        if waiter.answer.failed:
            raise load_any_exception(waiter.answer.payload)
        return pickle.loads(waiter.answer.payload)

    def preview(self, message: Any) -> None:
        """Looks at a message of the driver as soon as it has arrived, in the thread that reads ahead."""
        if isinstance(message, Answer):
            with self._lock:
                waiter = self._waiters.get(message.request_id)
            if waiter is not None and waiter.arrived.locked():
                waiter.answer = message
                waiter.arrived.release()
        elif isinstance(message, StopTrial):
            with self._lock:
                link = self._links.get(message.trial_id)
                if link is not None:
                    self._close(link)
        elif isinstance(message, StopLane):
            with self._lock:
                self._shut_down = True
                for link in self._links.values():
                    self._close(link)

    def _close(self, link: LaneDriverLink) -> None:
        """Refuses a link's requests; for a thread that holds the lock."""
        link.closed = True
        for waiter in self._waiters.values():
            if waiter.link is link and waiter.arrived.locked():
                waiter.arrived.release()


class LaneDriverLink:
    """The :class:`fluid.trainables.trial_code.DriverLink` of a resident.

    Attributes:
        trial_id: the resident.
        folder: its own folder.
        closed: whether its requests are refused, as it is to end.
    """

    def __init__(self, trial_id: str, folder: str, requests: DriverRequests) -> None:
        self.trial_id = trial_id
        self.folder = folder
        self.closed = False
        self._requests = requests

    def ask(self, request: Any) -> Any:
        """Sends a request, and waits for the answer."""
        return self._requests.ask(self, request)
