"""A process that connects to a port many times, shows nothing by which it may, and connects again where it is closed.

python stranger_processes.py HOST PORT COUNT KIND
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: What strangers say: nothing, what is no handshake, half of one, and a byte now and then.
KINDS = ("silent", "garbage", "half", "slow")


@contextmanager
def strangers_at(address: tuple[str, int], count: int, kind: str = "silent") -> Iterator[None]:
    """Keeps so many connections of strangers at a port; all have been made once when it begins."""
    command = [sys.executable, __file__, address[0], str(address[1]), str(count), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"connected\n"
            yield
        finally:
            process.kill()


def _say(connection: socket.socket, kind: str) -> None:
    if kind == "garbage":
        connection.send(b"GET / HTTP/1.1\r\n" + os.urandom(200))
    elif kind == "half":
        connection.send(os.urandom(30))
    elif kind == "slow":
        connection.send(b"x")


def _attack(address: tuple[str, int], count: int, kind: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parent, made, connections = os.getppid(), 0, list[socket.socket]()
    while os.getppid() == parent:
        for connection in connections[:]:
            try:
                if kind == "slow":
                    _say(connection, kind)
                is_closed = not connection.recv(100)
            except BlockingIOError:
                continue
            except OSError:
                is_closed = True
            if is_closed:
                connection.close()
                connections.remove(connection)
        while len(connections) < count:
            with suppress(OSError):
                connection = socket.create_connection(address, timeout=0.5)
                connection.setblocking(False)
                connections.append(connection)
                _say(connection, kind)
            made += 1
            if made == count:
                print("connected", flush=True)
            if made > count and made % 100 == 0:
                break
        time.sleep(0.02)


if __name__ == "__main__":
    _attack((sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), sys.argv[4])
