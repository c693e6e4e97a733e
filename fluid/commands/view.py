"""``fluid view``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fluid.commands.inout import Subparsers, add_price
from fluid.commands.runs import newest
from fluid.errors import InvalidFieldError

if TYPE_CHECKING:
    from fluid.reports.index.server import IndexServer
    from fluid.reports.page.server import RunServer


def add_view(commands: Subparsers) -> None:
    """Adds ``fluid view``."""
    view = commands.add_parser("view", help="show runs in a browser, and follow those that go on")
    text = (
        "the run folder of a session; several are compared; or a folder of runs, for all of them (default: the newest)"
    )
    view.add_argument("runs", metavar="RUN", nargs="*", help=text)
    view.add_argument("--port", type=int, default=0, metavar="N", help="the port on 127.0.0.1 (default: a free one)")
    view.add_argument("--no-browser", action="store_true", help="print the address only")
    add_price(view)
    view.set_defaults(command=_view)


def _view(arguments: argparse.Namespace) -> None:
    folders = [Path(run).expanduser() for run in arguments.runs] or [newest()]
    for place, folder in enumerate(folders):
        if folder.resolve() in (other.resolve() for other in folders[:place]):
            raise InvalidFieldError("run", str(folder), "is given twice")
    with _server(folders, arguments.port, arguments.price) as server, contextlib.ExitStack() as rest:
        print(f"{server.url} is served until Ctrl-C", flush=True)
        if not arguments.no_browser and _has_display():
            rest.enter_context(_opened_in_browser(server.url, folders[0]))
        try:
            server.serve()
        except KeyboardInterrupt:
            # A terminal shows the key: it stays on a line of its own.
            print(f"{chr(10) if sys.stdout.isatty() else ''}no longer served", flush=True)


def _server(folders: Sequence[Path], port: int, price: float | None) -> RunServer | IndexServer:
    """What serves runs; or, of one folder that is none, those below it."""
    from fluid.results.runs import find_runs, is_run

    with contextlib.suppress(OSError):  # What is there is told by what reads it.
        if len(folders) == 1 and not is_run(folders[0]) and find_runs(folders[0]).runs:
            from fluid.reports.index.server import IndexServer

            return IndexServer(folders[0], port, price=price)
    from fluid.reports.page.server import RunServer

    return RunServer(folders, port, price=price)


def _has_display() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextlib.contextmanager
def _opened_in_browser(url: str, folder: Path) -> Iterator[None]:
    """Opens the address in a browser, by a file that leads there.

    The browser's arguments, which other users see, then do not name the address. The file is in the run folder, as some
    browsers cannot read a temporary folder.
    """
    import webbrowser

    with contextlib.ExitStack() as rest:
        with contextlib.suppress(OSError):  # Without write access to the folder, the printed address remains.
            file = rest.enter_context(
                tempfile.NamedTemporaryFile("w", dir=folder, prefix=".view-", suffix=".html", encoding="utf-8")
            )
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}"><title>Fluid</title>')
            file.flush()
            webbrowser.open(Path(file.name).resolve().as_uri())
        yield
