"""A terminal for tests: what its user sees after a program has written to it."""

from __future__ import annotations

import codecs
import re

_TOKEN = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\r\n\x07\x08]|[^\x1b\r\n\x07\x08]+|\x1b")


class TerminalScreen:
    """Lines on a screen of a given width, with the cursor movements and erasures that live views use.

    The whole scrolled text is kept, as if the screen were endlessly high.

    Args:
        width: columns.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._lines = [""]
        self._row = self._column = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> None:
        """Takes what a program wrote."""
        for token in _TOKEN.findall(self._decoder.decode(data)):
            if token == "\r":
                self._column = 0
            elif token == "\n":
                self._go_to(self._row + 1)
            elif token.startswith("\x1b["):
                self._control(token)
            elif token >= " ":
                self._write(token)

    def text(self) -> list[str]:
        """The lines, without what colours them, and without blanks at their ends."""
        return [line.rstrip() for line in self._lines]

    def _write(self, text: str) -> None:
        while text:
            if self._column >= self._width:
                self._go_to(self._row + 1)
                self._column = 0
            part, text = text[: self._width - self._column], text[self._width - self._column :]
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + part + line[self._column + len(part) :]
            self._column += len(part)

    def _control(self, token: str) -> None:
        count = int(token[2:-1]) if token[2:-1].isdecimal() else 1
        if token[-1] == "A":
            self._row = max(0, self._row - count)
        elif token[-1] == "K":
            self._lines[self._row] = "" if token[2:-1] == "2" else self._lines[self._row][: self._column]
        else:
            assert token[-1] in "mhl", f"an unknown control sequence: {token!r}"

    def _go_to(self, row: int) -> None:
        self._row = row
        self._lines += [""] * (row + 1 - len(self._lines))
