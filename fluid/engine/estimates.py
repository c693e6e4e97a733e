"""Estimates: the work, speed and memory to expect of a trial, from its profile key's measurements and its own."""

from __future__ import annotations

import math
from statistics import median_low

from fluid.engine import tuning
from fluid.engine.key_estimates import KeyEstimate
from fluid.engine.records import TrialRecord
from fluid.engine.running_table import RunningTable
from fluid.planning.occupancy import Occupancy
from fluid.planning.profile import Profile
from fluid.planning.runtime_model import TOLERANCE, stretch_of
from fluid.resources import MemoryNeed
from fluid.trialgroup import TrialState


class Estimates:
    """Estimates what a trial needs and how long it takes.

    Args:
        profile: what was measured.
        occupancy: which trial holds which device.
        table: has a copy of every key's estimate.
        max_packing: most trials on one device, whatever the profile says; 1 switches packing off.
        max_width: most devices for one trial.
    """

    def __init__(
        self, profile: Profile, occupancy: Occupancy, table: RunningTable, *, max_packing: int, max_width: int
    ) -> None:
        self._profile = profile
        self._occupancy = occupancy
        self._table = table
        self._max_packing = max_packing
        self._max_width = max_width
        self._by_key: dict[str, KeyEstimate] = {}

    # -- by key --------------------------------------------------------------------------------------------

    def of_key(self, trial: TrialRecord) -> KeyEstimate:
        """The estimate of the trial's profile key."""
        key = trial.spec.profile_key
        estimate = self._by_key.get(key)
        if estimate is None:
            estimate = self._by_key[key] = KeyEstimate(key, self._max_packing, self._max_width)
            self.update(estimate)
        return estimate

    def update(self, estimate: KeyEstimate, *, trying_pays: bool = True) -> bool:
        """Brings a key's estimate up to date with the profile; returns whether c or d changed."""
        changed = estimate.update(self._profile, trying_pays=trying_pays)
        self._table.set_key(estimate)
        return changed

    @property
    def epsilon(self) -> float:
        """Seconds that a resize costs."""
        return self._profile.epsilon

    def usual_pace(self) -> float:
        """Seconds per iteration to assume for unmeasured keys: the median of the measured ones, or 1."""
        paces = [estimate.pace for estimate in self._by_key.values() if estimate.pace is not None]
        return median_low(paces) if paces else 1.0

    # -- work and speed ------------------------------------------------------------------------------------

    def is_measured(self, trial: TrialRecord) -> bool:
        """Whether the trial's seconds per iteration were measured, on it or on its key."""
        return trial.pace.seconds is not None or self.of_key(trial).pace is not None

    def height(self, trial: TrialRecord) -> float:
        """Predicted seconds of work left at width 1 and speed 1."""
        pace = trial.pace.seconds
        return trial.progress.left * (pace if pace is not None else self.pace(trial))

    def pace(self, trial: TrialRecord) -> float:
        """Predicted seconds per iteration at width 1 and speed 1."""
        pace = trial.pace.seconds if trial.pace.seconds is not None else self.of_key(trial).pace
        return pace if pace is not None else self.usual_pace()

    def seconds_left(self, trial: TrialRecord) -> float:
        """Predicted seconds of running at the width that the trial has, or is to have."""
        if trial.row in self._occupancy.held:
            return self.height(trial) * self.stretch(trial)
        if trial.spec.gang:
            return self.height(trial)
        estimate = self.of_key(trial)
        return self.height(trial) * stretch_of(estimate.alpha, estimate.beta, trial.placement.width)

    def stretch(self, trial: TrialRecord) -> float:
        """h(w)/h(1) at the trial's present width and co-residency, device speed included."""
        devices = self._occupancy.held[trial.row]
        width = trial.placement.width
        if width < 1.0:
            width = 1.0 / len(self._occupancy.residents[devices[0]])
        elif trial.spec.gang:
            width = 1.0  # its runtime is measured as it is, on all of its devices
        estimate = self.of_key(trial)
        return stretch_of(estimate.alpha, estimate.beta, width) / self._occupancy.speed(devices)

    def seconds_gained(self, trial: TrialRecord, width: float) -> float:
        """Predicted seconds by which a running trial ends earlier at another width of at least 1, after a resize.

        The iteration in flight still runs at its present width. Negative if the trial ends later.
        """
        estimate, speed = self.of_key(trial), self._occupancy.speed(self._occupancy.held[trial.row])
        after = self.height(trial) * (1.0 - 1.0 / max(1, trial.progress.left))
        moved = self.epsilon + after * stretch_of(estimate.alpha, estimate.beta, width) / speed
        return after * self.stretch(trial) - moved

    # -- packing and width ---------------------------------------------------------------------------------

    def co_residents(self, trial: TrialRecord) -> int:
        """Trials on the trial's device, itself included; 1 for a wide one. During a resize, on its old device."""
        move = trial.placement.move
        devices = move.old_devices if move is not None else self._occupancy.held[trial.row]
        return len(self._occupancy.residents[devices[0]])

    def packing(self, trial: TrialRecord) -> int:
        """c for a trial: that of its key, at most the cap that its own failures, or its submitter, set."""
        c, cap = self.of_key(trial).packing, trial.packing_cap
        return c if cap is None else min(c, cap)

    def widest(self, trial: TrialRecord) -> int:
        """d for a trial: that of its key if trying it pays, at most what the trial can use."""
        estimate = self.of_key(trial)
        width = estimate.width if self.may_try(trial, estimate.width) else estimate.tried
        return 1 if trial.pinned else min(width, trial.max_width)

    def may_try(self, trial: TrialRecord, width: float) -> bool:
        """Whether a width was measured, or the trial has enough iterations left to repay measuring it.

        A trial whose state is kept in a lane resumes there at once: it tries while it runs, and need not wait for
        further lanes.
        """
        if width <= self.of_key(trial).tried:
            return True
        at_that_width = trial.progress.left - (trial.state is TrialState.RUNNING)
        return at_that_width >= tuning.LEAST_TO_TRY and trial.residence.lane is None

    # -- memory --------------------------------------------------------------------------------------------

    def need(self, trial: TrialRecord) -> MemoryNeed | None:
        """Device memory, as specified or measured; ``None`` if unknown.

        What was measured on a device fits there, even above the watermark: it is scaled down to the largest device.
        """
        if trial.spec.memory is not None:
            return trial.spec.memory
        need = self.of_key(trial).memory
        if need is None or self.most_usable() >= need.peak_bytes:
            return need
        share = self.most_usable() / need.peak_bytes
        return MemoryNeed(need.persistent_bytes * share * (1.0 - TOLERANCE), need.ephemeral_bytes * share)

    def kept_bytes(self, trial: TrialRecord) -> float:
        """Device memory that the trial's state takes between iterations; 0 if unknown."""
        need = self.need(trial)
        return need.persistent_bytes if need is not None else 0.0

    def most_usable(self) -> float:
        """Bytes that trials may fill on the device with the most memory."""
        rooms = [self._occupancy.memory.usable_bytes(index) for index in self._occupancy.residents]
        return max((math.inf if room is None else room for room in rooms), default=math.inf)
