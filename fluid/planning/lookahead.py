"""Lookahead: when the trials that run and wait end if some width changes are made now, and a re-planner then goes on.

By the rollout's model (:mod:`fluid.planning.rollout`). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fluid.planning.arrangement import Arrangement, KeepWidths, Replanner, Running, WidthChange, start_order
from fluid.planning.instance import Instance
from fluid.planning.rollout import Rollout
from fluid.planning.runtime_model import TOLERANCE, FloatArray
from fluid.resources import Cluster, Device


class Ends(NamedTuple):
    """When trials end, seconds from now.

    Attributes:
        last: the last one; infinite if the rollout was given up.
        total: the sum over all trials.
    """

    last: float
    total: float

    def are_earlier(self, other: Ends) -> bool:
        """Whether the last end is earlier; or, if it is the same, the mean of all."""
        if abs(self.last - other.last) <= TOLERANCE * other.last:
            return self.total < other.total * (1.0 - TOLERANCE)
        return self.last < other.last


class Waiting(NamedTuple):
    """Trials that wait for devices.

    Attributes:
        instance: what they are.
        widths: (k,) the width that each is to get.
    """

    instance: Instance
    widths: FloatArray


def ends_after(
    running: Running,
    changes: Sequence[WidthChange],
    replanner: Replanner,
    waiting: Waiting | None = None,
    *,
    give_up_after: float = math.inf,
) -> Ends:
    """When trials end if these changes are made, and a re-planner goes on at each departure.

    Args:
        running: the trials that run; idle devices of unknown speed are taken to be as fast as those of the longest one.
        changes: of their widths, in order.
        replanner: asked to make room while trials wait, and for widths once none does.
        waiting: the trials that wait; ``None`` for none.
        give_up_after: seconds beyond which the rollout stops unfinished.
    """
    rollout = _resume(running)
    if waiting is not None:
        widths = waiting.widths
        order = start_order(widths, waiting.instance.late_heights, waiting.instance.priority)
        rollout.submit(waiting.instance, Arrangement(widths, order, KeepWidths(), replan_at_start=False, name=""))
    position = {row: i for i, row in enumerate(running.rows.tolist())}
    rollout.apply([WidthChange(position[row], width) for row, width in changes])
    if waiting is not None:
        rollout.dispatch()
    limit = give_up_after * (1.0 + TOLERANCE)
    while rollout.running:
        if rollout.next_end > limit:
            return Ends(math.inf, math.inf)
        rollout.advance(math.inf)
        if rollout.queued:
            rollout.dispatch()
        if rollout.queued and waiting is not None:
            left = np.array([waiting.instance.heights[row - len(running)] for row in rollout.waiting_rows])
            rollout.apply(replanner.make_room(rollout.snapshot(), left))
            rollout.dispatch()
        elif rollout.running:
            rollout.apply(replanner.replan(rollout.snapshot()))
    return Ends(rollout.now, math.fsum(rollout.finished.values()))


def _resume(running: Running) -> Rollout:
    """A rollout in which the trials of a snapshot hold as many devices, of the same speeds, with the same others."""
    speed, first = running.speed.tolist(), running.device.tolist()
    speeds: list[float] = []
    held: list[tuple[int, ...]] = []
    shared: dict[int, int] = {}
    for i, width in enumerate(running.widths.tolist()):
        if width < 1.0 and first[i] in shared:
            held.append((shared[first[i]],))
            continue
        held.append(tuple(range(len(speeds), len(speeds) + max(1, round(width)))))
        speeds += [speed[i]] * len(held[-1])
        if width < 1.0:
            shared[first[i]] = held[-1][0]
    idle = running.idle_speeds
    speeds += [speed[int(running.remaining.argmax())]] * running.free if idle is None else idle
    rollout = Rollout(Cluster(tuple(Device(index, speed=each) for index, each in enumerate(speeds))), running.epsilon)
    rollout.take_over(running, held)
    return rollout
