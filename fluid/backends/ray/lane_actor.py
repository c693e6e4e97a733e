"""A lane as a Ray actor: Ray starts the process and gives it its device, a socket does the rest."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fluid._imports import try_import
from fluid.backends.hosts import host_memory
from fluid.backends.hosts.folders import HERE, HostFolders, SessionFolders, locate, pack, unpack
from fluid.backends.hosts.framed_socket import limit_lane_buffer
from fluid.backends.hosts.listener import is_reachable
from fluid.backends.ray.placement import PIN_SHARE
from fluid.backends.ray.remote import call
from fluid.lane.channel import Connection as LaneConnection
from fluid.lane.checkpoint_paths import host_of
from fluid.lane.device import bind
from fluid.lane.messages import LaneOptions, StartResident, decode, encode
from fluid.lane.serve import serve
from fluid.lane.stack_dump import dump_stacks_at_signal
from fluid.processes.handshake import Address, connect_all
from fluid.processes.session_mark import SESSION_VARIABLE, kill_marked
from fluid.processes.signals import leave_to_driver, restore_in_forks

with try_import("Ray", extra="ray"):
    import ray

#: Seconds for a checkpoint to come from another machine.
_FETCH_S = 600.0
#: Seconds in which a driver that is alive answers.
_DRIVER_S = 1.0


class LaneStart(NamedTuple):
    """What an actor needs to become a lane.

    Attributes:
        number: which actor it is.
        address: where the driver listens.
        key: to prove that it belongs to the session.
        host: name of its machine; ``"localhost"`` for the driver's.
        driver_ip: address of the driver's machine, as Ray knows it.
        spread: whether checkpoints may be on other machines.
        kind: of its device.
        bounded: whether its device has so much memory and no more.
        visible: what ``CUDA_VISIBLE_DEVICES`` is set to; ``None`` leaves it as Ray has set it.
        threads: threads that PyTorch and numeric libraries may use.
        share: of its machine's memory for checkpoints: one over the number of devices there.
        modules: to load before it connects.
        folder: the driver's working directory.
        policy: which trial runs next if several have iterations left.
    """

    number: int
    address: Address
    key: bytes
    session: SessionFolders
    host: str
    driver_ip: str
    spread: bool
    kind: str
    bounded: bool
    visible: str | None
    threads: int
    share: float
    modules: tuple[str, ...]
    folder: str
    policy: str


class Assignment(NamedTuple):
    """From the driver: which lane an actor is. It is one from then on."""

    lane_id: int


class Preload(NamedTuple):
    """From the driver, while an actor waits to become a lane: load modules."""

    modules: tuple[str, ...]


def run_lane(start: LaneStart) -> None:
    """Connects to the driver, waits to be made a lane, and is one until the end. All that an actor does.

    Raises:
        OSError: the driver cannot be reached.
    """
    leave_to_driver(signal.SIGINT, signal.SIGUSR1)  # Not SIGTERM, by which Ray ends its workers.
    restore_in_forks()
    os.environ[SESSION_VARIABLE] = start.session.token
    with suppress(OSError):  # Another machine need not have it.
        os.chdir(start.folder)
    if start.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = start.visible
    # The lane does not set it, as it would also set the order of the GPUs, which is Ray's.
    options = LaneOptions(
        -1, kind=start.kind, visible=None, threads=start.threads, policy=start.policy, bounded=start.bounded
    )
    bind(options)
    _load(start.modules)
    (sock,) = connect_all(start.address, start.key, [start.number])
    limit_lane_buffer(sock)
    connection = Connection(sock.detach())
    lane_id = _await_assignment(connection)
    if lane_id is None:
        return
    # Not before: the driver waits for its lanes when it clears the folders, and knows of no others.
    home = HostFolders(start.session, start.host)
    try:
        options = options._replace(
            lane_id=lane_id,
            address=start.driver_ip if start.host == HERE else start.host,
            run_folder=home.run_folder,
            memory_folder=home.memory_folder,
            memory_bytes=host_memory.checkpoint_bytes(home.memory_folder) * start.share,
            note=home.note(lane_id),
        )
        over = threading.Event()
        dump_stacks_at_signal(options.run_folder, lane_id)
        fetching = FetchingConnection(connection, start, home) if start.spread else connection
        serve(fetching, options, lambda: None if over.is_set() else _hang_up(start, home))
        # The connection ends now, and Ray ends the process; it complains of those that end themselves.
        over.set()
    finally:
        # Other lanes may need its checkpoints; the driver has the folders cleared in the end.
        home.leave(clear=False)


class FetchingConnection:
    """A connection that fetches a checkpoint from another machine before the lane reads that it is to restore it.

    Args:
        connection: to the driver.
        start: the options of this actor.
        home: its folders.
    """

    def __init__(self, connection: LaneConnection, start: LaneStart, home: HostFolders) -> None:
        self._connection = connection
        self._start = start
        self._home = home
        self.send_bytes = connection.send_bytes
        self.fileno = connection.fileno
        self.close = connection.close

    def recv_bytes(self) -> bytes:
        """Receives a whole message; raises ``EOFError`` at the end."""
        data = self._connection.recv_bytes()
        messages = decode(data)
        ready = [self._prepared(message) if isinstance(message, StartResident) else message for message in messages]
        return data if ready == messages else encode(ready)

    def _prepared(self, message: StartResident) -> StartResident:
        if message.checkpoint is None:
            return message
        found = locate(message.checkpoint, self._start.session.run_folder)
        try:
            found = found or self._fetch(message.trial_id, message.checkpoint)
        except Exception:
            traceback.print_exc()
            return message  # The lane takes an earlier one that this machine has, or begins afresh, and says so.
        return message._replace(checkpoint=found)

    def _fetch(self, trial_id: str, path: str) -> str:
        host = host_of(path)
        ip = self._start.driver_ip if host == HERE else host
        ports = [node["NodeManagerPort"] for node in ray.nodes() if node["NodeManagerAddress"] == ip and node["Alive"]]
        if not any(is_reachable((ip, port), _DRIVER_S) for port in ports):
            raise FileNotFoundError(f"{path}: its machine {ip} is gone")
        packed = call(pack, path, self._start.session.run_folder, resources={f"node:{ip}": PIN_SHARE})
        name, data = ray.get(packed, timeout=_FETCH_S)
        target = self._home.place_for(trial_id, name, len(data))
        unpack(data, target)
        return target


def _await_assignment(connection: Connection) -> int | None:
    """Returns which lane this is to be; ``None`` if the driver has gone."""
    while True:
        try:
            messages: list[Any] = decode(connection.recv_bytes())
        except (EOFError, OSError):
            return None
        for message in messages:
            if isinstance(message, Assignment):
                return message.lane_id
            _load(message.modules)


def _load(modules: Sequence[str]) -> None:
    for name in modules:
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except BaseException as error:  # Also what a script without a main guard may do.
                print(f"lanes start without {name}: {error}", file=sys.stderr)


def _hang_up(start: LaneStart, home: HostFolders) -> None:
    """Ends the process at once, and those that a trial started."""
    try:
        # The driver may be alive, and have closed this connection only.
        if not is_reachable(start.address, _DRIVER_S):
            home.leave(clear=True)
            kill_marked(start.session.token)
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)
