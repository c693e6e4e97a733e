"""The live view: the dashboard of a session, redrawn on the terminal several times a second while trials run.

``rich.live.Live`` moves the cursor and keeps the dashboard below what the program prints. Its automatic refresh is not
used: a thread of the view asks for the status before each drawing, and must end with it. The cursor stays visible, so
that no way of dying leaves the user's terminal without one. At the end the view leaves one line per group.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.segment import Segment

from fluid.display.dashboard import render, summary_lines
from fluid.display.device_map import TrialNumbers
from fluid.display.states import has_ended
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
        self._numbers = TrialNumbers()
        self._last: Status | None = None
        #: When each group first appeared, and when it was first found to have ended; by position.
        self._first_seen: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._stopping = threading.Event()
        self._drawing = threading.Lock()
        #: Whether drawing is over.
        self._finished = False
        #: Two views would overwrite each other on one terminal, so only the first one draws.
        self._draws = _showing.acquire(blocking=False)
        # Started in the program's own thread: redirecting its output from another one could split a line.
        self._live = self._begin() if self._draws else None
        self._thread = threading.Thread(target=self._run, name="fluid-live", daemon=True)
        self._thread.start()

    @staticmethod
    def wanted() -> bool:
        """Whether stderr is a terminal that can redraw lines, and no other live view of rich uses it."""
        stream = sys.stderr
        if stream is None or isinstance(stream, FileProxy) or os.environ.get("TERM", "").lower() in _DUMB:
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
            if self._live is None or self._finished or not isinstance(stream, FileProxy):
                return False
            self._console.print(_AsIs(text), soft_wrap=True, end="")
            return True

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
            self._last = status
            for position, group in enumerate(status.groups):
                self._first_seen.setdefault(position, status.at)
                if has_ended(group.trials):
                    self._ended.setdefault(position, status.at)
                else:
                    self._ended.pop(position, None)
            if status.groups and self._live is not None:
                size = self._console.size
                # The last line stays free for the cursor; otherwise the terminal would scroll.
                shown = render(status, size.width, size.height - 1, self._numbers.update(status))
                self._live.update(shown, refresh=True)
        return True

    def _begin(self) -> Live | None:
        """Takes over the terminal without drawing yet; returns ``None`` if it has been closed."""
        live = Live(
            Group(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            # Output that the program redirects to a file or a pipe must not go to the terminal.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )
        try:
            live.start()
            self._console.show_cursor(True)
        except OSError:
            return None  # As in _run.
        return live

    def _finish(self) -> None:
        with self._drawing:
            if self._finished:
                return
            self._finished = True
            try:
                if self._live is not None:
                    self._live.stop()
                    self._leave_summary()
            except OSError:
                pass  # As in _run.
            finally:
                if self._draws:
                    _showing.release()

    def _leave_summary(self) -> None:
        if self._last is None:
            return
        seconds = {
            position: self._ended.get(position, self._last.at) - first for position, first in self._first_seen.items()
        }
        for line in summary_lines(self._last, seconds):
            self._console.print(line, soft_wrap=True)


class _AsIs:
    """Lines that rich writes without looking into them, which would take most of the time."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield Segment(self._text)


def _is_terminal(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    try:
        return bool(isatty and isatty())
    except ValueError:  # The stream is closed.
        return False
