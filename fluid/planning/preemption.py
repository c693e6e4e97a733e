"""Who makes way for whom, where more trials are left than devices and none can be spread over several.

One after the other, the last of them runs alone while devices idle. A trial that can be interrupted between two
iterations need not: run in two parts, it fills the time that the others leave, and all end within
max(longest, work / n), up to an iteration (McNaughton, Scheduling with deadlines and loss functions, 1959).

Whoever has least slack (least laxity first) must run, and nobody is interrupted before that: so trials are interrupted
as rarely as can be, and the first ones end as early as without. What can only begin once a trial is done counts as if
it were part of it, which is the level of Muntz and Coffman (Preemptive scheduling of real-time tasks, 1970).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

#: Iterations of late that are not worth an interruption: trials can be interrupted only between two.
_ROUNDING = 0.7


class Demand(NamedTuple):
    """A trial that runs or waits.

    Attributes:
        row: the number by which whoever runs it knows it.
        seconds: predicted work left, at the width it has or is to have.
        after: predicted seconds, on one device, of what can only begin then.
        step: predicted seconds of one of its iterations.
        width: of a device, or in devices.
        cost: seconds that it takes to interrupt it and to go on with it elsewhere, if it runs.
        yields: whether it may be interrupted, if it runs, or may take another's place, if it waits.
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
        """Seconds until all that follows from it can be done at the earliest."""
        return self.seconds + self.after


class Preemption(NamedTuple):
    """Interrupt ``running`` at the end of its iteration, and give its device to ``waiting``."""

    running: int
    waiting: int


class PreemptionPlan(NamedTuple):
    """What to do.

    Attributes:
        swaps: at most one for each trial.
        again_in: seconds after which a trial that waits will be pressed, if nothing else happens, or infinite.
    """

    preemptions: list[Preemption]
    again_in: float


def choose_preemptions(running: Sequence[Demand], waiting: Sequence[Demand], n: int) -> PreemptionPlan:
    """Says which running trials make way now.

    Args:
        running: the trials that hold devices.
        waiting: those that do not, in starting order.
        n: number of devices.
    """
    everyone = (*running, *waiting)
    if not running or not waiting:
        return PreemptionPlan([], math.inf)
    work = sum(demand.seconds * demand.width for demand in everyone)
    horizon = max(work / n, *(demand.level for demand in everyone))
    victims = [demand for demand in running if demand.yields and demand.seconds >= (1.0 + _ROUNDING) * demand.step]
    #: when devices fall free, if nobody is interrupted
    ends = sorted(demand.seconds for demand in running)
    ahead = {demand.row: place for place, demand in enumerate(waiting)}
    preemptions: list[Preemption] = []
    again_in = math.inf
    for demand in sorted(waiting, key=lambda demand: -demand.level):
        if not victims:
            break
        victim = min(victims, key=lambda other: other.level)
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
        # By when it has made way, the slack of the one that waits is less by an iteration.
        if demand.level - victim.level + victim.step < worth:
            again_in = min(again_in, victim.step)
            continue
        preemptions.append(Preemption(victim.row, demand.row))
        victims.remove(victim)
        ends.remove(victim.seconds)
        ends = sorted([*ends, victim.step + demand.seconds])
    return PreemptionPlan(preemptions, again_in)
