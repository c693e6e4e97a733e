"""Serves the page of runs on this machine's loopback, and tells open pages how the runs go on.

Configs may hold secrets, and other users and web pages can reach the loopback too. So the address has a random part,
and requests must name this host, which those of a web page whose own name leads here do not (DNS rebinding).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from fluid.errors import InvalidFieldError, require_integer
from fluid.processes.http import HttpServer
from fluid.reports.page.html import html_page
from fluid.reports.run.following import RunFollower

_HOST = "127.0.0.1"
#: Seconds after which a page that has heard nothing is sent an empty line: it shows whether the page is still there.
_HEARTBEAT = 15.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class RunServer:
    """Serves runs until it is closed.

    Args:
        paths: the run folders.
        port: the port; 0 for one that is free.
        price: US dollars for a device-hour; ``None`` for the sessions' own.

    Raises:
        InvalidFieldError: a path is not a run folder, the port cannot be used, or the price is below 0.
    """

    def __init__(self, paths: Sequence[str | Path], port: int = 0, *, price: float | None = None) -> None:
        require_integer("port", port, at_least=0, at_most=65535)
        self.follower = RunFollower(paths, price)
        try:
            self._http = _PageServer(self.follower, port)
        except OSError as error:
            self.follower.close()
            raise InvalidFieldError("port", port, f"cannot be used: {error.strerror}") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self._http.server_port}/{self._http.token}/"

    def serve(self) -> None:
        """Serves until :meth:`close`, which another thread calls, or an interrupt."""
        while not self.follower.is_closed:
            self._http.handle_request()

    def close(self) -> None:
        """Ends the serving. Pages that are open keep what they show."""
        self.follower.close()
        self._http.server_close()

    def __enter__(self) -> RunServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _PageServer(HttpServer):
    #: Seconds between two looks at whether the server was closed.
    timeout = 0.5

    def __init__(self, follower: RunFollower, port: int) -> None:
        self.follower = follower
        self.token = secrets.token_urlsafe(16)
        super().__init__((_HOST, port), _PageRequests, "the page of runs", _PageRequests.timeout)


class _PageRequests(BaseHTTPRequestHandler):
    server: _PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fluid", ""
    timeout = 60.0

    def do_GET(self) -> None:
        """Answers with the page, or with its events."""
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{_HOST}:{port}", f"localhost:{port}"):
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        address = urlsplit(self.path)
        token, _, name = address.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()) or name not in ("", "events"):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        self.server.strangers.remove(self.connection)
        if name:
            known = parse_qs(address.query).get("after", ["0"])[-1]
            known = self.headers.get("Last-Event-ID") or known
            self._send_events(int(known) if known.isdecimal() else 0)
        else:
            self._send_page()

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing: the address holds the token."""

    def _send_page(self) -> None:
        snapshot = self.server.follower.snapshot
        events = f"events?after={snapshot.version}"
        page = html_page(snapshot.runs, importances=snapshot.importances, events=events).encode()
        self._begin("text/html; charset=utf-8", str(len(page)))
        self.wfile.write(page)

    def _send_events(self, version: int) -> None:
        """Sends what is newer as events, until the page or the server is closed."""
        self.close_connection = True
        self._begin("text/event-stream")
        while not self.server.follower.is_closed:
            newer = self.server.follower.next_after(version, _HEARTBEAT)
            if newer is None:
                self.wfile.write(b":\n\n")
            else:
                parts = newer.after(version)
                for number, data in enumerate(parts, newer.version - len(parts) + 1):
                    self.wfile.write(f"id: {number}\ndata: {data}\n\n".encode())
                version = newer.version
            self.wfile.flush()

    def _begin(self, content: str, length: str | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": content, **_HEADERS}.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
