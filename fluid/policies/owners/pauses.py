"""Pauses for deadlines: running trials that make room for a group that would miss its deadline otherwise.

Ranks alone take no device away: where all are in use for long, a group comes too late whatever its rank. A trial pauses
for it only if the expected cost of all groups falls by more than the pauses cost (docs/theory.md, section 15).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from fluid.engine.core import SessionState
from fluid.engine.events import IterationDone, TrialStarted
from fluid.engine.policy import Policy, Preempt, Proposal
from fluid.engine.records import TrialRecord
from fluid.policies.owners.lateness import Pause, RunningPart, Unit, ends_of, gain_of_pauses
from fluid.policies.owners.shares import SHARES_S, GroupShares
from fluid.policies.owners.units import may_pause
from fluid.trialgroup import TrialState

#: A trial pauses for deadlines so many times.
MOST_PAUSES = 2
#: Odds of missing a deadline that are left as they are, and by which pauses have to lower them.
_LEAST_ODDS = 0.02
#: Groups for which pauses are sought on a tick, the first in order that may be late.
_MOST_SOUGHT = 3


class DeadlinePauses(Policy):
    """Chooses the running trials that pause for a group with a deadline.

    Args:
        core: the state of the session.
        shares: which groups come first.
    """

    def __init__(self, core: SessionState, shares: GroupShares) -> None:
        self._core = core
        self._shares = shares
        #: Row -> how often a trial has paused for a deadline.
        self._times: dict[int, int] = {}
        self._wants_tick = False
        self._looked_at = -math.inf
        #: Whether a group may have been late at the last look.
        self._is_late = False

    def iterated(self, trial: TrialRecord, event: IterationDone, observed: int) -> None:
        """Looks again, as more is known of how long trials take, or time has passed."""
        core = self._core
        if core.queue and self._shares.ranks and self._shares.knows_lateness:
            self._wants_tick = trial.pace.observed == observed or core.now - self._looked_at >= SHARES_S

    def started(self, trial: TrialRecord, event: TrialStarted) -> None:
        """Looks again where a group may be late, as a trial can pause that could not at the last look."""
        self._wants_tick |= self._is_late

    @property
    def wants_tick(self) -> bool:
        """Whether it is time to look again."""
        return self._wants_tick and bool(self._core.occupancy)

    def exchange(self) -> Iterator[Proposal]:
        """Running trials that pause after their iteration, each for a waiting one."""
        for leaving, coming in self.choose():
            yield Preempt(leaving, coming)
            if leaving.placement.preemption is not None:  # It was told to.
                self._times[leaving.row] = self._times.get(leaving.row, 0) + 1

    def left(self, trial: TrialRecord) -> None:
        """Forgets a trial that has ended."""
        if trial.state.ended:
            self._times.pop(trial.row, None)

    def forgotten(self, trial: TrialRecord) -> None:
        """Knows it no more."""
        self._times.pop(trial.row, None)

    def choose(self) -> list[tuple[TrialRecord, TrialRecord]]:
        """The trials that are to pause now, each with the one that takes its device over."""
        core, self._wants_tick, self._is_late = self._core, False, False
        if core.drained or not core.queue or core.resizing:
            return []
        if not self._shares.ranks or not self._shares.knows_lateness:
            return []
        self._looked_at = core.now
        self._shares.update()
        by_row = core.trials.by_row
        running = [by_row[row] for row in core.allocations.alone()]
        if any(trial.placement.preemption is not None for trial in running):
            return []
        victims = {trial.row: trial for trial in running if self._may_pause(trial)}
        order, devices = self._shares.units_in_order()
        ends = ends_of(order, devices)
        late = [
            place
            for place, (unit, end) in enumerate(zip(order, ends, strict=True))
            if unit.trials and unit.ahead and end.late(unit.ahead[0][0]) > _LEAST_ODDS
        ]
        self._is_late = bool(late)
        for place in late[:_MOST_SOUGHT]:
            pairs = self._pairs(order, place, victims)
            stalls = [self._core.estimates.of_key(leaving).interruption() for leaving, _, _ in pairs]
            pauses = [
                Pause(leaving.owner, part, stall) for (leaving, part, _), stall in zip(pairs, stalls, strict=True)
            ]
            count = _best_count(order, devices, order[place], pauses)
            if count:
                return [(leaving, coming) for leaving, _, coming in pairs[:count]]
        return []

    def _pairs(
        self, order: Sequence[Unit], place: int, victims: dict[int, TrialRecord]
    ) -> list[tuple[TrialRecord, RunningPart, TrialRecord]]:
        """Trials that could pause for a unit, the last unit's first, each with the waiting one that it is for."""
        core, unit = self._core, order[place]
        waiting = list(islice(self._waiting(unit.owner), len(victims)))
        pairs = []
        for behind in reversed(order[place + 1 :]):
            for part in sorted(behind.running, reverse=True):
                leaving = victims.get(part.row)
                if leaving is None or behind.priority > unit.priority:
                    continue
                if behind.ahead and behind.ahead[0][0] <= unit.ahead[0][0] and not core.estimates.is_measured(leaving):
                    continue  # As far as is known, the one that is due first may need all the time that it has.
                (device,) = core.occupancy.held[leaving.row]
                coming = next((trial for trial in waiting if self._fits(leaving, trial, device)), None)
                if coming is not None:
                    waiting.remove(coming)
                    pairs.append((leaving, part, coming))
        return pairs

    def _waiting(self, owner: int) -> Iterator[TrialRecord]:
        """The waiting trials of an owner that could take a device over, in starting order."""
        for row in self._core.queue:
            trial = self._core.trials.by_row[row]
            if trial.owner == owner and not (trial.width > 1.0 or trial.pinned or trial.calls or trial.sharing_group):
                yield trial

    def _fits(self, leaving: TrialRecord, coming: TrialRecord, device: int) -> bool:
        """Whether a trial may have the device of a paused one, and fits beside the state that that leaves there."""
        core = self._core
        allowed = core.scheduling.placing.allowed(coming)
        if allowed is not None and device not in allowed:
            return False
        return core.memory.fits_in_place_of(device, core.estimates.need_on(coming, device), leaving.row)

    def _may_pause(self, trial: TrialRecord) -> bool:
        if trial.state is not TrialState.RUNNING:
            return False
        return self._times.get(trial.row, 0) < MOST_PAUSES and may_pause(trial)


def _best_count(order: Sequence[Unit], devices: float, unit: Unit, pauses: Sequence[Pause]) -> int:
    """How many of the trials are to pause, the first of them; 0 if that gains no more than it costs."""
    most, best, count = 0.0, 0, 1
    worth = _LEAST_ODDS * unit.miss_s * sum(cost for _, cost in unit.ahead)
    while count <= len(pauses):
        stalls = sum(each.stall for each in pauses[:count])
        gain = gain_of_pauses(order, devices, pauses[:count])
        if gain > max(worth, stalls) and gain - stalls > most:
            most, best = gain - stalls, count
        count = len(pauses) if count < len(pauses) < 2 * count else 2 * count
    return best
