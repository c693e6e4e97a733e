"""What a live view remembers from one status to the next, on a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Mapping

from fluid.display.device_map import TrialNumbers
from fluid.display.end_times import EndTimes
from fluid.display.states import has_ended
from fluid.session.status import Status


class StatusFollower:
    """Follows the statuses of a session.

    Attributes:
        last: the latest status; ``None`` before the first.
        numbers: the number of every trial on a device.
    """

    def __init__(self) -> None:
        self.last: Status | None = None
        self.numbers: Mapping[str, int] = {}
        self._numbers = TrialNumbers()
        self._ends = EndTimes()
        #: When each group first appeared, and when it was first found to have ended; by position.
        self._first_seen: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        #: The largest shares of searches so far, by position.
        self._shares: dict[int, float] = {}
        #: What is about to begin, and the number of groups before; the text is empty if nothing is.
        self._announced = ("", 0)

    def announce(self, text: str) -> None:
        """Shows what is about to begin, until the next group is submitted."""
        self._announced = (text, 0 if self.last is None else len(self.last.groups))

    @property
    def announced(self) -> str:
        """What is about to begin; empty if nothing is."""
        return self._announced[0]

    def take(self, status: Status) -> None:
        """Takes the current status."""
        self.last, self.numbers = status, self._numbers.update(status)
        self._ends.take(status)
        if len(status.groups) > self._announced[1]:
            self._announced = ("", 0)
        for position, group in enumerate(status.groups):
            self._first_seen.setdefault(position, status.at)
            if has_ended(group.trials):
                self._ended.setdefault(position, status.at)
            else:
                self._ended.pop(position, None)

    def shares(self) -> dict[int, float]:
        """Share done of each group, by position, where known. That of a search is a prediction, and only grows."""
        shares: dict[int, float] = {}
        for position, group in enumerate(() if self.last is None else self.last.groups):
            share = group.share
            if share is None:
                continue
            if group.is_search:
                share = self._shares[position] = max(share, self._shares.get(position, 0.0))
            shares[position] = share
        return shares

    def ends(self) -> Mapping[int, str]:
        """By when each group is likely to have ended, as text, by position, where known."""
        return self._ends.texts

    def seconds(self) -> dict[int, float]:
        """Seconds that each group ran, or has run so far, by position."""
        at = 0.0 if self.last is None else self.last.at
        return {position: self._ended.get(position, at) - first for position, first in self._first_seen.items()}
