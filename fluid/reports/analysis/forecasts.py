"""Forecasts in a run folder: by when groups were forecast to end, with odds, and when they did."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from fluid.display.format import duration
from fluid.results.iterations import FinishedIterations
from fluid.results.metrics import is_number

#: Shares of a group's time at which its forecasts are compared with its end.
SHARES = (0.25, 0.5, 0.75)
#: The odds that reports show.
_MIDDLE, _HIGH = 0.5, 0.9


class WrittenForecast(NamedTuple):
    """A forecast, as the session wrote it.

    Attributes:
        at: when, in seconds since the run began.
        seconds: by probability, the seconds from then by which the group was forecast to have ended.
        age_s: seconds for which what it says was known then.
    """

    at: float
    seconds: Mapping[float, float]
    age_s: float = 0.0

    def by(self, odds: float) -> float | None:
        """When the group was forecast to have ended with these odds, in seconds since the run began."""
        left = self.seconds.get(odds)
        return None if left is None else self.at + left


@dataclass(frozen=True)
class ComparedForecast:
    """A forecast beside the end that it forecast.

    Attributes:
        group: the group's name.
        share: of the time from the group's first iteration to its end that had passed.
        middle, high: when the group was forecast to end with 50 % and with 90 %, in seconds since the run began.
        ended: when it did.
    """

    group: str
    share: float
    middle: float
    high: float
    ended: float

    @property
    def is_covered(self) -> bool:
        """Whether the group had ended by the time that the forecast gave with 90 %."""
        return self.ended <= self.high

    @property
    def text(self) -> str:
        """In words."""
        late = "in time" if self.is_covered else f"{duration(self.ended - self.high)} late"
        text = f"at {round(100 * self.share)} %: 50 % by {duration(self.middle)}, 90 % by {duration(self.high)}"
        return f"{text}; ended at {duration(self.ended)}, {late}"


def read_forecasts(
    entries: Iterable[Mapping[str, Any]], done: FinishedIterations, zero: float
) -> dict[str, list[WrittenForecast]]:
    """The forecasts of each group, by id, in order; lines that cannot be used are left out.

    Args:
        entries: the lines of ``forecasts.jsonl``.
        done: the finished iterations, which give the time axis.
        zero: the time at which the run began, on the clock of the session.
    """
    found: dict[str, list[WrittenForecast]] = {}
    clock = done.clock() if done.by_trial else None
    for entry in entries:
        at, age, listed = entry.get("at"), entry.get("age_s", 0.0), entry.get("seconds")
        if not is_number(at) or not is_number(age) or not isinstance(listed, Mapping):
            continue
        seconds = {odds: left for name, left in listed.items() if (odds := _odds(name)) and is_number(left)}
        when = at - zero if clock is None else clock.seconds(at)
        found.setdefault(str(entry.get("group")), []).append(WrittenForecast(when, seconds, age))
    return found


def _odds(name: str) -> float | None:
    try:
        odds = float(name)
    except ValueError:
        return None
    return odds if 0.0 < odds < 1.0 else None


def compared(group: str, forecasts: Sequence[WrittenForecast], start: float, end: float) -> list[ComparedForecast]:
    """The latest forecasts after each of :data:`SHARES` of a group's time; none where there was none yet.

    Args:
        group: its name.
        forecasts: of the group, in order.
        start: when its first iteration began, in seconds since the run began.
        end: when its last one ended.
    """
    found = []
    for share in SHARES:
        until = start + share * (end - start)
        known = [each for each in forecasts if start <= each.at <= until]
        middle, high = (known[-1].by(odds) if known else None for odds in (_MIDDLE, _HIGH))
        if middle is not None and high is not None:
            found.append(ComparedForecast(group, share, middle, high, end))
    return found


def forecast_text(forecast: WrittenForecast, clock: datetime | None, now: float | None = None) -> str:
    """A forecast in words, ``"90 % by 14:32 (50 % by 14:20; age 12 s)"``; empty if it lacks the odds shown.

    Args:
        forecast: the forecast.
        clock: the time of day at which the run began; ``None`` to give times since then.
        now: the time, in seconds since the run began; ``None`` to leave the age out.
    """
    middle, high = forecast.by(_MIDDLE), forecast.by(_HIGH)
    if middle is None or high is None:
        return ""
    age = "" if now is None else f"; age {duration(max(0.0, now - forecast.at) + forecast.age_s)}"
    when = (_time_of_day(each, clock, forecast.at) for each in (high, middle))
    return "90 % by {} (50 % by {}{})".format(*when, age)


def _time_of_day(at: float, clock: datetime | None, since: float) -> str:
    """When that is: with seconds if it is soon after ``since``, with the date if it is another day."""
    if clock is None or not math.isfinite(at):
        return duration(at)
    try:
        then, now = clock + timedelta(seconds=at), clock + timedelta(seconds=since)
    except OverflowError:
        return duration(at)
    if then.date() != now.date():
        return then.strftime("%Y-%m-%d %H:%M")
    return then.strftime("%H:%M:%S" if at - since < 600.0 else "%H:%M")
