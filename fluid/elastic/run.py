"""An elastic trial on the devices of this machine, without an executor: its controller, and a process per device."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, NamedTuple

from fluid.elastic.controller import (
    Action,
    AllHalted,
    Collapsed,
    ElasticController,
    Formed,
    MemberFailed,
    MemberReady,
    Phase,
    Reported,
    Send,
)
from fluid.elastic.messages import CheckpointWritten, EndWorker, Left, Prepare, WriteCheckpoint
from fluid.errors import FluidError, require_integer
from fluid.resources import available_cores
from fluid.trainables.pickling import Packed, dump_config, dump_trainable

#: How long processes that were told to end may take for it, seconds.
_END_S = 10.0


class ElasticResult(NamedTuple):
    """One iteration, and the number of devices it ran on."""

    iteration: int
    metrics: Mapping[str, Any]
    width: int


class ElasticRun:
    """Trains an elastic trainable on as many processes as asked for, and goes on with fewer if some of them die.

    Processes that are not needed any more stay, for the next time it grows. As a context manager it ends them all.

    Args:
        trainable: an :class:`ElasticTrainable` subclass.
        config: handed to its ``build``.
        width: processes to begin with.
        backend: ``"torch"`` (see :func:`fluid.elastic.make_group.make_group`), ``"gloo"``, ``"nccl"`` or
            ``"horovod"``.
        checkpoint: a folder that :meth:`save` wrote, to begin from.
        gpus: for each process in turn, the GPU it sees, as in ``CUDA_VISIBLE_DEVICES``; empty to train on CPUs,
            one core and one thread each.

    Raises:
        InvalidFieldError: an argument cannot be used.
        FluidError: the trainable raised while it was set up; the message holds its traceback.
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
        self._message = Prepare(dump_trainable(trainable), dump_config(config), checkpoint, tuple(sys.path))
        self._backend = backend
        self._gpus = gpus
        self._controller = ElasticController()
        self._processes: dict[int, tuple[subprocess.Popen[bytes], Connection]] = {}
        self._cores: dict[int, int] = {}
        self._next = 0
        #: Events that nobody has waited for yet.
        self._events: list[Any] = []
        #: Set-up members that do not train yet, the one that was prepared first in front.
        self._spares: list[int] = []
        #: Members that have left; they have imported everything, and set up again in no time.
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
        """Processes that train."""
        return len(self._controller.ranks)

    @property
    def iteration(self) -> int:
        """Iterations done."""
        return self._controller.iteration

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of those who train, rank 0 first."""
        return tuple(self._processes[member][0].pid for member in self._controller.ranks if member in self._processes)

    def prepare(self, spares: int) -> None:
        """Starts processes and sets them up, until so many are ready beside those who train."""
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

    def resize(self, width: int) -> None:
        """Goes on with another number of processes.

        Raises:
            FluidError: no process that knows the state is left.
        """
        width = require_integer("width", width, at_least=1)
        self.prepare(max(0, width - len(self._controller.survivors)))
        while not self._form([*self._survivors(), *self._spares][:width]):
            pass  # With who is left.

    def run(self, iterations: int, on_result: Callable[[ElasticResult], None] | None = None) -> list[ElasticResult]:
        """Trains, and goes on with the survivors if processes die.

        Args:
            iterations: how many.
            on_result: called for each as soon as it is done.

        Returns:
            One result per iteration; fewer if the trial says that it has finished.

        Raises:
            FluidError: the user's code raised, or no process that knows the state is left.
        """
        target = self._controller.iteration + require_integer("iterations", iterations, at_least=1)
        results: list[ElasticResult] = []
        if self._controller.phase is not Phase.IDLE:
            self._go_on()
        self._do(self._controller.run(iterations))
        while True:
            event = self._next_event((Reported, AllHalted, Collapsed, MemberFailed))
            if isinstance(event, Reported):
                metrics = pickle.loads(event.metrics.payload) if isinstance(event.metrics, Packed) else event.metrics
                results.append(ElasticResult(event.iteration, metrics, event.width))
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
        """Writes a checkpoint into an empty folder; it can be gone on from at any width."""
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
        """Whether the generation came together."""
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
            pass  # With who is left.

    def _survivors(self) -> list[int]:
        """Members that have the trial's state; at the very beginning nobody has, and nobody needs to."""
        survivors = list(self._controller.survivors)
        if self._controller.generation and not survivors:
            raise FluidError("no process is left that knows the trial's state")
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
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        environment["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environment.get("PYTHONPATH")])])
        threads = "1" if core >= 0 else str(max(1, len(available_cores()) // max(1, len(self._gpus))))
        arguments = [str(theirs.fileno()), self._backend, threads, str(core)]
        command = [sys.executable, "-m", "fluid.elastic.worker", *arguments]
        self._cores[member] = core
        process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._processes[member] = (process, Connection(ours.detach()))
        return member

    def _end(self, member: int) -> None:
        with suppress(OSError):
            self._processes[member][1].send_bytes(pickle.dumps(EndWorker()))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if not isinstance(action, Send):
                self._events.append(action)
            elif action.member in self._processes:
                with suppress(OSError):  # It is gone, and its end of the connection says so.
                    self._processes[action.member][1].send_bytes(pickle.dumps(action.message))

    def _next_event(self, kinds: tuple[type, ...]) -> Any:
        """The next event of these kinds; others have lost their meaning by then."""
        while True:
            while self._events:
                event = self._events.pop(0)
                if isinstance(event, kinds):
                    return event
            members = {connection: member for member, (_, connection) in self._processes.items()}
            for connection in wait(list(members)):
                assert isinstance(connection, Connection)
                self._receive(members[connection], connection)

    def _receive(self, member: int, connection: Connection) -> None:
        try:
            message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            process, _ = self._processes.pop(member)
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
