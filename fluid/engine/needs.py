"""Needs: the device memory to reserve for a trial, from its key's measurements, its config and its own."""

from __future__ import annotations

import math
from collections.abc import Callable

from fluid.devices.occupancy import Occupancy
from fluid.engine.key_estimates import KeyEstimate
from fluid.engine.records import TrialRecord
from fluid.resources import MemoryNeed


class Needs:
    """Says how much device memory trials need.

    Args:
        occupancy: which trial holds which device.
        of_key: the estimate of a trial's profile key, on the device model that it holds or is planned for.
        on_model: the estimate of a profile key on a device model.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        of_key: Callable[[TrialRecord], KeyEstimate],
        on_model: Callable[[str, str | None], KeyEstimate],
    ) -> None:
        self._occupancy = occupancy
        self._of_key = of_key
        self._on_model = on_model

    def of(self, trial: TrialRecord) -> MemoryNeed | None:
        """Device memory, as specified, predicted or measured, scaled down to the largest device; ``None``: unknown."""
        return trial.spec.memory or self._as_fits(trial.pace.expected_need or self._of_trials_key(trial))

    def on(self, trial: TrialRecord, estimate: KeyEstimate) -> MemoryNeed | None:
        """The same on a device model of which this is the estimate."""
        known = trial.pace.expected_need or estimate.memory or self._of_trials_key(trial)
        return trial.spec.memory or self._as_fits(known)

    def most_of(self, key: str) -> MemoryNeed | None:
        """The most that was measured of a key's trials on any device model."""
        models = self._occupancy.models or (None,)
        known = [need for model in models if (need := self._on_model(key, model).memory) is not None]
        if not known:
            return None
        return MemoryNeed(max(need.persistent_bytes for need in known), max(need.ephemeral_bytes for need in known))

    def most_usable(self) -> float:
        """Bytes that trials may fill on the device with the most memory."""
        rooms = [self._occupancy.memory.usable_bytes(index) for index in self._occupancy.residents]
        return max((math.inf if room is None else room for room in rooms), default=math.inf)

    def _of_trials_key(self, trial: TrialRecord) -> MemoryNeed | None:
        """What was measured on the device model that the trial holds; else the most that was on any."""
        models = self._occupancy.models
        if len(models) <= 1 or trial.row in self._occupancy.held:
            need = self._of_key(trial).memory
            if need is not None or len(models) <= 1:
                return need
        return self.most_of(trial.spec.profile_key)

    def _as_fits(self, need: MemoryNeed | None) -> MemoryNeed | None:
        if need is None or (usable := self.most_usable()) >= need.peak_bytes:
            return need
        persistent = float(math.floor(need.persistent_bytes / need.peak_bytes * usable))
        return MemoryNeed(persistent, usable - persistent)
