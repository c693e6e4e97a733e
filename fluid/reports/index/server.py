"""Serves the page of all runs below a folder, and the pages of each of them and of several that are compared.

It is reached as that of one run is (:mod:`fluid.reports.page.server`). It can delete runs, too, which a page of another
origin must not bring about, not even one that has come to know the address: a request to delete names the origin of
this server and a key that only its page has. What is deleted is a run below the folder, and never one that goes on.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from html import escape
from http import HTTPStatus
from itertools import count
from pathlib import Path

from fluid.errors import FluidError, InvalidFieldError
from fluid.reports.index.following import IndexFollower
from fluid.reports.index.html import index_page
from fluid.reports.page.server import PageRequests, PageServer, ServedPages
from fluid.reports.run.following import RunFollower
from fluid.session.folder.existing import delete_run

#: Pages of runs that are kept read while no page of theirs is open, and runs that are compared at most.
_MOST_IDLE, _MOST_COMPARED = 4, 12
#: Bytes of a request to delete at most.
_LONGEST_REQUEST = 1 << 20


class IndexServer(ServedPages):
    """Serves the runs below a folder until it is closed.

    Args:
        home: the folder.
        port: the port; 0 for one that is free.
        price: US dollars for a device-hour; ``None`` for the sessions' own.

    Raises:
        InvalidFieldError: the folder cannot be looked into, or the port cannot be used.
    """

    def __init__(self, home: str | Path, port: int = 0, *, price: float | None = None) -> None:
        home = Path(home).absolute()
        self.index = IndexFollower(home)
        self._pages = _RunPages(price)
        super().__init__(self.index, lambda: _IndexPageServer(home, self.index, self._pages, port))

    def close(self) -> None:
        super().close()
        self._pages.close()


class _RunPages:
    """The runs that pages look at, each followed as long as one does, and a few longer.

    Args:
        price: US dollars for a device-hour; ``None`` for the sessions' own.
    """

    def __init__(self, price: float | None) -> None:
        self._price = price
        self._lock = threading.Lock()
        #: By the runs' folders, the one that was asked for last at the end; each with a name that no other one had.
        self._followers: OrderedDict[tuple[Path, ...], tuple[str, RunFollower]] = OrderedDict()
        self._names = map(str, count(1))

    def of(self, paths: Sequence[Path]) -> tuple[str, RunFollower]:
        """What follows these runs, and its name.

        Raises:
            FluidError: one cannot be read.
        """
        key = tuple(paths)
        with self._lock:
            if key not in self._followers:
                self._followers[key] = next(self._names), RunFollower(paths, self._price)
            self._followers.move_to_end(key)
            idle = [one for one, (_, follower) in self._followers.items() if not follower.has_listeners]
            for one in idle[: max(0, len(idle) - _MOST_IDLE)]:
                self._followers.pop(one)[1].close()
            return self._followers[key]

    def close(self) -> None:
        """Ends the following."""
        with self._lock:
            for _, follower in self._followers.values():
                follower.close()
            self._followers.clear()


class _IndexPageServer(PageServer):
    def __init__(self, home: Path, index: IndexFollower, pages: _RunPages, port: int) -> None:
        self.home = home
        self.index = index
        self.pages = pages
        self.key = secrets.token_urlsafe(16)
        super().__init__(port, _IndexPageRequests)


class _IndexPageRequests(PageRequests):
    server: _IndexPageServer

    def answer(self, name: str, version: int, of: str) -> bool:
        index = self.server.index
        if name == "events":
            self.send_events(index, version)
            return True
        if not name:
            self.send_page(index_page(self.server.home, index.state, self.server.key))
            return True
        kind, _, rest = name.partition("/")
        ids, _, page = rest.partition("/")
        paths = [index.state.paths.get(each) for each in dict.fromkeys(ids.split("+"))]
        known = [path for path in paths if path is not None]
        if kind != "runs" or page not in ("", "events") or len(known) < len(paths) or len(known) > _MOST_COMPARED:
            return False
        try:
            its_name, follower = self.server.pages.of(known)
        except FluidError as error:
            self.send_page(f"<!doctype html><title>Fluid</title><p>This run cannot be shown: {escape(str(error))}</p>")
            return True
        if page:
            # A page that was fed by another follower of these runs has versions of that one: it is sent all.
            self.send_events(follower, version if of == its_name else -1)
        else:
            self.send_run(follower, its_name)
        return True

    def do_POST(self) -> None:
        """Deletes runs, for the page of this server only."""
        length = self.headers.get("Content-Length", "")
        body = b""
        if length.isdecimal() and int(length) <= _LONGEST_REQUEST:
            body = self.rfile.read(int(length))
        else:
            self.close_connection = True
        name = self.asked_name()
        if name is None:
            return
        origin = self.headers.get("Origin")
        key = self.headers.get("X-Fluid-Key", "")
        if origin != f"http://{self.headers.get('Host')}" or not hmac.compare_digest(
            key.encode(), self.server.key.encode()
        ):
            self.refuse(HTTPStatus.FORBIDDEN)
        elif name != "delete" or (ids := _ids_in(body)) is None:
            self.refuse(HTTPStatus.NOT_FOUND)
        else:
            self.send_page(json.dumps({"refused": self._delete(ids)}), "application/json")

    def _delete(self, ids: Sequence[str]) -> dict[str, str]:
        """Deletes runs; returns why not, by id, of those that are still there."""
        refused, paths = {}, self.server.index.state.paths
        home = os.path.realpath(self.server.home)
        for each in ids:
            path = paths.get(each)
            if path is None:
                refused[each] = "is not one of the runs any more"
            elif (real := os.path.realpath(path)) != os.path.join(home, path.relative_to(self.server.home)):
                refused[each] = f"is reached by a link, from {real}: it is not deleted"
            else:
                try:
                    delete_run(path)
                except InvalidFieldError as error:
                    refused[each] = error.reason
                except FluidError as error:
                    refused[each] = str(error)
        self.server.index.look_soon()
        return refused


def _ids_in(body: bytes) -> list[str] | None:
    """The ids of runs in a request to delete; ``None`` if it is none."""
    try:
        ids = json.loads(body)["runs"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return ids if isinstance(ids, list) and all(isinstance(each, str) for each in ids) else None
