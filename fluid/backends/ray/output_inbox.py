"""What trials print on other nodes, until the driver shows it."""

from __future__ import annotations

import threading
from collections import Counter, deque

from fluid.backends.base import LaneText

#: Most bytes that are kept; the oldest are dropped where a terminal does not take them.
_MOST_KEPT = 1 << 22


class OutputInbox:
    """Texts of lanes, in the order in which they came. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: deque[LaneText] = deque()
        self._bytes = 0
        #: Bytes dropped, by lane and stream, of which no text says so yet.
        self._dropped: Counter[tuple[int, bool]] = Counter()

    def put(self, text: LaneText) -> None:
        """Adds a text; drops the oldest if too many bytes wait."""
        with self._lock:
            self._texts.append(text)
            self._bytes += len(text.data)
            while self._bytes > _MOST_KEPT:
                old = self._texts.popleft()
                self._bytes -= len(old.data)
                self._dropped[old.lane_id, old.is_error] += len(old.data) + old.skipped

    def take(self) -> list[LaneText]:
        """Returns the texts since the last call."""
        with self._lock:
            texts = list(self._texts)
            self._texts.clear()
            self._bytes = 0
            return [
                text._replace(skipped=text.skipped + self._dropped.pop((text.lane_id, text.is_error), 0))
                for text in texts
            ]
