"""Horovod's rendezvous server, for one process: a server of HTTP behind which is the generation's store.

Horovod finds its peers through such a server, and sends it no secret. So every member has a server of its own, on the
loopback interface, which refuses connections of other processes.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fluid.elastic.generation import GenerationBrokenError
from fluid.elastic.messages import LOOPBACK
from fluid.elastic.rendezvous import Rendezvous

#: Longest that the server waits for a value before it answers that there is none, and Horovod asks again, seconds.
_ANSWER_S = 1.0
#: Longest that a request may take to arrive, seconds.
_REQUEST_S = 3.0
_NOT_FOUND, _OK = 404, 200
#: Of groups in which each member is alone: see the environment that :mod:`fluid.elastic.horovod_group` sets.
_ALONE = ("/local_", "/cross_")


class RendezvousProxy:
    """The server; it runs in threads until it is closed.

    Args:
        rendezvous: where the values are.

    Attributes:
        port: at which it listens.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._server = _Server((LOOPBACK, 0), _handler_for(rendezvous))
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="fluid-elastic-rendezvous", daemon=True).start()

    def close(self) -> None:
        """Stops the server, in another thread: it checks twice a second whether to stop."""
        threading.Thread(target=self._stop, name="fluid-elastic-rendezvous-end", daemon=True).start()

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return _is_own(client_address, self.server_address)


def _handler_for(rendezvous: Rendezvous) -> type[BaseHTTPRequestHandler]:
    #: What this process has put.
    own: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S

        def do_GET(self) -> None:
            value = own.get(self.path)
            if value is None:
                with suppress(GenerationBrokenError):
                    (value,) = rendezvous.get([self.path], _ANSWER_S)
            if value is None:
                self._answer(_NOT_FOUND)
            else:
                self._answer(_OK, value)

        def do_PUT(self) -> None:
            own[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(_OK)
            if not self.path.startswith(_ALONE):
                rendezvous.put(self.path, own[self.path])

        def do_DELETE(self) -> None:
            self._answer(_OK)  # The store ends with the generation.

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _is_own(client: Any, server: Any) -> bool:
    """Whether this process has the other end of a connection between these addresses."""
    for descriptor in open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family == socket.AF_INET and connection.getsockname() == client:
                return bool(connection.getpeername() == server)
    return False


def open_sockets() -> dict[int, int]:
    """Returns the inodes of this process's sockets by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The descriptor of the listing itself is closed by now.
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
