"""What watches the session of an executor from outside: its loggers, and the server of its metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from fluid.loggers.hub import LoggerHub, PastEnd
from fluid.loggers.prometheus import MetricsServer
from fluid.results.submitted import shown_state
from fluid.session.folder.folder import RunFolder
from fluid.session.folder.resume import LeftSession
from fluid.session.listeners import TrialListener
from fluid.session.status import Status


class Attached:
    """The loggers and the metrics of one executor.

    Args:
        loggers: see :class:`fluid.FluidExecutor`.
        metrics_port: the same.
        folder: the session's run folder.
        status: gives its status.

    Attributes:
        metrics_address: where the metrics are served: ``127.0.0.1:9400``; ``None`` if they are not.

    Raises:
        InvalidFieldError: a logger or the port cannot be used.
    """

    def __init__(
        self,
        loggers: Sequence[TrialListener],
        metrics_port: int | str | None,
        folder: RunFolder,
        status: Callable[[], Status],
    ) -> None:
        self._server: MetricsServer | None = None
        self._hub: LoggerHub | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if metrics_port is not None:
                self._server = MetricsServer(metrics_port, status, self._backlog)
            if not isinstance(loggers, Sequence) or len(loggers):
                self._hub = LoggerHub(loggers, folder)
            undo.pop_all()
        self.metrics_address = None if self._server is None else self._server.address

    def recall(self, left: LeftSession) -> None:
        """Tells the loggers how trials of an earlier session ended, as far as they were not told then."""
        if self._hub is not None:
            self._hub.recall(_past_ends(left))

    def close(self) -> None:
        """Waits until the loggers have all. The session has ended."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.close()

    def _backlog(self) -> int:
        return 0 if self._hub is None else self._hub.backlog


def _past_ends(left: LeftSession) -> Iterator[PastEnd]:
    recovered = left.recovered
    for group_id, trials in recovered.groups.items():
        for trial_id, history in trials.items():
            if history.ended is not None:
                state = shown_state(history.ended, recovered.outcomes.get(trial_id), left.groups[group_id].line.search)
                yield PastEnd(trial_id, state, recovered.failures.get(trial_id))
