"""Strikes: which devices, and not the trials that failed there, are to blame for exceptions that left CUDA unusable.

The first such exception of a trial does not count as its failure, the second one does. A device gets a strike from each
trial that failed so there since a trial last completed an iteration on it. It is guilty after a few strikes if other
devices completed iterations meanwhile, so code with a fault, which fails on every device, costs no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fluid.engine import tuning
from fluid.engine.records import TrialRecord


class DeviceStrikes:
    """Counts strikes.

    Attributes:
        any: whether a device has a strike.
        given_up: devices that the engine uses no more, with the reason.
    """

    def __init__(self) -> None:
        self.any = False
        self.given_up: dict[int, str] = {}
        #: device -> trials that failed there since it last completed an iteration, by row
        self._strikes: dict[int, dict[int, TrialRecord]] = {}
        #: Of these, devices since whose first strike another device has completed an iteration.
        self._others_work: set[int] = set()

    def excuses(self, trial: TrialRecord, devices: tuple[int, ...], *, others: bool) -> bool:
        """Counts an exception of a trial that left its lane's devices unusable.

        Args:
            trial: the trial.
            devices: the lane's; of several, any may be to blame, and none gets a strike.
            others: whether there are further devices, on which the trial can be tried.

        Returns:
            Whether the trial is to be tried on another device, and this does not count as its failure.
        """
        if len(devices) > 1:
            return False
        self._strikes.setdefault(devices[0], {})[trial.row] = trial
        self.any = True
        if trial.limits.excused or not others:
            return False
        trial.limits = replace(trial.limits, excused=True, avoids=devices[0])
        return True

    def iterated(self, devices: Iterable[int]) -> bool:
        """Clears devices that completed an iteration; returns whether a trial need not avoid one any longer."""
        cleared = [self.forget(device) for device in devices]
        self._others_work.update(self._strikes)
        return any(cleared)

    def forget(self, device: int) -> bool:
        """Clears a device; returns whether a trial need not avoid it any longer."""
        avoiding = [trial for trial in self._strikes.pop(device, {}).values() if trial.limits.avoids == device]
        for trial in avoiding:
            trial.limits = replace(trial.limits, avoids=None)
        self._others_work.discard(device)
        self.any = bool(self._strikes)
        return bool(avoiding)

    def removed(self, device: int, reason: str) -> None:
        """Clears a device that is removed; with a reason, it is given up."""
        self.forget(device)
        if reason:
            self.given_up[device] = reason

    def guilty(self) -> list[int]:
        """The devices that are to be given up."""
        return [device for device in self._others_work if len(self._strikes[device]) >= tuning.MOST_STRIKES]
