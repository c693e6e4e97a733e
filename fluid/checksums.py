"""Checksums within JSON: of each line of a file, and of a file that holds one object. Pure: no IO.

A checked line ends with one more key, ``"crc": "4821-9f3a0c1e"``: its *offset*, which is the byte of the file where the
line begins, and the CRC-32 of all bytes of the line before these eight digits. So a line that was changed is noticed,
and so is one that is at another place, is there twice, or is missing. An object that is a file by itself ends with
``"crc": "9f3a0c1e"``. Both remain JSON that any program reads. Older versions of Fluid wrote no checksums.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from zlib import crc32

_KEY = b', "crc": "'
#: Bytes of a line behind its offset: the digits, and what ends the line.
_TAIL_BYTES = len('01234567"}\n')
#: Most bytes of a line from the key on: an offset has at most 20 digits.
_LONGEST = len(_KEY) + 20 + len("-") + _TAIL_BYTES
#: The end of an object with a checksum, also where a bit of its name or its digits was flipped.
_OBJECT_END = re.compile(rb',\n "([^"]{3})": "([^"]{8})"\n\}\Z')
#: What :func:`split_line` gives as the offset of a line without a checksum, and of a damaged one.
UNCHECKED, DAMAGED = -1, -2


def checked_lines(texts: Iterable[str], offset: int) -> bytes:
    """Lines with their checksums.

    Args:
        texts: JSON objects that are not empty, without newlines.
        offset: that of the first line.

    Example:
        >>> checked_lines(['{"a": 1}'], 0)
        b'{"a": 1, "crc": "0-c90196bb"}\\n'
    """
    parts = []
    for text in texts:  # There is one for each result: the loop calls no function of Python.
        parts.append(head := f'{text[:-1]}, "crc": "{offset}-'.encode())
        parts.append(b'%08x"}\n' % crc32(head))
        offset += len(head) + _TAIL_BYTES
    return b"".join(parts)


def checked_parts(parts: Iterable[str], offset: int) -> Iterator[bytes]:
    """One line with its checksum, part by part.

    Args:
        parts: those of a JSON object that is not empty, without newlines; the last one is its closing brace.
        offset: that of the line.

    Example:
        >>> b"".join(checked_parts(['{"a": ', "1", "}"], 0))
        b'{"a": 1, "crc": "0-c90196bb"}\\n'
    """
    crc, before = 0, b""
    for part in parts:
        if before:
            crc = crc32(before, crc)
            yield before
        before = part.encode()
    head = b'%b, "crc": "%d-' % (before.removesuffix(b"}"), offset)
    yield b'%b%08x"}\n' % (head, crc32(head, crc))


def split_line(line: bytes) -> tuple[int, bytes]:
    """Takes the checksum off a line: returns the line's offset, and its JSON object.

    What stands behind the checksum, such as the newline, may be missing. Of a line without a checksum, and of a damaged
    one, the offset is :data:`UNCHECKED` or :data:`DAMAGED`, and the line is returned as it is.
    """
    mark = line.rfind(_KEY, -_LONGEST)
    if mark < 0:
        return UNCHECKED, line
    digits = line.find(b"-", mark) + 1
    try:
        offset, crc = int(line[mark + len(_KEY) : digits - 1]), int(line[digits : digits + 8], 16)
    except ValueError:
        return UNCHECKED, line
    if crc32(line[:digits]) != crc or len(line) < digits + 8:
        return DAMAGED, line
    return offset, line[:mark] + b"}"


def checked_object(text: str) -> bytes:
    """A JSON object that is a file by itself, with its checksum.

    Args:
        text: the object, which is not empty, as ``json.dumps`` with ``indent=1`` writes it.
    """
    head = f'{text.removesuffix("}").rstrip()},\n "crc": "'.encode()
    return b'%b%08x"\n}' % (head, crc32(head))


def split_object(data: bytes) -> bytes | None:
    """Takes the checksum off such a file; ``None`` if it is damaged. A file without a checksum is left as it is."""
    end = _OBJECT_END.search(data)
    if end is None:
        return data
    is_right = end[1] == b"crc" and end[2] == b"%08x" % crc32(data[: end.start(2)])
    return data[: end.start()] + b"\n}" if is_right else None


class LineChecks:
    """Takes the lines of a file in order, and finds out which of them are damaged, repeated or missing.

    Lines without a checksum are taken as they are before the first line that has one: an older Fluid wrote them.

    Args:
        start: the byte of the file at which the first line begins.

    Attributes:
        damage: damaged, repeated and misplaced lines so far; lines that are missing at one place count as one.
        first: the number of the first of them, from 1 for the first line taken; ``None`` if there is none.
        count: lines taken.
        is_checked: whether one of them had a checksum.
    """

    def __init__(self, start: int = 0) -> None:
        self.damage = self.count = 0
        self.first: int | None = None
        #: Where the next line is to begin.
        self._next = start
        self.is_checked = False
        #: Whether the line before was damaged.
        self._after_damage = False

    def take(self, line: bytes) -> bytes | None:
        """Takes the next line; returns its JSON text, or ``None`` if it is damaged, repeated or out of order."""
        self.count += 1
        if line[-12:-11] == b"-":
            right = b', "crc": "%d-%08x"}\n' % (self._next, crc32(line[:-11]))
            if line.endswith(right):  # As nearly all do: what follows is not needed.
                self._next += len(line)
                self.is_checked, self._after_damage = True, False
                return line[: -len(right)] + b"}"
        offset, text = split_line(line)
        if offset == UNCHECKED and not self.is_checked:
            self._next += len(line)
            return text
        first_check, self.is_checked = not self.is_checked, True
        if offset < self._next and not (first_check and offset >= 0):
            self.refuse()
            return None
        if offset != self._next and not self._after_damage:
            self._tell()
        self._next, self._after_damage = offset + len(line), False
        if not line.endswith(b"\n"):
            self._next += 1  # It is written in a moment.
        return text

    def refuse(self) -> None:
        """Counts the line taken last as damaged, which the caller has found it to be."""
        self._tell()
        self._after_damage = True

    def reaches(self, end: int) -> bool:
        """Whether the lines taken go on to the offset ``end``, or are known to be damaged where they do not."""
        return self._next >= end or self._after_damage

    def _tell(self) -> None:
        self.damage += 1
        self.first = self.count if self.first is None else self.first
