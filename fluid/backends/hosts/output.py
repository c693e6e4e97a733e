"""Reads what the lanes of a host write to their own output while it grows, for the driver to show.

The files are the buffer: a trial never waits for a terminal, and what is not read yet takes no memory. Where lanes
write more than can be shown, the oldest of it is skipped.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass

from fluid.backends.base import LaneText
from fluid.lane.output import lane_output

#: Bytes that one call reads of all lanes together: more lines than a reader could follow, and little work.
_MOST_AT_ONCE = 1 << 17
#: Bytes that one call reads of one file.
_CHUNK = 1 << 15
#: A file of which more than so many bytes are unread is skipped to its last bytes, so many of them.
_LONGEST_BACKLOG = 1 << 21
_KEPT_BACKLOG = 1 << 18


@dataclass(slots=True)
class _File:
    """A file that is read up to ``offset``; ``over`` says whether its lane has ended."""

    lane_id: int
    is_error: bool
    path: str
    offset: int
    over: bool = False

    def read(self, most: int, backlog: int) -> LaneText | None:
        """Reads what is new; skips to the last bytes if more than ``backlog`` are unread."""
        unread = _size(self.path) - self.offset
        if unread <= 0:
            return None
        skipped = 0
        if unread > backlog:
            skipped = unread - _KEPT_BACKLOG
            self.offset += skipped
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset)
                data = file.read(most)
        except OSError:
            return None
        self.offset += len(data)
        has_more = unread - skipped > len(data)
        if skipped and (end := data.find(b"\n")) >= 0:
            skipped, data = skipped + end + 1, data[end + 1 :]  # It begins with a whole line.
        return LaneText(self.lane_id, self.is_error, data, skipped, has_more)


class OutputTail:
    """What the lanes of a host have written and was not read yet. Thread-safe.

    Args:
        run_folder: folder of the run.
    """

    def __init__(self, run_folder: str) -> None:
        self._run_folder = run_folder
        self._lock = threading.Lock()
        #: In the order in which they are read.
        self._files: deque[_File] = deque()
        #: Read when the host was closed.
        self._last: list[LaneText] = []

    def follow(self, lane_id: int) -> None:
        """Reads the output of a lane that is about to be forked."""
        # An earlier session may have written to the files.
        out, log = ((path, _size(path)) for path in lane_output(self._run_folder, lane_id))
        with self._lock:
            self._files += (_File(lane_id, False, *out), _File(lane_id, True, *log))

    def lane_ended(self, lane_id: int) -> None:
        """Reads the rest of what a lane has written, and no more."""
        with self._lock:
            for file in self._files:
                file.over = file.over or file.lane_id == lane_id

    def read(self) -> list[LaneText]:
        """Returns what is new, a bounded number of bytes."""
        with self._lock:
            texts, self._last = self._last, []
            left = _MOST_AT_ONCE
            for _ in range(len(self._files)):
                if left <= 0:
                    break
                file = self._files.popleft()
                text = file.read(min(_CHUNK, left), _LONGEST_BACKLOG)
                if text is not None:
                    texts.append(text)
                    left -= len(text.data)
                if text is not None or not file.over:
                    self._files.append(file)  # The next call begins with those that this one does not get to.
            return texts

    def close(self) -> None:
        """Reads the rest, of each file no more than the last bytes, for the next :meth:`read` to return."""
        with self._lock:
            for file in self._files:
                text = file.read(_KEPT_BACKLOG, _KEPT_BACKLOG)
                if text is not None:
                    self._last.append(text)
            self._files.clear()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
