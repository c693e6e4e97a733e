"""Preemption: which running trials to interrupt for waiting ones, if trials outnumber devices and cannot be widened.

Without preemption the last trial runs alone while devices idle. McNaughton's wrap-around rule (Scheduling with
deadlines and loss functions, 1959) avoids that: trials that are interrupted between two iterations all end within
max(longest, work / n), up to an iteration.

A trial is preempted only when a waiting one has no slack left (least laxity first), so preemptions are few and the
first trials end as early as without. Work that can begin only after a trial counts as part of it: its level, as in
Muntz and Coffman (Preemptive scheduling of real-time tasks, 1970).

What it gains (``benchmarks/paper_shapes.py``, ``benchmarks/ray_tune.py`` with the workload hyperband): the last rung
does not run alone while devices idle; docs/theory.md, section 6 has the bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from fluid.engine.core import SessionState
from fluid.engine.policy import Policy, Preempt, Proposal
from fluid.engine.records import TrialRecord
from fluid.trialgroup import TrialState

#: With more trials waiting per device, none is preempted: each device has further work to fill gaps with, and looking
#: for preemptions costs time (benchmarks/engine.py).
MOST_WAITING = 2

#: Share of an iteration by which a gain must exceed the cost, as trials are preempted only between two iterations.
_ROUNDING = 0.7


class Demand(NamedTuple):
    """A trial that runs or waits.

    Attributes:
        row: the caller's number of the trial.
        seconds: predicted work left, at its present or future width.
        after: predicted seconds, on one device, of work that can begin only after the trial.
        step: predicted seconds per iteration.
        width: share of a device, or number of devices.
        cost: seconds to preempt a running trial and to resume it elsewhere.
        yields: whether a running trial may be preempted, or a waiting one may preempt.
    """

    row: int
    seconds: float
    after: float
    step: float
    width: float = 1.0
    cost: float = 0.0
    yields: bool = True

    @property
    def level(self) -> float:
        """Seconds of the critical path that begins with it."""
        return self.seconds + self.after


class Preemption(NamedTuple):
    """Interrupt ``running`` at the end of its iteration, and give its device to ``waiting``."""

    running: int
    waiting: int


class PreemptionPlan(NamedTuple):
    """The preemptions to make now.

    Attributes:
        preemptions: at most one for each trial.
        again_in: seconds until the next preemption may be due if nothing else happens; infinite if none.
    """

    preemptions: list[Preemption]
    again_in: float


def choose_preemptions(running: Sequence[Demand], waiting: Sequence[Demand], n: int) -> PreemptionPlan:
    """Chooses the running trials to preempt now.

    Args:
        running: the trials that hold devices.
        waiting: the trials that wait for one, in starting order.
        n: number of devices.
    """
    everyone = (*running, *waiting)
    if not running or not waiting:
        return PreemptionPlan([], math.inf)
    work = sum(demand.seconds * demand.width for demand in everyone)
    horizon = max(work / n, *(demand.level for demand in everyone))
    victims = [demand for demand in running if demand.yields and demand.seconds >= (1.0 + _ROUNDING) * demand.step]
    victims = sorted(victims, key=lambda demand: demand.level)[::-1]  # The next one is the last.
    # When devices become idle without preemption.
    ends = sorted(demand.seconds for demand in running)
    ahead = {demand.row: place for place, demand in enumerate(waiting)}
    preemptions: list[Preemption] = []
    again_in = math.inf
    for demand in sorted(waiting, key=lambda demand: -demand.level):
        if not victims:
            break
        victim = victims[-1]
        worth = _ROUNDING * victim.step + victim.cost
        slack = horizon - demand.level
        place = max(0, ahead[demand.row] - len(preemptions))
        starts_in = ends[place] if place < len(ends) else math.inf
        if not demand.yields or starts_in - slack <= worth:
            continue
        spare = (1.0 + _ROUNDING) * victim.step
        if slack > spare:
            again_in = min(again_in, slack - spare)
            continue
        # The waiting trial loses an iteration of slack until the victim's iteration has ended.
        if demand.level - victim.level + victim.step < worth:
            again_in = min(again_in, victim.step)
            continue
        preemptions.append(Preemption(victim.row, demand.row))
        victims.pop()
        del ends[bisect_left(ends, victim.seconds)]
        insort(ends, victim.step + demand.seconds)
    return PreemptionPlan(preemptions, again_in)


# -- preemption ----------------------------------------------------------------------------------
#
# Chooses running trials to preempt for waiting ones, so that all end earlier (:mod:`fluid.policies.preemption`).


class Preemptions(Policy):
    """Chooses which trial is preempted for which, and when to choose again.

    Args:
        core: the state of the session.
        wanted: whether the planner preempts.
    """

    def __init__(self, core: SessionState, wanted: bool) -> None:
        self._core = core
        self._wanted = wanted
        self._due = math.inf
        #: Row of a trial that took over another's device -> iterations that it had done.
        self._came: dict[int, int] = {}

    @property
    def wants_tick(self) -> bool:
        """Whether it is time to choose again: a waiting trial may be late by now."""
        return self._core.now >= self._due and bool(self._core.occupancy)

    def exchange(self) -> list[Proposal]:
        """Running trials that leave for waiting ones, if all end earlier that way."""
        return [Preempt(leaving, coming) for leaving, coming in self.choose()]

    def choose(self) -> list[tuple[TrialRecord, TrialRecord]]:
        """Returns the running trials to preempt now, each with the trial that takes its device over."""
        core = self._core
        self._due = math.inf
        if not self._wanted or len(core.occupancy) < 2 or core.resizing:
            return []
        if not 0 < len(core.queue) <= MOST_WAITING * len(core.occupancy):
            return []
        first = core.queue.first_priority
        owner = core.queue.first_owner if core.queue.ranks else None
        # Two trials that are equally late would take turns for ever, without an iteration in between.
        trials = core.trials.by_row
        self._came = {
            row: done for row, done in self._came.items() if row in trials and trials[row].progress.done == done
        }
        alone = [row for row in core.allocations.alone() if row not in self._came]
        victims = {row for row in alone if self._may_be_preempted(trials[row], first)}
        if owner is not None:
            victims = {row for row in victims if core.sharing.outranks(owner, core.trials.by_row[row].owner)}
        if not victims:
            return []
        running = [core.trials.by_row[row] for row in core.allocations.running]
        waiting = [core.trials.by_row[row] for row in core.queue]
        if any(trial.placement.preemption is not None for trial in running):
            return []
        if not all(core.estimates.is_measured(trial) for trial in (*running, *waiting)):
            return []
        pace = core.estimates.usual_pace()
        plan = choose_preemptions(
            [self._demand(trial, pace, trial.row in victims) for trial in running],
            [self._demand(trial, pace, self._may_take_over(trial, first, owner)) for trial in waiting],
            len(core.occupancy),
        )
        self._due = core.now + plan.again_in
        preemptions = [
            (core.trials.by_row[swap.running], core.trials.by_row[swap.waiting]) for swap in plan.preemptions
        ]
        chosen = [(leaving, coming) for leaving, coming in preemptions if self._fits(leaving, coming)]
        self._came.update((coming.row, coming.progress.done) for _, coming in chosen)
        return chosen

    def _demand(self, trial: TrialRecord, usual_pace: float, yields: bool) -> Demand:
        estimates = self._core.estimates
        seconds = estimates.seconds_left(trial)
        holds = trial.row in self._core.occupancy.held
        width = 1.0 / estimates.co_residents(trial) if holds and trial.width < 1.0 else trial.width
        step = seconds / max(1, trial.progress.left)
        cost = estimates.of_key(trial).interruption()
        return Demand(trial.row, seconds, trial.progress.follow_up_iterations * usual_pace, step, width, cost, yields)

    @staticmethod
    def _may_be_preempted(trial: TrialRecord, first: tuple[float, float]) -> bool:
        if trial.state is not TrialState.RUNNING or trial.placement.preemption is not None or trial.calls:
            return False
        return trial.spec.can_save and trial.priority <= first

    @staticmethod
    def _may_take_over(trial: TrialRecord, first: tuple[float, float], owner: int | None) -> bool:
        if owner is not None and trial.owner != owner:
            return False
        return trial.width <= 1.0 and trial.priority == first and not trial.pinned and not trial.calls

    def _fits(self, leaving: TrialRecord, coming: TrialRecord) -> bool:
        """Whether a trial may have the device of a preempted one, and fits beside the state that that leaves there."""
        core = self._core
        (device,) = core.occupancy.held[leaving.row]
        allowed = core.scheduling.placing.allowed(coming)
        if allowed is not None and device not in allowed:
            return False
        return core.memory.fits_in_place_of(device, core.estimates.need_on(coming, device), leaving.row)
