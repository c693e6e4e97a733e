"""A host on another node, as a Ray actor: Ray starts its process, a connection to the driver does the rest.

The actor takes no device. Its lanes are forked from a fork server below it, as on the driver's node. Each has a
connection of its own to the driver, which the host opens for it.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fluid._clock import MonotonicClock
from fluid._waiting import await_descriptor
from fluid.backends.base import LaneDying, LaneExited
from fluid.backends.hosts.checkpoint_server import CheckpointServer, ServedFolders
from fluid.backends.hosts.framed_socket import FramedSocket, limit_lane_buffer
from fluid.backends.hosts.host import Host, HostSettings
from fluid.backends.hosts.listener import is_reachable
from fluid.backends.hosts.selector import WakeableSelector
from fluid.backends.ray.host_messages import (
    BringCheckpoint,
    DiscardKept,
    DropPayload,
    DumpLane,
    EndHost,
    EndLane,
    ForgetTrial,
    HostStarted,
    LaunchLane,
    PayloadStored,
    PersistCheckpoint,
    PreloadModules,
    SharingChanged,
    StorePayload,
    ValueTrials,
)
from fluid.engine.commands import CheckpointValue
from fluid.errors import FluidError
from fluid.processes.handshake import Address, connect_all
from fluid.processes.signals import leave_to_driver

#: Seconds between two looks at the fork server.
_LOOK_S = 2.0
#: Seconds between two looks at what the lanes have printed, and most seconds to send the last of it.
_OUTPUT_S = 0.1
_LAST_OUTPUT_S = 2.0
#: Seconds in which a driver that is alive answers.
_DRIVER_S = 1.0
#: Keys of the selector.
_DRIVER, _HOST = "driver", "host"


class HostStart(NamedTuple):
    """What an actor needs to become a host.

    Attributes:
        number: tells the driver which host it is; negative, as lanes have the others.
        address: where the driver listens.
        settings: the host's.
        folder: the driver's working directory; empty to stay where Ray starts processes of this job.
    """

    number: int
    address: Address
    settings: HostSettings
    folder: str


def run_host(start: HostStart) -> None:
    """Runs a host until the driver ends it or is gone. All that an actor does.

    Raises:
        OSError: the driver cannot be reached.
        InvalidFieldError: MPS was asked for and cannot be had on this node.
    """
    leave_to_driver(signal.SIGINT, signal.SIGUSR1)  # Not SIGTERM, by which Ray ends its workers.
    if start.folder:
        with suppress(OSError):  # This machine need not have it.
            os.chdir(start.folder)
    if start.settings.tokens:
        # Ray hides every GPU from an actor that takes none.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(start.settings.tokens)
    (sock,) = connect_all(start.address, start.settings.key, [start.number])
    connection = FramedSocket(sock)
    try:
        host = Host(start.settings)
    except BaseException:
        connection.close()
        raise
    HostService(start, connection, host).run()


class HostService:
    """Does what the driver asks of a host, and reports what happens there.

    Args:
        start: as the driver sent it.
        connection: to the driver.
        host: owned by this object from now on.
    """

    def __init__(self, start: HostStart, connection: FramedSocket, host: Host) -> None:
        self._start = start
        self._connection = connection
        self._host = host
        self._clock = MonotonicClock()
        self._selector = WakeableSelector()
        self._sharing = host.sharing
        settings, folders = start.settings, host.folders
        self._checkpoints = CheckpointServer(
            settings.address,
            settings.key,
            ServedFolders(settings.session.run_folder, folders.run_folder, folders.memory_folder),
        )
        self._is_over = False
        #: When to read next what the lanes have printed; never if the driver does not show it.
        self._output_at = math.inf

    def run(self) -> None:
        """Serves until the session is over, or the driver gone; no process of the host is left then."""
        look_at = self._clock.now() + _LOOK_S
        self._connection.send([HostStarted(self._checkpoints.address), SharingChanged(self._sharing)])
        try:
            while not self._is_over and not self._connection.ended:
                self._selector.watch(_DRIVER, self._connection)
                self._selector.watch(_HOST, self._host)
                self._selector.wait(max(0.0, min(look_at, self._output_at) - self._clock.now()))
                if self._clock.now() >= look_at:
                    look_at = self._clock.now() + _LOOK_S
                    self._host.look()
                self._turn()
                self._forward()
        finally:
            # The driver may have lost this connection only, and start another host here.
            clear = self._is_over or not is_reachable(self._start.address, _DRIVER_S)
            self._checkpoints.close()
            self._host.close(clear=clear)
            self._forward_last()
            self._connection.close()
            self._selector.close()

    def _turn(self) -> None:
        self._connection.flush()
        messages = self._connection.receive()
        reports: list[Any] = self._launch([message for message in messages if isinstance(message, LaunchLane)])
        for message in messages:
            if isinstance(message, StorePayload):
                reports += self._store(message)
            else:
                self._serve(message)
        reports += self._host.poll()
        if self._host.sharing != self._sharing:
            self._sharing = self._host.sharing
            reports.append(SharingChanged(self._sharing))
        if reports:
            self._connection.send(reports)

    def _forward(self) -> None:
        """Sends what the lanes have printed, unless the driver has not yet taken what was sent before."""
        if self._clock.now() >= self._output_at:
            self._output_at = self._clock.now() + _OUTPUT_S
            if not self._connection.wants_to_write and (texts := self._host.read_output()):
                self._connection.send([text._replace(host=self._start.settings.name) for text in texts])

    def _forward_last(self) -> None:
        """Sends what the lanes have printed before they ended, and what was done with checkpoints since."""
        texts = [text._replace(host=self._start.settings.name) for text in self._host.read_output()]
        last = [*self._host.stores.poll(), *texts]
        if last and not self._connection.ended:
            self._connection.send(last)
        deadline = self._clock.now() + _LAST_OUTPUT_S
        while self._connection.wants_to_write and self._clock.now() < deadline:
            seconds = deadline - self._clock.now()
            await_descriptor(self._connection.fileno(), seconds, readable=False, writable=True)
            self._connection.flush()

    def _serve(self, message: Any) -> None:
        if isinstance(message, EndLane):
            self._host.kill(message.lane_id)
        elif isinstance(message, DumpLane):
            self._host.dump_stacks(message.lane_id, message.trial_id)
        elif isinstance(message, PreloadModules):
            self._host.preload(message.modules, late=message.late)
        elif isinstance(message, DropPayload):
            self._host.drop(message.name)
        elif isinstance(message, ValueTrials):
            self._host.stores.value({trial_id: CheckpointValue(*value) for trial_id, value in message.values.items()})
        elif isinstance(message, ForgetTrial):
            self._host.stores.forget(message.trial_id, keep_newest=message.keep_newest)
        elif isinstance(message, PersistCheckpoint):
            self._host.stores.persist(self._start.settings.name, message.trial_id, message.path, keep=message.keep)
        elif isinstance(message, DiscardKept):
            self._host.stores.discard(self._start.settings.name, message.path, demote=message.demote)
        elif isinstance(message, BringCheckpoint):
            self._host.stores.prefetch(self._start.settings.name, *message)
        elif isinstance(message, EndHost):
            self._is_over = True

    def _store(self, message: StorePayload) -> list[PayloadStored]:
        number, name, size, offset, data = message
        is_kept = self._host.payloads.write(name, data, size=size, offset=offset)
        return [] if is_kept is None else [PayloadStored(number, name, is_kept)]

    def _launch(self, requests: Sequence[LaunchLane]) -> list[LaneDying | LaneExited]:
        """Launches lanes, whose connections are all opened at once; returns those that cannot be launched."""
        numbers = [request.lane_id for request in requests]
        if any(request.echo for request in requests):
            self._host.forward_output()
            self._output_at = min(self._output_at, self._clock.now())
        try:
            connections = connect_all(self._start.address, self._start.settings.key, numbers) if numbers else []
        except OSError as error:
            return [LaneExited(number, f"could not be started: its host cannot connect: {error}") for number in numbers]
        failed: list[LaneDying | LaneExited] = []
        for (lane_id, binding, _), connection in zip(requests, connections, strict=True):
            limit_lane_buffer(connection)
            if binding.token:
                _show_gpus(binding.token)
            try:
                self._host.launch(lane_id, binding, connection)
            except (FluidError, OSError) as error:
                failed.append(LaneExited(lane_id, f"could not be started: {error}"))
        return failed


def _show_gpus(tokens: str) -> None:
    """Shows GPUs, UUIDs divided by commas, to this process as well: they may have joined the session later."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(filter(None, [*shown, *tokens.split(",")])))
