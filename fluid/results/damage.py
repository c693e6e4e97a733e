"""Cuts the last, torn entry off a run folder's files, so that a session can go on behind the one before it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from fluid._logs import logger_of
from fluid.checksums import LineChecks, split_line
from fluid.results.run_files import is_entry

_CHUNK = 1 << 16
_log = logger_of(__name__)


def cut_torn_line(path: Path) -> None:
    """Cuts a file of JSON lines back to its last whole entry: valid JSON, and a newline.

    What follows is half a line that was being written when the session was killed or its disk was full, or zeros,
    which some file systems leave after a power cut.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return
    with file:
        size = file.seek(0, os.SEEK_END)
        keep = _line_start(file, size)
        if keep == size and size:
            last = _line_start(file, size - 1)
            file.seek(last)
            text = file.read(size - last)
            keep = size if not text.strip() or is_entry(text) else last
        cut(file, keep, size)


def cut(file: IO[bytes], keep: int, size: int) -> None:
    """Cuts a file of ``size`` bytes back to ``keep``."""
    if keep < size:
        file.truncate(keep)
        name = os.path.basename(file.name)
        _log.warning("%s: its last entry was not whole, and was cut off (%d bytes)", name, size - keep)


def cut_file(path: Path, keep: int) -> None:
    """Cuts a file back to ``keep`` bytes; a file that is missing has none."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        cut(file, keep, file.seek(0, os.SEEK_END))


def tell_damage(path: Path, checks: LineChecks, end: int = 0) -> None:
    """Logs what is damaged of a file whose lines were read, and went on to the offset ``end`` at least."""
    if checks.damage:
        what, whose = ("line is", "it") if checks.damage == 1 else ("lines are", "they")
        text = "%s: %d %s damaged or missing, the first at line %d; what %s told is lost"
        _log.warning(text, path, checks.damage, what, checks.first, whose)
    if not checks.reaches(end):
        _log.warning("%s ends too early: its last lines are missing, and what they told is lost", path)


def end_of_lines(path: Path) -> int:
    """The offset of the next line of a file, for its checksum: that of the last line, and its length.

    Where the last line has no checksum, it is the size of the file, or what any other line says if that is more.
    """
    with path.open("rb") as file:
        end = size = file.seek(0, os.SEEK_END)
        start = _line_start(file, size - 1) if size else 0
        file.seek(start)
        offset, _ = split_line(file.read())
        if offset >= 0:
            return offset + size - start
        file.seek(0)
        for line in file:
            offset, _ = split_line(line)
            end = max(end, offset + len(line))
    return end


def _line_start(file: IO[bytes], end: int) -> int:
    """Where the line begins that holds the byte before ``end``: behind the last newline before that."""
    while end > 0:
        begin = max(0, end - _CHUNK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


# -- gaps ----------------------------------------------------------------------------------------
#
# Iterations that were reported and are not in ``results.jsonl``: their lines were lost in a power cut, or damaged.


#: Most trials that a sentence names.
_MOST_TRIALS = 8
_NONE: Mapping[str, int] = {}


class IterationGaps:
    """Follows which iterations of each trial there are.

    Example:
        >>> from fluid.results.damage import IterationGaps
        >>> gaps = IterationGaps()
        >>> for number in (1, 2, 5, 4):
        ...     gaps.take("a", number)
        >>> gaps.of("a", reported=7)
        [(3, 3), (6, 7)]
    """

    def __init__(self) -> None:
        #: The number behind the highest one of each trial, and what is missing below, as first and last numbers.
        self._next: dict[str, int] = {}
        self._missing: dict[str, list[tuple[int, int]]] = {}

    def take(self, trial_id: str, number: int) -> None:
        """Takes an iteration."""
        expected = self._next.get(trial_id, 1)
        if number >= expected:
            self._next[trial_id] = number + 1
            if number > expected:
                self._missing.setdefault(trial_id, []).append((expected, number - 1))
        elif trial_id in self._missing:
            parts = []
            for first, last in self._missing[trial_id]:
                inside = first <= number <= last
                parts += [(first, number - 1), (number + 1, last)] if inside else [(first, last)]
            self._missing[trial_id] = [(first, last) for first, last in parts if first <= last]

    def of(self, trial_id: str, reported: int = 0, skipped: int = 0) -> list[tuple[int, int]]:
        """What is missing of a trial, as first and last numbers.

        Args:
            trial_id: the trial.
            reported: iterations that it has reported, as the journal says; more than there are results of are missing.
            skipped: its first iterations that it never reports, as it starts from the state after them.
        """
        found, expected = list(self._missing.get(trial_id, ())), self._next.get(trial_id, 1)
        found += [(expected, reported)] if reported >= expected else []
        return [(max(first, skipped + 1), last) for first, last in found if last > skipped]

    def notes(self, reported: Mapping[str, int], skipped: Mapping[str, int] = _NONE) -> list[str]:
        """A sentence that names what is missing of all trials; none if nothing is.

        Args:
            reported: iterations that each trial has reported, as the journal says.
            skipped: first iterations that trials never report, by trial.
        """
        names = dict.fromkeys([*self._missing, *reported])
        found = {name: self.of(name, reported.get(name, 0), skipped.get(name, 0)) for name in names}
        return gap_notes({name: parts for name, parts in found.items() if parts})


def gap_notes(gaps: Mapping[str, list[tuple[int, int]]]) -> list[str]:
    """A sentence that names missing iterations, given by trial as first and last numbers; none if there are none."""
    if not gaps:
        return []
    number = sum(last - first + 1 for parts in gaps.values() for first, last in parts)
    named = [f"{name} ({_ranges(parts)})" for name, parts in list(gaps.items())[:_MOST_TRIALS]]
    rest = f" and {len(gaps) - _MOST_TRIALS} more trials" if len(gaps) > _MOST_TRIALS else ""
    are = "iteration is" if number == 1 else "iterations are"
    return [f"{number:,} {are} missing from results.jsonl, though reported: {', '.join(named)}{rest}."]


def _ranges(parts: list[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
