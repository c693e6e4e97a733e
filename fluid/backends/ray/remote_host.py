"""A host on another node, as the driver sees it."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from fluid._clock import Clock
from fluid.backends.base import (
    DeviceBinding,
    GpuSharing,
    Keeping,
    LaneDying,
    LaneExited,
    LaneSuperseded,
    LaneText,
    LauncherReport,
)
from fluid.backends.hosts.sockets import FramedSocket, WakeableSelector
from fluid.engine.commands import CheckpointValue, ValueCheckpoints
from fluid.errors import FluidError, InvalidFieldError
from fluid.lane.protocol import CheckpointForked, CheckpointPersisted, CheckpointReport
from fluid.wire import Frame, decoder

# -- host messages -------------------------------------------------------------------------------
#
# The messages between the driver and the host on another node: frames (:mod:`fluid.wire`), as those of lanes.


# -- from the driver to a host --------------------------------------------------------------------------------


class LaunchLane(Frame, frozen=True):
    """Fork a lane, with a connection to the driver of its own; ``echo`` says whether to send what its trials print."""

    lane_id: int
    binding: DeviceBinding
    echo: bool = False


class EndLane(Frame, frozen=True):
    """Kill a lane."""

    lane_id: int


class DumpLane(Frame, frozen=True):
    """Have the stacks of a lane's threads written to the log of a trial."""

    lane_id: int
    trial_id: str


class PreloadModules(Frame, frozen=True):
    """Load modules before the next lane is forked; late: as soon as no lane waits for it."""

    modules: tuple[str, ...]
    late: bool = False


class StorePayload(Frame, frozen=True):
    """Keep a payload for the lanes: a part of it, in order. The last one is answered by PayloadStored.

    Attributes:
        number: of the transfer.
        name: the payload's.
        size: of the whole payload, bytes.
        offset: where the part begins.
        data: the part.
    """

    number: int
    name: str
    size: int
    offset: int
    data: bytes


class DropPayload(Frame, frozen=True):
    """Delete a payload, or the part of one that has arrived."""

    name: str


class ForgetTrial(Frame, frozen=True):
    """Delete the checkpoints of a trial; with ``keep_newest``, the newest outlives the run."""

    trial_id: str
    keep_newest: bool


class PersistCheckpoint(Frame, frozen=True):
    """Copy a checkpoint to disk, with ``keep`` to where it outlives the run; answered by CheckpointPersisted."""

    trial_id: str
    path: str
    keep: bool


class ForkCheckpoint(Frame, frozen=True):
    """Make a checkpoint of the parent the state from which the trial starts; answered by CheckpointForked."""

    trial_id: str
    parent: str
    path: str


class DiscardKept(Frame, frozen=True):
    """Remove a checkpoint from those that outlive the run; with ``demote``, its trial may be restored from it."""

    path: str
    demote: bool


class BringCheckpoint(Frame, frozen=True):
    """Bring a checkpoint, written to ``path``, into the host's memory; ``source`` as in SetUpTrial."""

    trial_id: str
    path: str
    source: tuple[str, int] | None


class EndHost(Frame, frozen=True):
    """The session is over: end every lane, clear the folders, and end."""


#: All that a host is told.
ToHost = (
    LaunchLane
    | EndLane
    | DumpLane
    | PreloadModules
    | StorePayload
    | DropPayload
    | ValueCheckpoints
    | ForgetTrial
    | PersistCheckpoint
    | ForkCheckpoint
    | DiscardKept
    | BringCheckpoint
    | EndHost
)


# -- from a host to the driver ---------------------------------------------------------------------------------


class HostStarted(Frame, frozen=True):
    """The first message of a host: where it serves the checkpoints of its machine."""

    checkpoints_at: tuple[str, int]


class SharingChanged(Frame, frozen=True):
    """How lanes that are started now share a GPU; sent in the beginning, and when it changes."""

    sharing: GpuSharing


class PayloadStored(Frame, frozen=True):
    """A payload has arrived; whether the host keeps it."""

    number: int
    name: str
    is_kept: bool


