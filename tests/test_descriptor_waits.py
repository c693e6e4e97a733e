"""Waits for descriptors of any number."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from fluid.waiting import waits as _waiting
from fluid.waiting.waits import await_descriptor


@pytest.mark.usefixtures("many_descriptors")
def test_a_wait_ends_when_a_descriptor_beyond_those_of_select_is_ready() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert ours.fileno() >= 1024
        assert not await_descriptor(ours.fileno(), 0.0), "nothing has come"
        assert await_descriptor(ours.fileno(), 0.0, writable=True)
        assert await_descriptor(ours.fileno(), readable=False, writable=True)
        theirs.send(b"x")
        assert await_descriptor(ours.fileno()) and await_descriptor(ours.fileno(), 0.0)
        ours.recv(1)
        theirs.close()
        assert await_descriptor(ours.fileno()), "an end is told, too"


def test_a_wait_without_end_runs_the_handlers_of_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_waiting, "LOOK_UP_S", 0.001)
    reader, writer = os.pipe()
    looks = []

    class Clock:
        def now(self) -> float:
            looks.append(None)
            if len(looks) == 3:
                os.write(writer, b"x")
            return 0.0

    monkeypatch.setattr(_waiting, "MonotonicClock", Clock)
    assert await_descriptor(reader, 1.0)
    assert len(looks) >= 3, "it looks up while it waits"
    os.close(reader)
    os.close(writer)


def test_a_wait_ends_with_its_time() -> None:
    reader, writer = os.pipe()
    waited = threading.Event()

    def wait() -> None:
        assert not await_descriptor(reader, 0.001)
        waited.set()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert waited.is_set()
    os.close(reader)
    os.close(writer)
