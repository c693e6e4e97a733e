"""The live view: how a session stands, redrawn on the terminal several times a second while it runs.

It has a thread of its own, which asks for the status and draws it (:mod:`fluid.display.dashboard`) below what the
program prints. When the session ends it leaves one line per group. The cursor is never hidden, so no way to die can
lose it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live

from fluid.display.dashboard import has_ended, render, summary_lines
from fluid.display.device_map import TrialNumbers
from fluid.errors import FluidError
from fluid.session.status import Status

__all__ = ["LiveView", "render"]

#: Seconds between two drawings.
DEFAULT_INTERVAL = 1.0 / 8.0
#: Seconds that closing waits for a status that does not come.
_PATIENCE = 2.0
#: Terminals that cannot move the cursor.
_DUMB = ("dumb", "unknown")

_showing = threading.Lock()


class LiveView:
    """Shows a session on stderr until it is closed. Make one only where :meth:`wanted` says so.

    Args:
        status: asked for the status in every round; a :class:`FluidError` from it ends the view.
        console: where to draw; stderr where ``None``.
        interval: seconds between two drawings.
    """

    def __init__(
        self, status: Callable[[], Status], *, console: Console | None = None, interval: float = DEFAULT_INTERVAL
    ) -> None:
        self._status = status
        # Ids and names are the user's: brackets and colons in them mean nothing.
        self._console = console or Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._interval = interval
        self._numbers = TrialNumbers()
        self._last: Status | None = None
        #: when each group was first seen, and when it was first seen to have ended; by position.
        self._first_seen: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._stopping = threading.Event()
        self._drawing = threading.Lock()
        #: whether nothing may be drawn any more.
        self._finished = False
        #: two views on one terminal would overwrite each other: only the first one draws.
        self._draws = _showing.acquire(blocking=False)
        # Begun here, in the thread of the program: later, what it prints could be redirected in mid-line.
        self._live = self._begin() if self._draws else None
        self._thread = threading.Thread(target=self._run, name="fluid-live", daemon=True)
        self._thread.start()

    @staticmethod
    def wanted() -> bool:
        """Whether stderr is a terminal on which lines can be redrawn, and nobody else redraws them."""
        stream = sys.stderr
        if stream is None or isinstance(stream, FileProxy) or os.environ.get("TERM", "").lower() in _DUMB:
            return False
        try:
            return stream.isatty()
        except ValueError:  # It is closed.
            return False

    def close(self) -> None:
        """Draws no more, and leaves a line per group. Closing twice is harmless."""
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
                self._refresh()  # What happened since the last time belongs into the lines that stay.
        except OSError:
            pass  # The terminal has gone away: there is nothing to draw on.
        finally:
            self._finish()

    def _refresh(self) -> bool:
        """Draws the newest status; returns whether to go on."""
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
                if has_ended(group):
                    self._ended.setdefault(position, status.at)
                else:
                    self._ended.pop(position, None)
            if status.groups and self._live is not None:
                size = self._console.size
                # A line is left free: where the cursor stands, or the terminal would scroll.
                shown = render(status, size.width, size.height - 1, self._numbers.update(status))
                self._live.update(shown, refresh=True)
        return True

    def _begin(self) -> Live | None:
        """Takes the terminal; nothing is drawn yet."""
        live = Live(
            Group(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            # What the program prints into a file or a pipe must get there.
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


def _is_terminal(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    try:
        return bool(isatty and isatty())
    except ValueError:  # It is closed.
        return False
