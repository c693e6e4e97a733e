"""Where the checkpoints of each machine of a session are served to lanes of other machines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fluid.backends.base import CheckpointSource
from fluid.backends.hosts.checkpoints.keeper import CheckpointKeeper
from fluid.backends.hosts.checkpoints.server import CheckpointServer, ServedFolders
from fluid.backends.hosts.folders import HERE, HostFolders
from fluid.backends.hosts.host import Host, HostSettings
from fluid.backends.ray.devices import RayDevices
from fluid.backends.ray.remote_host import RemoteHost, RemoteStore
from fluid.engine.commands import CheckpointValue
from fluid.lane.checkpoints.fetch import LinkRates, fetch_checkpoint
from fluid.lane.protocol import CheckpointReport


class CheckpointSources:
    """Knows where the checkpoints of each machine are served; serves those of the driver's machine itself.

    Args:
        devices: the session's.
        settings: of its hosts.
        host_on: returns a host of a machine, which is started if need be; ``None`` if the session has no node there.
    """

    def __init__(
        self, devices: RayDevices, settings: HostSettings, host_on: Callable[[str], Host | RemoteHost | None]
    ) -> None:
        self._devices = devices
        self._settings = settings
        self._host_on = host_on
        #: Once a lane of another machine needs a checkpoint of the driver's.
        self._server: CheckpointServer | None = None

    def find(self, machine: str) -> CheckpointSource:
        """Returns where the checkpoints of a machine are served, given its name; starts a host there if need be."""
        if machine == HERE:
            return CheckpointSource(self._serve().address)
        host = self._host_on(machine)
        if not isinstance(host, RemoteHost):
            return CheckpointSource()
        return CheckpointSource(host.checkpoints_at, is_coming=host.checkpoints_at is None)

    def fetch(self, source: CheckpointSource, path: str, target: str) -> None:
        """Copies a checkpoint from the machine that serves it.

        Args:
            source: where it is served.
            path: its folder there.
            target: its folder here, which appears as a whole.

        Raises:
            OSError: it cannot be fetched, or is gone there.
        """
        if source.address is None:
            raise ConnectionError(f"{path} is not served by its machine")
        name = os.path.basename(path)

        def place_for(found: str, size: int) -> str:
            if found != name:
                raise FileNotFoundError(f"{path} is damaged or gone")
            return target

        rates = LinkRates(self._settings.session.run_folder)
        fetch_checkpoint(source.address, self._settings.key, path, place_for, rates)

    def close(self) -> None:
        """Ends the driver's server."""
        if self._server is not None:
            self._server.close()

    def abandon(self) -> None:
        """Called in a process forked from the driver: closes descriptors that are the driver's."""
        if self._server is not None:
            self._server.abandon()

    def _serve(self) -> CheckpointServer:
        if self._server is None:
            session = self._settings.session
            folders = HostFolders(session, HERE)
            served = ServedFolders(session.run_folder, session.run_folder, folders.memory_folder)
            folders.leave(clear=False)
            self._server = CheckpointServer(self._devices.ip, self._settings.key, served)
        return self._server


# -- stores --------------------------------------------------------------------------------------
#
# The stores of checkpoints of a Ray session's hosts, as the driver sees them.


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

    def fork(self, host: str, child: str, parent: str, path: str) -> None:
        """Has the host of a machine make a checkpoint there the start of a trial."""
        with self._lock:
            self._store_on(host).fork(host, child, parent, path)

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

    def poll(self) -> list[CheckpointReport]:
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
