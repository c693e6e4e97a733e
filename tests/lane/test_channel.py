"""A lane's end of its connection, by itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fluid._clock import MonotonicClock
from fluid.lane.channel import Channel
from fluid.lane.protocol import DropTrainable
from fluid.processes.frames import FramedConnection
from fluid.wire import encode

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0
#: Messages of the driver.
A, B, C = map(DropTrainable, (1, 2, 3))


class Ends:
    """A channel, the driver's end of it, and what was overheard."""

    def __init__(self) -> None:
        self.driver, lane = map(FramedConnection, socket.socketpair())
        self.hung_up = threading.Event()
        self.channel = Channel(lane, MonotonicClock(), self.hung_up.set)
        self.overheard: list[Any] = []
        self.heard = threading.Event()

    def preview(self, message: Any) -> None:
        self.overheard.append(message)
        self.heard.set()

    def send(self, *messages: Any) -> None:
        self.driver.send_bytes(encode(messages))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.driver.close()
    assert made.hung_up.wait(PATIENCE)


def test_messages_are_overheard_while_the_main_thread_is_busy(ends: Ends) -> None:
    ends.send(C)
    assert ends.channel.receive(timeout=None) == [C]
    ends.channel.read_ahead(ends.preview)
    ends.send(A, B)
    assert ends.heard.wait(PATIENCE)
    ends.send(C)
    received: list[Any] = []
    while len(received) < 3:
        received += ends.channel.receive(timeout=None)
    assert received == ends.overheard == [A, B, C]
    assert ends.channel.receive(timeout=0.0) == []
    assert ends.channel.receive(timeout=0.001) == []


def test_a_lane_ends_if_a_message_cannot_be_previewed(ends: Ends, capsys: pytest.CaptureFixture[str]) -> None:
    def preview(message: Any) -> None:
        raise RuntimeError("can't start new thread")

    ends.channel.read_ahead(preview)
    ends.send(A)
    assert ends.hung_up.wait(5.0), "else it waits for messages for ever"
    assert "RuntimeError: can't start new thread" in capsys.readouterr().err


def test_what_came_before_it_reads_ahead_is_not_lost(ends: Ends) -> None:
    ends.send(A)
    ends.channel.read_ahead(ends.preview)
    ends.channel.read_ahead(print)  # A second time changes nothing.
    assert ends.channel.receive(timeout=None) == [A] == ends.overheard


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_lane_waits_for_messages_only_so_long(ends: Ends, reads_ahead: bool) -> None:
    if reads_ahead:
        ends.channel.read_ahead(ends.preview)
    ends.channel.send("report", at_once=False)
    assert ends.channel.receive(timeout=0.001) == []
    assert ends.driver.recv_bytes() == encode(["report"]), "the driver must have it to answer"
    ends.send(A)
    assert ends.channel.receive(timeout=PATIENCE) == [A]


def test_the_driver_is_missed_while_it_reads_ahead(ends: Ends) -> None:
    ends.channel.read_ahead(ends.preview)
    ends.channel.send("hello")
    assert ends.driver.recv_bytes() == encode(["hello"])
    ends.driver.close()
    assert ends.hung_up.wait(PATIENCE)
