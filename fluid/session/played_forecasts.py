"""Forecasts of searches, by playing them from now to their end in a thread that gives way to all others.

A play begins when a forecast is asked for, and takes what the engine knows at that moment. Over time, plays take one
hundredth of a core: one that took a second of it is followed by 99 without any. Between plays, the newest one holds,
counted down. Nothing runs while no forecast is asked for.

The thread sleeps after each draw, of a millisecond or so, as long as that took. It has no lower priority in the eyes
of the operating system: on busy cores that would take it off its core while it holds the interpreter's lock, for which
the session's thread would wait.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from fluid._clock import MonotonicClock, nap, thread_seconds
from fluid._logs import logger_of
from fluid._waiting import AwaitedThread
from fluid.engine.engine import EngineState
from fluid.planners.instance import EndDistribution
from fluid.session.inbox import GroupInbox
from fluid.session.run_overheads import RunOverheads
from fluid.session.searches_now import search_now
from fluid.session.status import GroupFacts
from fluid.simulation.playing import Player
from fluid.simulation.search_now import SearchNow
from fluid.trialgroup import Search

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
_log = logger_of(__name__)


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
