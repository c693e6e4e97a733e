"""Where the checkpoints of each machine of a session are served to lanes of other machines."""

from __future__ import annotations

import os
from collections.abc import Callable

from fluid.backends.base import CheckpointSource
from fluid.backends.hosts.checkpoint_server import CheckpointServer, ServedFolders
from fluid.backends.hosts.folders import HERE, HostFolders
from fluid.backends.hosts.host import Host, HostSettings
from fluid.backends.ray.devices import RayDevices
from fluid.backends.ray.remote_host import RemoteHost
from fluid.lane.checkpoints.fetch import LinkRates, fetch_checkpoint


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
