"""Demand: what further devices the waiting trials could use, and which devices are idle. Autoscaling reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fluid.engine.core import SessionState
from fluid.engine.drains import is_only_in_memory
from fluid.engine.records import TrialRecord
from fluid.measure.runtime_model import TOLERANCE
from fluid.trialgroup import TrialState


class DeviceDemand:
    """Reads the demand off the queue; nothing here takes longer with more trials or devices.

    Args:
        core: the session.
    """

    def __init__(self, core: SessionState) -> None:
        self._core = core

    @property
    def devices(self) -> int:
        """How many devices the waiting trials could use beyond those in use.

        A trial that is to be packed counts for its share of a device, and an elastic one for one device, as those
        that it could be widened onto are not worth asking for. One of a fixed width counts for all its devices. A trial
        that can go on only in the lane that keeps its state does not count.
        """
        core = self._core
        if core.drained:
            return 0
        shares = sum(count * min(width, 1.0) for width, count in core.queue.unbound.items())
        arriving = sum(trial.fixed_width or 1 for trial in core.arrivals.values())
        further = sum(count * (width - 1) for asked, count in core.queue.constraints.items() if (width := asked.width))
        return arriving + further + math.ceil(shares - TOLERANCE)

    @property
    def trials_wait(self) -> bool:
        """Whether a trial waits that could start on any device."""
        return bool(self._core.queue.unbound or self._core.arrivals)

    @property
    def idle_since(self) -> Mapping[int, float]:
        """Since when each idle device is idle, seconds; one that drains is left out."""
        return self._core.occupancy.idle_since

    def may_give_back(self, device_id: int) -> bool:
        """Whether an idle device can go without loss.

        It cannot while it keeps the state of a trial that is called, or of one that may run again and cannot be saved.
        The last device of a machine cannot, either, while that machine alone has the state of a trial that may run
        again.
        """
        core = self._core
        host = core.occupancy.device(device_id).host
        is_last = all(device.host != host for device in core.occupancy.devices if device.index != device_id)
        for _, trial_id in core.lanes.kept_on(device_id):
            trial = core.trials[trial_id]
            if trial.calls or (may_run_again(trial) and (is_last or not trial.spec.can_save)):
                return False
        trials = core.trials.values() if is_last else ()
        return not any(may_run_again(trial) and is_only_in_memory(trial, {host}) for trial in trials)


def may_run_again(trial: TrialRecord) -> bool:
    """Whether a trial has not ended, or its search algorithm has said that it may be extended."""
    return not trial.state.ended or (trial.state is TrialState.DONE and trial.progress.follow_up_iterations > 0)
