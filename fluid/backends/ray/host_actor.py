"""A host on another node, as a Ray actor: Ray starts its process, a connection to the driver does the rest.

The actor takes no device. Its lanes are forked from a fork server below it, as on the driver's node. Each has a
connection of its own to the driver, which the host opens for it.
"""

from __future__ import annotations

import functools
import math
import os
import queue
import re
import signal
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import structs

from fluid._clock import MonotonicClock
from fluid._imports import try_import
from fluid._logs import logger_of
from fluid.backends.base import LaneDying, LaneExited
from fluid.backends.hosts.checkpoints.server import CheckpointServer, ServedFolders
from fluid.backends.hosts.folders import SessionFolders, clear_host
from fluid.backends.hosts.host import Host, HostSettings
from fluid.backends.hosts.sockets import FramedSocket, WakeableSelector, is_reachable, limit_lane_buffer
from fluid.backends.ray.devices import RayDevices
from fluid.backends.ray.nodes import PIN_SHARE, NodeChanges
from fluid.backends.ray.other_jobs import StarvationWatch
from fluid.backends.ray.remote import call, make_host_class, pickled
from fluid.backends.ray.remote_host import (
    BringCheckpoint,
    DiscardKept,
    DropPayload,
    DumpLane,
    EndHost,
    EndLane,
    ForgetTrial,
    ForkCheckpoint,
    HostStarted,
    LaunchLane,
    PayloadStored,
    PersistCheckpoint,
    PreloadModules,
    SharingChanged,
    StorePayload,
    ToHost,
)
from fluid.engine.commands import ValueCheckpoints
from fluid.errors import FluidError
from fluid.processes.handshake import Address, connect_all
from fluid.processes.signals import leave_to_driver
from fluid.waiting.waits import BackgroundThread, await_descriptor
from fluid.wire import decoder

with try_import("Ray", extra="ray"):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


#: Seconds between two looks at the fork server.
_LOOK_S = 2.0
#: Seconds between two looks at what the lanes have printed, and most seconds to send the last of it.
_OUTPUT_S = 0.1
_LAST_OUTPUT_S = 2.0
#: Seconds in which a driver that is alive answers.
_DRIVER_S = 1.0
#: Keys of the selector.
_DRIVER, _HOST = "driver", "host"
_decode = decoder(ToHost)


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
    connection = FramedSocket(sock, _decode)
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
                self._connection.send([structs.replace(text, host=self._start.settings.name) for text in texts])

    def _forward_last(self) -> None:
        """Sends what the lanes have printed before they ended, and what was done with checkpoints since."""
        texts = [structs.replace(text, host=self._start.settings.name) for text in self._host.read_output()]
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
        elif isinstance(message, ValueCheckpoints):
            self._host.stores.value(message.values)
        elif isinstance(message, ForgetTrial):
            self._host.stores.forget(message.trial_id, keep_newest=message.keep_newest)
        elif isinstance(message, PersistCheckpoint):
            self._host.stores.persist(self._start.settings.name, message.trial_id, message.path, keep=message.keep)
        elif isinstance(message, ForkCheckpoint):
            self._host.stores.fork(self._start.settings.name, message.trial_id, message.parent, message.path)
        elif isinstance(message, DiscardKept):
            self._host.stores.discard(self._start.settings.name, message.path, demote=message.demote)
        elif isinstance(message, BringCheckpoint):
            self._host.stores.prefetch(self._start.settings.name, message.trial_id, message.path, message.source)
        elif isinstance(message, EndHost):
            self._is_over = True

    def _store(self, message: StorePayload) -> list[PayloadStored]:
        is_kept = self._host.payloads.write(message.name, message.data, size=message.size, offset=message.offset)
        return [] if is_kept is None else [PayloadStored(message.number, message.name, is_kept)]

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
        for request, connection in zip(requests, connections, strict=True):
            lane_id, binding = request.lane_id, request.binding
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


# -- host actors ---------------------------------------------------------------------------------
#
# The thread that calls Ray, which may block, so that the driver's own thread never waits for Ray.
#
# It starts and kills the actors of hosts, notices their end, and checks the nodes.


_log = logger_of(__name__)
#: Seconds between two checks of the nodes.
_CHECK_NODES_S = 1.0
#: Seconds for killed actors to end and for machines whose host has died to clear their folders.
_END_S = 3.0
#: The part of Ray's message about a death that says why; the rest are names, numbers and advice.
_WHY = re.compile(r"(?:(?<=actor is dead because )|Worker exit type: |The actor is temporarily unavailable)[^\n]+")
_ADVICE = ". Some common causes include"
_LONGEST_REASON = 300


class Checked(NamedTuple):
    """The nodes were checked because a host has gone.

    Attributes:
        number: the host's.
    """

    number: int


class ActorEnded(NamedTuple):
    """A host's actor has ended, or could not be started; ``reason`` is to be read after "its host"."""

    number: int
    reason: str


