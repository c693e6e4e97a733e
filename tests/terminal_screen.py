"""A terminal for tests: what its user sees after a program has written to it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TOKEN = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|[\r\n\x07\x08]|[^\x1b\r\n\x07\x08]+|\x1b")


class TerminalScreen:
    """Lines on a screen of a given width, with the cursor movements and erasures that live views use.

    The whole scrolled text is kept, as if the screen were endlessly high. A line that is longer than the screen is wide
    is wrapped, and wrapped anew if the width changes.

    Args:
        width: columns.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._lines = [""]
        #: Whether each line goes on in the next.
        self._wrapped = [False]
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

    def resize(self, width: int) -> None:
        """Changes the width, as most terminals do: lines are wrapped anew, and the cursor stays where it is in them."""
        whole: list[str] = []
        row = column = 0
        continues = False
        for position, line in enumerate(self._lines):
            if not continues:
                whole.append("")
            if position == self._row:
                row, column = len(whole) - 1, len(whole[-1]) + self._column
            continues = self._wrapped[position]
            whole[-1] += line.ljust(self._width) if continues else line
        self._lines, self._wrapped, self._width = [], [], width
        for position, line in enumerate(whole):
            if position == row:
                self._row, self._column = len(self._lines) + column // width, column % width
            parts = [line[start : start + width] for start in range(0, max(1, len(line)), width)]
            self._lines += parts
            self._wrapped += [True] * (len(parts) - 1) + [False]
        self._go_to(self._row)

    def text(self) -> list[str]:
        """The lines, without what colours them, and without blanks at their ends."""
        return [line.rstrip() for line in self._lines]

    def _write(self, text: str) -> None:
        while text:
            if self._column >= self._width:
                self._wrapped[self._row] = True
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
        elif token == "\x1b[J":
            self._lines[self._row :] = [self._lines[self._row][: self._column]]
            self._wrapped[self._row :] = [False]
        else:
            assert token[-1] in "mhl", f"an unknown control sequence: {token!r}"

    def _go_to(self, row: int) -> None:
        self._row = row
        self._lines += [""] * (row + 1 - len(self._lines))
        self._wrapped += [False] * (row + 1 - len(self._wrapped))


class TerminalProcess:
    """A program on a terminal of its own.

    Args:
        command: the program and its arguments.
        environment: variables beside those of this process.
        columns, rows: size of the terminal.
        cwd: the program's folder; that of this process if ``None``.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        columns: int = 80,
        rows: int = 24,
        cwd: Path | None = None,
    ) -> None:
        self.screen = TerminalScreen(columns)
        #: Every state of the screen that was read, as one text; a state may be read in the middle of a drawing.
        self.seen: list[list[str]] = []
        settings = {**os.environ, "TERM": "xterm-256color", **environment}
        for name in ("COLUMNS", "LINES"):
            settings.pop(name, None)
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            if cwd is not None:
                os.chdir(cwd)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execvpe(command[0], list(command), settings)

    def read(self, timeout: float = 60.0) -> bool:
        """Reads what the program has written; returns whether it may write more."""
        if not select.select([self._terminal], [], [], timeout)[0]:
            raise TimeoutError("\n".join(self.screen.text()))
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # So Linux says that the program has closed the terminal.
            return False
        self.screen.feed(data)
        self.seen.append(self.screen.text())
        return bool(data)

    def read_until(self, holds: Callable[[list[str]], bool]) -> None:
        """Reads until the lines of the screen have some property."""
        while not holds(self.screen.text()):
            assert self.read(), "\n".join(self.screen.text())

    def resize(self, columns: int, rows: int) -> None:
        """Changes the size of the terminal; the program gets SIGWINCH."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(columns)

    def type(self, text: str) -> None:
        """Types something; ``"\\x03"`` is Ctrl-C."""
        os.write(self._terminal, text.encode())

    def finish(self) -> int:
        """Reads until the program has ended; returns its exit status."""
        while self.read():
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
