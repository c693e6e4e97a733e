"""Shows what trials print on the driver's own standard output and error: ``(train pid=123) text``."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol, TextIO

from fluid._clock import Clock, MonotonicClock
from fluid._waiting import BackgroundThread
from fluid.backends.base import LaneText
from fluid.display.deduplication import Deduplicator
from fluid.display.printed_lines import LineAssembler, PrintedLine

#: Seconds between two looks at what was printed.
_INTERVAL_S = 0.1
#: Most times that all that was printed is read for; a host hands over a bounded number of bytes at a time.
_MOST_READS = 64
#: Seconds that the end waits for a terminal that takes nothing.
_PATIENCE_S = 2.0
_HERE = "localhost"
_CYAN, _GREEN, _RESET = "\x1b[36m", "\x1b[32m", "\x1b[0m"
#: Of the processes, in turn, if RAY_COLOR_PREFIX is 1; those of Ray.
_COLOURS = ("\x1b[35m", "\x1b[36m", "\x1b[32m", "\x1b[90m", "\x1b[94m", "\x1b[95m")


class Above(Protocol):
    """A view that keeps the last lines of a terminal, such as :class:`fluid.display.live.LiveView`."""

    def write_above(self, stream: TextIO, text: str) -> bool:
        """Writes whole lines above the view; returns whether it did, which it does not for other streams."""
        ...


class TrialOutput:
    """Shows what trials print until it is closed.

    Args:
        read: returns what was printed since the last call.
        above: the view of the same session, if there is one.
        is_hidden: whether what is printed now is not to be shown.
        environment: variables that say how; see :class:`fluid.display.deduplication.Deduplicator`.
            ``RAY_COLOR_PREFIX=0`` or ``NO_COLOR`` leaves the prefix without colour.
        clock: tells how old a line is.
    """

    def __init__(
        self,
        read: Callable[[], list[LaneText]],
        above: Above | None = None,
        *,
        is_hidden: Callable[[], bool] = lambda: False,
        environment: Mapping[str, str] = os.environ,
        clock: Clock | None = None,
    ) -> None:
        self._read = read
        self._above = above
        self._is_hidden = is_hidden
        self._clock = clock or MonotonicClock()
        self._deduplicator = Deduplicator(environment)
        plain = "NO_COLOR" in environment or environment.get("RAY_COLOR_PREFIX") == "0"
        self._colours = () if plain else _COLOURS if environment.get("RAY_COLOR_PREFIX") == "1" else (_CYAN,)
        self._assemblers: dict[tuple[int, bool], LineAssembler] = {}
        #: Held while lines are written.
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = BackgroundThread("fluid-output", self._run)
        self._thread.start()

    def flush(self) -> None:
        """Shows all that was printed until now, also lines that are not complete or held back."""
        if self._lock.acquire(timeout=_PATIENCE_S):
            try:
                for _ in range(_MOST_READS):
                    if not (lines := self._new_lines()):
                        break
                    self._show(lines, list)
                rest = [line for assembler in self._assemblers.values() for line in assembler.flush()]
                self._show(rest, self._deduplicator.flush)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Shows the rest, and ends. Closing twice is harmless."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_S)
        self.flush()

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            with self._lock:
                now = self._clock.now()
                lines = self._new_lines()
                for assembler in self._assemblers.values():
                    lines += assembler.overdue(now)
                self._show(lines, lambda now=now: self._deduplicator.due(now))  # type: ignore[misc]

    def _new_lines(self) -> list[PrintedLine]:
        now = self._clock.now()
        lines: list[PrintedLine] = []
        for text in self._read():
            key = text.lane_id, text.is_error
            if key not in self._assemblers:
                self._assemblers[key] = LineAssembler(text.lane_id, text.host, text.is_error)
            lines += self._assemblers[key].feed(text, now)
        return lines

    def _show(self, lines: Iterable[PrintedLine], due: Callable[[], list[tuple[PrintedLine, str]]]) -> None:
        now = self._clock.now()
        shown = [(line, "") for line in lines if self._deduplicator.shows(line, now)]
        shown += due()
        if not shown or self._is_hidden():
            return
        for is_error, stream in ((False, sys.stdout), (True, sys.stderr)):
            of_stream = [told for told in shown if told[0].is_error == is_error]
            if of_stream and stream is not None:
                colours = self._colours if _is_terminal(stream) else ()
                self._write(stream, "".join(_format(line, suffix, colours) for line, suffix in of_stream))

    def _write(self, stream: TextIO, text: str) -> None:
        # The user may have closed the stream, or its reader may be gone: trials go on without it.
        with suppress(OSError, ValueError):
            if self._above is not None and self._above.write_above(stream, text):
                return
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = stream.encoding or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()


def _format(line: PrintedLine, suffix: str, colours: tuple[str, ...]) -> str:
    source = f"{line.name or f'lane {line.lane_id}'}"
    if line.pid:
        source += f" pid={line.pid}"
    if line.host != _HERE:
        source += f", ip={line.host}"
    if not colours:
        return f"({source}) {line.text}{suffix}\n"
    ending = f"{_GREEN}{suffix}{_RESET}" if suffix else ""
    return f"{colours[line.pid % len(colours)]}({source}){_RESET} {line.text}{ending}\n"


def _is_terminal(stream: TextIO) -> bool:
    with suppress(AttributeError, ValueError):
        return stream.isatty()
    return False
