"""Strikes: which devices, and not the trials that failed there, are to blame for exceptions that left CUDA unusable.

The first such exception of a trial does not count as its failure, the second one does. A device gets a strike from each
trial that failed so there since a trial last completed an iteration on it. It is guilty after a few strikes if other
devices completed iterations meanwhile, so code with a fault, which fails on every device, costs no device.

It is there for safety, and has no figure: without it, one broken GPU of a node fails every trial that comes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fluid.engine.core import SessionState
from fluid.engine.events import DeviceAdded, DeviceLost, Event, Failure, IterationDone
from fluid.engine.policy import Check, Handler, Policy
from fluid.engine.records import TrialRecord

#: A device is given up after so many strikes.
MOST_STRIKES = 3


class Strikes(Policy):
    """Counts strikes, and gives up guilty devices.

    Args:
        core: the state of the session.
        device_lost: removes a device.
    """

    def __init__(self, core: SessionState, device_lost: Callable[[DeviceLost], None]) -> None:
        self._core = core
        self._device_lost = device_lost
        #: Of each device with a strike: how many, and the rows of the trials, but for those that were forgotten.
        self._strikes: dict[int, int] = {}
        self._struck: dict[int, set[int]] = {}
        #: Of these devices, those since whose first strike another device has completed an iteration.
        self._others_work: set[int] = set()
        #: Rows of trials of which one exception was not counted.
        self._excused: set[int] = set()
        #: The last exception, if it was in this instant.
        self._last: Failure | None = None

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """Devices that come, or come back."""
        return {DeviceAdded: (None, lambda event: self._clear(event.device.index))}

    def excuses(self, trial: TrialRecord, failure: Failure, devices: tuple[int, ...]) -> bool:
        """Counts a strike, and sends the trial elsewhere; of several devices any may be to blame, and none gets one."""
        if len(devices) > 1:
            return False
        if trial.row not in (rows := self._struck.setdefault(devices[0], set())):
            self._strikes[devices[0]] = self._strikes.get(devices[0], 0) + 1
            rows.add(trial.row)
        self._last = failure
        if trial.row in self._excused or not self._core.scheduling.placing.has_choice(trial):
            return False
        self._excused.add(trial.row)
        trial.limits = replace(trial.limits, avoids=devices[0])
        return True

    def iterated(self, trial: TrialRecord, event: IterationDone, observed: int) -> None:
        """Clears the devices of a trial: they work."""
        if not self._strikes:
            return
        for device in self._core.occupancy.held[trial.row]:
            self._clear(device)
        self._others_work.update(self._strikes)
        if trial.limits.avoids is not None:
            trial.limits = replace(trial.limits, avoids=None)

    def forgotten(self, trial: TrialRecord) -> None:
        """Drops the trial's row; its strikes count on."""
        self._excused.discard(trial.row)
        for rows in self._struck.values():
            rows.discard(trial.row)

    def after_events(self) -> None:
        """Gives up the devices that are guilty since an exception of this instant."""
        if self._last is None:
            return
        last, self._last = self._last, None
        for device in [one for one in self._others_work if self._strikes[one] >= MOST_STRIKES]:
            why = f"{MOST_STRIKES} trials in a row left it unusable, the last by {last.message}"
            self._device_lost(DeviceLost(self._core.now, device, why))
            self._clear(device)

    def _clear(self, device: int) -> None:
        """Drops the strikes of a device; the trials that avoid it may go back."""
        self._strikes.pop(device, None)
        for row in self._struck.pop(device, ()):
            trial = self._core.trials.by_row.get(row)
            if trial is not None and trial.limits.avoids == device:
                trial.limits = replace(trial.limits, avoids=None)
                self._core.changed = True
        self._others_work.discard(device)
