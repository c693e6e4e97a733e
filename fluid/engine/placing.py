"""Placing: the devices that a queued trial gets."""

from __future__ import annotations

from collections.abc import Set

from fluid.engine.allocations import Allocations
from fluid.engine.estimates import Estimates
from fluid.engine.lanes import Lanes
from fluid.engine.records import TrialRecord
from fluid.engine.reservations import Reservations
from fluid.engine.trials import Trials
from fluid.planning.occupancy import Occupancy
from fluid.planning.start_queue import StartQueue


class Placing:
    """Places the trials of a queue.

    Args:
        trials: the trials of the session.
        queue: the trials that wait.
        occupancy: which trial holds which device.
        lanes: which trial runs in which lane.
        estimates: what trials need.
        allocations: gives trials devices.

    Attributes:
        refused: trials that did not fit in the latest round, one of those that are alike to placement.
        reservations: devices kept for some of these.
    """

    def __init__(
        self,
        trials: Trials,
        queue: StartQueue,
        occupancy: Occupancy,
        lanes: Lanes,
        estimates: Estimates,
        allocations: Allocations,
    ) -> None:
        self.refused: list[TrialRecord] = []
        self.reservations = Reservations(trials, occupancy, estimates)
        self._trials = trials
        self._queue = queue
        self._occupancy = occupancy
        self._lanes = lanes
        self._estimates = estimates
        self._allocations = allocations
        #: Devices that waiting trials with requirements ask for: others take different ones where they can.
        self._sought: Set[int] = frozenset()

    def place_all(self) -> list[int]:
        """Places every queued trial that fits, in order; returns their rows, which are no longer queued."""
        self.refused = []
        if self._trials.constrained:
            self.reservations.begin_round(self._queue)
            self._sought = self._sought_devices()
        started = self._queue.start(self._place) if self._queue else []
        for trial in self.refused.copy():
            device = trial.limits.avoids
            if device is not None and not self._occupancy.residents.get(device):
                # No other trial can use that device, and so show that it works, or the trial fits nowhere else.
                trial.limits.avoids, self.refused = None, []
                started += self._queue.start(self._place)
        return started

    def has_choice(self, trial: TrialRecord) -> bool:
        """Whether a trial may run on more than one device."""
        eligible = self._occupancy.eligible.of(trial.constraint)
        return len(self._occupancy if eligible is None else eligible) > 1

    def place_near(self, trial: TrialRecord, near: int | None, *, only: bool) -> bool:
        """Places a trial, on that device if it fits there; where ``only`` is set, on no other one."""
        own_state, residence = 0.0, trial.residence
        if near is not None and near == residence.device and residence.lane is not None:
            # On the device that keeps its state, its need includes that state, which is reserved there already.
            own_state = self._lanes.kept_bytes(residence.lane, trial.trial_id)
        host = self._host_of_state(trial)
        if not self._trials.constrained:
            others = None if trial.limits.avoids is None else self.allowed(trial)
            return self._allocations.place(trial, near=near, only=only, own_state=own_state, host=host, allowed=others)
        allowed = self.allowed(trial)
        if trial.spec.gang:
            return self._place_gang(trial, allowed, own_state, host, only=only)
        if trial.constraint is None and self._sought and near is None:
            rest = (self._occupancy.residents.keys() if allowed is None else allowed) - self._sought
            if rest and self._allocations.place(
                trial, near=None, only=False, own_state=0.0, host=host, allowed=frozenset(rest)
            ):
                return True
        return self._allocations.place(trial, near=near, only=only, own_state=own_state, host=host, allowed=allowed)

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
        # A pinned trial can start nowhere else, and the state that it keeps may be what the reservation waits for.
        if trial.pinned:
            return allowed
        forbidden = self.reservations.forbidden_to(trial) if self.reservations else frozenset()
        if trial.limits.avoids is not None:
            forbidden = forbidden | {trial.limits.avoids}
        if not forbidden:
            return allowed
        return frozenset(self._occupancy.residents if allowed is None else allowed) - forbidden

    def lane_is_busy(self, trial: TrialRecord) -> bool:
        """Whether another trial runs in the lane that keeps a trial's state."""
        return trial.residence.lane is not None and bool(self._lanes[trial.residence.lane].holders)

    def _place(self, row: int) -> bool:
        trial = self._trials.by_row[row]
        near = None if trial.residence.saving else trial.residence.device
        busy = trial.pinned and self.lane_is_busy(trial)
        if not busy and self.place_near(trial, near, only=trial.pinned):
            return True
        self.refused.append(trial)
        if trial.fixed_width is not None:
            self._reserve(trial)
        return False

    def _reserve(self, trial: TrialRecord) -> None:
        allowed = self._occupancy.eligible.of(trial.constraint)
        lane = trial.residence.lane
        if trial.pinned and lane is not None:
            if len(self._lanes[lane].device_ids) != trial.fixed_width:
                return
            allowed = frozenset(self._lanes[lane].device_ids)
        self.reservations.passed_over(trial, self._occupancy.residents if allowed is None else allowed)

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
