"""Follows a file of JSON lines while its session writes it: each reading takes the lines that are new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fluid.checksums import LineChecks, parse_text, split_line
from fluid.errors import FluidError

#: What stands for a line that is no JSON, or is damaged, repeated or out of order.
BROKEN = object()
#: Bytes before the position that must be as they were: if not, the file was replaced.
_REMEMBERED = 256


class JsonLines:
    """The lines of one file.

    An unfinished last line waits until it is whole: a session is writing it, or was killed meanwhile.

    Args:
        path: the file.

    Attributes:
        count: lines taken so far.
        checks: what is damaged of these.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self.checks = LineChecks()
        #: Bytes taken so far, and the last of them.
        self._position, self._before = 0, b""

    def new(self) -> list[tuple[int, Any]]:
        """Takes the new lines: the number and the JSON value of each that is not blank, or ``BROKEN``.

        Raises:
            FileNotFoundError: the file is missing, and was when it was read before.
            OSError: the file cannot be read.
            ReplacedError: the lines taken so far are no longer in the file.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._position - len(self._before))
                same = file.read(len(self._before)) == self._before
                data = file.read()
        except FileNotFoundError:
            if not self._position:
                raise
            same = False
        if not same:
            raise ReplacedError(f"{self._path} was truncated or replaced")
        found = []
        start = 0
        while start < len(data):
            end = data.find(b"\n", start) + 1
            line = data[start : end or len(data)]
            # A JSON object ends where its braces do: it is whole even if its newline is missing.
            if not end and not self._is_whole(line):
                break
            begins = start or not self._before or self._before.endswith(b"\n")
            start += len(line)
            if begins:
                self.count += 1
            if line.strip():
                found.append((self.count, self._value_of(line)))
            elif begins:
                self.checks.take(line)
        self._position += start
        self._before = (self._before + data[max(0, start - _REMEMBERED) : start])[-_REMEMBERED:]
        return found

    def _value_of(self, line: bytes) -> Any:
        text = self.checks.take(line)
        value = BROKEN if text is None else parsed(text)
        if text is not None and value is BROKEN:
            self.checks.refuse()
        return value

    def _is_whole(self, line: bytes) -> bool:
        """Whether an unfinished last line lacks its newline only."""
        offset, text = split_line(line)
        if offset >= 0:
            return b'"}' in line[-3:]  # Behind these the newline may be damaged.
        return not self.checks.is_checked and isinstance(parsed(text), dict)


class ReplacedError(FluidError):
    """A file was truncated or replaced by another one since it was read."""


def without_surrogates(value: Any) -> Any:
    """What JSON holds, with an escape such as ``\\udce9`` for each lone surrogate in a text.

    No output can hold one. A file name that is not UTF-8 has some, and older versions of Fluid let them into ids.
    """
    if isinstance(value, str):
        return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
    if isinstance(value, list):
        return [without_surrogates(inner) for inner in value]
    if isinstance(value, dict):
        return {without_surrogates(name): without_surrogates(inner) for name, inner in value.items()}
    return value


def parsed(line: bytes) -> Any:
    """The value of JSON text; ``BROKEN`` if it is none."""
    # A line cut off within a character must not make the others unreadable.
    text = line.decode("utf-8", errors="replace")
    try:
        content = parse_text(text)
    except (ValueError, RecursionError):
        return BROKEN
    return without_surrogates(content) if "\\ud" in text else content
