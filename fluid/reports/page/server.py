"""Serves the page of runs on this machine's loopback, and tells open pages how the runs go on.

Configs may hold secrets, and other users and web pages can reach the loopback too. So the address has a random part,
and requests must name this host, which those of a web page whose own name leads here do not (DNS rebinding).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

from fluid.errors import InvalidFieldError, require_integer
from fluid.processes.http import HttpServer
from fluid.reports.page.html import UNPRINTABLE, html_page
from fluid.reports.run.follower import Follower
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
S = TypeVar("S", bound="ServedPages")


class ServedPages:
    """Serves pages of what is followed, until it is closed.

    Args:
        follower: follows it.
        make: makes the server; if that fails, the following ends.
    """

    def __init__(self, follower: Follower[Any], make: Callable[[], PageServer]) -> None:
        self._follower = follower
        try:
            self._http = make()
        except InvalidFieldError:
            follower.close()
            raise

    @property
    def url(self) -> str:
        """The address of the page."""
        return self._http.url

    def serve(self) -> None:
        """Serves until :meth:`close`, which another thread calls, or an interrupt."""
        while not self._follower.is_closed:
            self._http.handle_request()

    def close(self) -> None:
        """Ends the serving. Pages that are open keep what they show."""
        self._follower.close()
        self._http.server_close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class RunServer(ServedPages):
    """Serves runs until it is closed.

    Args:
        paths: the run folders.
        port: the port; 0 for one that is free.
        price: US dollars for a device-hour; ``None`` for the sessions' own.

    Raises:
        InvalidFieldError: a path is not a run folder, the port cannot be used, or the price is below 0.
    """

    def __init__(self, paths: Sequence[str | Path], port: int = 0, *, price: float | None = None) -> None:
        self.follower = RunFollower(paths, price)
        super().__init__(self.follower, lambda: _RunPageServer(self.follower, port))


class PageServer(HttpServer):
    """A server of pages at an address that has a random part.

    Args:
        port: the port; 0 for one that is free.
        handler: answers requests.

    Attributes:
        token: the random part of the address.

    Raises:
        InvalidFieldError: the port cannot be used.
    """

    #: Seconds between two looks at whether the server was closed.
    timeout = 0.5

    def __init__(self, port: int, handler: type[PageRequests]) -> None:
        require_integer("port", port, at_least=0, at_most=65535)
        self.token = secrets.token_urlsafe(16)
        try:
            super().__init__((_HOST, port), handler, "the page of runs", handler.timeout)
        except OSError as error:
            raise InvalidFieldError("port", port, f"cannot be used: {error.strerror}") from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self.server_port}/{self.token}/"


class Followed(Protocol):
    """What grows while pages look at it, one version after another."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        ...

    def next_after(self, version: int, timeout: float) -> FollowedVersion | None:
        """Waits for a newer version; ``None`` if there is none after so many seconds."""
        ...


class FollowedVersion(Protocol):
    """A version of it."""

    @property
    def version(self) -> int:
        """Its number."""
        ...

    def after(self, version: int) -> tuple[str, ...]:
        """What brings a page at another version up to this one, an event each."""
        ...


class PageRequests(BaseHTTPRequestHandler):
    """Answers those who know the address."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fluid", ""
    timeout = 60.0

    def do_GET(self) -> None:
        """Answers with a page, or with its events."""
        name = self.asked_name()
        if name is None:
            return
        query = parse_qs(urlsplit(self.path).query)
        known = self.headers.get("Last-Event-ID") or query.get("after", ["0"])[-1]
        if not self.answer(name, int(known) if known.isdecimal() else 0, query.get("of", [""])[-1]):
            self.refuse(HTTPStatus.NOT_FOUND)

    def answer(self, name: str, version: int, of: str) -> bool:
        """Answers with what is at a name.

        Args:
            name: the address behind its random part.
            version: the version that a page of events has.
            of: what the page says of whom it had this from.

        Returns:
            Whether there is anything.
        """
        raise NotImplementedError

    def asked_name(self) -> str | None:
        """The address behind its random part; ``None`` for one who does not know that, who is refused."""
        if self.headers.get("Host") not in self.hosts:
            self.refuse(HTTPStatus.FORBIDDEN)
            return None
        token, _, name = urlsplit(self.path).path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self.refuse(HTTPStatus.NOT_FOUND)
            return None
        self.server.strangers.remove(self.connection)
        return name

    @property
    def hosts(self) -> tuple[str, str]:
        """The names of this server."""
        port = self.server.server_port
        return f"{_HOST}:{port}", f"localhost:{port}"

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing: the address holds the token."""

    def send_page(self, text: str, content: str = "text/html; charset=utf-8") -> None:
        """Sends a page, or another text."""
        page = text.encode(errors=UNPRINTABLE)
        self._begin(content, str(len(page)))
        self.wfile.write(page)

    def send_events(self, followed: Followed, version: int) -> None:
        """Sends what is newer as events, until the page or what it looks at is closed."""
        self.close_connection = True
        self._begin("text/event-stream")
        while not followed.is_closed:
            newer = followed.next_after(version, _HEARTBEAT)
            if newer is None:
                self.wfile.write(b":\n\n")
            else:
                parts = newer.after(version)
                for number, data in enumerate(parts, newer.version - len(parts) + 1):
                    self.wfile.write(f"id: {number}\ndata: {data}\n\n".encode(errors=UNPRINTABLE))
                version = newer.version
            self.wfile.flush()

    def send_run(self, follower: RunFollower, of: str = "") -> None:
        """Sends the page of runs, which then listens to their events."""
        state = follower.state
        events = f"events?after={state.version}" + (f"&of={of}" if of else "")
        self.send_page(html_page(state.runs, importances=state.importances, events=events))

    def refuse(self, status: HTTPStatus) -> None:
        """Sends a status, and nothing else."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _begin(self, content: str, length: str | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": content, **_HEADERS}.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()


class _RunPageServer(PageServer):
    def __init__(self, follower: RunFollower, port: int) -> None:
        self.follower = follower
        super().__init__(port, _RunPageRequests)


class _RunPageRequests(PageRequests):
    server: _RunPageServer

    def answer(self, name: str, version: int, of: str) -> bool:
        if name == "events":
            self.send_events(self.server.follower, version)
        elif not name:
            self.send_run(self.server.follower)
        return name in ("", "events")
