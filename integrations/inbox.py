"""The thread boundary of an integration: events of the executor's thread, handled in the thread of the search."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial

from fluid.engine.events import Failure
from fluid.results.records import Result
from fluid.session.listeners import TrialListener, TrialRequest
from fluid.session.waits import SessionWaits
from fluid.waiting.queue import HeldQueue


class EventInbox(TrialListener):
    """Queues what the executor's thread reports until the owner's thread takes it.

    The ``on_...`` methods and :meth:`post` may be called in any thread. :meth:`deliver` calls the listener in the
    thread that calls it, in the order in which the events came.

    Args:
        listener: handles the events in the owner's thread.
        waits: of the session.
    """

    def __init__(self, listener: TrialListener, waits: SessionWaits) -> None:
        self._listener = listener
        self._waits = waits
        self.tells_failures = listener.tells_failures
        self._events = HeldQueue[Callable[[], None]](waits.hold)

    def on_start(self, trial_id: str) -> None:
        self.post(partial(self._listener.on_start, trial_id))

    def on_result(self, result: Result) -> None:
        self.post(partial(self._listener.on_result, result))

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        self.post(partial(self._listener.on_end, trial_id, state, failure))

    def on_request(self, request: TrialRequest) -> None:
        self.post(partial(self._listener.on_request, request))

    def on_left(self, trial_id: str) -> None:
        """A driver that is gone has left a trial of a group of this name, which no other one had submitted."""
        if (take_up := getattr(self._listener, "on_left", None)) is not None:
            self.post(partial(take_up, trial_id))

    def on_broken(self, error: BaseException) -> None:
        self.post(partial(self._listener.on_broken, error))

    def post(self, handler: Callable[[], None]) -> None:
        """Queues a call of ``handler`` by the owner's thread."""
        self._events.put(handler)

    def deliver_settled(self, timeout: float | None, *, polls: bool = False) -> bool:
        """Handles the events of the next instant of a virtual clock at which there are any, once all have come.

        Args:
            timeout, polls: see :meth:`HeldQueue.get_settled`.

        Returns:
            Whether there was any.

        Raises:
            FluidError: the session's thread asks, as in a listener.
        """
        with self._waits.waiting("events"):
            handlers = self._events.get_settled(timeout, polls=polls)
        for handler in handlers:
            handler()
        return bool(handlers)

    def deliver(self, timeout: float | None = 0.0, *, polls: bool = False) -> bool:
        """Handles all queued events.

        Args:
            timeout: seconds to wait for the first event; ``None`` for no limit.
            polls: whether the timeout is only how often the caller looks at something else: see :class:`HeldQueue`.

        Returns:
            Whether there was any.
        """
        try:
            with self._waits.waiting("events"):
                handler = self._events.get(timeout, polls=polls)
        except queue.Empty:
            return False
        while True:
            handler()
            try:
                handler = self._events.get(0.0)
            except queue.Empty:
                return True
