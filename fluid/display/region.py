"""The last lines of a terminal: redrawn in place, while what the program prints scrolls by above them."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments

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
