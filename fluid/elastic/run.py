"""Elastic training of one trial on this machine, driven by the caller: a controller, and a process per device.

This is the second driver of elastic trials. A sweep's elastic trials are driven by :class:`fluid.FluidExecutor`, which
chooses widths and devices and whose lanes host the members. :class:`ElasticRun` is for one trial whose width the
caller chooses: examples, tests of a trainable, and benchmarks of a resize.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_start_method, set_start_method, spawn
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, NamedTuple

from fluid.elastic.members.controller import ElasticController, Phase
from fluid.elastic.messages import (
    Action,
    AllHalted,
    CheckpointWritten,
    Collapsed,
    EndWorker,
    Formed,
    Left,
    MemberFailed,
    MemberReady,
    MembersConnected,
    OfMember,
    Prepare,
    Reported,
    Send,
    WriteCheckpoint,
)
from fluid.errors import FluidError, require_integer
from fluid.processes.frames import FramedConnection
from fluid.processes.interpreters import import_path, start_program
from fluid.resources import available_cores
from fluid.trainables.pickling import dump_config, dump_trainable
from fluid.wire import decoder, encode

#: Longest that processes may take to end before they are killed, and to go on with a message, seconds.
_END_S = 10.0
_STALL_S = 10.0
_decode = decoder(OfMember)


class ElasticResult(NamedTuple):
    """The result of one iteration, and the number of processes that ran it."""

    iteration: int
    metrics: Mapping[str, Any]
    width: int


def _process_settings() -> dict[str, Any]:
    """What ``multiprocessing`` hands on to a process that it starts, except for the script, which is not run again."""
    start_method = get_start_method(allow_none=True)
    settings = spawn.get_preparation_data("fluid-elastic")
    if not start_method:
        set_start_method(None, force=True)  # To ask for it has fixed it.
    settings |= {"authkey": bytes(settings["authkey"]), "sys_path": import_path(), "start_method": start_method}
    return {name: value for name, value in settings.items() if not name.startswith("init_main")}


class ElasticRun:
    """Trains one elastic trainable in processes of this machine, at widths that the caller chooses.

    If processes die, training continues with the survivors. Processes that leave stay idle for the next growth. As a
    context manager it ends them all. The trials of a sweep belong in a :class:`fluid.FluidExecutor` instead, which
    chooses widths and devices.

    Args:
        trainable: an :class:`ElasticTrainable` subclass.
        config: passed to its ``build``.
        width: number of processes at first.
        backend: ``"torch"`` (see :func:`fluid.elastic.groups.make.make_group`), ``"gloo"``, ``"nccl"`` or
            ``"horovod"``.
        checkpoint: a folder that :meth:`save` wrote, to start from.
        gpus: the GPU of each process, in turn, as in ``CUDA_VISIBLE_DEVICES``; empty to train on CPUs, with one core
            and one thread each.

    Raises:
        InvalidFieldError: an argument cannot be used.
        FluidError: the trainable raised while it was set up; the message has its traceback.

    Example:
        Each process imports PyTorch and the trainable, which takes some seconds (so this is not run here)::

            with ElasticRun(MyTrainable, {"lr": 0.1}, width=1) as run:
                results = run.run(iterations=2)
                run.resize(3)
                results += run.run(iterations=2)
            [result.width for result in results]  # [1, 1, 3, 3]

        >>> from fluid.elastic import ElasticRun
        >>> ElasticRun(dict, {}, width=0)
        Traceback (most recent call last):
        ...
        fluid.errors.InvalidFieldError: width=0: must be at least 1
    """

    def __init__(
        self,
        trainable: Any,
        config: Mapping[str, Any],
        width: int = 1,
        *,
        backend: str = "torch",
        checkpoint: str | None = None,
        gpus: tuple[str, ...] = (),
    ) -> None:
        width = require_integer("width", width, at_least=1)
        self._message = Prepare(
            dump_trainable(trainable), dump_config(config), checkpoint, pickle.dumps(_process_settings())
        )
        self._backend = backend
        self._gpus = gpus
        self._controller = ElasticController()
        self._processes: dict[int, tuple[subprocess.Popen[bytes], FramedConnection]] = {}
        self._cores: dict[int, int] = {}
        self._next = 0
        #: Events that no method has consumed yet.
        self._events: list[Any] = []
        #: Members that are set up and do not train yet, in the order of their set-up.
        self._spares: list[int] = []
        #: Members that have left; they have imported everything, so that their next set-up is quick.
        self._idle: list[int] = []
        try:
            self.prepare(width)
            self.resize(width)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def width(self) -> int:
        """Number of processes that train."""
        return len(self._controller.ranks)

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self._controller.iteration

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that train, rank 0 first."""
        return tuple(self._processes[member][0].pid for member in self._controller.ranks if member in self._processes)

    def prepare(self, spares: int) -> None:
        """Starts and sets up processes until so many spares are ready beside those that train, and connects them all.

        So a :meth:`resize` to all of them need not connect them.
        """
        missing = max(0, require_integer("spares", spares, at_least=0) - len(self._spares))
        wanted = {self._idle.pop() if self._idle else self._start() for _ in range(missing)}
        for member in wanted:
            self._do(self._controller.prepare(member, self._message))
        while wanted:
            event = self._next_event((MemberReady, MemberFailed))
            if isinstance(event, MemberFailed):
                raise FluidError(f"the trainable could not be set up:\n{event.traceback}")
            wanted.discard(event.member)
            self._spares.append(event.member)
        if self._spares and self._controller.survivors:
            self._do(self._controller.connect([*self._controller.survivors, *self._spares]))
        if self._controller.is_connecting:
            self._next_event((MembersConnected,))

    def resize(self, width: int) -> None:
        """Continues with another number of processes.

        Raises:
            FluidError: no process with the trial's state is left.
        """
        width = require_integer("width", width, at_least=1)
        self.prepare(max(0, width - len(self._controller.survivors)))
        while not self._form([*self._survivors(), *self._spares][:width]):
            pass  # Again, with the processes that are left.

    def run(self, iterations: int, on_result: Callable[[ElasticResult], None] | None = None) -> list[ElasticResult]:
        """Trains, and continues with the survivors if processes die.

        Args:
            iterations: how many.
            on_result: called with each result as soon as it is there.

        Returns:
            One result per iteration; fewer if the trial says that it is done.

        Raises:
            FluidError: the user's code raised, or no process with the trial's state is left.
        """
        target = self._controller.iteration + require_integer("iterations", iterations, at_least=1)
        results: list[ElasticResult] = []
        if self._controller.phase is not Phase.IDLE:
            self._go_on()
        self._do(self._controller.run(iterations))
        while True:
            event = self._next_event((Reported, AllHalted, Collapsed, MemberFailed))
            if isinstance(event, Reported):
                results.append(ElasticResult(event.iteration, event.metrics.decode(), event.width))
                if on_result is not None:
                    on_result(results[-1])
            elif isinstance(event, AllHalted):
                return results
            elif isinstance(event, MemberFailed):
                raise FluidError(f"the trainable raised in iteration {self.iteration + 1}:\n{event.traceback}")
            else:
                self._go_on()
                if self._controller.iteration < target:
                    self._do(self._controller.run(target - self._controller.iteration))

    def save(self, folder: str) -> None:
        """Writes a checkpoint, from which a run of any width can start, into an empty folder."""
        first = self._controller.ranks[0]
        self._do([Send(first, WriteCheckpoint(folder))])
        event = self._next_event((CheckpointWritten, Collapsed, MemberFailed))
        if not isinstance(event, CheckpointWritten):
            raise FluidError(f"the checkpoint could not be written: {event}")

    def close(self) -> None:
        """Ends all processes."""
        for member in list(self._processes):
            self._end(member)
        for process, _ in self._processes.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for _, connection in self._processes.values():
            connection.close()
        self._processes.clear()

    # -- generations ---------------------------------------------------------------------------------------

    def _form(self, members: list[int]) -> bool:
        """Forms a generation; returns whether all members joined."""
        self._do(self._controller.form(members))
        event = self._next_event((Formed, Collapsed, MemberFailed))
        if isinstance(event, MemberFailed):
            raise FluidError(f"the trainable raised while it was resized:\n{event.traceback}")
        self._spares = [spare for spare in self._spares if spare not in members]
        return isinstance(event, Formed)

    def _go_on(self) -> None:
        while self._controller.phase is Phase.BREAKING:
            self._next_event((Collapsed,))
        while not self._form(self._survivors()):
            pass  # Again, with the processes that are left.

    def _survivors(self) -> list[int]:
        """The members that have the trial's state; none before the first generation."""
        survivors = list(self._controller.survivors)
        if self._controller.generation and not survivors:
            raise FluidError("no process with the trial's state is left")
        return survivors

    # -- processes -----------------------------------------------------------------------------------------

    def _start(self) -> int:
        member, self._next = self._next, self._next + 1
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        core = -1
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[member % len(self._gpus)]
        else:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            used = [self._cores[other] for other in self._processes]
            core = min(available_cores(), key=used.count)
        threads = "1" if core >= 0 else str(max(1, len(available_cores()) // max(1, len(self._gpus))))
        arguments = [str(theirs.fileno()), self._backend, threads, str(core)]
        self._cores[member] = core
        process = start_program("fluid.elastic.members.worker", arguments, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._processes[member] = (process, FramedConnection(ours))
        return member

    def _end(self, member: int) -> None:
        with suppress(OSError):
            self._processes[member][1].send_bytes(encode([EndWorker()]))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if not isinstance(action, Send):
                self._events.append(action)
            elif action.member in self._processes:
                with suppress(OSError):  # It is gone; reading from its connection will show that.
                    self._processes[action.member][1].send_bytes(encode([action.message]))

    def _next_event(self, kinds: tuple[type, ...]) -> Any:
        """Waits for the next event of these kinds; drops others, which are out of date by then."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kinds):
                    return event
            members = {connection.fileno(): member for member, (_, connection) in self._processes.items()}
            for descriptor in wait(list(members)):
                assert isinstance(descriptor, int)
                self._receive(members[descriptor])

    def _receive(self, member: int) -> None:
        process, connection = self._processes[member]
        try:
            (message,) = _decode(connection.recv_bytes(_STALL_S))
        except Exception:  # It has ended, or cannot be believed: what it wrote is no message.
            del self._processes[member]
            connection.close()
            process.kill()
            process.wait()
            self._spares = [spare for spare in self._spares if spare != member]
            self._idle = [idle for idle in self._idle if idle != member]
            self._do(self._controller.member_lost(member))
            return
        if isinstance(message, Left):
            self._idle.append(member)
        elif isinstance(message, CheckpointWritten):
            self._events.append(message)
        self._do(self._controller.receive(member, message))
