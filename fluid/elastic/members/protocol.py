"""The protocol between a member and its controller; a lane or a worker transports the messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fluid._clock import Clock
from fluid.elastic.groups.generation import GenerationBrokenError
from fluid.elastic.groups.rendezvous import Rendezvous
from fluid.elastic.members.member import ElasticMember, Iteration
from fluid.elastic.messages import (
    Abort,
    Broken,
    Connect,
    Connected,
    Disconnect,
    Halt,
    Halted,
    Join,
    Joined,
    MemberIterated,
    RunMember,
    StoreValues,
)
from fluid.trainables.encoded_metrics import encode_metrics


class MemberProtocol:
    """Handles a controller's messages about generations.

    Two threads use it: the one that runs the user's code handles messages between two iterations, while another one
    previews them, so that Halt and Abort take effect in the middle of an iteration.

    Args:
        member: set up, and restored if there is a checkpoint.
        send: sends the controller a message.
        clock: measures durations.

    Attributes:
        left: iterations still to run.
    """

    def __init__(self, member: ElasticMember, send: Callable[[Any], None], clock: Clock) -> None:
        self.member = member
        self.left = 0
        self._send = send
        self._clock = clock
        self._halt = threading.Event()
        #: Of the generation that this member is in, or joins, and of the last one that it connected for.
        self._rendezvous: Rendezvous | None = None
        self._ahead: Rendezvous | None = None
        #: The generation of this member, also after it broke.
        self._generation = 0
        #: The last generation that was reported as broken.
        self._broken_generation = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Join: self._join,
            RunMember: self._run,
            Halt: lambda message: None,  # Previewed in time, or nothing runs.
            Abort: self._abort,
            StoreValues: lambda message: None,  # Previewed by the thread that waited for them.
            Connect: lambda message: None,  # Previewed, as are those that follow.
            Disconnect: lambda message: None,
        }

    def preview(self, message: Any) -> None:
        """Acts at once on a message that cannot wait, in any thread; :meth:`handle` follows, in order."""
        if isinstance(message, Halt):
            self._halt.set()
        elif isinstance(message, RunMember):
            self._halt.clear()
        elif isinstance(message, Abort):
            self.member.abort(message.generation)
        elif isinstance(message, StoreValues):
            for rendezvous in filter(None, (self._rendezvous, self._ahead)):
                rendezvous.receive(message)
        elif isinstance(message, Connect):
            self._ahead = Rendezvous(message.generation, message.address, self._send)
            arguments = (self._ahead, message)
            threading.Thread(target=self._connect, args=arguments, name="fluid-elastic-ahead", daemon=True).start()
        elif isinstance(message, Disconnect):
            if self._ahead is not None and self._ahead.generation == message.generation:
                self._ahead.close()  # Its thread may not have come so far that the member knows these connections.
            self.member.disconnect(message.generation)

    def handle(self, message: Any) -> None:
        """Handles one of the controller's messages about generations and connections.

        Raises:
            Exception: what the user's code raises; the member cannot be used afterwards.
        """
        try:
            self._handlers[type(message)](message)
        except GenerationBrokenError as error:
            self._send_broken(str(error))

    def iterate(self, at_end: Callable[[Iteration], Any] = lambda done: None) -> Iteration | None:
        """Runs an iteration together with the other members; returns ``None`` if one of them failed.

        Args:
            at_end: called at the end of the iteration, before it is reported.

        Raises:
            Exception: what the user's code raises; the member cannot be used afterwards.
        """
        begun = self._clock.now()
        self.left -= 1
        try:
            done = self.member.iterate(lambda: self.left > 0 and not self._halt.is_set())
        except GenerationBrokenError as error:
            self._send_broken(str(error))
            return None
        seconds = self._clock.now() - begun
        at_end(done)
        if self.member.trainable.rank == 0:
            self._send(MemberIterated(self._generation, done.iteration, encode_metrics(done.metrics), seconds))
        if not done.go_on:
            self.left = 0
            self._send(Halted(self._generation, done.iteration, done.finished))
        return done

    def leave_generation(self) -> None:
        """Leaves the current generation without waiting for its other members."""
        self.member.leave_generation()

    def _connect(self, rendezvous: Rendezvous, message: Connect) -> None:
        problem = ""
        try:
            self.member.connect(rendezvous, message.rank, message.size)
        except Exception as error:  # It is made again when the generation is formed, and raises there if it must.
            problem = str(error) or type(error).__name__
        self._send(Connected(message.generation, problem))

    def _join(self, message: Join) -> None:
        begun = self._clock.now()
        self._generation = message.generation
        alone = message.size == 1
        self._rendezvous = None if alone else Rendezvous(message.generation, message.address, self._send)
        self.member.join(
            self._rendezvous, message.rank, message.size, message.sync, message.reported, message.connection
        )
        metrics = None if self.member.metrics is None else encode_metrics(self.member.metrics)
        self._send(Joined(message.generation, self.member.iteration, metrics, self._clock.now() - begun))

    def _run(self, message: RunMember) -> None:
        if message.generation == self._generation and self._broken_generation != self._generation:
            self.left = message.iterations

    def _abort(self, message: Abort) -> None:
        # A running iteration has raised and reported it. Otherwise the member is idle, and may not have joined yet.
        if self._broken_generation < message.generation:
            self._generation = message.generation
            self.member.leave_generation()
            self._send_broken("it was aborted")

    def _send_broken(self, reason: str) -> None:
        self.left = 0
        if self._broken_generation < self._generation:
            self._broken_generation = self._generation
            self._send(Broken(self._generation, self.member.iteration, reason))
