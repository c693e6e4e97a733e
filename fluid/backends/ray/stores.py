"""The stores of checkpoints of a Ray session's hosts, as the driver sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fluid.backends.hosts.folders import HERE
from fluid.backends.hosts.host import Host
from fluid.backends.ray.remote_host import RemoteHost
from fluid.engine.checkpoint_places import CheckpointValue

#: Most values that a host is sent at once.
_BATCH = 1000


class HostStores:
    """Implements :class:`fluid.backends.retention.CheckpointStores` over the hosts of a launcher.

    Args:
        hosts: returns the hosts; a machine may have several.
        sent: called with a host for which something waits to be sent.
        lock: the launcher's, any of whose threads may start a host.
    """

    def __init__(
        self,
        hosts: Callable[[], Iterable[Host | RemoteHost]],
        sent: Callable[[Host | RemoteHost], None],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._hosts = hosts
        self._sent = sent
        self._lock = lock
        #: All that is known, for hosts to come.
        self._values: dict[str, CheckpointValue] = {}

    def value(self, values: Mapping[str, CheckpointValue]) -> None:
        """Tells all hosts what checkpoints of trials are worth, by trial."""
        with self._lock:
            self._values |= values
            for host in self._hosts():
                self._tell(host, values)

    def forget(self, trial_id: str) -> None:
        """Drops what they know of a trial."""
        with self._lock:
            if self._values.pop(trial_id, None) is not None:
                for host in self._hosts():
                    host.stores.forget(trial_id)
                    self._sent(host)

    def prefetch(self, host: str, trial_id: str, path: str, source: tuple[str, int] | None) -> None:
        """Has a host bring a checkpoint into its memory; one of a machine's, if that has several."""
        with self._lock:
            found = next((one for one in self._hosts() if _name_of(one) == host), None)
            if found is not None:
                found.stores.prefetch(host, trial_id, path, source)
                self._sent(found)

    def tell_all(self, host: Host | RemoteHost) -> None:
        """Tells a host that has just been started."""
        if self._values:
            self._tell(host, self._values)

    def _tell(self, host: Host | RemoteHost, values: Mapping[str, CheckpointValue]) -> None:
        trials = list(values)
        for begin in range(0, len(trials), _BATCH):
            host.stores.value({trial_id: values[trial_id] for trial_id in trials[begin : begin + _BATCH]})
        self._sent(host)


def _name_of(host: Host | RemoteHost) -> str:
    return host.name if isinstance(host, RemoteHost) else HERE
