"""Processes that do not belong to a trial: they can neither join its members nor read or write what these exchange."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import ExitStack, suppress

import pytest

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch")

from elastic.quick import QuickRun  # noqa: E402
from elastic.sockets import listening  # noqa: E402
from elastic.trainables import Regression  # noqa: E402
from stranger_processes import strangers_at  # noqa: E402

#: Seconds to wait for an answer that should not come.
_ANSWER_S = 0.2
#: What a client of torch.distributed's TCPStore says first, and a question for the number of keys.
TCP_STORE = struct.pack("<BIB", 0, 0x3C85F7CE, 7)


def speak(address: tuple[str, int], data: bytes) -> bytes:
    """Sends data to a port, and returns what comes back."""
    answer = b""
    with suppress(OSError), socket.create_connection(address, timeout=_ANSWER_S) as connection:
        connection.sendall(data)
        answer = connection.recv(1 << 16)
    return answer


def test_strangers_keep_no_member_out() -> None:
    with QuickRun(Regression, {}, 1, backend="gloo", addresses=("127.0.0.1", "127.0.0.3")) as run:
        results = run.run(1)
        run.resize(2)
        results += run.run(1)
        ports = listening(run.pids)
        assert ports
        with ExitStack() as attack:
            for port in ports:
                attack.enter_context(strangers_at(port, 300))
            begun = time.monotonic()
            run.resize(1)
            run.resize(2)
            results += run.run(1)
            assert time.monotonic() - begun < 15.0
    assert [result.metrics["loss"] for result in results] == pytest.approx(undisturbed(3), rel=1e-5)


def undisturbed(iterations: int) -> list[float]:
    trial = Regression()
    trial.setup({})
    return [float(trial.step()["loss"]) for _ in range(iterations)]


def test_members_on_one_machine_listen_nowhere() -> None:
    with QuickRun(Regression, {}, 2, backend="torch") as run:
        run.run(1)
        assert run.width == 2
        assert listening(run.pids) == []


@pytest.mark.parametrize(
    ("backend", "machines"),
    [
        ("gloo", ("127.0.0.1",)),
        ("gloo", ("127.0.0.1", "127.0.0.3")),
        pytest.param("horovod", ("127.0.0.1",), marks=pytest.mark.horovod),
    ],
)
def test_a_stranger_changes_nothing(backend: str, machines: tuple[str, ...]) -> None:
    with QuickRun(Regression, {}, 1, backend=backend, addresses=machines) as run:
        results = run.run(1)
        run.resize(2)
        results += run.run(1)
        ports = listening(run.pids)
        assert {address for address, _ in ports} == set(machines), "each member accepts connections of the others"
        for port in ports:
            assert speak(port, TCP_STORE) == b""
            for path in ("global/0", "global_0/0", "secret", "store/0"):
                assert speak(port, f"GET /{path} HTTP/1.1\r\n\r\n".encode()) == b""
                assert speak(port, f"PUT /{path} HTTP/1.1\r\nContent-Length: 1\r\n\r\nx".encode()) == b""
            for number in range(8):  # gloo numbers its connections.
                assert speak(port, struct.pack("<Q", number) + bytes(1000)) == b""
        results += run.run(1)
        run.resize(1)
        run.resize(2)
        results += run.run(1)
    assert [result.metrics["loss"] for result in results] == pytest.approx(undisturbed(4), rel=1e-5)