#: All that a host tells.
FromHost = (
    HostStarted | SharingChanged | PayloadStored | LaneDying | LaneExited | LaneSuperseded | LaneText | CheckpointReport
)
_decode = decoder(FromHost)


# -- output inbox --------------------------------------------------------------------------------
#
# What trials print on other nodes, until the driver shows it.


#: Most bytes that are kept; the oldest are dropped where a terminal does not take them.
_MOST_KEPT = 1 << 22


class OutputInbox:
    """Texts of lanes, in the order in which they came. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: deque[LaneText] = deque()
        self._bytes = 0
        #: Bytes dropped, by lane and stream, of which no text says so yet.
        self._dropped: Counter[tuple[int, bool]] = Counter()

    def put(self, text: LaneText) -> None:
        """Adds a text; drops the oldest if too many bytes wait."""
        with self._lock:
            self._texts.append(text)
            self._bytes += len(text.data)
            while self._bytes > _MOST_KEPT:
                old = self._texts.popleft()
                self._bytes -= len(old.data)
                self._dropped[old.lane_id, old.is_error] += len(old.data) + old.skipped

    def take(self) -> list[LaneText]:
        """Returns the texts since the last call."""
        with self._lock:
            texts = list(self._texts)
            self._texts.clear()
            self._bytes = 0
            return [
                structs.replace(text, skipped=text.skipped + self._dropped.pop((text.lane_id, text.is_error), 0))
                for text in texts
            ]


# -- remote host ---------------------------------------------------------------------------------


#: Seconds for all hosts to say how their lanes share GPUs.
_START_S = 120.0
#: Seconds for hosts to end their lanes.
_END_S = 5.0
#: Bytes of a payload that are sent at once: no other message, and no other lane, waits for more.
_PART = 1 << 20


@dataclass(slots=True, eq=False)
class _Transfer:
    """A payload on its way to a host, or there.

    Attributes:
        number: tells it from an earlier one of the same payload.
        data: the payload; empty once it was sent.
        sent: bytes sent.
        keeping: how far it is.
    """

    number: int
    data: bytes
    sent: int = 0
    keeping: Keeping = Keeping.UNDER_WAY


class RemoteStore:
    """The store of checkpoints of a host on another node.

    Args:
        send: puts a message into what is sent to the host next.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        #: What it was asked to copy, and has not said how that went, in order.
        self._asked: list[PersistCheckpoint | ForkCheckpoint] = []

    def value(self, values: Mapping[str, CheckpointValue]) -> None:
        """Tells it what checkpoints of trials are worth, by trial."""
        self._send(ValueCheckpoints(values))

    def forget(self, trial_id: str, *, keep_newest: bool) -> None:
        """Drops what it knows of a trial, and has its checkpoints deleted."""
        self._send(ForgetTrial(trial_id, keep_newest))

    def persist(self, host: str, trial_id: str, path: str, *, keep: bool) -> None:
        """Has it copy a checkpoint to disk."""
        self._asked.append(PersistCheckpoint(trial_id, path, keep))
        self._send(self._asked[-1])

    def fork(self, host: str, child: str, parent: str, path: str) -> None:
        """Has it make a checkpoint the start of a trial."""
        self._asked.append(ForkCheckpoint(child, parent, path))
        self._send(self._asked[-1])

    def discard(self, host: str, path: str, *, demote: bool) -> None:
        """Has it remove a checkpoint from those that outlive the run."""
        self._send(DiscardKept(path, demote))

    def answered(self) -> None:
        """Takes note of an answer: they come in order."""
        del self._asked[:1]

    def fail(self, host: str, reason: str) -> list[CheckpointPersisted | CheckpointForked]:
        """Answers, in place of a host that is gone, what it has not."""
        asked, self._asked = self._asked, []
        problem = f"its host {reason}"
        return [
            CheckpointForked(one.trial_id, one.parent, host, problem=problem)
            if isinstance(one, ForkCheckpoint)
            else CheckpointPersisted(one.trial_id, one.path, host, one.keep, problem=problem)
            for one in asked
        ]

    def prefetch(self, host: str, trial_id: str, path: str, source: tuple[str, int] | None) -> None:
        """Has it bring a checkpoint into its memory."""
        self._send(BringCheckpoint(trial_id, path, source))


