"""Writes forecasts of a session's groups into its run folder, for the pages and reports that are made from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fluid._logs import logger_of
from fluid.engine.commands import Command
from fluid.engine.engine import EngineState
from fluid.engine.events import Event
from fluid.session.forecast import Forecast
from fluid.session.run_folder import RunFolder

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

    def _follow(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
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
