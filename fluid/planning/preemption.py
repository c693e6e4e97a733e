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


class Claim(NamedTuple):
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


class Swap(NamedTuple):
    """Interrupt ``running`` at the end of its iteration, and give its device to ``waiting``."""

    running: int
    waiting: int


class Turns(NamedTuple):
    """What to do.

    Attributes:
        swaps: at most one for each trial.
        again_in: seconds after which a trial that waits will be pressed, if nothing else happens, or infinite.
    """

    swaps: list[Swap]
    again_in: float


def take_turns(running: Sequence[Claim], waiting: Sequence[Claim], n: int) -> Turns:
    """Says which running trials make way now.

    Args:
        running: the trials that hold devices.
        waiting: those that do not, in starting order.
        n: number of devices.
    """
    everyone = (*running, *waiting)
    if not running or not waiting:
        return Turns([], math.inf)
    work = sum(claim.seconds * claim.width for claim in everyone)
    horizon = max(work / n, *(claim.level for claim in everyone))
    victims = [claim for claim in running if claim.yields and claim.seconds >= (1.0 + _ROUNDING) * claim.step]
    #: when devices fall free, if nobody is interrupted
    ends = sorted(claim.seconds for claim in running)
    ahead = {claim.row: place for place, claim in enumerate(waiting)}
    swaps: list[Swap] = []
    again_in = math.inf
    for claim in sorted(waiting, key=lambda claim: -claim.level):
        if not victims:
            break
        victim = min(victims, key=lambda other: other.level)
        worth = _ROUNDING * victim.step + victim.cost
        slack = horizon - claim.level
        place = max(0, ahead[claim.row] - len(swaps))
        starts_in = ends[place] if place < len(ends) else math.inf
        if not claim.yields or starts_in - slack <= worth:
            continue
        spare = (1.0 + _ROUNDING) * victim.step
        if slack > spare:
            again_in = min(again_in, slack - spare)
            continue
        # By when it has made way, the slack of the one that waits is less by an iteration.
        if claim.level - victim.level + victim.step < worth:
            again_in = min(again_in, victim.step)
            continue
        swaps.append(Swap(victim.row, claim.row))
        victims.remove(victim)
        ends.remove(victim.seconds)
        ends = sorted([*ends, victim.step + claim.seconds])
    return Turns(swaps, again_in)
