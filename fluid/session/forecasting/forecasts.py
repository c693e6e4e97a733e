"""Forecasts of a session's groups: when each ends, with odds, and which trial is likely to end last.

Groups of trials are forecast in closed form (:mod:`fluid.forecasting.group`), those of a search by a forecaster
of searches, as what a search submits next depends on results that are to come.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fluid._clock import MonotonicClock, nap, thread_seconds
from fluid._logs import logger_of
from fluid.engine.commands import Command
from fluid.engine.events import Event
from fluid.errors import InvalidFieldError, require_integer
from fluid.forecasting.play import Player
from fluid.forecasting.search_now import SearchNow
from fluid.planners.instance import EndDistribution, require_odds
from fluid.policies.engine import EngineState
from fluid.session.facts import Forecast
from fluid.session.folder.folder import RunFolder
from fluid.session.forecasting.left import RunOverheads, trials_left
from fluid.session.forecasting.search import search_now
from fluid.session.inbox import GroupInbox
from fluid.session.status import GroupFacts
from fluid.trialgroup import Search
from fluid.waiting.waits import AwaitedThread

# -- forecast log --------------------------------------------------------------------------------
#
# Writes forecasts of a session's groups into its run folder, for the pages and reports that are made from it.


_log = logger_of(__name__)
#: Seconds between two writings: so large a share of the time since the first event, within these bounds.
_SHARE, _LEAST_S, _MOST_S = 0.02, 1.0, 30.0
#: Groups that are forecast at most, the newest ones.
_MOST_GROUPS = 8


class ForecastLog:
    """Follows a session, and writes forecasts of its open groups now and then, while something happens.

    A line of ``forecasts.jsonl`` has ``at`` (on the clock of the events), ``group``, ``seconds`` from then by
    probability, and ``age_s``.

    Args:
        folder: the session's run folder.
        state: the engine.
        shown: the forecast of a group, by its id; ``None`` if too little was measured.
        now: the time, seconds on the clock of the events.
    """

    def __init__(
        self,
        folder: RunFolder,
        state: EngineState,
        shown: Callable[[str], Forecast | None],
        now: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._state = state
        self._shown = shown
        self._now = now
        self._began: float | None = None
        self._next_at = 0.0
        folder.follow(self._follow)

    def _follow(self, events: Sequence[Event], commands: Sequence[Command], others: bool) -> None:
        now = self._now()
        if self._began is None:
            self._began = self._next_at = now
        if now < self._next_at:
            return
        self._next_at = now + min(max(_SHARE * (now - self._began), _LEAST_S), _MOST_S)
        groups = [group_id for group_id, group in self._state.groups.items() if group.open][-_MOST_GROUPS:]
        try:
            self._write(now, groups)
        except Exception as error:  # A forecast that fails does not end the session.
            told = None if isinstance(error, OSError) else error
            _log.warning("forecasts are no longer written to the run folder: %s", error, exc_info=told)
            self._next_at = float("inf")

    def _write(self, now: float, groups: Sequence[str]) -> None:
        found = {group_id: forecast for group_id in groups if (forecast := self._shown(group_id)) is not None}
        self._folder.write_forecasts(
            {
                "at": round(now, 3),
                "group": group_id,
                "seconds": {f"{odds:g}": round(seconds, 3) for odds, seconds in forecast.seconds.items()},
                "age_s": round(forecast.age_s, 3),
            }
            for group_id, forecast in found.items()
        )


# -- played forecasts ----------------------------------------------------------------------------
#
# Forecasts of searches, by playing them from now to their end in a thread that gives way to all others.
#
# A play begins when a forecast is asked for, and takes what the engine knows at that moment. Over time, plays take one
# hundredth of a core: one that took a second of it is followed by 99 without any. Between plays, the newest one holds,
# counted down. Nothing runs while no forecast is asked for.
#
# The thread sleeps after each draw, of a millisecond or so, as long as that took. It has no lower priority in the eyes
# of the operating system: on busy cores that would take it off its core while it holds the interpreter's lock, for
# which the session's thread would wait.


#: Seconds of rest for each second of a core that a play takes.
_REST = 99.0
#: Draws of a play, and fewer for searches of very many trials.
_DRAWS, _LEAST_DRAWS, _MOST_RUNS = 200, 40, 60_000
#: Draws on other numbers of devices than the session has; and how many such numbers a play has at most.
_DRAWS_BESIDE, _MOST_NUMBERS = 60, 16
#: Seconds of sleep for each second of a core, while a play is under way.
_NAP = 1.0
#: Longest that the first forecast of a search is awaited, seconds.
_FIRST_S = 10.0


@dataclass(frozen=True, slots=True)
class _Played:
    """What a play has found.

    Attributes:
        at: when it began, seconds on the session's clock.
        ends: by number of devices, when the search ends, from then on.
    """

    at: float
    ends: Mapping[int, EndDistribution]

    def on(self, devices: int) -> EndDistribution:
        """When the search ends on so many devices: as played, or between the numbers that were."""
        if (found := self.ends.get(devices)) is not None:
            return found
        known = sorted(self.ends)
        if devices < known[0]:
            return self.ends[known[0]].stretched(known[0] / devices)
        if devices > known[-1]:
            return self.ends[known[-1]]
        above = next(number for number in known if number > devices)
        below = max(number for number in known if number < devices)
        part = math.log(devices / below) / math.log(above / below)
        return self.ends[below].towards(self.ends[above], part)


def _to_play(held: int, asked: Collection[int]) -> list[int]:
    """The numbers of devices to play a search on: those held, and if others were asked for, those and some between."""
    if not asked:
        return [held]
    most = 2 * max(held, *asked)
    powers = [1 << step for step in range(most.bit_length())]
    return list(dict.fromkeys([held, *asked, *powers]))


class PlayedForecasts:
    """Forecasts the searches of a session.

    Args:
        state: the engine.
        now: the time of its events, seconds.
        inboxes: the groups, by id.
    """

    def __init__(self, state: EngineState, now: Callable[[], float], inboxes: Mapping[str, GroupInbox]) -> None:
        self._state = state
        self._now = now
        self._inboxes = inboxes
        self._clock = MonotonicClock()
        self._played: dict[str, _Played] = {}
        #: Numbers of devices that were asked for, by group, besides those held.
        self._numbers: dict[str, dict[int, None]] = {}
        self._thread: AwaitedThread | None = None
        self._rests_until = 0.0
        self._overheads = RunOverheads(state)
        self._is_closed = False
        self._session_thread: int | None = None

    # -- in the session's thread ---------------------------------------------------------------------------

    def end_on(self, group_id: str, devices: int | None) -> EndDistribution | None:
        """When the search of a group ends, from now, on so many devices.

        Args:
            group_id: the group.
            devices: how many; ``None`` for those that the session has.

        Returns:
            Its distribution; ``None`` if too little is known yet.
        """
        self._session_thread = threading.get_ident()
        search = self._inboxes[group_id].group.search
        held = len(self._state.occupancy)
        if search is None or not held:
            return None
        facts = self._inboxes[group_id].facts
        start_s, limit = self._overheads.per_run(group_id, facts, self._now()), self._ends_in(search, facts)
        if search.trials is None:
            return None if limit is None else EndDistribution.certain(limit)
        if devices is not None and devices != held:
            numbers = self._numbers.setdefault(group_id, {})
            numbers.pop(devices, None)
            numbers[devices] = None
            if len(numbers) > _MOST_NUMBERS:
                del numbers[next(iter(numbers))]
        self._play(group_id, held, start_s, limit)
        played = self._played.get(group_id)
        if played is None:
            return None
        ends = played.on(held if devices is None else devices)
        return ends.later(played.at - self._now())

    def age_s(self, group_id: str) -> float:
        """Seconds since what :meth:`end_on` tells of a group was worked out."""
        played = self._played.get(group_id)
        return 0.0 if played is None else max(0.0, self._now() - played.at)

    def close(self) -> None:
        """Ends the play under way."""
        self._is_closed = True

    def _ends_in(self, search: Search, facts: GroupFacts) -> float | None:
        """Seconds until a search ends by its own limit of time; ``None`` if it has none."""
        if search.time_budget_s is None:
            return None
        return max(0.0, search.time_budget_s - (0.0 if facts.first_start is None else self._now() - facts.first_start))

    def _play(self, group_id: str, held: int, start_s: float, limit: float | None) -> None:
        """Begins a play of a group, unless one is under way, or the core is to be left alone."""
        if self._is_closed or (self._thread is not None and self._thread.is_alive()):
            return
        if group_id in self._played and self._clock.now() < self._rests_until:
            return
        inbox = self._inboxes[group_id]
        assert inbox.group.search is not None
        now = self._now()
        shown = {trial.id: trial.shown for trial in inbox.group if trial.shown is not None and trial.shown.iterations}
        search = search_now(
            *(self._state, group_id, inbox.group.search, now), ends_in=limit, shown=shown, start_s=start_s
        )
        if search is None:
            return
        numbers = _to_play(held, self._numbers.pop(group_id, {}))
        self._thread = AwaitedThread("fluid-forecast", partial(self._work, group_id, search, now, numbers))
        self._thread.start()

    # -- in the thread of a play ---------------------------------------------------------------------------

    def _work(self, group_id: str, search: SearchNow, at: float, numbers: list[int]) -> None:
        began = thread_seconds()
        try:
            ends = self._ends(search, numbers)
            if ends is not None:
                self._played[group_id] = _Played(at, ends)
        except Exception:
            _log.warning("a search could not be forecast", exc_info=True)
        finally:
            self._rests_until = self._rest(thread_seconds() - began)

    def _ends(self, search: SearchNow, numbers: list[int]) -> dict[int, EndDistribution] | None:
        """Plays a search, a draw at a time, so that other threads get their turns; ``None`` if it was broken off."""
        trials = len(search.live) + search.coming
        draws = max(_LEAST_DRAWS, min(_DRAWS, _MOST_RUNS // max(1, trials)))
        player = Player(search, draws=draws)
        ends = {}
        for place, devices in enumerate(numbers):
            found = []
            for draw in range(draws if place == 0 else min(draws, _DRAWS_BESIDE)):
                if self._is_closed:
                    return None
                began = thread_seconds()
                found.append(player.end_of(draw, devices))
                nap(_NAP * (thread_seconds() - began))
            ends[devices] = EndDistribution.of_draws(found)
        return ends

    def _rest(self, used: float) -> float:
        return max(self._rests_until, self._clock.now()) + _REST * used

    # -- from any other thread -----------------------------------------------------------------------------

    def await_play(self) -> bool:
        """Waits until the play under way has ended; returns whether there was one. The session does not wait."""
        thread = self._thread
        if thread is None or threading.get_ident() == self._session_thread:
            return False
        thread.join(_FIRST_S)
        return True


# -- forecasts -----------------------------------------------------------------------------------


T = TypeVar("T")
#: The odds that displays show.
SHOWN_ODDS = (0.1, 0.5, 0.9)
#: Seconds for which displays show a forecast, and further ones for each trial of the session that has not ended: a
#: forecast takes up to 20 microseconds per trial, and displays are drawn several times a second.
_SHOWN_FOR_S, _PER_TRIAL_S = 1.0, 2e-3


class SearchForecaster(Protocol):
    """Forecasts searches. Called in the session's thread."""

    def end_on(self, group_id: str, devices: int | None) -> EndDistribution | None:
        """When the search of a group ends, from now, on so many devices, or on those held; ``None`` if unknown."""
        ...

    def age_s(self, group_id: str) -> float:
        """Seconds since that was worked out."""
        ...

    def await_play(self) -> bool:
        """Waits until a forecast under way is there; returns whether one was. The session does not wait."""
        ...

    def close(self) -> None:
        """Forecasts nothing any more."""
        ...


