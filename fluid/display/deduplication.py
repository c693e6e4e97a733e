"""Shows equal lines of several processes once, by the rules and environment variables of Ray's log deduplication."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fluid.display.printed_lines import PrintedLine

#: Words with numbers do not count where lines are compared: processes differ in them.
_NUMBERS = re.compile(r"\d+|0x[0-9a-fA-F]+")
#: Lines that tell of one piece of work each, such as scikit-learn's of a fit: they differ in numbers only.
_OF_ONE_EACH = re.compile(r"\[CV\b")
_WINDOW_S = 5.0
_HINT = " (Equal lines of several trials are shown once, as by Ray; RAY_DEDUP_LOGS=0 shows all.)"


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
