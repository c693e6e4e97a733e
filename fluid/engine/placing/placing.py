"""Placing: the devices that a queued trial gets."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from functools import partial

from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.placing.allocations import Allocations
from fluid.engine.placing.lanes import Lanes
from fluid.engine.placing.sharing import Sharing
from fluid.engine.policy import Choice, Policies
from fluid.engine.records import TrialRecord, Trials

# -- state hosts ---------------------------------------------------------------------------------
#
# The host whose memory holds a trial's state: where the trial starts, if that saves more seconds than it costs.


def devices_at_state(
    trial: TrialRecord, occupancy: Occupancy, estimates: Estimates, allowed: Set[int] | None
) -> frozenset[int]:
    """Returns the devices of the host whose memory holds a trial's checkpoint on which the trial ends soonest.

    A restore from there takes less than one over the network, as both were measured. A slower device, or one that
    others share, costs what the iterations left take longer there than on the fastest device that is idle elsewhere.

    Args:
        trial: a trial that waits, and whose state no lane keeps.
        occupancy: which devices are idle, or open to one more trial.
        estimates: what the trial takes.
        allowed: the only devices that it may get; ``None`` for all.

    Returns:
        Their indices; none if the host is the only one, restores were not measured, or another host is better.
    """
    checkpoint, width = trial.residence.checkpoint, trial.width
    if checkpoint is None or not checkpoint.in_memory or width > 1.0 or trial.residence.lane is not None:
        return frozenset()
    seconds = estimates.of_key(trial).restores
    if "memory" not in seconds or "host" not in seconds:
        return frozenset()
    saved = seconds["host"] - seconds["memory"]
    here: dict[int, float] = {}
    elsewhere: float | None = None
    for index in occupancy.residents if allowed is None else allowed:
        if index not in occupancy.residents or not occupancy.is_open(index, width):
            continue
        at_home = occupancy.device(index).host == checkpoint.host
        if at_home or not occupancy.residents[index]:
            taken = _seconds_on(trial, index, occupancy, estimates)
            if at_home:
                here[index] = taken
            elsewhere = taken if not at_home and (elsewhere is None or taken < elsewhere) else elsewhere
    if not here or elsewhere is None:
        return frozenset()  # There is no choice, or none that is clear: hosts are preferred as they always are.
    least = min(here.values())
    if least - elsewhere >= saved:
        return frozenset()
    return frozenset(index for index, taken in here.items() if taken <= least)


def _seconds_on(trial: TrialRecord, index: int, occupancy: Occupancy, estimates: Estimates) -> float:
    """Predicted seconds of the iterations left of a trial on a device, beside those that are there now."""
    stretch = estimates.of_key(trial).stretch(1.0 / (1 + len(occupancy.residents[index])))
    return estimates.height(trial) * stretch / estimates.speed(trial, (index,))


# -- placing -------------------------------------------------------------------------------------


class Placing:
    """Places the trials of a queue.

    Args:
        trials: the trials of the session.
        queue: the trials that wait.
        occupancy: which trial holds which device.
        lanes: which trial runs in which lane.
        estimates: what trials need.
        allocations: gives trials devices.
        sharing: which devices trials get first.
        policies: may keep devices from trials, and choose where they go.

    Attributes:
        refused: trials that did not fit in the latest round, one of those that are alike to placement.
    """

    def __init__(
        self,
        trials: Trials,
        queue: StartQueue,
        occupancy: Occupancy,
        lanes: Lanes,
        estimates: Estimates,
        allocations: Allocations,
        sharing: Sharing,
        policies: Policies,
    ) -> None:
        self.refused: list[TrialRecord] = []
        self._trials = trials
        self._queue = queue
        self._occupancy = occupancy
        self._lanes = lanes
        self._estimates = estimates
        self._allocations = allocations
        self._sharing = sharing
        self._policies = policies
        #: Devices that waiting trials with requirements ask for: others take different ones where they can.
        self._sought: Set[int] = frozenset()

    def place_all(self) -> list[int]:
        """Places every queued trial that fits, in order; returns their rows, which are no longer queued.

        Where devices are shared out among owners, trials of the groups of highest priority first get idle devices of
        their own share, in order; then any idle ones that they may use, in order; then, if they can be packed, the
        same with slots of devices in use. Then the trials of the other groups do.
        """
        self.refused = []
        for begin_round in self._policies.begin_round:
            begin_round()
        if self._trials.constrained:
            self._sought = self._sought_devices()
        if not self._queue:
            return []
        choose: Choice | None = None
        for policy in self._policies.choice:
            choose = policy.choice if choose is None else choose
        if not self._sharing.restricts:
            started = self._queue.start(self._place, choose=choose)
        else:
            started = []
            for priority in self._queue.group_priorities():
                started += self._place_in_shares(priority)
                started += self._queue.start(self._place, priority, choose)
        if choose is not None:
            for end_round in self._policies.end_round:
                end_round(self.refused)
        for trial in self.refused.copy():
            device = trial.limits.avoids
            if device is not None and not self._occupancy.residents.get(device):
                # No other trial can use that device, and so show that it works, or the trial fits nowhere else.
                trial.limits, self.refused = replace(trial.limits, avoids=None), []
                started += self._queue.start(self._place)
        return started

    def _place_in_shares(self, group_priority: float) -> list[int]:
        """Places trials of groups of this priority that have a share; any others are placed after."""
        is_packed = any(width < 1.0 for width in self._queue.unbound)
        started: list[int] = []
        passes = [(True, False), (True, True), (False, False)] if is_packed else [(True, False)]
        for only_idle, anywhere in passes:
            if self._occupancy.free_count or not only_idle:
                place = partial(self._place_within, only_idle=only_idle, anywhere=anywhere)
                started += self._queue.start(place, group_priority)
        return started

    def _place_within(self, row: int, *, only_idle: bool, anywhere: bool) -> bool:
        """Places a trial on the devices that it gets first, or on idle ones that it may use; returns whether it could.

        A pinned trial, and one that needs more devices than its share has, are placed as if there were no shares, so
        that devices are reserved for them before later ones take these.
        """
        trial = self._trials.by_row[row]
        if trial.pinned or (anywhere and trial.width >= 1.0):
            return self._place_or_reserve(trial, None)
        share = None if anywhere else self._sharing.share_of(trial)
        if share is not None and max(1, len(share)) < (trial.fixed_width or 1):
            share = None
        if trial.width >= 1.0 or not only_idle:
            return self._place_or_reserve(trial, share)
        idle = self._occupancy.idle_since
        return self._place_or_reserve(trial, frozenset(index for index in idle if share is None or index in share))

    def has_choice(self, trial: TrialRecord) -> bool:
        """Whether a trial may run on more than one device."""
        eligible = self._occupancy.eligible.of(trial.constraint)
        return len(self._occupancy if eligible is None else eligible) > 1

    def place_near(
        self, trial: TrialRecord, near: int | None, *, only: bool, within: frozenset[int] | None = None
    ) -> bool:
        """Places a trial.

        Args:
            trial: a trial that waits.
            near: the device to prefer; ``None`` for none.
            only: whether no other one will do.
            within: the only devices that will do; ``None`` for all that it may get.
        """
        own_state, residence = 0.0, trial.residence
        if near is not None and near == residence.device and residence.lane is not None:
            # On the device that keeps its state, its need includes that state, which is reserved there already.
            own_state = self._lanes.kept_bytes(residence.lane, trial.trial_id)
        host = self._host_of_state(trial)
        if not self._trials.constrained:
            free = trial.limits.avoids is None and not self._are_kept
            others = None if free else self.allowed(trial)
            others = others if within is None else within if others is None else within & others
            if near is None and host is not None and self._place_at_state(trial, host, others):
                return True
            return self._allocations.place(trial, near=near, only=only, own_state=own_state, host=host, allowed=others)
        allowed = self.allowed(trial)
        allowed = allowed if within is None else within if allowed is None else within & allowed
        if trial.spec.gang:
            return self._place_gang(trial, allowed, own_state, host, only=only)
        if near is None and host is not None and self._place_at_state(trial, host, allowed):
            return True
        if trial.constraint is None and self._sought and near is None:
            rest = (self._occupancy.residents.keys() if allowed is None else allowed) - self._sought
            if rest and self._allocations.place(
                trial, near=None, only=False, own_state=0.0, host=host, allowed=frozenset(rest)
            ):
                return True
        return self._allocations.place(trial, near=near, only=only, own_state=own_state, host=host, allowed=allowed)

    def _place_at_state(self, trial: TrialRecord, host: str, allowed: Set[int] | None) -> bool:
        """Places a trial on the host whose memory holds its state, if there are others and it ends sooner there."""
        there = devices_at_state(trial, self._occupancy, self._estimates, allowed)
        return bool(there) and self._allocations.place(
            trial, near=None, only=False, own_state=0.0, host=host, allowed=there
        )

    def _place_gang(
        self, trial: TrialRecord, allowed: Set[int] | None, own_state: float, host: str | None, *, only: bool
    ) -> bool:
        residence = trial.residence
        if residence.lane is not None and not residence.saving:
            kept = frozenset(self._lanes[residence.lane].device_ids)
            here = kept if allowed is None else kept & allowed
            if self._allocations.place(trial, near=None, only=False, own_state=own_state, host=host, allowed=here):
                return True
        if only:
            return False
        return self._allocations.place(trial, near=None, only=False, own_state=0.0, host=host, allowed=allowed)

    def allowed(self, trial: TrialRecord) -> Set[int] | None:
        """The devices that a trial may get now; ``None`` for any."""
        allowed = self._occupancy.eligible.of(trial.constraint)
        forbidden: Set[int] = frozenset()
        for policy in self._policies.keeps_devices:
            if policy.keeps_devices:
                forbidden = forbidden | policy.forbidden_to(trial)
        if trial.limits.avoids is not None and not trial.pinned:
            forbidden = forbidden | {trial.limits.avoids}
        if not forbidden:
            return allowed
        return frozenset(self._occupancy.residents if allowed is None else allowed) - forbidden

    @property
    def reserved_devices(self) -> frozenset[int]:
        """Devices that are kept for some of the waiting trials."""
        return self._policies.all_kept_devices()

    @property
    def restricts(self) -> bool:
        """Whether trials may be refused devices for other reasons than want of room there."""
        return self._trials.constrained or self._are_kept

    @property
    def _are_kept(self) -> bool:
        for policy in self._policies.keeps_devices:  # noqa: SIM110  Asked of every trial that is placed.
            if policy.keeps_devices:
                return True
        return False

    def lane_is_busy(self, trial: TrialRecord) -> bool:
        """Whether another trial runs in the lane that keeps a trial's state."""
        return trial.residence.lane is not None and bool(self._lanes[trial.residence.lane].holders)

    def _place(self, row: int) -> bool:
        trial = self._trials.by_row[row]
        if self._place_or_reserve(trial, None):
            return True
        self.refused.append(trial)
        return False

    def _place_or_reserve(self, trial: TrialRecord, within: frozenset[int] | None) -> bool:
        near = None if trial.residence.saving else trial.residence.device
        for target_of in self._policies.target_of:
            near = target_of(trial) if near is None else near
        busy = trial.pinned and (self.lane_is_busy(trial) or not self._fits_in_own_lane(trial))
        if not busy and self.place_near(trial, near, only=trial.pinned, within=within):
            return not self._gives_back(trial)
        if trial.fixed_width is not None:
            self._reserve(trial, within)
        return False

    def _fits_in_own_lane(self, trial: TrialRecord) -> bool:
        """Whether a pinned trial that takes turns fits in the lane that keeps its state: it can join no other one."""
        lane = trial.residence.lane
        if lane is None or not trial.takes_turns:
            return True
        device, memory = self._lanes[lane].device_id, self._occupancy.memory
        need = self._estimates.need_on(trial, device)
        if need is None:
            return True
        usable, own = memory.usable_bytes(device), self._lanes.kept_bytes(lane, trial.trial_id)
        return usable is None or memory.filled_bytes(device, own_state=own) + need.peak_bytes <= usable

    def _gives_back(self, trial: TrialRecord) -> bool:
        """Whether a trial of several devices gives back those that it just got, as it waits for others."""
        if (trial.fixed_width or 1) < 2 or trial.pinned or not self._policies.rather:
            return False
        chosen, allowed = self._occupancy.held[trial.row], self._occupancy.eligible.of(trial.constraint)
        every = self._occupancy.residents if allowed is None else allowed
        for rather in self._policies.rather:
            others = rather(trial, chosen, every)
            if others is None:
                continue
            self._occupancy.release(trial.row)
            if any(awaits(trial) for awaits in self._policies.awaits):
                return True
            within = (frozenset(others), frozenset(chosen))  # States that are kept there may leave the others no room.
            return not any(self.place_near(trial, None, only=False, within=devices) for devices in within)
        return False

    def _reserve(self, trial: TrialRecord, within: frozenset[int] | None) -> None:
        allowed = self._occupancy.eligible.of(trial.constraint)
        allowed = allowed if within is None else within if allowed is None else within & allowed
        lane = trial.residence.lane
        if trial.pinned and lane is not None:
            if len(self._lanes[lane].device_ids) != trial.fixed_width:
                return
            allowed = frozenset(self._lanes[lane].device_ids)
        for passed_over in self._policies.passed_over:
            passed_over(trial, self._occupancy.residents if allowed is None else allowed)

    def _sought_devices(self) -> Set[int]:
        """The devices that meet requirements of waiting trials."""
        sought: set[int] = set()
        for constraint in self._queue.constraints:
            sought |= self._occupancy.eligible.of(constraint) or frozenset()
        return sought

    def _host_of_state(self, trial: TrialRecord) -> str | None:
        """The host from which a trial is restored, where that needs no transfer; ``None`` if it starts afresh."""
        residence = trial.residence
        if residence.device is not None:
            return self._occupancy.device(residence.device).host
        return None if residence.checkpoint is None else residence.checkpoint.host
