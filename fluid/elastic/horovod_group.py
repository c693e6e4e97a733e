"""Horovod 0.28.1 as a process group: without its elastic driver, as a plain run of its own in every generation.

Horovod is one per process, and reads its settings from the environment when it starts.
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

#: The members' common host, in the eyes of the rendezvous server.
_HOST = "fluid"
#: Longest that the rendezvous server waits for a value that somebody asked for, seconds.
_ANSWER_S = 1.0
#: How long members wait for each other's first sign, seconds.
_MEET_S = "30"


class HorovodGroup:
    """A :class:`fluid.elastic.group.Group` on Horovod's gloo.

    Horovod notices a member that dies when its connections close, but keeps its own open when it gives up, and others
    would wait for it. So a broken generation's connections are shut down here, which is what interrupts Horovod, too.

    Raises:
        MissingDependencyError: Horovod is not installed.
    """

    #: Whose generation this process's Horovod runs.
    _owner: ClassVar[HorovodGroup | None] = None

    def __init__(self) -> None:
        _imports.check()
        self.rank = 0
        self.size = 1
        self._guard = GenerationGuard()
        self._server: Any = None
        #: Descriptors and inodes of the connections of this generation.
        self._sockets: dict[int, int] = {}
        #: Operations are matched between members by name.
        self._numbers = itertools.count()

    @property
    def broken(self) -> bool:
        """Whether an operation of this generation has failed, or it was aborted."""
        return self._guard.is_broken

    def open_rendezvous(self, address: str, generation: int, size: int) -> str:
        """Starts a rendezvous server; Horovod's listens on all addresses, at a free port."""
        self._stop_server()
        server = RendezvousServer(verbose=0)
        port = server.start(_waiting_handler())
        server.init(get_host_assignments(parse_hosts(f"{_HOST}:{size}"), size, size))
        self._server = server
        return f"{address}:{port}"

    def configure(self, rendezvous: str, generation: int, rank: int, size: int) -> None:
        """Starts Horovod anew, with the members that meet at rank 0's server.

        Raises:
            GenerationBrokenError: not all members came, or the generation was aborted.
            FluidError: another trial in this process uses Horovod.
        """
        self._leave()
        if HorovodGroup._owner is not None:
            raise FluidError("Horovod can train one trial at a time in a process, and another one uses it")
        self._guard.start(generation)
        self._guard.check()
        address, port = split_address(rendezvous)
        own = own_address_towards(address, port)
        os.environ.pop("HOROVOD_ELASTIC", None)
        os.environ.update(
            HOROVOD_RANK=str(rank),
            HOROVOD_SIZE=str(size),
            # Alone on its host, and alone across hosts: there is no use for hierarchies here, and for each of them all
            # members would connect to each other once more.
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
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", _MEET_S)
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
        """Breaks a generation; what waits for its members raises, here and there."""
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
            with suppress(Exception):  # What broke, broke.
                hvd.shutdown()

    def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # It looks twice a second whether it has to stop; nobody waits for that.
            threading.Thread(target=server.stop, name="fluid-elastic-rendezvous-end", daemon=True).start()


def _waiting_handler() -> type:
    """Makes what answers the members' questions as soon as it can; without it, they would ask again every 10 ms."""
    arrived = threading.Condition()

    class WaitingHandler(RendezvousHandler):  # type: ignore[misc]
        """Waits for a value that is not there yet."""

        def _get_value(self, scope: str, key: str) -> Any:
            found: list[Any] = []

            def look() -> bool:
                found[:] = [super(WaitingHandler, self)._get_value(scope, key)]
                return found[0] is not None

            with arrived:
                arrived.wait_for(look, _ANSWER_S)
            return found[0]

        def _put_value(self, scope: str, key: str, value: Any) -> None:
            super()._put_value(scope, key, value)
            with arrived:
                arrived.notify_all()

    return WaitingHandler


def _open_sockets() -> dict[int, int]:
    """This process's sockets: descriptors and inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The one that lists them is closed by now.
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _cut(sockets: dict[int, int]) -> None:
    """Shuts connections down, whoever else has them open; those that are closed by now are left alone."""
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            if os.stat(descriptor).st_ino == inode:
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                        connection.shutdown(socket.SHUT_RDWR)