@dataclass(frozen=True, slots=True)
class _ShownForecast:
    """What displays show of a group."""

    at: float
    ends: EndDistribution | None
    age_s: float


class Forecasts:
    """Forecasts the groups of a session.

    Args:
        state: the engine.
        now: the time of its events, seconds.
        inboxes: the groups, by id.
        in_thread: runs a function in the session's thread, and returns what it does.
        folder: gets forecasts every now and then. ``None`` for none but those that are asked for: on a virtual clock, a
            forecast takes longer than what it forecasts.

    Attributes:
        searches: forecasts those of searches.
    """

    def __init__(
        self,
        state: EngineState,
        now: Callable[[], float],
        inboxes: Mapping[str, GroupInbox],
        in_thread: Callable[[Callable[[], Any]], Any],
        folder: RunFolder | None,
    ) -> None:
        self.searches: SearchForecaster = PlayedForecasts(state, now, inboxes)
        self._state = state
        self._now = now
        self._inboxes = inboxes
        self._in_thread = in_thread
        self._shown: dict[str, _ShownForecast] = {}
        if folder is not None:
            ForecastLog(folder, state, self.shown, now)

    # -- from any thread -----------------------------------------------------------------------------------

    def forecast(self, group_id: str, q: Sequence[float]) -> Forecast | None:
        """When a group ends with each of these odds; ``None`` if too little was measured, or a trial hangs.

        Raises:
            InvalidFieldError: ``q`` is no sequence of odds in (0, 1).
            FluidError: the session has ended.
        """
        odds = require_odds_of("q", q)

        def forecast() -> Forecast | None:
            ends = self.end_on(group_id, None)
            return None if ends is None else Forecast(seconds=ends.quantiles(odds), age_s=self._age_s(group_id))

        found: Forecast | None = self._in_thread(forecast)
        if found is None and self.searches.await_play():
            found = self._in_thread(forecast)
        return found

    def stragglers(self, group_id: str, most: int) -> list[tuple[str, float]]:
        """The trials that are most likely to end last, with their odds, the likeliest first.

        Raises:
            InvalidFieldError: ``most`` is below 1.
            FluidError: the session has ended.
        """
        most = require_integer("most", most, at_least=1)

        def stragglers() -> list[tuple[str, float]]:
            left = trials_left(self._state, group_id, self._now(), coming=self._coming(group_id))
            if left is None:
                return []
            last = left.forecast()
            odds = zip(left.trial_ids, last.odds_last.tolist(), left.left.counts.tolist(), strict=True)
            known = [(trial_id, each) for trial_id, each, counts in odds if counts and trial_id]
            return sorted(known, key=lambda pair: -pair[1])[:most]

        found: list[tuple[str, float]] = self._in_thread(stragglers)
        return found

    def close(self) -> None:
        """Ends what is under way."""
        self.searches.close()

    # -- in the session's thread ---------------------------------------------------------------------------

    def end_on(self, group_id: str, devices: int | None) -> EndDistribution | None:
        """When a group ends, from now, on so many devices from now on.

        Args:
            group_id: the group.
            devices: how many; ``None`` for those that the session has.

        Returns:
            Its distribution; ``None`` if too little was measured, a trial hangs, or one waits for devices that there
            are not.
        """
        if self._state.hangs(group_id, self._now()) or self._state.awaited(group_id):
            return None
        search = self._inboxes[group_id].group.search
        if search is not None:
            return self.searches.end_on(group_id, devices)
        if not self._state.groups[group_id].open:
            return EndDistribution.certain(0.0)
        left = trials_left(self._state, group_id, self._now(), devices=devices)
        return None if left is None else left.forecast().ends

    def lasts(self) -> float:
        """Seconds for which displays show a forecast: the longer, the longer one takes and the more there are."""
        left = [group.open for group in self._state.groups.values() if group.open]
        return max(_SHOWN_FOR_S, _PER_TRIAL_S * sum(left) * len(left))

    def shown(self, group_id: str, lasts: float | None = None) -> Forecast | None:
        """The forecast that displays show: it is made anew every second or few, and counts down between.

        Args:
            group_id: the group.
            lasts: what :meth:`lasts` says; ``None`` to ask it.
        """
        now, shown = self._now(), self._shown.get(group_id)
        if shown is None or not shown.at <= now < shown.at + (self.lasts() if lasts is None else lasts):
            ends = self.end_on(group_id, None)
            if shown is None:  # No display asks for those of groups that have ended.
                groups = self._state.groups
                self._shown = {known: each for known, each in self._shown.items() if groups[known].open}
            shown = self._shown[group_id] = _ShownForecast(now, ends, self._age_s(group_id))
        if shown.ends is None:
            return None
        passed = now - shown.at
        return Forecast(seconds=shown.ends.later(-passed).quantiles(SHOWN_ODDS), age_s=shown.age_s + passed)

    def _coming(self, group_id: str) -> int:
        """Trials that a group's search is still to submit; 0 if that is unknown, or it extends trials."""
        search = self._inboxes[group_id].group.search
        if search is None or search.trials is None or search.extends:
            return 0
        return max(0, search.trials - self._state.groups[group_id].known)

    def _age_s(self, group_id: str) -> float:
        is_search = self._inboxes[group_id].group.search is not None
        return self.searches.age_s(group_id) if is_search else 0.0


def require_odds_of(name: str, value: object) -> list[float]:
    """Returns several probabilities in (0, 1).

    Raises:
        InvalidFieldError: it is no sequence of at least one.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not len(value):
        raise InvalidFieldError(name, value, "must be a sequence of odds, such as (0.1, 0.5, 0.9)")
    return [require_odds(name, each) for each in value]
