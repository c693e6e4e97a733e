"""What a live view remembers from one status to the next, on a terminal and in a notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fluid._clock import local_time, wall_seconds
from fluid.display.device_map import TrialNumbers
from fluid.display.format import clock_time, count, percent, printable
from fluid.display.names import has_ended
from fluid.session.status import GroupStatus, Start, Status

# -- end times -----------------------------------------------------------------------------------
#
# When groups end by the clock on the wall, as live views say it: ``90 % by 14:32``, which must not jump about.


#: The odds that are shown, where a forecast has them.
_ODDS = 0.9
#: A time stays as it is shown while the forecast differs from it by less than this share of the time that is left.
_HOLDS = 0.1
#: Up to so many seconds ahead, a time is shown to the second: rounded up to multiples of five.
_TO_THE_SECOND, _SECONDS = 600.0, 5.0
_MINUTE, _DAY, _WEEK = 60.0, 86400.0, 6 * 86400.0


class EndTimes:
    """Follows by when the groups of a session have ended with 90 %."""

    def __init__(self) -> None:
        #: The time shown for each group, seconds since 1970, by position.
        self._shown: dict[int, float] = {}
        self._now = 0.0
        self._texts: dict[int, str] = {}

    def take(self, status: Status, now: float | None = None) -> None:
        """Takes the current status.

        Args:
            status: the status.
            now: seconds since 1970; ``None`` for what the wall clock says.
        """
        self._now = wall_seconds() if now is None else now
        self._texts = {}
        for position, group in enumerate(status.groups):
            seconds = _seconds_left(group)
            if seconds is None:
                self._shown.pop(position, None)
                continue
            at, shown = self._now + seconds, self._shown.get(position, -math.inf)
            if shown <= self._now or abs(at - shown) > _HOLDS * (shown - self._now):
                self._shown[position] = shown = at
            self._texts[position] = f"{percent(_ODDS)} by {time_text(shown, self._now)}"

    @property
    def texts(self) -> dict[int, str]:
        """What is shown of each group that has a forecast, by position."""
        return self._texts


def time_text(at: float, now: float) -> str:
    """A time to come, rounded up: ``14:32``; soon ``14:32:05``, on another day ``Tue 14:32``, later ``3 Feb 14:32``.

    Args:
        at: the time, seconds since 1970.
        now: what time it is.
    """
    if at - now < _TO_THE_SECOND:
        return local_time(math.ceil(at / _SECONDS) * _SECONDS, "%H:%M:%S")
    rounded = math.ceil(at / _MINUTE) * _MINUTE
    if local_time(rounded, "%j") == local_time(now, "%j") and at - now < _DAY:
        return local_time(rounded, "%H:%M")
    return local_time(rounded, "%a %H:%M" if at - now < _WEEK else "%d %b %H:%M").lstrip("0")


def _seconds_left(group: GroupStatus) -> float | None:
    if group.forecast is None or has_ended(group.trials):
        return None
    return group.forecast.seconds.get(_ODDS)


# -- follow --------------------------------------------------------------------------------------


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
        #: What the first iterations wait for, and since when, seconds since the session began.
        self._start: tuple[Start | None, float] = None, 0.0
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
        before, now = self._start[0], status.start
        if before is None or now is None or (before.phase, before.module) != (now.phase, now.module):
            self._start = now, status.at
        else:
            self._start = now, self._start[1]
        if len(status.groups) > self._announced[1]:
            self._announced = ("", 0)
        for position, group in enumerate(status.groups):
            self._first_seen.setdefault(position, status.at)
            if has_ended(group.trials):
                self._ended.setdefault(position, status.at)
            else:
                self._ended.pop(position, None)

    @property
    def start(self) -> str:
        """What the first iterations wait for, and for how long; empty if they wait for nothing."""
        start, since = self._start
        if start is None or self.last is None:
            return ""
        lanes, trials = count(start.number, "lane"), count(start.number, "trial")
        what = {
            "importing": f"importing {printable(start.module)} for {lanes}",
            "lanes": f"{lanes}",
            "set up": f"setting up {trials}",
            "iteration": f"the first iteration of {trials}",
        }[start.phase]
        return f"{what}, {clock_time(self.last.at - since)}"

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
