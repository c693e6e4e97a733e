"""When groups end by the clock on the wall, as live views say it: ``90 % by 14:32``, which must not jump about."""

from __future__ import annotations

import math

from fluid._clock import local_time, wall_seconds
from fluid.display.format import percent
from fluid.display.states import has_ended
from fluid.session.status import GroupStatus, Status

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
