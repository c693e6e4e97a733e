"""Horovod 0.28.1 as a process group, without its elastic driver: every generation is a Horovod run of its own.

A process runs Horovod once at a time, and Horovod reads its settings from the environment when it starts.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import torch

from fluid._imports import try_import
from fluid.elastic.groups.generation import GenerationBrokenError, GenerationGuard
from fluid.elastic.groups.group import interface_of
from fluid.elastic.groups.rendezvous import PROOF_BYTES, Rendezvous, proofs_of, require_proofs
from fluid.elastic.messages import HOROVOD_INSTALL, LOOPBACK
from fluid.errors import FluidError

with try_import("Horovod", install=HOROVOD_INSTALL) as _imports:
    import horovod.torch as hvd


# -- rendezvous proxy ----------------------------------------------------------------------------
#
# Horovod's rendezvous server, for one process: a server of HTTP behind which is the generation's store.
#
# Horovod finds its peers through such a server, and sends it no secret. So every member has a server of its own, on
# the loopback interface, which refuses connections of other processes.


#: Longest that the server waits for a value before it answers that there is none, and Horovod asks again, seconds.
_ANSWER_S = 1.0
#: Longest that a request may take to arrive, seconds.
_REQUEST_S = 3.0
_NOT_FOUND, _OK = 404, 200
#: Of groups in which each member is alone: see the environment that :mod:`fluid.elastic.groups.horovod_group` sets.
_ALONE = ("/local_", "/cross_")


class RendezvousProxy:
    """The server; it runs in threads until it is closed.

    Args:
        rendezvous: where the values are.

    Attributes:
        port: at which it listens.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._server = _Server((LOOPBACK, 0), _handler_for(rendezvous))
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="fluid-elastic-rendezvous", daemon=True).start()

    def close(self) -> None:
        """Stops the server, in another thread: it checks twice a second whether to stop."""
        threading.Thread(target=self._stop, name="fluid-elastic-rendezvous-end", daemon=True).start()

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return _is_own(client_address, self.server_address)


