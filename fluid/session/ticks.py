"""Ticks: when the pump lets the engine rebalance and preempt."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from fluid.engine import tuning
from fluid.engine.engine import EngineState
from fluid.engine.events import Event, TrialStarted


class Ticks:
    """Decides when a tick comes: once no event has come for a while, or at the latest a while after one was wanted.

    Args:
        state: the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        #: Seconds that the latest trials took to be set up.
        self._setups: deque[float] = deque([0.0], maxlen=tuning.LATEST_SETUPS)
        #: Since when the engine wants a tick and events come one after another; ``None`` if it wants none.
        self._wanted_at: float | None = None
        #: Before that, a tick comes only where no event does.
        self._pause_until = 0.0

    def heard(self, events: Iterable[Event]) -> None:
        """Learns from events how long set-ups take."""
        self._setups += [event.seconds for event in events if isinstance(event, TrialStarted)]

    def until(self, now: float) -> float | None:
        """Seconds without an event after which a tick is due; ``None`` if none is.

        Ray Tune adds the next trial only after it has seen the last result. So an idle device is kept free for one
        set-up time before a running trial is widened onto it: this is 2-competitive, as in ski rental.
        """
        if not self._state.wants_tick:
            return None
        if not self._state.only_spreads:
            return tuning.SETTLING_S
        return max(tuning.SETTLING_S, self._state.changed_at + self._kept_free() - now)

    def is_overdue(self, now: float, waited: float) -> bool:
        """Whether a tick is due although events keep coming; has to be asked after each wait for events.

        Args:
            now: seconds.
            waited: how long the latest wait for events took, seconds.
        """
        if not self._state.wants_tick:
            self._wanted_at = None
            return False
        if self._wanted_at is None or waited >= tuning.SETTLING_S:
            self._wanted_at = now
        if now < max(self._wanted_at + tuning.LATEST_TICK_S, self._pause_until):
            return False
        return not self._state.only_spreads or now >= self._wanted_at + self._kept_free()

    def ticked(self, began: float, ended: float) -> None:
        """Learns how long a tick took: it sets how soon the next one may come although events keep coming."""
        self._wanted_at = None
        self._pause_until = ended + (ended - began) * (1.0 / tuning.MOST_TICKING - 1.0)

    def _kept_free(self) -> float:
        """Seconds for which an idle device is kept free."""
        return min(statistics.median_low(self._setups), tuning.LONGEST_SETUP_S)
