"""Turns: several trials in one lane, and which lane of a device a new one joins (docs/theory.md, section 8).

Trials of one lane take turns: one of them runs an iteration at a time. A lane therefore has to hold the largest
ephemeral bytes of its trials once, not their sum, while the persistent bytes of all of them stay on the device. The
algorithm is that of Salus (Yu and Chowdhury, Salus: Fine-Grained GPU Sharing Primitives for Deep Learning Applications,
MLSys 2020, "find GPU lane for job").

What taking turns gains (``benchmarks/lanes.py``): the mean completion of jobs is a third of that under first come,
first served.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from fluid.devices.memory import TURNS
from fluid.devices.occupancy import Occupancy
from fluid.engine import tuning
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.estimates.measuring import Measuring
from fluid.engine.events import IterationDone
from fluid.engine.placing.lanes import Lanes
from fluid.engine.records import LaneRecord, TrialRecord, Trials
from fluid.errors import require_integer, require_number
from fluid.resources import MemoryNeed
from fluid.trialgroup import TrialState


class LaneLoad(NamedTuple):
    """What a lane holds on a device.

    Attributes:
        lane: the caller's number of the lane; ``None`` for a new one.
        persistent_bytes: persistent bytes of all its trials together.
        ephemeral_bytes: the lane's size: the largest ephemeral bytes of one of its trials.
        trials: number of its trials.
    """

    lane: int | None
    persistent_bytes: float = 0.0
    ephemeral_bytes: float = 0.0
    trials: int = 0


def find_lane(
    need: MemoryNeed,
    lanes: Iterable[LaneLoad],
    usable_bytes: float | None,
    *,
    new_lane_bytes: float = 0.0,
    most_lanes: int | None = None,
    most_per_lane: int | None = None,
) -> LaneLoad | None:
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
        LaneLoad(lane=None, persistent_bytes=1.0, ephemeral_bytes=4.0, trials=1)
        >>> find_lane(MemoryNeed(1.0, 4.0), lanes, 12.0)
        LaneLoad(lane=0, persistent_bytes=3.0, ephemeral_bytes=6.0, trials=2)
        >>> find_lane(MemoryNeed(1.0, 9.0), lanes, 12.0)
        LaneLoad(lane=0, persistent_bytes=3.0, ephemeral_bytes=9.0, trials=2)
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
        The lane as it is with the trial; ``None`` if that fits in no lane.

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
        return LaneLoad(None, need.persistent_bytes, ephemeral, trials=1)
    best: LaneLoad | None = None
    best_rank: tuple[bool, float, int] | None = None
    for lane in candidates:
        grows = lane.ephemeral_bytes < ephemeral
        fits = taken + (ephemeral - lane.ephemeral_bytes if grows else 0.0) <= usable
        rank = grows, lane.ephemeral_bytes, lane.trials
        if fits and lane.trials < limit_trials and (best_rank is None or rank < best_rank):
            best, best_rank = lane, rank
    if best is None:
        return None
    size = max(ephemeral, best.ephemeral_bytes)
    return LaneLoad(best.lane, best.persistent_bytes + need.persistent_bytes, size, best.trials + 1)


# -- turns ---------------------------------------------------------------------------------------
#
# Turns: several running trials in one lane, which run an iteration each in turn.
#
# They have one process and one CUDA context between them. A device does no more iterations per second than with one of
# them at a time: this is for users who want many trials to advance, in rounds, by equal seconds, or the shortest
# first. All trials that take turns are of one sharing group, whatever their profile keys.


class Joining(NamedTuple):
    """The lane in which a trial takes turns.

    Attributes:
        group: the sharing group.
        lane_id: a lane that others hold; ``None`` for an idle or a new one.
    """

    group: str
    lane_id: int | None

    def joins(self, lane: LaneRecord) -> bool:
        """Whether the trial is to share a lane that others hold."""
        return lane.lane_id == self.lane_id


class Turns:
    """Decides in which lanes trials take turns, and learns from their iterations.

    Args:
        trials: the trials of the session.
        lanes: which trials share a lane.
        occupancy: has the memory of devices.
        estimates: how many trials take turns on a device, and in how many lanes.
        measuring: learns from iterations.
    """

    def __init__(
        self, trials: Trials, lanes: Lanes, occupancy: Occupancy, estimates: Estimates, measuring: Measuring
    ) -> None:
        self._all = trials
        self._lanes = lanes
        self._occupancy = occupancy
        self._estimates = estimates
        self._measuring = measuring
        if estimates.turns > 1:
            occupancy.groups.turns.add(TURNS)

    def takes(self, trial: TrialRecord) -> bool:
        """Whether a trial takes turns with others, unless it is fused with them."""
        return self._estimates.turns > 1 and trial.spec.devices is None

    def lane_for(self, trial: TrialRecord, device: int) -> Joining:
        """The lane of a device that a trial joins there, once it has been given a part of that device.

        That is the one that keeps its state, unless another one has far fewer trials, or it does not fit there; or else
        the choice of :mod:`fluid.policies.turns`. Of a trial that is in a lane there, as if it had left it.
        """
        held = [lane for lane in self._lanes.on(device) if lane.holders.keys() - {trial.trial_id} and not lane.others]
        home = self._home(trial, device)
        if not held or (home is not None and trial.pinned):
            return Joining(TURNS, home)
        need, usable = self._occupancy.memory.need_of(trial.row) or MemoryNeed(), self._usable(trial, device)
        loads = [self._load(lane, trial) for lane in held]
        if usable is not None:
            coming = self._without_lane(device, trial)
            usable = max(0.0, usable - sum(other.persistent_bytes for other in coming))
            if coming:  # They can join the largest lane, which then is as large as the largest of them.
                largest = max(range(len(loads)), key=lambda position: loads[position].ephemeral_bytes)
                sizes = (loads[largest].ephemeral_bytes, *(other.ephemeral_bytes for other in coming))
                loads[largest] = loads[largest]._replace(ephemeral_bytes=max(sizes))
        has_idle = any(not lane.holders and not lane.others for lane in self._lanes.on(device))
        new = 0.0 if has_idle else self._occupancy.memory.new_lane_bytes(device)
        most = self._estimates.of_key(trial).processes
        at_home = next((load.trials for load in loads if load.lane == home), None)
        most_at_home = 0 if len(held) < most else 1 + min(load.trials for load in loads)
        stays = at_home is not None and (at_home <= most_at_home or not trial.spec.can_save)
        if stays and self._joins(need, home, loads, usable):
            return Joining(TURNS, home)
        found = find_lane(need, loads, usable, new_lane_bytes=new, most_lanes=most)
        if found is not None:
            return Joining(TURNS, found.lane)
        # It was given the device, and what others need has grown since: it joins where the least is added.
        return Joining(TURNS, max(loads, key=lambda load: (load.ephemeral_bytes, -load.trials)).lane)

    def _home(self, trial: TrialRecord, device: int) -> int | None:
        """The lane of a device that keeps a trial's state; ``None`` if none there does."""
        residence = trial.residence
        if residence.lane is None or residence.saving or self._lanes[residence.lane].device_ids != (device,):
            return None
        return residence.lane

    def _usable(self, trial: TrialRecord, device: int) -> float | None:
        """Bytes that the trials that run on a device may fill beside its lanes; ``None`` for no limit."""
        memory, residence = self._occupancy.memory, trial.residence
        usable = memory.usable_bytes(device)
        if usable is None:
            return None
        own = 0.0  # Of the states that the device keeps, the trial's own is a part of its need.
        if residence.lane is not None and residence.device == device:
            own = self._lanes.kept_bytes(residence.lane, trial.trial_id)
        return max(0.0, usable - memory.lane_bytes(device, 0) - max(0.0, memory.reserved.get(device, 0.0) - own))

    @staticmethod
    def _joins(need: MemoryNeed, home: int | None, loads: list[LaneLoad], usable: float | None) -> bool:
        """Whether a trial fits into that lane."""
        others = [load for load in loads if load.lane != home]
        rest = sum(load.persistent_bytes + load.ephemeral_bytes for load in others)
        left = None if usable is None else max(0.0, usable - rest)
        return find_lane(need, [load for load in loads if load.lane == home], left, most_lanes=1) is not None

    def _without_lane(self, device: int, trial: TrialRecord) -> list[MemoryNeed]:
        """The needs of other trials that were given a part of a device, and no lane yet."""
        lane_of, memory = self._occupancy.groups.lane_of, self._occupancy.memory
        rows = [row for row in self._occupancy.residents[device] if row != trial.row and row not in lane_of]
        return [need for row in rows if (need := memory.need_of(row)) is not None]

    def uneven(self) -> list[TrialRecord]:
        """Trials that wait for their turn though a further lane would run them now: one of each such device.

        Their states have to move to that lane, which the work that is left must repay.
        """
        found = []
        for device, rows in self._occupancy.residents.items() if self._estimates.turns > 1 else ():
            trials = [self._all.by_row[row] for row in rows if row in self._all.by_row]
            held = [lane for lane in self._lanes.on(device) if lane.holders]
            fullest = max(held, key=lambda lane: len(lane.holders), default=None)
            if fullest is None or len(fullest.holders) < 2 or any(trial.placement.preemption for trial in trials):
                continue
            there = [self._all[trial_id] for trial_id in fullest.holders]
            able = [trial for trial in there if self._repays_move(trial) and self._gets_lane(trial, device, len(held))]
            if able:
                found.append(max(able, key=self._estimates.height))
        return found

    def _repays_move(self, trial: TrialRecord) -> bool:
        if trial.state is not TrialState.RUNNING or not trial.takes_turns or trial.calls or not trial.spec.can_save:
            return False
        estimate = self._estimates.of_key(trial)
        cost = tuning.WORTH_TRYING_STARTS * estimate.interruption()
        return estimate.takes_turns and self._estimates.height(trial) > cost

    def _gets_lane(self, trial: TrialRecord, device: int, held: int) -> bool:
        """Whether a trial that left its lane would get a further one: else it would come back, and leave again."""
        return held < self._estimates.of_key(trial).processes and self.lane_for(trial, device).lane_id is None

    def placed(self, trial: TrialRecord) -> None:
        """Books the lane that a trial was given: of those there, only the largest ephemeral bytes count."""
        lanes = trial.placement.lanes
        if len(lanes) == 1:
            self._occupancy.groups.lane_of[trial.row] = lanes[0]
        else:
            self._occupancy.groups.lane_of.pop(trial.row, None)

    def _load(self, lane: LaneRecord, leaving: TrialRecord) -> LaneLoad:
        """What a lane holds, one trial left out."""
        memory = self._occupancy.memory
        rows = [self._all[trial_id].row for trial_id in lane.holders if trial_id != leaving.trial_id]
        needs = [memory.need_of(row) or MemoryNeed() for row in rows]
        return LaneLoad(
            lane.lane_id,
            sum(need.persistent_bytes for need in needs),
            max((need.ephemeral_bytes for need in needs), default=0.0),
            trials=len(rows),
        )

    def observe(self, trial: TrialRecord, event: IterationDone) -> bool:
        """Learns from an iteration of a trial that shares its lane; returns whether it has.

        The trials of one lane do not run at the same time, but those of several lanes do: an iteration was one of so
        many co-residents as lanes ran then, if all of their trials have settled.
        """
        lane = self._lanes.get(event.lane_id)
        if lane is None:
            return False
        busy = [other for other in self._lanes.on(lane.device_id) if other.holders]
        if all(len(other.holders) == 1 for other in busy):
            return False  # Each has a lane of its own: measured like any others.
        is_first, trial.placement.settled = not trial.placement.settled, True
        if event.memory is not None:
            self._measuring.observe_memory(trial, event.memory)
        if is_first and self._estimates.of_key(trial).pace is not None:
            return True  # A first iteration loads, or compiles.
        if all(self._is_settled(other) for other in busy if other is not lane):
            self._measuring.observe_turn(trial, event, len(busy))
        return True

    def _is_settled(self, lane: LaneRecord) -> bool:
        trials = [self._all[trial_id] for trial_id in lane.holders]
        return all(trial.state is TrialState.RUNNING and trial.placement.settled for trial in trials)
