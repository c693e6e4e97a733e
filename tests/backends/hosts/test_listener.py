"""Authenticated connections: the listener, which never blocks, and strangers that connect to it."""

from __future__ import annotations

import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from stranger_processes import KINDS, strangers_at

from fluid.backends.hosts.sockets import AuthenticatedConnection, LaneListener, is_reachable
from fluid.processes.handshake import Address, connect_all, derive_key
from fluid.processes.strangers import Strangers
from fluid.wire import VERSION


class Listening:
    """A listener that serves."""

    def __init__(self, key: bytes) -> None:
        self.listener = LaneListener(key)
        self.address = self.listener.listen("127.0.0.1")

    def serve(
        self, key: bytes, numbers: Sequence[int]
    ) -> tuple[list[AuthenticatedConnection], list[socket.socket], list[BaseException]]:
        """Lets a client open connections, and serves until that has come to an end for both."""
        opened: list[socket.socket] = []
        errors: list[BaseException] = []

        def connect() -> None:
            try:
                opened.extend(connect_all(self.address, key, numbers))
            except OSError as error:
                errors.append(error)

        client = threading.Thread(target=connect)
        client.start()
        authenticated: list[AuthenticatedConnection] = []
        while client.is_alive():
            select.select([self.listener], [], [], 0.01)
            authenticated += self.listener.accept()
        return authenticated + self.listener.accept(), opened, errors


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening(b"right")
    yield made
    made.listener.close()


def close(authenticated: Sequence[AuthenticatedConnection], opened: Sequence[socket.socket]) -> None:
    for sock in (*(connection.socket for connection in authenticated), *opened):
        sock.close()


def test_a_client_that_knows_the_key_is_accepted(listening: Listening) -> None:
    authenticated, opened, errors = listening.serve(b"right", [7])
    (hello,) = [connection.hello for connection in authenticated]
    assert (hello.number, hello.version) == (7, VERSION)
    assert errors == []
    close(authenticated, opened)


def test_a_client_that_does_not_know_it_is_refused(listening: Listening) -> None:
    authenticated, opened, (error,) = listening.serve(b"wrong", [7])
    assert (authenticated, opened) == ([], [])
    assert isinstance(error, ConnectionError)


def test_many_connections_are_opened_at_once(listening: Listening) -> None:
    """All of them wait together for the server: none is opened after another one is authenticated."""
    authenticated, opened, errors = listening.serve(b"right", range(100))
    assert errors == [] and len(opened) == 100
    by_number = {connection.hello.number: connection.socket for connection in authenticated}
    assert sorted(by_number) == list(range(100))
    for number, sock in enumerate(opened):
        assert sock.gettimeout() is None
        by_number[number].sendall(b"%d" % number)
        assert sock.recv(10) == b"%d" % number
    close(authenticated, opened)


def test_hellos_are_sent_without_waiting_for_proofs() -> None:
    """A server that answers only after it has all hellos gets them all."""
    count = 20
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
        problems: list[BaseException] = []

        def connect() -> None:
            try:
                connect_all(listener.getsockname(), b"key", range(count))
            except OSError as error:
                problems.append(error)

        client = threading.Thread(target=connect)
        client.start()
        accepted = [listener.accept()[0] for _ in range(count)]
        for sock in accepted:
            sock.sendall(b"c" * 32)
        numbers = [int.from_bytes(sock.recv(8, socket.MSG_WAITALL)) for sock in accepted]
        assert sorted(numbers) == list(range(count))
        close([], accepted)
        client.join()
        assert len(problems) == 1


def test_if_one_connection_fails_none_is_left() -> None:
    accepted: list[socket.socket] = []

    def refuse_second(listener: socket.socket) -> None:
        accepted.extend(listener.accept()[0] for _ in range(3))
        accepted[0].sendall(b"c" * 32)
        accepted[1].close()

    with pytest.raises(ConnectionError, match="closed the connection"):
        with_server(refuse_second, lambda address: connect_all(address, b"right", range(3)))
    assert len(accepted[0].recv(1000)) > 0 and accepted[0].recv(1) == b""
    assert accepted[2].recv(1) == b""
    close([], accepted)


