"""The live view: the dashboard of a session, redrawn on the terminal several times a second while trials run.

A thread of the view asks for the status before each drawing, and ends with it. The cursor stays visible, so that no way
of dying leaves the user's terminal without one. At the end the view leaves one line per group, and how to see the rest.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.file_proxy import FileProxy

from fluid._waiting import AwaitedThread
from fluid.display.dashboard import Dashboard, render
from fluid.display.follow import StatusFollower
from fluid.display.region import AboveRegion, TerminalRegion
from fluid.display.summary import folder_lines, summary_lines
from fluid.errors import FluidError
from fluid.session.status import Status

__all__ = ["LiveView", "render"]

#: Seconds between two drawings.
DEFAULT_INTERVAL = 1.0 / 8.0
#: Seconds that ``close`` waits for the thread, which may be waiting for a status.
_PATIENCE = 2.0
#: Values of TERM for terminals that cannot move the cursor.
_DUMB = ("dumb", "unknown")

_showing = threading.Lock()


class LiveView:
    """Shows a session on stderr until it is closed. Create one only if :meth:`wanted` is true.

    Args:
        status: returns the current status; the view ends if it raises a :class:`FluidError`.
        console: where to draw; stderr if ``None``.
        interval: seconds between two drawings.
    """

    def __init__(
        self, status: Callable[[], Status], *, console: Console | None = None, interval: float = DEFAULT_INTERVAL
    ) -> None:
        self._status = status
        # The user chose the ids and names, so brackets and colons in them are not markup.
        self._console = console or Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._interval = interval
        self._follower = StatusFollower()
        self._stopping = threading.Event()
        self._drawing = threading.RLock()  # A signal handler may close the executor while the main thread draws.
        #: Whether drawing is over.
        self._finished = False
        #: Two views would overwrite each other on one terminal, so only the first one draws.
        self._draws = _showing.acquire(blocking=False)
        # Started in the program's own thread: redirecting its output from another one could split a line.
        self._region = self._begin() if self._draws else None
        self._thread = AwaitedThread("fluid-live", self._run)
        self._thread.start()

    @staticmethod
    def wanted() -> bool:
        """Whether stderr is a terminal that can redraw lines, and no other live view of rich uses it."""
        stream = sys.stderr
        if (
            stream is None
            or isinstance(stream, (FileProxy, AboveRegion))
            or os.environ.get("TERM", "").lower() in _DUMB
        ):
            return False
        try:
            return stream.isatty()
        except ValueError:  # The stream is closed.
            return False

    def write_above(self, stream: TextIO, text: str) -> bool:
        """Writes whole lines above the view, as they are; returns whether it did.

        Args:
            stream: ``sys.stdout`` or ``sys.stderr``; it is written above the view only if that is the view's terminal.
            text: the lines.
        """
        with self._drawing:
            if self._region is None or self._finished or not isinstance(stream, AboveRegion):
                return False
            self._region.write(text)
            return True

    @property
    def is_drawn(self) -> bool:
        """Whether this view has the terminal, which another one may have."""
        return self._region is not None and not self._finished

    def begin_group(self) -> None:
        """Does nothing: a terminal has one place for all groups."""

    def announce(self, text: str) -> None:
        """Shows what is about to begin, until the next group is submitted."""
        self._follower.announce(text)

    def close(self) -> None:
        """Ends the drawing and leaves one line per group. Closing twice is harmless."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        self._finish()

    # -- the view's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._refresh() and not self._stopping.wait(self._interval):
                pass
            if self._stopping.is_set():
                self._refresh()  # The lines that remain must show the final state.
        except OSError:
            pass  # The terminal has been closed.
        finally:
            self._finish()

    def _refresh(self) -> bool:
        """Draws the current status; returns whether to continue."""
        try:
            status = self._status()
        except FluidError:
            return False
        with self._drawing:
            if self._finished:
                return False
            self._follower.take(status)
            if self._region is not None and (status.groups or self._follower.announced):
                self._region.draw(self._dashboard(status))
        return True

    def _dashboard(self, status: Status) -> Dashboard:
        size, follower = self._console.size, self._follower
        # The last line stays free for the cursor; otherwise the terminal would scroll.
        return render(
            status,
            size.width,
            size.height - 1,
            follower.numbers,
            shares=follower.shares(),
            ends=follower.ends(),
            announced=follower.announced,
        )

    def _begin(self) -> TerminalRegion:
        """Takes over the terminal without drawing yet."""
        region = TerminalRegion(self._console)
        region.open()
        return region

    def _finish(self) -> None:
        with self._drawing:
            if self._finished:
                return
            self._finished = True
            try:
                if self._region is not None:
                    self._region.close()
                    self._leave_summary()
            except OSError:
                pass  # As in _run.
            finally:
                if self._draws:
                    _showing.release()

    def _leave_summary(self) -> None:
        last, width = self._follower.last, self._console.width
        if last is None or not last.groups:
            return
        lines = summary_lines(last, self._follower.seconds(), width=width)
        if last.run_dir is not None:
            lines += folder_lines(last.run_dir, width)
        for line in lines:
            self._console.print(line, soft_wrap=True)
