"""The stores of checkpoints of a Ray session's hosts, as the driver sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fluid.backends.hosts.checkpoint_keeper import CheckpointKeeper
from fluid.backends.hosts.folders import HERE
from fluid.backends.hosts.host import Host
from fluid.backends.ray.remote_host import RemoteHost, RemoteStore
from fluid.engine.commands import CheckpointValue
from fluid.lane.protocol import CheckpointMoved, CheckpointPersisted

#: Most values that a host is sent at once.
_BATCH = 1000


class HostStores:
    """Implements :class:`fluid.backends.base.CheckpointStores` over the hosts of a launcher.

    Args:
        hosts: returns the hosts; a machine may have several.
        host_on: returns one of a machine, which is started if need be; ``None`` if the session has no node there.
        sent: called with a host for which something waits to be sent.
        here: of the driver's machine, which has no host where the session has no device there.
        lock: the launcher's, any of whose threads may start a host.
    """

    def __init__(
        self,
        hosts: Callable[[], Iterable[Host | RemoteHost]],
        host_on: Callable[[str], Host | RemoteHost | None],
        sent: Callable[[Host | RemoteHost], None],
        here: CheckpointKeeper,
        lock: AbstractContextManager[Any],
    ) -> None:
        self._hosts = hosts
        self._host_on = host_on
        self._sent = sent
        self._here = here
        self._lock = lock
        #: All that is known, for hosts to come.
        self._values: dict[str, CheckpointValue] = {}

    def value(self, values: Mapping[str, CheckpointValue]) -> None:
        """Tells all hosts what checkpoints of trials are worth, by trial."""
        with self._lock:
            self._values |= values
            for host in self._hosts():
                self._tell(host, values)

    def forget(self, trial_id: str, *, keep_newest: bool) -> None:
        """Drops what they know of a trial, and has its checkpoints deleted on every machine that has a host."""
        with self._lock:
            self._values.pop(trial_id, None)
            hosts = list(self._hosts())
            for host in hosts:
                host.stores.forget(trial_id, keep_newest=keep_newest)
                self._sent(host)
            if HERE not in map(name_of, hosts):
                self._here.forget(trial_id, keep_newest=keep_newest)

    def persist(self, host: str, trial_id: str, path: str, *, keep: bool) -> None:
        """Has the host of a machine copy a checkpoint there."""
        with self._lock:
            self._store_on(host).persist(host, trial_id, path, keep=keep)

    def discard(self, host: str, path: str, *, demote: bool) -> None:
        """Has the host of a machine remove a checkpoint from those that outlive the run."""
        with self._lock:
            self._store_on(host).discard(host, path, demote=demote)

    def prefetch(self, host: str, trial_id: str, path: str, source: tuple[str, int] | None) -> None:
        """Has a host bring a checkpoint into its memory; one of a machine's, if that has several."""
        with self._lock:
            found = next((one for one in self._hosts() if name_of(one) == host), None)
            if found is not None:
                found.stores.prefetch(host, trial_id, path, source)
                self._sent(found)

    def tell_all(self, host: Host | RemoteHost) -> None:
        """Tells a host that has just been started."""
        if self._values:
            self._tell(host, self._values)

    def poll(self) -> list[CheckpointMoved | CheckpointPersisted]:
        """Returns what was done without a host since the last call."""
        return self._here.poll()

    def close(self) -> None:
        """Ends what works without a host; the hosts' own end with them."""
        self._here.close()

    def _store_on(self, machine: str) -> CheckpointKeeper | RemoteStore:
        """The store of a machine; that of the driver's refuses what is for another one."""
        found = self._host_on(machine)
        if found is None:
            return self._here
        self._sent(found)
        return found.stores

    def _tell(self, host: Host | RemoteHost, values: Mapping[str, CheckpointValue]) -> None:
        trials = list(values)
        for begin in range(0, len(trials), _BATCH):
            host.stores.value({trial_id: values[trial_id] for trial_id in trials[begin : begin + _BATCH]})
        self._sent(host)


def name_of(host: Host | RemoteHost) -> str:
    """The name of a host's machine."""
    return host.name if isinstance(host, RemoteHost) else HERE