class HostActors:
    """Starts and kills the actors of hosts, notices their end, and checks the nodes.

    Args:
        devices: the session's, on the nodes that are checked.
        session: its folders, which machines clear whose host has died.
        wake: called in another thread when there is something to :meth:`take`.
    """

    def __init__(self, devices: RayDevices, session: SessionFolders, wake: Callable[[], None]) -> None:
        self._devices = devices
        self._session = session
        self._wake = wake
        self._starvation = StarvationWatch(devices.devices[0].kind)
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: The thread's own.
        self._handles: dict[int, Any] = {}
        self._calls: dict[int, Any] = {}
        self._host_class = make_host_class()
        self._news: deque[Checked | ActorEnded] = deque()
        self._changes: deque[NodeChanges] = deque()
        self._notify: Callable[[], None] = lambda: None
        self._thread = BackgroundThread("fluid-ray", self._run)
        self._thread.start()

    def start(self, node: str, start: HostStart) -> None:
        """Starts a host on a node; :meth:`take` tells if that fails."""
        self._requests.put(functools.partial(self._start, node, start))

    def kill(self, number: int) -> None:
        """Kills a host's actor, if it is there."""
        self._requests.put(functools.partial(self._kill, number))

    def check(self, number: int) -> None:
        """Checks the nodes now, as a host has gone; :meth:`take` tells when that is done."""
        self._requests.put(functools.partial(self._check, number))

    def request(self, work: Callable[[], None]) -> None:
        """Makes a call to Ray in the thread; an error that it raises is logged only."""
        self._requests.put(work)

    def take(self) -> list[Checked | ActorEnded]:
        """Returns what has become of hosts since the last call, in order."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def take_changes(self) -> list[NodeChanges]:
        """Returns what has become of the nodes since the last call."""
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def notify_of_changes(self, notify: Callable[[], None]) -> None:
        """Sets what is called, in another thread, when there is something to :meth:`take_changes`."""
        self._notify = notify
        if self._changes:
            notify()

    def close(self, hosts: Sequence[str]) -> bool:
        """Kills the actors that are left, and ends the thread; waits for it a few seconds, as Ray may not answer.

        Args:
            hosts: machines whose host has died: they clear their folders.

        Returns:
            Whether Ray answers.
        """
        self._requests.put(functools.partial(self._end, hosts))
        self._requests.put(None)
        self._thread.join(_CHECK_NODES_S + _END_S)
        return not self._thread.is_alive()

    # -- in the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=_CHECK_NODES_S)
            except queue.Empty:
                request = self._look
            if request is None:
                return
            try:
                request()
            except Exception as error:  # Ray may raise anything once it is shut down.
                _log.debug("Ray: %s", error)

    def _start(self, node: str, start: HostStart) -> None:
        try:
            actor = self._host_class.options(
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote()
            self._handles[start.number] = actor
            self._calls[start.number] = running = actor.run.remote(pickled(run_host, start))
            running.future().add_done_callback(functools.partial(self._note_end, start.number))
        except Exception as error:
            self._tell(ActorEnded(start.number, f"could not be started: {error}"))

    def _kill(self, number: int) -> None:
        actor = self._handles.pop(number, None)
        self._calls.pop(number, None)
        if actor is not None:
            ray.kill(actor)

    def _check(self, number: int) -> None:
        try:
            self._look(probe=True)
        finally:
            self._tell(Checked(number))

    def _look(self, *, probe: bool = False) -> None:
        self._starvation.look(len(self._devices.devices))
        changes = self._devices.check(probe=probe)
        if any(changes):
            self._changes.append(changes)
            self._notify()

    def _end(self, hosts: Sequence[str]) -> None:
        if not ray.is_initialized():
            return
        running = list(self._calls.values())
        for number in list(self._handles):
            with suppress(Exception):
                self._kill(number)
        waits = [
            call(clear_host, self._session, host, resources={f"node:{host}": PIN_SHARE})
            for host in hosts
            if not self._devices.is_gone(host)
        ]
        if running or waits:
            running += waits
            ray.wait(running, num_returns=len(running), timeout=_END_S, fetch_local=False)

    # -- in a thread of Ray's ------------------------------------------------------------------------------

    def _note_end(self, number: int, running: Future[Any]) -> None:
        error = running.exception()
        self._tell(ActorEnded(number, "has ended" if error is None else _describe(error)))
        # Its work is over, but its process would wait for more.
        self.kill(number)

    def _tell(self, news: Checked | ActorEnded) -> None:
        self._news.append(news)
        self._wake()


def _describe(error: BaseException) -> str:
    """Why an actor ended, in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"ended with {type(cause).__name__}: {cause}"[:_LONGEST_REASON]
    text = str(error).strip()
    # The last line is that of the traceback, if there is one.
    why = _WHY.search(text)
    reason = text.rpartition("\n")[2] if why is None else why[0].partition(_ADVICE)[0]
    return f"died: {reason}"[:_LONGEST_REASON]
