"""The host whose memory holds a trial's state: where the trial starts, if that saves more seconds than it costs."""

from __future__ import annotations

from collections.abc import Set

from fluid.devices.occupancy import Occupancy
from fluid.engine.estimates import Estimates
from fluid.engine.records import TrialRecord


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
