"""The listeners that a user passes to a sweep, called besides its own."""

from __future__ import annotations

from typing import Any

from fluid.engine.events import Failure
from fluid.results.records import Result
from fluid.session.listeners import TrialListener, TrialRequest
from fluid.session.waits import guarded


class Callbacks(TrialListener):
    """Calls several listeners in turn. What one raises is logged, and ends nothing. Each has results of its own.

    Args:
        listeners: what to call.
        name: of the sweep, for the log.
    """

    def __init__(self, listeners: tuple[TrialListener, ...], name: str) -> None:
        self._listeners = listeners
        self._whose = f"a callback of the sweep {name!r}"
        self.tells_failures = any(getattr(listener, "tells_failures", False) for listener in listeners)

    def on_start(self, trial_id: str) -> None:
        self._call("on_start", trial_id)

    def on_result(self, result: Result) -> None:
        for listener in self._listeners:
            guarded(self._whose, lambda each=listener: each.on_result(result.copy()))

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        self._call("on_end", trial_id, state, failure)

    def on_request(self, request: TrialRequest) -> None:
        """Asks the first listener that answers requests."""
        for listener in self._listeners:
            if getattr(type(listener), "on_request", None) is not TrialListener.on_request:
                listener.on_request(request)
                return
        super().on_request(request)

    def on_broken(self, error: BaseException) -> None:
        self._call("on_broken", error)

    def _call(self, method: str, *facts: Any) -> None:
        for listener in self._listeners:
            guarded(self._whose, lambda each=listener: getattr(each, method)(*facts))
