"""Runs code of a trial, whose exceptions are the trial's."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from fluid.lane.work_queue import ResidentTrial


class UserCode:
    """Runs a trial's code in a ``with`` block; an exception in the block fails the trial and is not raised again.

    Args:
        resident: the trial.
        fail: called with the trial and the exception.

    Attributes:
        failed: whether it raised.
    """

    __slots__ = ("_fail", "_resident", "failed")

    def __init__(self, resident: ResidentTrial, fail: Callable[[ResidentTrial, BaseException], None]) -> None:
        self.failed = False
        self._resident = resident
        self._fail = fail

    def __enter__(self) -> UserCode:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if exc is None:
            return False
        self.failed = True
        self._fail(self._resident, exc)
        return True
