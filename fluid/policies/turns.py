"""The lane finder: which lane of a device a new trial joins, by the bytes of its trials (docs/theory.md, section 8).

Trials of one lane take turns: one of them runs an iteration at a time. A lane therefore has to hold the largest
ephemeral bytes of its trials once, not their sum, while the persistent bytes of all of them stay on the device. The
algorithm is that of Salus (Yu and Chowdhury, Salus: Fine-Grained GPU Sharing Primitives for Deep Learning Applications,
MLSys 2020, "find GPU lane for job").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from fluid.errors import require_integer, require_number
from fluid.resources import MemoryNeed


class LaneLoad(NamedTuple):
    """What a lane holds on a device.

    Attributes:
        lane: the caller's number of the lane.
        persistent_bytes: persistent bytes of all its trials together.
        ephemeral_bytes: the lane's size: the largest ephemeral bytes of one of its trials.
        trials: number of its trials.
    """

    lane: int
    persistent_bytes: float = 0.0
    ephemeral_bytes: float = 0.0
    trials: int = 0


class LaneChoice(NamedTuple):
    """The lane of a new trial.

    Attributes:
        lane: number of the lane that it joins; ``None`` for a new lane.
        ephemeral_bytes: the lane's size with it.
    """

    lane: int | None
    ephemeral_bytes: float


def find_lane(
    need: MemoryNeed,
    lanes: Iterable[LaneLoad],
    usable_bytes: float | None,
    *,
    new_lane_bytes: float = 0.0,
    most_lanes: int | None = None,
    most_per_lane: int | None = None,
) -> LaneChoice | None:
    """Finds the lane of a device that a new trial joins, in one pass over the lanes.

    With P_i and E_i the persistent and ephemeral bytes of trial i, and C the usable bytes, this safety condition holds
    for the device with the new trial::

        sum over trials P_i  +  sum over lanes (max of its E_i)  <=  C

    The first of these that keeps it is chosen:

    1. a new lane;
    2. the smallest lane that is at least as large as the trial's ephemeral bytes, so that no lane has to grow;
    3. the smallest lane that can grow to them.

    Of equally large lanes, the one with fewest trials is chosen, then the one that comes first.

    Salus' algorithm checks no memory in step 2 and tries all lanes in step 3. Here the persistent bytes have to fit in
    step 2, too, and step 3 never takes a lane that is larger than the trial, as that would make it smaller than the
    trials that it has.

    Example:
        >>> from fluid.policies.turns import LaneLoad, find_lane
        >>> lanes = [LaneLoad(0, persistent_bytes=2.0, ephemeral_bytes=6.0, trials=1)]
        >>> find_lane(MemoryNeed(1.0, 4.0), lanes, 13.0)
        LaneChoice(lane=None, ephemeral_bytes=4.0)
        >>> find_lane(MemoryNeed(1.0, 4.0), lanes, 12.0)
        LaneChoice(lane=0, ephemeral_bytes=6.0)
        >>> find_lane(MemoryNeed(1.0, 9.0), lanes, 12.0)
        LaneChoice(lane=0, ephemeral_bytes=9.0)
        >>> find_lane(MemoryNeed(1.0, 9.5), lanes, 12.0) is None
        True

    Args:
        need: what the new trial needs.
        lanes: the lanes of the device, those without trials included.
        usable_bytes: what trials may fill on the device beside the bytes that its lanes take for themselves, such as
            for CUDA contexts; ``None`` where memory does not bound packing.
        new_lane_bytes: bytes that a new lane takes of these for itself.
        most_lanes: most lanes on the device; ``None`` for any number.
        most_per_lane: most trials in a lane; ``None`` for any number.

    Returns:
        The choice; ``None`` if the trial fits in no lane.

    Raises:
        InvalidFieldError: an argument cannot be used.
    """
    usable = math.inf if usable_bytes is None else require_number("usable_bytes", usable_bytes, at_least=0.0)
    new_lane_bytes = require_number("new_lane_bytes", new_lane_bytes, at_least=0.0)
    limit_lanes = math.inf if most_lanes is None else require_integer("most_lanes", most_lanes, at_least=1)
    limit_trials = math.inf if most_per_lane is None else require_integer("most_per_lane", most_per_lane, at_least=1)
    ephemeral = need.ephemeral_bytes
    taken, candidates = need.persistent_bytes, list(lanes)
    for lane in candidates:
        taken += lane.persistent_bytes + lane.ephemeral_bytes
    if len(candidates) < limit_lanes and taken + ephemeral + new_lane_bytes <= usable:
        return LaneChoice(None, ephemeral)
    best: LaneLoad | None = None
    best_rank: tuple[bool, float, int] | None = None
    for lane in candidates:
        grows = lane.ephemeral_bytes < ephemeral
        fits = taken + (ephemeral - lane.ephemeral_bytes if grows else 0.0) <= usable
        rank = grows, lane.ephemeral_bytes, lane.trials
        if fits and lane.trials < limit_trials and (best_rank is None or rank < best_rank):
            best, best_rank = lane, rank
    return None if best is None else LaneChoice(best.lane, max(ephemeral, best.ephemeral_bytes))
