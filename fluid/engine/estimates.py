"""What is expected of a trial: work, speed and memory, by what its profile key has shown so far and by itself."""

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
    """Answers what a trial needs and how long it takes.

    Args:
        profile: what was measured.
        occupancy: who holds which device.
        board: told of profile keys that are new.
        max_packing: most trials on one device, whatever the profile says.
        max_width: most devices for one trial.
    """

    def __init__(
        self, profile: Profile, occupancy: Occupancy, board: RunningTable, *, max_packing: int, max_width: int
    ) -> None:
        self._profile = profile
        self._occupancy = occupancy
        self._table = board
        self._max_packing = max_packing
        self._max_width = max_width
        self._by_key: dict[str, KeyEstimate] = {}

    def facts(self, trial: TrialRecord) -> KeyEstimate:
        """What the profile says about its key."""
        key = trial.spec.profile_key
        facts = self._by_key.get(key)
        if facts is None:
            facts = self._by_key[key] = KeyEstimate(key, self._max_packing, self._max_width)
            facts.update(self._profile)
            self._table.set_key(facts)
        return facts

    def is_measured(self, trial: TrialRecord) -> bool:
        """Whether its seconds per iteration are known."""
        return trial.pace.seconds is not None or self.facts(trial).pace is not None

    def packing(self, trial: TrialRecord) -> int:
        """c for a trial: how far its key's ramp-up has come, at most what its own memory failures allow."""
        c = self.facts(trial).packing
        return c if trial.limits.packing_cap is None else min(c, trial.limits.packing_cap)

    def widest(self, trial: TrialRecord) -> int:
        """d for a trial: how far its key's ramp-up has come, at most what it is able to."""
        facts = self.facts(trial)
        width = facts.width if self.may_try(trial, facts.width) else facts.tried
        return 1 if trial.pinned else min(width, trial.max_width)

    def may_try(self, trial: TrialRecord, width: float) -> bool:
        """Whether a trial runs for long enough for a width to pay for finding out what it is worth, if need be.

        One whose state is in a lane goes on there at once: it tries while it runs, and need not wait for further lanes.
        """
        at_that_width = trial.progress.left - (trial.state is TrialState.RUNNING)
        return width <= self.facts(trial).tried or (
            at_that_width >= tuning.LEAST_TO_TRY and trial.residence.lane is None
        )

    def height(self, trial: TrialRecord) -> float:
        """Predicted seconds of work left at width 1 and speed 1."""
        pace = trial.pace.seconds if trial.pace.seconds is not None else self.facts(trial).pace
        return trial.progress.left * (pace if pace is not None else self.usual_pace())

    def seconds_left(self, trial: TrialRecord) -> float:
        """Predicted seconds of running at the width it has, or is to have."""
        if trial.row in self._occupancy.held:
            return self.height(trial) * self.stretch(trial)
        facts = self.facts(trial)
        return self.height(trial) * stretch_of(facts.alpha, facts.beta, trial.placement.width)

    def need(self, trial: TrialRecord) -> MemoryNeed | None:
        """Device memory, where it is known. What was measured on a device fits there, whatever the watermark says."""
        if trial.spec.memory is not None:
            return trial.spec.memory
        need = self.facts(trial).memory
        if need is None or self.most_usable() >= need.peak_bytes:
            return need
        share = self.most_usable() / need.peak_bytes
        return MemoryNeed(need.persistent_bytes * share * (1.0 - TOLERANCE), need.ephemeral_bytes * share)

    def kept_bytes(self, trial: TrialRecord) -> float:
        """Device memory that its state takes between iterations, as far as it is known."""
        need = self.need(trial)
        return need.persistent_bytes if need is not None else 0.0

    def could_hold(self, need: MemoryNeed | None) -> bool:
        """Whether there is a device that would hold as much if it were empty, or none at all yet."""
        return need is None or not self._occupancy or need.peak_bytes <= self.most_usable()

    def most_usable(self) -> float:
        """Bytes that trials may fill on the device with the most memory."""
        rooms = [self._occupancy.memory.usable_bytes(index) for index in self._occupancy.residents]
        return max((math.inf if room is None else room for room in rooms), default=math.inf)

    def stretch(self, trial: TrialRecord) -> float:
        """h(w)/h(1) at the width and co-residency the trial has now, device speed included."""
        devices = self._occupancy.held[trial.row]
        width = (
            trial.placement.width if trial.placement.width >= 1.0 else 1.0 / len(self._occupancy.residents[devices[0]])
        )
        facts = self.facts(trial)
        return stretch_of(facts.alpha, facts.beta, width) / self._occupancy.speed(devices)

    def co_residents(self, trial: TrialRecord) -> int:
        """Trials on its device, itself included; 1 for a wide trial. Where it is being resized, on its old one."""
        devices = (
            trial.placement.move.old_devices if trial.placement.move is not None else self._occupancy.held[trial.row]
        )
        return len(self._occupancy.residents[devices[0]])

    def usual_pace(self) -> float:
        """The pace of those that nobody has measured: the median of the others, so that widths are not absurd."""
        paces = [facts.pace for facts in self._by_key.values() if facts.pace is not None]
        return median_low(paces) if paces else 1.0
