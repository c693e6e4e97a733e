"""Preemption: which running trials to interrupt for waiting ones, if trials outnumber devices and cannot be widened.

Without preemption the last trial runs alone while devices idle. McNaughton's wrap-around rule (Scheduling with
deadlines and loss functions, 1959) avoids that: trials that are interrupted between two iterations all end within
max(longest, work / n), up to an iteration.

A trial is preempted only when a waiting one has no slack left (least laxity first), so preemptions are few and the
first trials end as early as without. Work that can begin only after a trial counts as part of it: its level, as in
Muntz and Coffman (Preemptive scheduling of real-time tasks, 1970).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

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