class RemoteHost:
    """Sends requests to a host, in batches, and reads its reports.

    Args:
        number: of its actor.
        node: id of its node.
        name: of its machine, as of the devices there.
        printed: receives what its trials print.

    Attributes:
        stores: the only one, of its checkpoints.
        sharing: how its lanes share a GPU; ``None`` before it has said so.
        checkpoints_at: where it serves the checkpoints of its machine; ``None`` before it has said so.
        failed: why the host is gone, to be read after "lane 3"; empty while it is there.
        checked: whether the nodes were checked since its connection was lost.
    """

    def __init__(self, number: int, node: str, name: str, printed: OutputInbox) -> None:
        self.number = number
        self.node = node
        self.name = name
        self._printed = printed
        self.sharing: GpuSharing | None = None
        self.checkpoints_at: tuple[str, int] | None = None
        self.failed = ""
        self.checked = False
        self._connection: FramedSocket | None = None
        self._outbox: list[Any] = []
        self.stores = RemoteStore(lambda message: self._outbox.append(message))
        self._numbers = itertools.count()
        #: By name of the payload.
        self._transfers: dict[str, _Transfer] = {}
        #: Those of which parts are still to be sent, in order.
        self._unsent: dict[str, _Transfer] = {}
        self._lanes: set[int] = set()
        self._dying: set[int] = set()

    @property
    def wants_to_write(self) -> bool:
        """Whether the host has not yet taken all that is to be sent."""
        return self._connection is not None and (
            self._connection.wants_to_write or (bool(self._unsent) and not self._connection.ended)
        )

    def fileno(self) -> int:
        """Descriptor of the connection; -1 while there is none."""
        return -1 if self._connection is None or self._connection.ended else self._connection.fileno()

    @property
    def is_connected(self) -> bool:
        """Whether the host has connected, and the connection has not ended."""
        return self._connection is not None and not self._connection.ended

    def connect(self, sock: socket.socket) -> None:
        """Takes the host's connection."""
        self._connection = FramedSocket(sock, _decode)

    # -- requests; they are sent by flush() ------------------------------------------------------------------

    def launch(self, lane_id: int, binding: DeviceBinding, *, echo: bool = False) -> None:
        """Launches a lane, which connects later; with ``echo``, the host sends what its trials print."""
        self._lanes.add(lane_id)
        self._outbox.append(LaunchLane(lane_id, binding, echo))

    def kill(self, lane_id: int) -> None:
        """Kills a lane."""
        self._outbox.append(EndLane(lane_id))

    def dump_stacks(self, lane_id: int, trial_id: str) -> None:
        """Has a lane's stacks written to the log of a trial, on the host's machine."""
        self._outbox.append(DumpLane(lane_id, trial_id))

    def preload(self, modules: Sequence[str], *, late: bool = False) -> None:
        """Loads modules ahead: see :meth:`fluid.backends.base.Launcher.preload`."""
        self._outbox.append(PreloadModules(tuple(modules), late))

    def keep(self, lane_id: int, name: str, data: bytes) -> Keeping:
        """Keeps a payload for its lanes: see :meth:`fluid.backends.base.Launcher.keep`."""
        transfer = self._transfers.get(name)
        if transfer is None:
            transfer = _Transfer(next(self._numbers), data)
            self._transfers[name] = self._unsent[name] = transfer
        return transfer.keeping

    def drop(self, name: str) -> None:
        """Drops a payload, or stops sending it."""
        if self._transfers.pop(name, None) is not None:
            self._unsent.pop(name, None)
            self._outbox.append(DropPayload(name))

    def end(self) -> None:
        """Ends the host, which closes the connection when no process of its lanes is left."""
        self._outbox.append(EndHost())

    def flush(self) -> None:
        """Sends what waits, once the host has connected; of payloads one part, once it has taken all else."""
        if self._connection is not None:
            self._connection.flush()
            batch, self._outbox = self._outbox, []
            if self._unsent and not self._connection.wants_to_write:
                batch.append(self._next_part())
            if batch:
                self._connection.send(batch)

    def _next_part(self) -> StorePayload:
        name, transfer = next(iter(self._unsent.items()))
        offset, size = transfer.sent, len(transfer.data)
        part = StorePayload(transfer.number, name, size, offset, transfer.data[offset : offset + _PART])
        transfer.sent += len(part.data)
        if transfer.sent >= size:
            del self._unsent[name]
            transfer.data = b""
        return part

    # -- reports ---------------------------------------------------------------------------------------------

    def receive(self) -> list[LauncherReport]:
        """Returns what the host has reported since the last call."""
        reports: list[LauncherReport] = []
        for message in [] if self._connection is None else self._connection.receive():
            if isinstance(message, SharingChanged):
                self.sharing = message.sharing
            elif isinstance(message, LaneText):
                self._printed.put(message)
            elif isinstance(message, HostStarted):
                self.checkpoints_at = message.checkpoints_at
            elif isinstance(message, PayloadStored):
                transfer = self._transfers.get(message.name)
                if transfer is not None and transfer.number == message.number:
                    transfer.keeping = Keeping.DONE if message.is_kept else Keeping.REFUSED
            else:
                if isinstance(message, LaneExited):
                    self._lanes.discard(message.lane_id)
                elif isinstance(message, (CheckpointPersisted, CheckpointForked)):
                    self.stores.answered()
                reports.append(message)
        return reports

    def lose(self) -> list[LaneDying | LaneExited]:
        """Closes the connection; returns that all lanes are dying, the first time."""
        self.close()
        dying = sorted(self._lanes - self._dying)
        self._dying |= self._lanes
        return [LaneDying(lane_id) for lane_id in dying]

    def fail(self, reason: str) -> list[LauncherReport]:
        """Gives the host up; returns that all lanes have ended, for which no trial is to blame, and no copy is made.

        Lanes of a host that never connected could not be started: devices on which none can, are given up.

        Args:
            reason: to be read after "its host".
        """
        was_there = self._connection is not None
        self.close()
        self.failed = f"lost the host that it came from, which {reason}"
        ended = sorted(self._lanes)
        self._lanes.clear()
        exits = [LaneExited(lane_id, self.failed, blameless=was_there) for lane_id in ended]
        return [*exits, *self.stores.fail(self.name, reason)]

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()


