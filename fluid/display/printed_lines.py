"""What trials print, as lines that a terminal can show: from bytes with marks, partial lines and control sequences."""

from __future__ import annotations

import re
from typing import NamedTuple

from fluid.backends.base import LaneText
from fluid.lane.output import MARK, MARK_BEGIN

#: Bytes of a line that are shown as one line; a longer one is shown in pieces.
_LONGEST_LINE = 1 << 14
#: Seconds after which a line is shown that is not complete; and a progress bar, which rewrites its line.
_UNFINISHED_S = 1.0
_PROGRESS_S = 5.0
#: Control sequences of terminals: those for colours end in "m".
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f]")
_RESET = "\x1b[0m"


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
            if "\x1b" in text and not text.endswith(_RESET):
                text += _RESET
        return [self._template._replace(text=text)]


def _colour_only(found: re.Match[str]) -> str:
    sequence = found[0]
    return sequence if sequence.startswith("\x1b[") and sequence.endswith("m") else ""


def _end_of_character(data: bytes, end: int) -> int:
    """The largest index up to ``end`` at which UTF-8 text can be divided."""
    return next((at for at in range(end, max(0, end - 4), -1) if data[at] & 0xC0 != 0x80), end)
