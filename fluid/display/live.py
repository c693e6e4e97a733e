"""The live view: the dashboard of a session, redrawn on the terminal several times a second while trials run.

A thread of the view asks for the status before each drawing, and ends with it. The cursor stays visible, so that no way
of dying leaves the user's terminal without one. At the end the view leaves one line per group, and how to see the rest.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.file_proxy import FileProxy
from rich.segment import Segment, Segments

from fluid.display.dashboard import Dashboard, render
from fluid.display.follow import StatusFollower
from fluid.display.summary import folder_lines, summary_lines
from fluid.errors import FluidError
from fluid.session.status import Status
from fluid.waiting.waits import AwaitedThread

# -- region --------------------------------------------------------------------------------------
#
# The last lines of a terminal: redrawn in place, while what the program prints scrolls by above them.


_ERASE_BELOW = "\x1b[J"


class TerminalRegion:
    """Keeps some lines at the end of a terminal.

    The cursor stays at the beginning of the line below them, so that what the terminal echoes, such as ``^C``, moves
    nothing. Most terminals wrap lines that are longer than a window which became narrower, so the rows to erase follow
    from the lengths of the lines and the width at that time.

    While the region is open, ``sys.stdout`` and ``sys.stderr`` write above it if they are terminals, and so do handlers
    of :mod:`logging` that hold one of these streams.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._file = console.file
        #: Held while something is written.
        self._lock = threading.RLock()
        #: What is shown now: the text, and the characters in each of its lines.
        self._text = ""
        self._lengths: list[int] = []
        self._streams: dict[str, AboveRegion] = {}

    def open(self) -> None:
        """Redirects the streams; draws nothing yet."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            # Output that the program redirects to a file or a pipe must not go to the terminal.
            if is_terminal(stream):
                self._streams[name] = AboveRegion(self, stream)
                setattr(sys, name, self._streams[name])
        for above in self._streams.values():
            _redirect_handlers(above.stream, above)

    def draw(self, shown: RenderableType) -> None:
        """Shows something in place of what was shown."""
        lines = self._console.render_lines(shown, pad=False)
        lengths = [sum(segment.cell_length for segment in line) for line in lines]
        with self._console.capture() as captured:
            self._console.print(Segments([segment for line in lines for segment in (*line, Segment.line())]), end="")
        with self._lock:
            text, self._text = self._text, captured.get()
            try:
                self._write("", lengths)
            except BaseException:
                self._text = text
                raise

    def write(self, text: str) -> None:
        """Writes whole lines above what is shown."""
        with self._lock:
            self._write(text, self._lengths)

    def close(self) -> None:
        """Erases what is shown, and puts the streams back."""
        for name, above in self._streams.items():
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
            _redirect_handlers(above, above.stream)
        with self._lock:
            self._text = ""
            try:
                self._write("".join(above.rest() for above in self._streams.values()), [])
            finally:
                self._streams.clear()

    def _write(self, above: str, lengths: list[int]) -> None:
        width = max(1, self._console.width)
        rows = sum(max(1, -(-length // width)) for length in self._lengths)
        erase = f"\r\x1b[{rows}A{_ERASE_BELOW}" if rows else ""
        if erase or above or self._text:
            self._file.write(f"{erase}{above}{self._text}")
            self._file.flush()
        self._lengths = lengths


class AboveRegion:
    """A stream in the place of ``sys.stdout`` or ``sys.stderr``; complete lines go above the region.

    Args:
        region: the region.
        stream: the stream that it stands for, whose other attributes it has.
    """

    def __init__(self, region: TerminalRegion, stream: TextIO) -> None:
        self.stream = stream
        self._region = region
        self._lock = threading.RLock()
        self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Writes what completes a line, and keeps the rest."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._lock:
            lines, newline, rest = (self._rest + text).rpartition("\n")
            self._rest = rest[max(0, rest.rfind("\r")) :]  # What is before it is overwritten.
            if newline:
                self._region.write(lines + newline)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Writes the rest as a line of its own, unless it is a progress bar, which rewrites its line."""
        if not self._rest.startswith("\r") and (rest := self.rest()):
            self._region.write(rest)

    def rest(self) -> str:
        """Takes what has not been written, with a line break; empty if there is nothing."""
        with self._lock:
            rest, self._rest = self._rest, ""
            return f"{rest}\n" if rest else ""


def is_terminal(stream: object) -> bool:
    """Whether a stream is a terminal."""
    isatty = getattr(stream, "isatty", None)
    try:
        return bool(isatty and isatty())
    except ValueError:  # The stream is closed.
        return False


def _redirect_handlers(old: object, new: Any) -> None:
    """Lets the handlers of all loggers that write to one stream write to another."""
    for handler in _handlers():
        if handler.__dict__.get("stream") is old:
            handler.setStream(new)


def _handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in list(getattr(logger, "handlers", ())):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                yield handler


# -- live ----------------------------------------------------------------------------------------


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
            start=follower.start,
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
