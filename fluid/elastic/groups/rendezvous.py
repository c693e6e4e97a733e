"""The rendezvous of a generation: a key-value store through which its members exchange addresses and a secret.

The controller in the driver keeps the values, and members reach it over their connections to the driver. So there is no
listening socket, and no process can join or read but those that the driver has started. No IO here.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fluid.elastic.groups.generation import GenerationBrokenError
from fluid.elastic.messages import Send, StoreGet, StorePut, StoreValues

#: Bytes of a proof.
PROOF_BYTES = 32


class RendezvousStore:
    """The values of one generation; the controller's side."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[int, StoreGet]] = []

    def receive(self, member: int, message: StorePut | StoreGet) -> list[Send]:
        """Stores a value, or notes a request; returns answers to the requests whose values are all there."""
        if isinstance(message, StorePut):
            self._values[message.key] = message.value
        else:
            self._waiting.append((member, message))
        answers, waiting = [], []
        for asker, request in self._waiting:
            if all(key in self._values for key in request.keys):
                values = tuple(self._values[key] for key in request.keys)
                answers.append(Send(asker, StoreValues(request.generation, request.number, values)))
            else:
                waiting.append((asker, request))
        self._waiting = waiting
        return answers


class Rendezvous:
    """A member's access to the store of a generation; may be used in any thread.

    Args:
        generation: number of the generation.
        address: at which the other members connect to this one; ``"127.0.0.1"`` if all are on one machine.
        send: sends the controller a message.
    """

    def __init__(self, generation: int, address: str, send: Callable[[Any], None]) -> None:
        self.generation = generation
        self.address = address
        self._send = send
        self._numbers = itertools.count()
        self._answered = threading.Condition()
        #: Values by number of the request; ``None`` until they have come.
        self._answers: dict[int, Sequence[bytes] | None] = {}
        self._closed = False

    def put(self, key: str, value: bytes) -> None:
        """Stores a value."""
        self._send(StorePut(self.generation, key, value))

    def get(self, keys: Iterable[str], timeout: float) -> Sequence[bytes]:
        """Waits until all of these keys have values, and returns them.

        Args:
            keys: the keys.
            timeout: longest to wait, seconds.

        Raises:
            GenerationBrokenError: a key has no value in time, or the generation was aborted.
        """
        with self._answered:
            number = next(self._numbers)
            self._answers[number] = None
        self._send(StoreGet(self.generation, number, tuple(keys)))
        with self._answered:
            self._answered.wait_for(lambda: self._closed or self._answers[number] is not None, timeout)
            values = self._answers.pop(number)
        if self._closed:
            raise GenerationBrokenError(f"generation {self.generation} was aborted")
        if values is None:
            raise GenerationBrokenError(f"not all members of generation {self.generation} arrived within {timeout:g} s")
        return values

    def receive(self, message: StoreValues) -> None:
        """Takes an answer of the controller; ignores those that no thread waits for any more."""
        with self._answered:
            if message.generation == self.generation and message.number in self._answers:
                self._answers[message.number] = message.values
                self._answered.notify_all()

    def close(self) -> None:
        """Makes threads that wait raise, now and later."""
        with self._answered:
            self._closed = True
            self._answered.notify_all()


def proofs_of(secret: bytes, rank: int, size: int) -> bytes:
    """Returns what a member sends to each rank over their new connection, one after the other.

    Libraries accept connections of any process that finds the port. A proof shows that its sender belongs to the
    generation, and is of use for one connection only.

    Args:
        secret: the generation's.
        rank: the sender's.
        size: number of members.
    """
    return b"".join(_proof(secret, rank, other) for other in range(size))


def require_proofs(secret: bytes, rank: int, size: int, received: bytes) -> None:
    """Checks what a member has received from each rank.

    Raises:
        GenerationBrokenError: a process that does not know the secret sent it.
    """
    if not hmac.compare_digest(received, b"".join(_proof(secret, other, rank) for other in range(size))):
        raise GenerationBrokenError("a process that does not belong to the generation has connected to it")


def _proof(secret: bytes, sender: int, receiver: int) -> bytes:
    return hmac.digest(secret, f"{sender} {receiver}".encode(), hashlib.sha256)
