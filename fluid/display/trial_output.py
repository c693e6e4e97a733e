"""Shows what trials print on the driver's own standard output and error: ``(train pid=123) text``."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TextIO

from fluid._clock import Clock, MonotonicClock
from fluid.backends.base import LaneText
from fluid.lane.output import MARK, MARK_BEGIN
from fluid.waiting.waits import BackgroundThread

# -- printed lines -------------------------------------------------------------------------------
#
# What trials print, as lines that a terminal can show: from bytes with marks, partial lines and control sequences.


#: Bytes of a line that are shown as one line; a longer one is shown in pieces.
_LONGEST_LINE = 1 << 14
#: Seconds after which a line is shown that is not complete; and a progress bar, which rewrites its line.
_UNFINISHED_S = 1.0
_PROGRESS_S = 5.0
#: Control sequences of terminals: those for colours end in "m".
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")
_PLAIN = "\x1b[0m"


class PrintedLine(NamedTuple):
    """A line that a trial has printed.

    Attributes:
        name: the trainable's; empty if not known.
        pid: the lane's process; 0 if not known.
        lane_id: the lane.
        host: name of its machine; ``"localhost"`` for the driver's.
        is_error: whether it was printed to standard error.
        text: the line, without its end; it may hold colours and no other control sequences.
    """

    name: str
    pid: int
    lane_id: int
    host: str
    is_error: bool
    text: str


class LineAssembler:
    """Makes lines of what one lane writes to one stream.

    Args:
        lane_id: the lane.
        host: name of its machine.
        is_error: whether the stream is standard error.
    """

    def __init__(self, lane_id: int, host: str, is_error: bool) -> None:
        self._template = PrintedLine("", 0, lane_id, host, is_error, "")
        #: What was written of a line that is not complete, and when its first byte came.
        self._rest = b""
        self._since = 0.0
        #: Whether the beginning of that line was shown, and whether its end can be read at once.
        self._is_begun = False
        self._has_more = False

    def feed(self, text: LaneText, now: float) -> list[PrintedLine]:
        """Takes what was written; returns the lines that are complete."""
        lines: list[PrintedLine] = []
        self._has_more = text.has_more
        if text.skipped:
            self._rest, self._is_begun = b"", False  # Its end was skipped.
            left_out = f"[{text.skipped / 1e6:.3g} MB not shown, as trials print faster than that; output.log has all]"
            lines.append(self._template._replace(text=left_out))
        if not self._rest:
            self._since = now
        *whole, self._rest = (self._rest + text.data).split(b"\n")
        for raw in whole:
            lines += self._lines_of(raw)
        if whole:
            self._since = now
        while len(self._rest) > _LONGEST_LINE:
            if (start := self._rest.rfind(b"\r")) > 0:
                self._rest = self._rest[start:]
            else:
                end = _end_of_character(self._rest, _LONGEST_LINE)
                piece, self._rest = self._rest[:end], self._rest[end:]
                lines += self._part(piece)
        return lines

    def overdue(self, now: float) -> list[PrintedLine]:
        """Returns the beginning of a line that was not completed for long."""
        if not self._rest or self._has_more:
            return []
        wait = _PROGRESS_S if b"\r" in self._rest else _UNFINISHED_S
        return self.flush() if now - self._since >= wait else []

    def flush(self) -> list[PrintedLine]:
        """Returns what there is of a line that is not complete."""
        text, begin, mark = self._rest.partition(MARK_BEGIN)
        self._rest = begin + mark  # A mark is read once it is complete.
        return self._part(text) if text else []

    def _part(self, raw: bytes) -> list[PrintedLine]:
        self._is_begun = True
        return self._shown(raw)

    def _lines_of(self, raw: bytes) -> list[PrintedLine]:
        """Returns a whole line, or several if marks divide it."""
        if MARK_BEGIN not in raw:
            was_begun, self._is_begun = self._is_begun, False
            return [] if was_begun and not raw.strip() else self._shown(raw)
        lines: list[PrintedLine] = []
        before, *marked = MARK.split(raw)
        if before:
            lines += self._shown(before)
        for name, pid, after in zip(marked[::3], marked[1::3], marked[2::3], strict=True):
            self._is_begun = False
            self._template = self._template._replace(name=name.decode("utf-8", "replace"), pid=int(pid))
            if after:
                lines += self._shown(after)
        return lines

    def _shown(self, raw: bytes) -> list[PrintedLine]:
        text = raw.decode("utf-8", "replace")
        if not text.isprintable():
            text = text.rstrip("\r")
            if "\r" in text:  # Each part overwrites the one before.
                text = text[text.rfind("\r") + 1 :]
                if not text.strip():
                    return []  # A progress bar that was cleared.
            text = _CONTROL.sub("", _SEQUENCE.sub(_colour_only, text))
            if "\x1b" in text and not text.endswith(_PLAIN):
                text += _PLAIN
        return [self._template._replace(text=text)]


def _colour_only(found: re.Match[str]) -> str:
    sequence = found[0]
    return sequence if sequence.startswith("\x1b[") and sequence.endswith("m") else ""


def _end_of_character(data: bytes, end: int) -> int:
    """The largest index up to ``end`` at which UTF-8 text can be divided."""
    return next((at for at in range(end, max(0, end - 4), -1) if data[at] & 0xC0 != 0x80), end)


# -- deduplication -------------------------------------------------------------------------------
#
# Shows equal lines of several processes once, by the rules and environment variables of Ray's log deduplication.


#: Words with numbers do not count where lines are compared: processes differ in them.
_NUMBERS = re.compile(r"\d+|0x[0-9a-fA-F]+")
#: Lines that tell of one piece of work each, such as scikit-learn's of a fit: they differ in numbers only.
_OF_ONE_EACH = re.compile(r"\[CV\b")
_WINDOW_S = 5.0
_HINT = " (Equal lines of several trials, but for numbers, are shown once, as by Ray; RAY_DEDUP_LOGS=0 shows all.)"


@dataclass(slots=True)
class _Pattern:
    """A line that was shown within the window.

    Attributes:
        since: when the window began, seconds.
        sources: the processes that printed it.
        count: how often it was held back since.
        last: the newest that was held back.
    """

    since: float
    sources: set[tuple[str, int]]
    count: int = 0
    last: PrintedLine | None = None


class Deduplicator:
    """Holds back lines that another process has printed within some seconds, and counts them.

    Args:
        environment: ``RAY_DEDUP_LOGS=0`` switches it off, ``RAY_DEDUP_LOGS_AGG_WINDOW_S`` is the number of seconds, 5
            by default; lines that match ``RAY_DEDUP_LOGS_ALLOW_REGEX`` are always shown, and lines that match
            ``RAY_DEDUP_LOGS_SKIP_REGEX`` never.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._is_off = environment.get("RAY_DEDUP_LOGS", "1").lower() in ("0", "false")
        self._window = _seconds(environment.get("RAY_DEDUP_LOGS_AGG_WINDOW_S", ""))
        self._allowed = _pattern(environment.get("RAY_DEDUP_LOGS_ALLOW_REGEX", ""))
        self._skipped = _pattern(environment.get("RAY_DEDUP_LOGS_SKIP_REGEX", ""))
        #: By stream and words, oldest window first.
        self._recent: dict[tuple[bool, str], _Pattern] = {}
        self._has_hinted = False

    def shows(self, line: PrintedLine, now: float) -> bool:
        """Whether to show a line now; otherwise it is counted, or dropped."""
        if self._is_off or (self._allowed is not None and self._allowed.search(line.text)):
            return True
        if self._skipped is not None and self._skipped.search(line.text):
            return False
        if _OF_ONE_EACH.match(line.text):
            return True
        words = " ".join(word for word in line.text.split() if not _NUMBERS.search(word))
        if not words:
            return True
        source = line.host, line.pid or -line.lane_id
        pattern = self._recent.get((line.is_error, words))
        if pattern is None:
            self._recent[line.is_error, words] = _Pattern(now, {source})
            return True
        pattern.sources.add(source)
        if len(pattern.sources) == 1:
            return True
        pattern.count += 1
        pattern.last = line
        return False

    def due(self, now: float) -> list[tuple[PrintedLine, str]]:
        """Returns lines whose window has ended, and what to add to each: how often it was repeated."""
        due = []
        while self._recent:
            key = next(iter(self._recent))
            pattern = self._recent[key]
            if now - pattern.since < self._window:
                break
            del self._recent[key]
            due += self._told(pattern)
            if pattern.count > 1:
                pattern.since, pattern.count = now, 0
                self._recent[key] = pattern
        return due

    def flush(self) -> list[tuple[PrintedLine, str]]:
        """Returns all lines that are held back, like :meth:`due`, and begins afresh."""
        patterns, self._recent = self._recent, {}
        return [told for pattern in patterns.values() for told in self._told(pattern)]

    def _told(self, pattern: _Pattern) -> list[tuple[PrintedLine, str]]:
        if pattern.last is None or not pattern.count:
            return []
        if pattern.count == 1:
            return [(pattern.last, "")]
        hint, self._has_hinted = "" if self._has_hinted else _HINT, True
        return [(pattern.last, f" [repeated {pattern.count}x across cluster]{hint}")]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return _WINDOW_S


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error:
        return None


# -- trial output --------------------------------------------------------------------------------


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
        environment: variables that say how; see :class:`fluid.display.trial_output.Deduplicator`.
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
