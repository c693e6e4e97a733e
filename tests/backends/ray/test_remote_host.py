"""The driver's end of a host on another node: how payloads get there, and what becomes of requests."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from fluid.backends.base import Keeping
from fluid.backends.hosts.sockets import FramedSocket
from fluid.backends.ray.remote_host import (
    _PART,
    DropPayload,
    EndLane,
    OutputInbox,
    PayloadStored,
    PersistCheckpoint,
    RemoteHost,
    StorePayload,
    ToHost,
)
from fluid.lane.protocol import CheckpointForked, CheckpointPersisted
from fluid.wire import decoder


class Pair:
    """A host as the driver sees it, and its end of the connection."""

    def __init__(self) -> None:
        self.host = RemoteHost(-1, "node", "10.0.0.7", OutputInbox())
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        self._sock = ours
        self.wire = FramedSocket(theirs, decoder(ToHost))
        self._come: list[Any] = []

    def connect(self) -> None:
        self.host.connect(self._sock)

    def next_message(self) -> Any:
        """What the host is sent next, as the driver goes on writing whenever it can."""
        while not self._come:
            if self.host.wants_to_write:
                self.host.flush()
            ready = select.select([self.wire.fileno()], [], [], 0.0)[0]
            assert ready or self.host.wants_to_write
            self._come += self.wire.receive() if ready else []
        return self._come.pop(0)

    def answer(self, *messages: Any) -> None:
        self.wire.send(messages)
        assert self.host.receive() == []


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.wire.close()
    made.host.close()


DATA = bytes(range(256)) * (_PART * 5 // 2 // 256)


def test_a_payload_comes_in_parts_once(pair: Pair) -> None:
    assert pair.host.keep(0, "a", DATA) is Keeping.UNDER_WAY
    assert not pair.host.wants_to_write  # The host has not connected.
    pair.connect()
    parts = [pair.next_message() for _ in range(3)]
    assert [part.offset for part in parts] == [0, _PART, 2 * _PART]
    assert b"".join(part.data for part in parts) == DATA
    assert {(part.name, part.size) for part in parts} == {("a", len(DATA))}
    assert not pair.host.wants_to_write
    assert pair.host.keep(1, "a", DATA) is Keeping.UNDER_WAY and not pair.host.wants_to_write
    pair.answer(PayloadStored(parts[0].number, "a", True))
    assert pair.host.keep(1, "a", DATA) is Keeping.DONE and not pair.host.wants_to_write


def test_other_messages_go_between_the_parts(pair: Pair) -> None:
    pair.connect()
    pair.host.keep(0, "a", DATA)
    assert pair.next_message().offset == 0
    pair.host.kill(7)
    messages = [pair.next_message() for _ in range(2)]
    assert EndLane(7) in messages  # Not after all parts.


def test_a_host_that_has_no_space_is_not_asked_again(pair: Pair) -> None:
    pair.connect()
    pair.host.keep(0, "a", b"1")
    pair.answer(PayloadStored(pair.next_message().number, "a", False))
    assert pair.host.keep(0, "a", b"1") is Keeping.REFUSED and not pair.host.wants_to_write


def test_a_payload_that_is_dropped_on_its_way_is_not_sent_on(pair: Pair) -> None:
    pair.connect()
    pair.host.keep(0, "a", DATA)
    first = pair.next_message()
    pair.host.drop("a")
    pair.host.drop("unknown")
    pair.host.keep(0, "b", b"1")
    messages = [pair.next_message()]
    while messages[-1] != StorePayload(1, "b", 1, 0, b"1"):
        messages.append(pair.next_message())
    parts = [message for message in messages if isinstance(message, StorePayload) and message.name == "a"]
    assert DropPayload("a") in messages and all(part.offset < 2 * _PART for part in parts)
    pair.host.keep(0, "a", b"2")
    again = pair.next_message()
    assert isinstance(again, StorePayload) and (again.offset, again.data) == (0, b"2")
    pair.answer(PayloadStored(first.number, "a", True))  # Too late: of the first time.
    assert pair.host.keep(0, "a", b"2") is Keeping.UNDER_WAY
    pair.answer(PayloadStored(again.number, "a", True))
    assert pair.host.keep(0, "a", b"2") is Keeping.DONE


def test_what_a_host_has_not_copied_is_answered_once_it_is_gone(pair: Pair) -> None:
    pair.connect()
    for trial_id in "abc":
        pair.host.stores.persist(pair.host.name, trial_id, f"/m/{trial_id}/00000003-0-1", keep=trial_id == "c")
    pair.host.stores.fork(pair.host.name, "d", "a", "/m/a/00000003-0-1")
    pair.host.flush()
    assert pair.next_message() == PersistCheckpoint("a", "/m/a/00000003-0-1", False)
    answer = CheckpointPersisted("a", "/run/trials/a/checkpoints/00000003-0-1", pair.host.name, False)
    pair.wire.send([answer])
    assert pair.host.receive() == [answer]
    assert pair.host.fail("died: killed") == [
        CheckpointPersisted(name, f"/m/{name}/00000003-0-1", "10.0.0.7", name == "c", problem="its host died: killed")
        for name in "bc"
    ] + [CheckpointForked("d", "a", "10.0.0.7", problem="its host died: killed")]
    assert pair.host.fail("died: killed") == []
