"""Forecasts of a session's groups: when each ends, with odds, and which trial is likely to end last.

Groups of trials are forecast in closed form (:mod:`fluid.forecasting.group`), those of a search by a forecaster
of searches, as what a search submits next depends on results that are to come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fluid.engine.engine import EngineState
from fluid.errors import InvalidFieldError, require_integer
from fluid.planners.instance import EndDistribution, require_odds
from fluid.session.forecast import Forecast
from fluid.session.forecast_log import ForecastLog
from fluid.session.inbox import GroupInbox
from fluid.session.played_forecasts import PlayedForecasts
from fluid.session.run_folder import RunFolder
from fluid.session.trials_left import trials_left

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