def end_hosts(all_hosts: Iterable[RemoteHost], selector: WakeableSelector, clock: Clock) -> set[str]:
    """Tells hosts to end, and waits until they close their connections; returns the names of those left.

    Args:
        all_hosts: the hosts; those that have not connected are left out.
        selector: that watches them.
        clock: of the driver.
    """
    hosts = [host for host in all_hosts if host.is_connected]
    for host in hosts:
        host.end()
    deadline = clock.now() + _END_S
    while hosts and clock.now() < deadline:
        for host in hosts:
            host.flush()
            host.receive()
            selector.watch(host.number, host)
        hosts = [host for host in hosts if host.is_connected]
        if hosts:
            selector.wait(max(0.0, deadline - clock.now()))
    return {host.name for host in hosts}


def await_sharing(hosts: Sequence[RemoteHost], wanted: str, turn: Callable[[], None], clock: Clock) -> None:
    """Waits until each host has said how its lanes share GPUs.

    Args:
        hosts: the hosts.
        wanted: how they were told to.
        turn: waits a moment for what hosts report.
        clock: of the driver.

    Raises:
        InvalidFieldError: MPS cannot be had on a node.
        FluidError: a host could not be started.
    """
    deadline = clock.now() + _START_S
    while waiting := [host for host in hosts if host.sharing is None]:
        for host in waiting:
            if host.failed:
                raise InvalidFieldError("sharing", wanted, f"{host.name}: {host.failed}")
        if clock.now() >= deadline:
            raise FluidError(f"the host on {waiting[0].name} has not started within {_START_S:g} s")
        turn()
