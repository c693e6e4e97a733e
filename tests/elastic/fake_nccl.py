"""A stand-in for NCCL between threads: its operations return when they are queued, as on a GPU."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from fluid.elastic.groups.torch_group import TorchGroup

#: Floats of at least so many elements count as being on a GPU.
LEAST = 50


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() >= LEAST


class FakeNccl:
    """The part of ``dist.ProcessGroupNCCL`` that TorchGroup uses, on gloo."""

    #: Made and not yet shut down or aborted.
    alive: ClassVar[list[FakeNccl]]
    #: Called by the members that connect, by rank.
    on_connect: ClassVar[dict[int, Any]]

    class Options:
        _timeout: Any = None

        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = options._timeout
        self._gloo = dist.ProcessGroupGloo(store, rank, size, gloo)
        #: As C++ has it.
        self.store = dist.PrefixStore("later", store)
        self.rank = rank
        self.aborted = threading.Event()
        #: The stream: one operation at a time, in order.
        self.stream = ThreadPoolExecutor(1)
        #: Set to let queued operations run; the GPU is busy until then.
        self.free = threading.Event()
        self.free.set()
        self.ended = ""
        type(self).alive.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        type(self).on_connect.get(self.rank, lambda: None)()

    def allreduce(self, tensors: list[torch.Tensor]) -> _Work:
        return _Work(self.stream.submit(self._run, self._gloo.allreduce, tensors[0]))

    def broadcast(self, tensors: list[torch.Tensor]) -> _Work:
        return _Work(self.stream.submit(self._run, self._gloo.broadcast, tensors[0]))

    def abort(self) -> None:
        self.aborted.set()
        self.free.set()
        self._end("aborted")

    def shutdown(self) -> None:
        self._end("shut down")

    def synchronize(self) -> None:
        self.stream.submit(lambda: None).result()

    def _end(self, how: str) -> None:
        self.ended = self.ended or how
        if self in type(self).alive:
            type(self).alive.remove(self)

    def _run(self, operation: Any, tensor: torch.Tensor) -> None:
        """Ends without an error when it is aborted, and without the result."""
        self.free.wait()
        if self.aborted.is_set():
            return
        result = tensor.clone()
        done = threading.Event()
        future = operation([result]).get_future()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(0.005):
            if self.aborted.is_set():
                return
        if not self.aborted.is_set():
            future.wait()
            tensor.copy_(result)


class _Work:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Returns at once: only later operations of the stream wait."""


def install(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    """Makes every group of backend "nccl" use the stand-in."""

    class Nccl(FakeNccl):
        alive: ClassVar = []
        on_connect: ClassVar = {}

    def wait() -> None:
        # Of all members, as they are threads of one process and have one host here.
        group = _current.group
        if group is not None and (process_group := group._process_group) is not None:
            process_group.synchronize()

    run = TorchGroup._run

    def remember(self: TorchGroup, *args: Any) -> None:
        _current.group = self
        run(self, *args)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(TorchGroup, "_run", remember)
    monkeypatch.setattr(TorchGroup, "_is_where_needed", lambda self, tensor: is_on_gpu(tensor))
    monkeypatch.setattr("fluid.elastic.groups.nccl.wait_for_gpu", wait)
    return Nccl


class _Current(threading.local):
    group: TorchGroup | None = None


_current = _Current()
