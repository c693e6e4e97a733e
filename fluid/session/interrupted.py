"""How a call that runs a sweep ends when a signal has ended the sweep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class SweepInterrupted(SystemExit):
    """A signal has ended a sweep before its trials were done; the process exits with ``128 +`` its number.

    Example:
        >>> from fluid import SweepInterrupted
        >>> try:
        ...     raise SweepInterrupted(130, result="the results so far")
        ... except SweepInterrupted as cut:
        ...     print(cut.code, cut.result)
        130 the results so far

    Attributes:
        result: what the call would have returned: a :class:`fluid.SweepResult`; under Ray Tune an
            ``ExperimentAnalysis`` or a ``ResultGrid``, which shows the trials that were cut off as terminated.
        cut_off: ids of the trials that had not ended.
    """

    def __init__(self, status: int, result: Any, cut_off: Iterable[str] = ()) -> None:
        super().__init__(status)
        self.result = result
        self.cut_off = frozenset(cut_off)

    def __reduce__(self) -> tuple[type[SweepInterrupted], tuple[Any, Any, frozenset[str]]]:
        return type(self), (self.code, self.result, self.cut_off)
