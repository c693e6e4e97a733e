"""Starts lanes on the nodes of a Ray cluster, by the host of each node.

The driver's own node has a host in the driver's process, unless Ray's processes get another environment than the
driver's (``runtime_env``). Each other node has a host in an actor (:mod:`fluid.backends.ray.host_actor`).
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from fluid._clock import MonotonicClock
from fluid.backends.base import (
    CheckpointSource,
    DeviceBinding,
    GpuSharing,
    Keeping,
    LaneConnected,
    LaneExited,
    LaneText,
    Launcher,
    LauncherReport,
)
from fluid.backends.hosts.checkpoints.keeper import CheckpointKeeper, KeeperOptions
from fluid.backends.hosts.folders import HERE, HostFolders
from fluid.backends.hosts.host import Host, HostSettings
from fluid.backends.hosts.sockets import AuthenticatedConnection, LaneListener, WakeableSelector
from fluid.backends.ray.checkpoints import CheckpointSources, HostStores, name_of
from fluid.backends.ray.devices import CLOSE_S, LeavingDevices, RayDevices
from fluid.backends.ray.host_actor import Checked, HostActors, HostStart
from fluid.backends.ray.remote_host import OutputInbox, RemoteHost, await_sharing, end_hosts
from fluid.elastic.messages import LOOPBACK
from fluid.errors import FluidError
from fluid.packing import DEFAULT_GPU_WAY, gpu_way_of
from fluid.wire import version_problem

#: Seconds to wait for Ray to say how a host ended whose connection was lost.
_POST_MORTEM_S = 3.0
#: Seconds for Ray to take the devices back where it has not answered before.
_SILENT_S = 1.0
#: Keys of the selector beside the hosts' numbers.
_LISTENER, _OWN = "listener", "own"


class RayLauncher(Launcher):
    """Starts lanes by the hosts of a Ray cluster's nodes.

    Args:
        devices: what lanes can be started on; the launcher owns them from now on.
        settings: of a host; each gets the name of its machine, its GPUs and the modules known by then, too.
        in_process: whether the driver's node has its host in this process.
        gpu_tokens: returns the UUIDs of the GPUs of a node.

    Attributes:
        actors: of the hosts on other nodes; they also say what has become of the nodes.
        leaving: the devices that go back to Ray.
        stores: of the hosts' checkpoints.
    """

    def __init__(
        self,
        devices: RayDevices,
        settings: HostSettings,
        *,
        in_process: bool,
        gpu_tokens: Callable[[str], tuple[str, ...]],
    ) -> None:
        self._devices = devices
        self._settings = settings = settings._replace(key=secrets.token_bytes(32))
        self._in_process = in_process
        self._gpu_tokens = gpu_tokens
        #: What hosts load ahead, with whether no lane waits for it.
        self._modules = dict.fromkeys(settings.preload, False)
        with open(settings.session.marker, "wb"):
            pass
        #: register() of a trial may preload from another thread than the one that polls.
        self._lock = threading.RLock()
        self._clock = MonotonicClock()
        self._numbers = itertools.count(-1, -1)
        self._own: Host | None = None
        #: What trials print on other nodes; and whether lanes that are launched now forward it.
        self._printed = OutputInbox()
        self._forwards = False
        self._checkpoints = CheckpointSources(devices, settings, self._host_on)
        #: By node, and by number. A host that is gone is in neither.
        self._hosts: dict[str, RemoteHost] = {}
        self._remote: dict[int, RemoteHost] = {}
        #: Numbers of hosts for which something waits to be sent.
        self._unsent: set[int] = set()
        #: Hosts whose connection was lost: when to give up waiting for what Ray says of them, by number.
        self._lost: dict[int, float] = {}
        self._why: dict[int, str] = {}
        #: Machines whose host has died, so that others are to clear their folders.
        self._deserted: set[str] = set()
        #: Host of every lane that may still run.
        self._of_lane: dict[int, Host | RemoteHost] = {}
        self._selector = WakeableSelector()
        self._listener = LaneListener(settings.key)
        self._selector.watch(_LISTENER, self._listener)
        self.actors = HostActors(devices, settings.session, self._selector.wake)
        self.leaving = LeavingDevices(devices, self.actors.request, self._end_host)
        here = CheckpointKeeper(KeeperOptions(HERE, "", settings.session.run_folder), self._selector.wake)
        self.stores: HostStores = HostStores(self._all_hosts, self._host_on, self._flush_soon, here, self._lock)

    # -- the interface of a launcher -----------------------------------------------------------------------

    def launch(self, lane_id: int, binding: DeviceBinding) -> LaneConnected | None:
        """Launches a lane by the host of the device's node, which is started if need be.

        Raises:
            FluidError, OSError: it cannot be started.
        """
        with self._lock:
            host = self.start_host(binding.node)
            self._of_lane[lane_id] = host
            self.leaving.started(lane_id, binding.device_ids)
            if isinstance(host, Host):
                return host.launch(lane_id, binding)
            host.launch(lane_id, binding, echo=self._forwards)
            self._flush_soon(host)
            return None

    def kill(self, lane_id: int) -> None:
        """Kills a lane, if it is there; :meth:`poll` reports its end."""
        with self._lock:
            if (host := self._of_lane.get(lane_id)) is not None:
                host.kill(lane_id)
                self._flush_soon(host)

    def dump_stacks(self, lane_id: int, trial_id: str) -> None:
        """Has a lane's stacks written to the log of the trial that runs there, soon, on the lane's machine."""
        with self._lock:
            if (host := self._of_lane.get(lane_id)) is not None:
                host.dump_stacks(lane_id, trial_id)
                self._flush_soon(host)

    def preload(self, modules: Sequence[str], *, late: bool = False) -> None:
        """Loads what trials are going to import on every node: see :meth:`fluid.backends.base.Launcher.preload`."""
        with self._lock:
            new = [name for name in modules if name not in self._modules or (self._modules[name] and not late)]
            self._modules |= dict.fromkeys(new, late)
            if new:
                for host in self._all_hosts():
                    host.preload(new, late=late)
                    self._flush_soon(host)

    def keep(self, lane_id: int, name: str, data: bytes) -> Keeping:
        """Keeps a payload on the node of a lane: see :meth:`fluid.backends.base.Launcher.keep`."""
        with self._lock:
            host = self._of_lane.get(lane_id)
            keeping = Keeping.REFUSED if host is None else host.keep(lane_id, name, data)
            if isinstance(host, RemoteHost):
                self._selector.watch(host.number, host)  # poll() sends it.
            return keeping

    def drop(self, name: str) -> None:
        """Drops a payload on every node."""
        with self._lock:
            for host in self._all_hosts():
                host.drop(name)
                self._flush_soon(host)

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`poll` has something to do."""
        return self._selector.fileno()

    def poll(self) -> list[LauncherReport]:
        """Returns the lanes that have connected, and those that have ended, since the last call."""
        with self._lock:
            ready, _ = self._selector.wait(0.0)
            reports = [lane for made in self._listener.accept() for lane in self._connect(made)]
            unsent, self._unsent = self._unsent, set()
            for number in unsent.union(one.key for one in ready):
                if (host := self._remote.get(number)) is not None:
                    reports += self._exchange(host)
            if self._own is not None:
                reports += self._own.poll()
                self._selector.watch(_OWN, self._own)
            reports += self._take_news()
            reports += self.stores.poll()
            for report in reports:
                if isinstance(report, LaneExited):
                    self._of_lane.pop(report.lane_id, None)
                    self.leaving.ended(report.lane_id)
            return reports

    def checkpoints_at(self, host: str) -> CheckpointSource:
        """Returns where the checkpoints of a machine are served to lanes of others; starts a host there if need be."""
        with self._lock:
            return self._checkpoints.find(host)

    def fetch(self, host: str, path: str, target: str) -> None:
        """Copies a checkpoint from another machine: see :meth:`fluid.backends.base.Backend.fetch_kept`."""
        self._checkpoints.fetch(self.checkpoints_at(host), path, target)

    def forward_output(self) -> None:
        """Makes lanes that are launched from now on forward what their trials print."""
        self._forwards = True
        if self._own is not None:
            self._own.forward_output()

    def read_output(self) -> list[LaneText]:
        """Returns what was printed: see :meth:`fluid.backends.base.Backend.read_output`."""
        return [*([] if self._own is None else self._own.read_output()), *self._printed.take()]

    def look(self) -> None:
        """Continues the fork server of this process if it was stopped, and gives up hosts that are long gone."""
        if self._own is not None:
            self._own.look()
        self._selector.wake()

    def close(self) -> None:
        """Ends every host with its lanes, clears the folders and gives the devices back.

        Where Ray's control store (GCS) is gone it takes at most ten seconds.
        """
        answers = False
        try:
            silent = end_hosts(self._remote.values(), self._selector, self._clock)
            answers = self.actors.close(sorted((self._deserted | silent) - {HERE}))
        finally:
            for host in self._remote.values():
                host.close()
            self._checkpoints.close()
            with suppress(OSError):
                os.unlink(self._settings.session.marker)
            try:
                self.stores.close()
                # Last of all hosts: it deletes the run's folder if that is temporary.
                if self._own is not None:
                    self._own.close()
                else:
                    HostFolders(self._settings.session, HERE).leave(clear=True)
            finally:
                self._close_descriptors()
                self._devices.close(CLOSE_S if answers else _SILENT_S)

    def abandon(self) -> None:
        """Called in a process forked from the driver: closes descriptors that are the driver's."""
        for host in self._remote.values():
            host.close()
        self._checkpoints.abandon()
        if self._own is not None:
            self._own.abandon()
        self._close_descriptors()

    # -- for the backend -----------------------------------------------------------------------------------

    @property
    def run_folder(self) -> str:
        """Folder of the run, on the driver's machine."""
        return self._settings.session.run_folder

    @property
    def sharing(self) -> GpuSharing:
        """How lanes share a GPU: by MPS if they do so on every node."""
        known = [host.sharing for host in self._remote.values() if host.sharing is not None]
        known += [] if self._own is None else [self._own.sharing]
        others = [sharing for sharing in known if not gpu_way_of(sharing.way).needs_mps]
        return next(iter(others or known), GpuSharing(DEFAULT_GPU_WAY))

    def start_host(self, node: str) -> Host | RemoteHost:
        """Returns the host of a node, which is started if there is none.

        Raises:
            InvalidFieldError: MPS was asked for and cannot be had, where that is known at once.
        """
        if node == self._devices.node and self._in_process:
            if self._own is None:
                self._own = Host(self._settings_of(node)._replace(name=HERE))
                if self._forwards:
                    self._own.forward_output()
                self._selector.watch(_OWN, self._own)
                self.stores.tell_all(self._own)
            return self._own
        return self._hosts.get(node) or self._start_actor(node)

    def await_sharing(self) -> None:
        """Waits until each host has said how its lanes share GPUs: see :func:`remote_host.await_sharing`."""

        def turn() -> None:
            self._selector.wait(0.1)
            self.poll()

        await_sharing(list(self._remote.values()), self._settings.sharing, turn, self._clock)

    # -- hosts ---------------------------------------------------------------------------------------------

    def _all_hosts(self) -> list[Host | RemoteHost]:
        return [*([] if self._own is None else [self._own]), *self._remote.values()]

    def _host_on(self, machine: str) -> Host | RemoteHost | None:
        """A host of a machine, given its name; one is started if need be, if the session has a node there."""
        hosts: list[Host | RemoteHost] = [*([] if self._own is None else [self._own]), *self._hosts.values()]
        for host in hosts:
            if name_of(host) == machine:
                return host
        devices = self._devices
        node = next((devices.node_of(device.index) for device in devices.devices if device.host == machine), None)
        with suppress(FluidError):  # It cannot be started, as MPS cannot be had.
            return None if node is None else self.start_host(node)
        return None

    def _settings_of(self, node: str) -> HostSettings:
        devices, tokens, ray_node = self._devices.devices, self._gpu_tokens(node), self._devices.node_at(node)
        # Where the session has GPUs, a node without any has nothing to share.
        is_idle = not tokens and any(device.kind == "gpu" for device in devices)
        return self._settings._replace(
            name=next(device.host for device in devices if self._devices.node_of(device.index) == node),
            preload=tuple(name for name, late in self._modules.items() if not late),
            preload_late=tuple(name for name, late in self._modules.items() if late),
            sharing=DEFAULT_GPU_WAY if is_idle else self._settings.sharing,
            tokens=tokens,
            address=ray_node.ip,
            reserved_bytes=ray_node.object_store_bytes,
        )

    def _start_actor(self, node: str) -> RemoteHost:
        settings = self._settings_of(node)
        # On its own machine nothing is open to the network.
        address = self._listener.listen(LOOPBACK if settings.name == HERE else self._devices.ip)
        host = RemoteHost(next(self._numbers), node, settings.name, self._printed)
        self._hosts[node] = self._remote[host.number] = host
        folder = os.getcwd() if self._in_process else ""
        start = HostStart(host.number, address, settings._replace(driver=address), folder)
        self.actors.start(node, start)
        self.stores.tell_all(host)
        self._deserted.discard(host.name)
        return host

    def _end_host(self, node: str) -> None:
        with self._lock:
            if (host := self._hosts.pop(node, None)) is not None:
                host.end()
                self._flush_soon(host)

    def _connect(self, made: AuthenticatedConnection) -> list[LauncherReport]:
        number, problem = made.hello.number, version_problem(made.hello.version, "it")
        if problem:
            made.socket.close()
            if number < 0:
                self._why[number] = f"cannot be used: {problem}"
                return self._lose(self._remote[number]) if number in self._remote else []
            return []
        if number >= 0:
            host = self._of_lane.get(number)
            if isinstance(host, RemoteHost):
                return [LaneConnected(number, made.socket, host.name)]
        elif (remote := self._remote.get(number)) is not None and not remote.is_connected:
            remote.connect(made.socket)
            self._unsent.add(number)
            return []
        made.socket.close()
        return []

    def _flush_soon(self, host: Host | RemoteHost) -> None:
        """Sends what waits for a host, with all else, when this object is polled next."""
        if isinstance(host, RemoteHost):
            self._unsent.add(host.number)
            self._selector.wake()

    def _exchange(self, host: RemoteHost) -> list[LauncherReport]:
        """Sends what waits for a host, and takes its reports."""
        was_connected = host.is_connected
        host.flush()
        reports: list[LauncherReport] = [*host.receive()]
        if was_connected and not host.is_connected and host.number not in self._lost:
            reports += self._lose(host)
        self._selector.watch(host.number, host)
        return reports

    def _lose(self, host: RemoteHost) -> list[LauncherReport]:
        """The connection has ended: before the lanes' end is reported, the nodes are checked, so that the engine
        hears first of devices that are lost with them."""
        self._lost[host.number] = self._clock.now() + _POST_MORTEM_S
        if self._hosts.get(host.node) is host:  # There may be a new one.
            del self._hosts[host.node]
        self.actors.check(host.number)
        return [*host.lose()]

    def _take_news(self) -> list[LauncherReport]:
        reports: list[LauncherReport] = []
        checked: set[int] = set()
        for news in self.actors.take():
            if isinstance(news, Checked):
                checked.add(news.number)
            elif (host := self._remote.get(news.number)) is not None:
                self._why.setdefault(news.number, news.reason)
                if host.number not in self._lost:
                    reports += self._lose(host)
        return reports + self._give_up(checked)

    def _give_up(self, checked: set[int]) -> list[LauncherReport]:
        """Reports the end of lanes whose host is lost, once the nodes were checked and Ray has said how it ended."""
        reports: list[LauncherReport] = []
        for number, deadline in list(self._lost.items()):
            host = self._remote[number]
            host.checked |= number in checked
            if (host.checked and number in self._why) or self._clock.now() >= deadline:
                del self._lost[number]
                del self._remote[number]
                self._selector.drop(number)
                self._deserted.add(host.name)
                why = self._why.pop(number, "does not answer any more")
                reports += host.fail(why)
                self.actors.kill(number)
        return reports

    def _close_descriptors(self) -> None:
        self._listener.close()
        self._selector.close()