def _handler_for(rendezvous: Rendezvous) -> type[BaseHTTPRequestHandler]:
    #: What this process has put.
    own: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S

        def do_GET(self) -> None:
            value = own.get(self.path)
            if value is None:
                with suppress(GenerationBrokenError):
                    (value,) = rendezvous.get([self.path], _ANSWER_S)
            if value is None:
                self._answer(_NOT_FOUND)
            else:
                self._answer(_OK, value)

        def do_PUT(self) -> None:
            own[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(_OK)
            if not self.path.startswith(_ALONE):
                rendezvous.put(self.path, own[self.path])

        def do_DELETE(self) -> None:
            self._answer(_OK)  # The store ends with the generation.

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _is_own(client: Any, server: Any) -> bool:
    """Whether this process has the other end of a connection between these addresses."""
    for descriptor in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_INET and connection.getsockname() == client:
                return bool(connection.getpeername() == server)
    return False


def open_sockets() -> dict[int, int]:
    """Returns the inodes of this process's sockets by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The descriptor of the listing itself is closed by now.
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


# -- horovod group -------------------------------------------------------------------------------


#: The host name that all members have.
_HOST = "fluid"
#: Longest that members wait for each other at the rendezvous, seconds.
_RENDEZVOUS_S = "30"


class HorovodGroup:
    """A :class:`fluid.elastic.groups.group.Group` on Horovod's gloo.

    Horovod detects a dead member when its connections close, but then keeps its own connections open, so that the other
    members would wait. So this class shuts down the connections of a broken generation, which also interrupts Horovod.

    Raises:
        MissingDependencyError: Horovod is not installed.
    """

    #: The group that uses this process's Horovod.
    _owner: ClassVar[HorovodGroup | None] = None

    def __init__(self) -> None:
        _imports.check()
        self.rank = 0
        self.size = 1
        self.on_operation: Callable[[], None] | None = None
        self._guard = GenerationGuard()
        self._rendezvous: Rendezvous | None = None
        self._server: RendezvousProxy | None = None
        #: Descriptors and inodes of the connections of this generation.
        self._sockets: dict[int, int] = {}
        #: Numbers the operations, which Horovod matches between members by name.
        self._numbers = itertools.count()

    @property
    def broken(self) -> bool:
        """Whether an operation of this generation has failed, or it was aborted."""
        return self._guard.is_broken

    def connect(self, rendezvous: Rendezvous, rank: int, size: int) -> None:
        """Not possible: a process runs Horovod once at a time."""
        raise GenerationBrokenError("Horovod connects the members of one generation at a time")

    def disconnect(self, generation: int) -> None:
        """Does nothing, as no connections are kept."""

    def configure(self, rendezvous: Rendezvous, rank: int, size: int, connection: int = 0) -> None:
        """Starts Horovod with the other members.

        Raises:
            GenerationBrokenError: not all members joined, or the generation was aborted.
            FluidError: another trial in this process uses Horovod.
        """
        self._leave()
        if HorovodGroup._owner is not None:
            raise FluidError("Horovod trains one trial at a time in a process, and another trial uses it")
        self._rendezvous = rendezvous
        self._guard.start(rendezvous.generation)
        self._guard.check()
        self._server = RendezvousProxy(rendezvous)
        os.environ.pop("HOROVOD_ELASTIC", None)
        os.environ.update(
            HOROVOD_RANK=str(rank),
            HOROVOD_SIZE=str(size),
            # Alone on its host and across hosts: hierarchies are of no use here, and for each of them all members would
            # connect to each other again.
            HOROVOD_LOCAL_RANK="0",
            HOROVOD_LOCAL_SIZE="1",
            HOROVOD_CROSS_RANK="0",
            HOROVOD_CROSS_SIZE="1",
            HOROVOD_HOSTNAME=_HOST,
            HOROVOD_CONTROLLER="gloo",
            HOROVOD_CPU_OPERATIONS="gloo",
            HOROVOD_GLOO_IFACE=interface_of(rendezvous.address),
            HOROVOD_GLOO_RENDEZVOUS_ADDR=LOOPBACK,
            HOROVOD_GLOO_RENDEZVOUS_PORT=str(self._server.port),
        )
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", _RENDEZVOUS_S)
        self._numbers = itertools.count()
        HorovodGroup._owner = self
        before = open_sockets()
        self._run_guarded(hvd.init)
        self._sockets = dict(open_sockets().items() - before.items())
        try:
            self._check_peers(rendezvous, rank, size)
        except GenerationBrokenError:
            self._guard.break_()
            raise
        self.rank, self.size = rank, size

    def _check_peers(self, rendezvous: Rendezvous, rank: int, size: int) -> None:
        """Checks over every connection that a member is at its other end: gloo accepts any process.

        Raises:
            GenerationBrokenError: another process is.
        """
        if rank == 0:
            rendezvous.put("secret", secrets.token_bytes(PROOF_BYTES))
        (secret,) = rendezvous.get(["secret"], float(_RENDEZVOUS_S))
        received: list[int] = []
        sent = torch.frombuffer(bytearray(proofs_of(secret, rank, size)), dtype=torch.uint8)
        # Each pair exchanges its part directly.
        self._run_guarded(lambda: received.extend(hvd.alltoall(sent, name="proofs").tolist()))
        require_proofs(secret, rank, size, bytes(received))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by its sum over the members."""
        if self.size > 1:
            name = f"sum-{next(self._numbers)}"
            staged = tensor.cpu()  # Horovod's gloo takes no tensors on a GPU.
            self._run_guarded(lambda: hvd.allreduce_(staged, op=hvd.Sum, name=name))
            if staged is not tensor:
                tensor.copy_(staged)

    def can_overlap(self, tensor: torch.Tensor) -> bool:
        """Whether sums run beside the computation: not here."""
        return False

    def start_all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Replaces a contiguous tensor by its sum over the members; the function that it returns does nothing."""
        self.all_reduce(tensor)
        return lambda: None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's."""
        if self.size > 1 and tensor.numel():
            name = f"broadcast-{next(self._numbers)}"
            staged = tensor.cpu()
            self._run_guarded(lambda: hvd.broadcast_(staged, root_rank=0, name=name))
            if staged is not tensor and self.rank:
                tensor.copy_(staged)

    def barrier(self) -> None:
        """Returns once all members have called it."""
        self.all_reduce(torch.zeros(1))

    def confirm(self) -> None:
        """Returns at once, as operations return when they have finished."""

    def abort(self, generation: int) -> None:
        """Breaks a generation; operations that wait for its members raise, in all of them."""
        self._guard.break_(generation)
        rendezvous = self._rendezvous
        if self._guard.is_broken:
            if rendezvous is not None:
                rendezvous.close()
            _cut(self._sockets)

    def shutdown(self) -> None:
        """Leaves the generation, so that the size is 1 again."""
        self._leave()

    def _run_guarded(self, operation: Callable[[], Any]) -> None:
        self._guard.check()
        try:
            operation()
        except Exception as error:  # HorovodInternalError, and RuntimeError from the rendezvous.
            self._guard.break_()
            raise GenerationBrokenError(f"a member of the generation failed: {error}") from None
        self._guard.check()

    def _leave(self) -> None:
        self.rank, self.size = 0, 1
        sockets, self._sockets = self._sockets, {}
        rendezvous, self._rendezvous = self._rendezvous, None
        server, self._server = self._server, None
        if rendezvous is not None:
            rendezvous.close()
        if self._guard.is_broken:
            _cut(sockets)
        if HorovodGroup._owner is self:
            HorovodGroup._owner = None
            with suppress(Exception):  # It may fail after a broken generation.
                hvd.shutdown()
        if server is not None:
            server.close()


def _cut(sockets: dict[int, int]) -> None:
    """Shuts connections down for all their users; skips descriptors that were closed or reused since."""
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            if os.stat(descriptor).st_ino == inode:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                        connection.shutdown(socket.SHUT_RDWR)
