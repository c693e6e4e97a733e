"""Horovod 0.28.1 as a process group, without its elastic driver: every generation is a Horovod run of its own.

A process runs Horovod once at a time, and Horovod reads its settings from the environment when it starts.
"""

from __future__ import annotations

import itertools
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import torch

from fluid._imports import try_import
from fluid.elastic.group import GenerationBrokenError, GenerationGuard, interface_of, own_address_towards, split_address
from fluid.elastic.messages import HOROVOD_INSTALL
from fluid.errors import FluidError

with try_import("Horovod", install=HOROVOD_INSTALL) as _imports:
    import horovod.torch as hvd
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

#: The host name under which the rendezvous server knows all members.
_HOST = "fluid"
#: Longest that the rendezvous server waits for a value before it answers a request, seconds.
_ANSWER_S = 1.0
#: Longest that members wait for each other at the rendezvous, seconds.
_RENDEZVOUS_S = "30"


class HorovodGroup:
    """A :class:`fluid.elastic.group.Group` on Horovod's gloo.

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
        self._guard = GenerationGuard()
        self._server: Any = None
        #: Descriptors and inodes of the connections of this generation.
        self._sockets: dict[int, int] = {}
        #: Numbers the operations, which Horovod matches between members by name.
        self._numbers = itertools.count()

    @property
    def broken(self) -> bool:
        """Whether an operation of this generation has failed, or it was aborted."""
        return self._guard.is_broken

    def open_rendezvous(self, address: str, generation: int, size: int) -> str:
        """Starts Horovod's rendezvous server, which listens on all addresses, at a free port."""
        self._stop_server()
        server = RendezvousServer(verbose=0)
        port = server.start(_waiting_handler())
        server.init(get_host_assignments(parse_hosts(f"{_HOST}:{size}"), size, size))
        self._server = server
        return f"{address}:{port}"

    def configure(self, rendezvous: str, generation: int, rank: int, size: int) -> None:
        """Starts Horovod with the members that meet at rank 0's server.

        Raises:
            GenerationBrokenError: not all members joined, or the generation was aborted.
            FluidError: another trial in this process uses Horovod.
        """
        self._leave()
        if HorovodGroup._owner is not None:
            raise FluidError("Horovod trains one trial at a time in a process, and another trial uses it")
        self._guard.start(generation)
        self._guard.check()
        address, port = split_address(rendezvous)
        own = own_address_towards(address, port)
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
            HOROVOD_GLOO_IFACE=interface_of(own),
            HOROVOD_GLOO_RENDEZVOUS_ADDR=address,
            HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        )
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", _RENDEZVOUS_S)
        self._numbers = itertools.count()
        HorovodGroup._owner = self
        before = _open_sockets()
        self._run_guarded(hvd.init)
        self._sockets = dict(_open_sockets().items() - before.items())
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by its sum over the members."""
        if self.size > 1:
            name = f"sum-{next(self._numbers)}"
            self._run_guarded(lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's."""
        if self.size > 1 and tensor.numel():
            name = f"broadcast-{next(self._numbers)}"
            self._run_guarded(lambda: hvd.broadcast_(tensor, root_rank=0, name=name))

    def barrier(self) -> None:
        """Returns once all members have called it."""
        self.all_reduce(torch.zeros(1))

    def abort(self, generation: int) -> None:
        """Breaks a generation; operations that wait for its members raise, in all of them."""
        self._guard.break_(generation)
        if self._guard.is_broken:
            _cut(self._sockets)

    def shutdown(self) -> None:
        """Leaves the generation, so that the size is 1 again."""
        self._leave()
        self._stop_server()

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
        if self._guard.is_broken:
            _cut(sockets)
        if HorovodGroup._owner is self:
            HorovodGroup._owner = None
            with suppress(Exception):  # It may fail after a broken generation.
                hvd.shutdown()

    def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # It checks twice a second whether to stop; this thread need not wait for that.
            threading.Thread(target=server.stop, name="fluid-elastic-rendezvous-end", daemon=True).start()


def _waiting_handler() -> type:
    """Makes a request handler that answers as soon as a value is set; with Horovod's, members poll every 10 ms."""
    arrived = threading.Condition()

    class WaitingHandler(RendezvousHandler):  # type: ignore[misc]
        """Waits for a value that is not set yet."""

        def _get_value(self, scope: str, key: str) -> Any:
            found: list[Any] = []

            def is_set() -> bool:
                found[:] = [super(WaitingHandler, self)._get_value(scope, key)]
                return found[0] is not None

            with arrived:
                arrived.wait_for(is_set, _ANSWER_S)
            return found[0]

        def _put_value(self, scope: str, key: str, value: Any) -> None:
            super()._put_value(scope, key, value)
            with arrived:
                arrived.notify_all()

    return WaitingHandler


def _open_sockets() -> dict[int, int]:
    """Returns the inodes of this process's sockets by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The descriptor of the listing itself is closed by now.
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _cut(sockets: dict[int, int]) -> None:
    """Shuts connections down for all their users; skips descriptors that were closed or reused since."""
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            if os.stat(descriptor).st_ino == inode:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                        connection.shutdown(socket.SHUT_RDWR)
