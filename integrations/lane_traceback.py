"""The traceback of an exception that comes from a lane."""

from __future__ import annotations


class LaneTraceback(Exception):
    """The traceback of an exception in its lane, as its cause.

    Args:
        text: the traceback.
    """

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'
