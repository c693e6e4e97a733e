"""Those who wait for the end of a drain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from fluid.engine.commands import Command, NoteDrained
from fluid.engine.events import DeviceDraining, Event, SessionDraining
from fluid.session.waits import SessionFuture, SessionWaits


class DrainWaits:
    """Begins drains, and tells those who wait when they have ended. For the session's thread.

    Args:
        handle: gives the engine an event.
        now: tells the time.
        waits: of the session.
    """

    def __init__(self, handle: Callable[[Event], None], now: Callable[[], float], waits: SessionWaits) -> None:
        self._handle, self._waits = handle, waits
        self._now = now
        #: By device; the session's where that is ``None``.
        self._waiting: dict[int | None, list[SessionFuture]] = {}

    def begin(self, device_id: int | None, deadline_s: float) -> SessionFuture:
        """Begins to drain a device, or the session where that is ``None``.

        Args:
            device_id: the device.
            deadline_s: seconds until its end at the latest.

        Returns:
            Gets the ids of the trials that were not saved.

        Raises:
            InvalidFieldError: the device is not in use.
        """
        answer = SessionFuture(self._waits)
        waiting = self._waiting.setdefault(device_id, [])
        waiting.append(answer)
        now = self._now()
        try:
            if device_id is None:
                self._handle(SessionDraining(now, now + deadline_s))
            else:
                self._handle(DeviceDraining(now, device_id, now + deadline_s))
        except BaseException:
            waiting.remove(answer)
            raise
        return answer

    def ended(self, commands: Iterable[Command]) -> list[Callable[[], None]]:
        """Returns what answers those whose drain has ended."""
        return [partial(self._answer, command) for command in commands if isinstance(command, NoteDrained)]

    def _answer(self, drained: NoteDrained) -> None:
        for answer in self._waiting.pop(drained.device_id, ()):
            answer.set_result(drained.unsaved)

    def give_up(self, error: BaseException) -> None:
        """Tells all that the session has ended before."""
        waiting, self._waiting = self._waiting, {}
        for answers in waiting.values():
            for one in answers:
                one.set_exception(error)
