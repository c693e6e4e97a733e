"""Which trials run their last iteration, as a moment nears at which all is to have ended: each by its own forecast.

A trial that is likely to end by then runs on. Of one that is not, an iteration is the last if no further one would be
over, and saved, by then, with the odds asked for; it is told during that iteration. One that waits starts no more if it
would neither end nor complete an iteration. What is likely is judged again and again, as paces become known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import NormalDist, median_low

from fluid.engine.records import TrialRecord
from fluid.policies.engine import EngineState
from fluid.trialgroup import TrialState

#: Time to save: so many times what a save took, and so many seconds more.
_SAVE_MARGIN, SAVE_MORE_S = 1.25, 0.5
#: A trial is looked at after so large a share of its iteration: it may end a little later than predicted.
_INTO = 0.05
#: An iteration of a trial whose own pace is not known takes at most so many times what is predicted: where trials
#: differ, a deadline would else end many that can end by it.
_NOT_ITS_OWN = 1.25
_RUNS = frozenset([TrialState.STARTING, TrialState.RUNNING, TrialState.RESIZING])


@dataclass(slots=True)
class LastIterations:
    """What can still be done until a moment.

    Attributes:
        last: trials that run, of which no further iteration would be over in time.
        run_on: the others that run.
        too_late: trials that wait, and would complete no iteration in time.
        wait: the others that wait.
        soonest_s: seconds that the shortest iteration takes of a trial that runs or waits; infinite if none is known.
        next_at: when to look again, seconds; infinite if nothing can change.
    """

    last: list[str] = field(default_factory=list)
    run_on: list[str] = field(default_factory=list)
    too_late: list[str] = field(default_factory=list)
    wait: list[str] = field(default_factory=list)
    soonest_s: float = math.inf
    next_at: float = math.inf


class Foresight:
    """Judges trials by the odds that a deadline is to be met with.

    Args:
        state: the engine.
        odds: in (0, 1).
    """

    def __init__(self, state: EngineState, odds: float) -> None:
        self._state = state
        self._z = NormalDist().inv_cdf(odds)

    def until(self, end: float, now: float, trials: Iterable[TrialRecord], *, saves: bool) -> LastIterations:
        """Looks at trials that run or wait; at none that was told before.

        Args:
            end: by when all is to be over, seconds.
            now: the time.
            trials: those in question.
            saves: whether they are to be saved by then.
        """
        found = LastIterations()
        for trial in trials:
            if trial.held:
                continue
            if trial.state in _RUNS and trial.row in self._state.occupancy.held:
                if trial.placement.preemption is None:
                    self._runs(found, trial, end, now, saves=saves)
            elif trial.state is TrialState.QUEUED:
                self._waits(found, trial, end, now, saves=saves)
        return found

    def save_s(self, trials: Iterable[TrialRecord]) -> float:
        """Seconds that it takes at most until any of these trials is saved, once it stands still."""
        return max(map(self._save_s, trials), default=SAVE_MORE_S)

    def _runs(self, found: LastIterations, trial: TrialRecord, end: float, now: float, *, saves: bool) -> None:
        estimates, place, left = self._state.estimates, trial.placement, trial.progress.left
        if not estimates.is_measured(trial) or (saves and not trial.spec.can_save):
            found.run_on.append(trial.trial_id)  # It runs until the end itself.
            return
        step, save = estimates.pace(trial) * estimates.stretch(trial), self._save_s(trial) if saves else 0.0
        late = step * self._factor(trial)
        found.soonest_s = min(found.soonest_s, late + save)
        begun = place.since if place.iterates else now
        over = max(now, begun + step)  # the iteration in flight
        if over + (left - 1) * step > end and left > 1 and over + late + save > end:
            found.last.append(trial.trial_id)
            return
        found.run_on.append(trial.trial_id)
        if left > 1:
            matters = end - save - step - late
            found.next_at = min(found.next_at, matters if now < matters else over + _INTO * step)

    def _waits(self, found: LastIterations, trial: TrialRecord, end: float, now: float, *, saves: bool) -> None:
        estimates = self._state.estimates
        if estimates.is_measured(trial):
            starts, save = estimates.of_key(trial).starts, self._save_s(trial) if saves else 0.0
            step, start = estimates.pace(trial), median_low(starts) if starts else 0.0
            needs = start + min(step * trial.progress.left, step * self._factor(trial) + save)
            found.soonest_s = min(found.soonest_s, needs)
            if now + needs > end:
                found.too_late.append(trial.trial_id)
                return
            found.next_at = min(found.next_at, math.nextafter(end - needs, math.inf))
        found.wait.append(trial.trial_id)

    def _factor(self, trial: TrialRecord) -> float:
        """How many times longer than predicted the next iteration may take, with these odds."""
        factor = math.exp(self._z * self._state.estimates.sigma(trial, 1))
        return factor if trial.pace.seconds is not None else min(factor, _NOT_ITS_OWN)

    def _save_s(self, trial: TrialRecord) -> float:
        saves = self._state.estimates.of_key(trial).saves
        return _SAVE_MARGIN * (median_low(saves) if saves else 0.0) + SAVE_MORE_S
