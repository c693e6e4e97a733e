"""Ends what cannot end by a deadline: of a sweep, or of a group of trials."""

from __future__ import annotations

import math
from collections.abc import Callable

from fluid.policies.engine import EngineState
from fluid.session.facts import DeadlineInForce
from fluid.session.scaling.last_iterations import Foresight

#: Seconds between two looks at what can still end in time, at least.
LOOKS_S = 0.05
#: And after so large a share of the time left, at most.
_LOOKS_SHARE = 0.1
#: The next look comes after so many times the seconds that one took, so that they take 2 % of the thread.
LOOK_COSTS = 50.0


class InTime:
    """Tells sweeps and groups what cannot end by their deadlines. For the session's thread.

    Args:
        state: the engine.
        now: tells the time.
        odds: in (0, 1), with which something counts as in time.

    Attributes:
        foresight: what it judges trials by.
    """

    def __init__(self, state: EngineState, now: Callable[[], float], odds: float) -> None:
        self.foresight = Foresight(state, odds)
        self._state = state
        self._now = now

    def look(self, deadline: DeadlineInForce, now: float) -> None:
        """Looks at what has a deadline, if it is time to, and sets when to look again."""
        if deadline.sweep is not None and now >= deadline.look_at:
            deadline.look_at = self._look(deadline, now)

    def _look(self, deadline: DeadlineInForce, now: float) -> float:
        sweep = deadline.sweep
        assert sweep is not None
        if now >= deadline.at:
            sweep.close(deadline.reason, ())
            return math.inf
        trials = [trial for name in sweep.open_trials() if (trial := self._state.trials.get(name)) is not None]
        found = self.foresight.until(deadline.at, now, trials, saves=False)
        if found.last:
            sweep.cut(deadline.reason, found.last)
        # From then on, no trial that the sweep may still start would complete an iteration.
        if found.soonest_s < math.inf:
            deadline.soonest_s = found.soonest_s
        known = deadline.soonest_s < math.inf
        closes_at = math.nextafter(deadline.at - deadline.soonest_s, math.inf) if known else math.inf
        if now >= closes_at and not found.wait:
            sweep.close(deadline.reason, found.run_on)
        return self.again(now, min(found.next_at, closes_at if now < closes_at else math.inf), deadline.at)

    def again(self, now: float, at: float, end_at: float) -> float:
        """When to look again: also long before it matters, as paces change; looks take a small share of the thread."""
        soonest = now + max(LOOKS_S, LOOK_COSTS * (self._now() - now))
        return min(max(soonest, min(at, now + _LOOKS_SHARE * (end_at - now))), max(end_at, now))
