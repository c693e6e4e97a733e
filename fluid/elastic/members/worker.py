"""A process that is a member of one elastic trial at a time; started by :class:`fluid.elastic.run.ElasticRun`.

Its arguments are DESCRIPTOR BACKEND THREADS CORE.

Under the executor a lane (:mod:`fluid.lane.serve`) hosts the members instead, beside other trials. Both work alike:
the thread that runs the user's code handles messages between two iterations, while another thread reads them, so that
Halt and Abort take effect in the middle of an iteration.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing import spawn
from typing import Any

import torch

from fluid._clock import MonotonicClock
from fluid.elastic.groups.make import make_group
from fluid.elastic.members.member import ElasticMember
from fluid.elastic.members.protocol import MemberProtocol
from fluid.elastic.messages import (
    LOOPBACK,
    Abort,
    CheckpointWritten,
    Connect,
    Disconnect,
    EndWorker,
    ForMember,
    Leave,
    Left,
    MemberRaised,
    Prepare,
    Prepared,
    StoreValues,
    WriteCheckpoint,
)
from fluid.elastic.trainable import ElasticTrainable
from fluid.elastic.tune import require_elastic_class
from fluid.errors import FluidError
from fluid.processes.frames import FramedConnection, FrameError
from fluid.wire import decoder, encode

_decode = decoder(ForMember)


class Worker:
    """Handles the messages of an :class:`~fluid.elastic.run.ElasticRun`.

    Args:
        connection: to the controller's process.
        backend: name for :func:`fluid.elastic.groups.make.make_group`.
    """

    def __init__(self, connection: FramedConnection, backend: str) -> None:
        self._connection = connection
        self._backend = backend
        self._sending = threading.Lock()
        self._clock = MonotonicClock()
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._protocol: MemberProtocol | None = None

    def serve(self) -> None:
        """Handles messages until EndWorker comes."""
        threading.Thread(target=self._read, name="fluid-elastic-reader", daemon=True).start()
        while not isinstance(message := self._messages.get(), EndWorker):
            try:
                self._handle(message)
            except Exception as error:
                self._fail(error)
        self._release_member()

    def _read(self) -> None:
        """Reads ahead of the main thread, which may be in an iteration, or waiting for a lost peer."""
        while True:
            try:
                (message,) = _decode(self._connection.recv_bytes())
            except BaseException as error:
                # The controller is gone, or another thread has taken part of what it sent.
                if not isinstance(error, (EOFError, OSError, FrameError)):
                    traceback.print_exc()
                os._exit(1)
            protocol = self._protocol
            if protocol is not None:
                protocol.preview(message)
            self._messages.put(message)

    def _handle(self, message: Any) -> None:
        if isinstance(message, Prepare):
            self._prepare(message)
        elif isinstance(message, Leave):
            self._release_member()
            self._send(Left())
        elif self._protocol is None:
            # The others were sent before the controller learned that this member had left.
            if not isinstance(message, (Abort, StoreValues, Connect, Disconnect)):
                raise FluidError("this member has not been prepared")
        elif isinstance(message, WriteCheckpoint):
            member = self._protocol.member
            member.trainable.save_checkpoint(message.path)
            self._send(CheckpointWritten(member.iteration, message.path))
        else:
            self._protocol.handle(message)
            while self._protocol.left:
                self._protocol.iterate()

    def _send(self, message: Any) -> None:
        with self._sending:  # Threads of a process group send, too.
            self._connection.send_bytes(encode([message]))

    def _fail(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self._release_member()
        self._send(MemberRaised(f"{type(error).__name__}: {error}", text))

    def _release_member(self) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            try:
                protocol.member.leave()
            except Exception:  # In the user's cleanup, on which nothing depends.
                traceback.print_exc()

    def _prepare(self, message: Prepare) -> None:
        self._release_member()
        begun = self._clock.now()
        spawn.prepare(pickle.loads(message.process))
        trainable: ElasticTrainable = require_elastic_class(pickle.loads(message.trainable))()
        trainable.setup(pickle.loads(message.config))
        if message.checkpoint is not None:
            trainable.load_checkpoint(message.checkpoint)
        group = make_group(self._backend, trainable.device)
        self._protocol = MemberProtocol(ElasticMember(trainable, group), self._send, self._clock)
        self._send(Prepared(trainable.iteration, LOOPBACK, self._clock.now() - begun))


def main(arguments: list[str]) -> None:
    """Runs a worker in this process, and ends it."""
    descriptor, backend, threads, core = int(arguments[0]), arguments[1], int(arguments[2]), int(arguments[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The controller's process handles interrupts.
    if core >= 0:
        with suppress(OSError):  # It may have been taken from this container.
            os.sched_setaffinity(0, {core})
    torch.set_num_threads(threads)
    Worker(FramedConnection(descriptor), backend).serve()
    sys.stdout.flush()
    # A regular exit would wait for libraries' threads, which wait for peers.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
