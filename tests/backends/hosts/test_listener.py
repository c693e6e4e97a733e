"""Authenticated connections: the driver's listener, which never blocks, and a server that waits for one client."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from fluid.backends.hosts.listener import AuthenticatedConnection, LaneListener, is_reachable
from fluid.processes.handshake import Address, Hello, authenticate_client, connect_all, derive_key


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
    assert hello.number == 7
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


def test_a_server_that_waits_authenticates_a_client_as_well() -> None:
    hellos: list[Hello] = []

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            hellos.append(authenticate_client(sock, b"right"))

    with_server(serve, lambda address: connect_all(address, b"right", [5])[0].close())
    assert hellos[0].number == 5


@pytest.mark.parametrize("sent", [b"", b"short", b"x" * 1000])
def test_a_server_that_waits_refuses_others(sent: bytes) -> None:
    refused: list[BaseException] = []

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            try:
                authenticate_client(sock, b"right")
            except OSError as error:
                refused.append(error)

    def send(address: Address) -> None:
        with socket.create_connection(address) as sock:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(100):
                pass

    with suppress(OSError):  # The server has closed with data unread.
        with_server(serve, send)
    assert len(refused) == 1


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
