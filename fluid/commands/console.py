"""The console on which commands print for people. Importing rich takes a while, so that commands import this late."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

#: A width at which nothing is folded.
_UNLIMITED = 10_000


class CommandConsole(Console):
    """A console of which a file or a pipe gets whole lines: not folded, and without blanks at their ends.

    Lines for a file are folded only if ``COLUMNS`` says at which width.

    Attributes:
        room: characters per line that are there for what is laid out in a width, such as a chart or the columns of a
            table; off a terminal those of a usual one.
    """

    def __init__(self) -> None:
        # The user chose the ids and names, so brackets and colons in them are not markup.
        super().__init__(markup=False, emoji=False, highlight=False)
        self.room = self.width
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNLIMITED

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints as :meth:`rich.console.Console.print` does."""
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        self.file.write("".join(f"{line.rstrip(' ')}\n" for line in captured.get().split("\n")[:-1]))
