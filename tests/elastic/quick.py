"""Elastic runs whose processes are forked from one that has imported everything: they start in no time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from fluid.elastic import ElasticRun
from fluid.elastic.messages import LOOPBACK
from fluid.processes.frames import FramedConnection

#: What the test's own process is set back to, once the one that is forked has started with it.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_context = multiprocessing.get_context("forkserver")


class QuickRun(ElasticRun):
    """An :class:`ElasticRun` on CPUs, with the same workers.

    Args:
        addresses: of the machines that the processes are on, in turn.
    """

    def __init__(self, *args: Any, addresses: Sequence[str] = (LOOPBACK,), **kwargs: Any) -> None:
        self._addresses = addresses
        super().__init__(*args, **kwargs)

    def _start(self) -> int:
        member, self._next = self._next, self._next + 1
        ours, theirs = socket.socketpair()
        preload = ["pytest", "torch._dynamo", "fluid.elastic.members.worker"]
        if find_spec("horovod") is not None:
            preload.append("horovod.torch")
        _context.set_forkserver_preload(preload)
        cores = sorted(os.sched_getaffinity(0))
        address = self._addresses[member % len(self._addresses)]
        arguments = (theirs, self._backend, cores[member % len(cores)], address)
        process = _context.Process(target=_serve, args=arguments, daemon=True)
        with _environment():
            process.start()
        theirs.close()
        self._processes[member] = (_Process(process), FramedConnection(ours))  # type: ignore[assignment]
        return member


class _Process:
    """What :class:`ElasticRun` needs of a process."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _serve(connection: socket.socket, backend: str, core: int, address: str) -> None:
    from fluid.elastic.members import worker

    worker.LOOPBACK = address
    worker.main([str(connection.detach()), backend, "1", str(core)])
