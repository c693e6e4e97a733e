"""A member and what it and its controller tell each other; for whoever hosts it and passes the messages on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fluid._clock import Clock
from fluid.elastic.group import GenerationBrokenError
from fluid.elastic.member import ElasticMember, Iteration
from fluid.elastic.messages import (
    Abort,
    Broken,
    Halt,
    Halted,
    Host,
    Hosting,
    Iterated,
    Join,
    Joined,
    Run,
)
from fluid.trainables.pickling import pack_metrics


class MemberProtocol:
    """Carries out a controller's messages that are about generations.

    Two threads use it: the one that runs the user's code takes messages between two iterations, while another one
    may read them ahead, so that Halt and Abort are seen in the middle of an iteration.

    Args:
        member: set up, and restored if need be.
        say: takes what is to be told to the controller.
        clock: for the seconds that things take.

    Attributes:
        left: iterations still to run.
    """

    def __init__(self, member: ElasticMember, say: Callable[[Any], None], clock: Clock) -> None:
        self.member = member
        self.left = 0
        self._say = say
        self._clock = clock
        self._halt = threading.Event()
        #: The generation this member is in, or was in when it broke.
        self._generation = 0
        #: The last generation that was said to be broken.
        self._broke = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Host: self._host,
            Join: self._join,
            Run: self._run,
            Halt: lambda message: None,  # It has been overheard in time, or there is nothing to halt.
            Abort: self._abort,
        }

    def preview(self, message: Any) -> None:
        """Looks at a message as soon as it has been read, in any thread; :meth:`take` follows, in order."""
        if isinstance(message, Halt):
            self._halt.set()
        elif isinstance(message, Run):
            self._halt.clear()
        elif isinstance(message, Abort):
            self.member.abort(message.generation)

    def take(self, message: Any) -> None:
        """Carries a message out; one of Host, Join, Run, Halt and Abort.

        Raises:
            Exception: whatever the user's code raises; the member is of no use then.
        """
        try:
            self._handlers[type(message)](message)
        except GenerationBrokenError as error:
            self._say_broken(str(error))

    def iterate(self, measure: Callable[[], Any] = lambda: None) -> Iteration | None:
        """Runs an iteration together with the others; ``None`` if it came to nothing, because one of them failed.

        Args:
            measure: called when it is done, before anybody is told.

        Raises:
            Exception: whatever the user's code raises; the member is of no use then.
        """
        begun = self._clock.now()
        self.left -= 1
        try:
            done = self.member.iterate(lambda: self.left > 0 and not self._halt.is_set())
        except GenerationBrokenError as error:
            self._say_broken(str(error))
            return None
        measure()
        if self.member.trainable.rank == 0:
            metrics = pack_metrics(done.metrics)
            self._say(Iterated(self._generation, done.iteration, metrics, self._clock.now() - begun))
        if not done.go_on:
            self.left = 0
            self._say(Halted(self._generation, done.iteration, done.finished))
        return done

    def leave_generation(self) -> None:
        """Leaves the current generation without waiting for anybody; the trainable goes on alone, or is cleaned up."""
        self.member.break_off()

    def _host(self, message: Host) -> None:
        self._generation = message.generation
        meeting = self.member.host(message.address, message.generation, message.size)
        self._say(Hosting(message.generation, meeting))

    def _join(self, message: Join) -> None:
        begun = self._clock.now()
        self._generation = message.generation
        self.member.join(*message)
        metrics = None if self.member.metrics is None else pack_metrics(self.member.metrics)
        self._say(Joined(message.generation, self.member.iteration, metrics, self._clock.now() - begun))

    def _run(self, message: Run) -> None:
        if message.generation == self._generation and self._broke != self._generation:
            self.left = message.iterations

    def _abort(self, message: Abort) -> None:
        # What was under way has raised and said so; else the member stands still, perhaps before it ever joined.
        if self._broke < message.generation:
            self._generation = message.generation
            self.member.break_off()
            self._say_broken("it was aborted")

    def _say_broken(self, reason: str) -> None:
        self.left = 0
        if self._broke < self._generation:
            self._broke = self._generation
            self._say(Broken(self._generation, self.member.iteration, reason))