def test_rubbish_and_silence_do_no_harm(listening: Listening) -> None:
    with socket.create_connection(listening.address), socket.create_connection(listening.address) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        authenticated, opened, errors = listening.serve(b"right", [1])
        assert errors == []
        close(authenticated, opened)


def test_an_impostor_learns_nothing_and_is_told_nothing() -> None:
    """A client sends no message, and reads none, before the server has proved that it knows the key."""

    def pretend(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"c" * 32)
            sock.recv(4096)
            sock.sendall(b"p" * 32)

    with pytest.raises(ConnectionError, match="does not know this session's key"):
        with_server(pretend, lambda address: connect_all(address, b"right", [1]))


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_keep_nobody_out(listening: Listening, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    served = threading.Event()
    authenticated: list[AuthenticatedConnection] = []

    def serve() -> None:
        while not served.is_set():
            select.select([listening.listener], [], [], 0.01)
            authenticated.extend(listening.listener.accept())

    before = len(os.listdir("/proc/self/fd"))
    server = threading.Thread(target=serve)
    server.start()
    try:
        with strangers_at(listening.address, 2000, kind):
            for number in range(3):
                begun = time.monotonic()
                close([], connect_all(listening.address, b"right", range(20)))
                assert time.monotonic() - begun < 5.0, number
            assert len(os.listdir("/proc/self/fd")) < before + 1024 + 200
    finally:
        served.set()
        server.join()
        close(authenticated, [])
    assert sorted(connection.hello.number for connection in authenticated) == sorted(3 * list(range(20)))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "closed a connection to the port for lanes that did not show that it may use it; further ones are not logged"
    ]


def test_one_that_only_looks_who_listens_is_not_told_of(listening: Listening, caplog: pytest.LogCaptureFixture) -> None:
    assert is_reachable(listening.address, 1.0)
    authenticated, opened, _ = listening.serve(b"right", [1])
    close(authenticated, opened)
    assert caplog.records == []


def test_strangers_leave_descriptors_for_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, hard))
    listener = LaneListener(b"right")
    try:
        with strangers_at(listener.listen("127.0.0.1"), 300):
            for _ in range(100):
                listener.accept()
            for _ in range(50):
                os.close(os.open("/dev/null", os.O_RDONLY))
            pipes = [os.pipe() for _ in range(25)]
            for descriptor in (end for pipe in pipes for end in pipe):
                os.close(descriptor)
    finally:
        listener.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_stranger_that_says_nothing_has_only_so_long() -> None:
    closed: list[str] = []
    strangers = Strangers("a port", closed.append, 0.05)
    strangers.add("first")
    time.sleep(0.03)
    strangers.add("second")
    strangers.turn_late_away()
    assert closed == []
    assert strangers.remove("second") and not strangers.remove("second")
    time.sleep(0.03)
    strangers.turn_late_away()
    assert closed == ["first"] and list(strangers) == []


def test_of_too_many_strangers_the_oldest_goes() -> None:
    closed: list[int] = []
    strangers = Strangers("a port", closed.append, 60.0, most=3)
    for number in range(5):
        strangers.add(number)
    assert closed == [0, 1] and list(strangers) == [2, 3, 4]
    assert not strangers.refuse(1) and strangers.refuse(3) and closed == [0, 1, 3]


def test_a_proof_for_one_purpose_is_none_for_another(listening: Listening) -> None:
    authenticated, opened, errors = listening.serve(derive_key(b"right", b"other"), [1])
    assert (authenticated, opened, len(errors)) == ([], [], 1)


def test_it_listens_once_per_address(listening: Listening) -> None:
    assert listening.listener.listen("127.0.0.1") == listening.address
    assert is_reachable(listening.address, 1.0)
    listening.listener.close()
    assert not is_reachable(listening.address, 1.0)


def test_a_server_that_is_gone_cannot_be_reached(listening: Listening) -> None:
    listening.listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect_all(listening.address, b"right", [1, 2])


def with_server(serve: Callable[[socket.socket], None], call: Callable[[Address], object]) -> None:
    """Makes a call while a server runs in another thread; returns when both have ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            call(listener.getsockname())
        finally:
            thread.join()
