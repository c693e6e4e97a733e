"""Warns of tasks and actors of Ray that wait for devices which the session holds, as those of a trial may."""

from __future__ import annotations

from fluid._clock import MonotonicClock
from fluid._logs import logger_of
from fluid.backends.ray.connection import gcs_address
from fluid.backends.ray.private_api import pending_requests

_log = logger_of(__name__)
#: Seconds between two looks; what waits at two of them is warned of.
LOOK_S = 10.0


class StarvationWatch:
    """Looks for tasks and actors that wait, and warns once.

    Args:
        kind: of the session's devices.
    """

    def __init__(self, kind: str) -> None:
        self._resource = kind.upper()
        self._clock = MonotonicClock()
        self._due = self._clock.now() + LOOK_S
        self._waited = False
        self._warned = False

    def look(self, held: int) -> None:
        """Looks if it is time to, by a call to Ray.

        Args:
            held: devices of the session.
        """
        if self._warned or self._clock.now() < self._due:
            return
        self._due = self._clock.now() + LOOK_S
        waiting = [request for request in pending_requests(gcs_address()) if request.get(self._resource, 0.0) > 0.0]
        if waiting and self._waited:
            self._warned = True
            _log.warning(
                "tasks or actors of Ray wait for %s, while this session holds %d %ss of the cluster: give them "
                'num_%ss=0, or leave them some, with FluidExecutor(backend="ray", devices=...)',
                waiting[0],
                held,
                self._resource,
                self._resource.lower(),
            )
        self._waited = bool(waiting)
