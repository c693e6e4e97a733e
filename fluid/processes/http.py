"""A server of HTTP that gives few threads to strangers: apart, as hosts and lanes need no HTTP."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fluid.processes.strangers import Strangers

#: Most connections without a proof, each of which has a thread.
_MOST_THREADS = 64


class HttpServer(ThreadingHTTPServer):
    """A server of HTTP with a thread for each connection, of which strangers have few.

    A handler takes a connection out of :attr:`strangers` once its request shows that it may have more.

    Args:
        address: host and port to listen at.
        handler: answers requests.
        service: for the log, as of :class:`Strangers`.
        seconds: that a connection has to show that it may have more.
    """

    request_queue_size = 1024
    daemon_threads = True
    #: The threads end with their connections, which are not waited for.
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], service: str, seconds: float
    ) -> None:
        self.strangers: Strangers[socket.socket] = Strangers(service, _shut_down, seconds, _MOST_THREADS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection."""
        self.strangers.turn_late_away()
        self.strangers.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        self.strangers.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints what a handler has raised, but for clients that have gone away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # Its thread, which waits for it, closes it.
