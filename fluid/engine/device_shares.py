"""Device shares: trials that may get certain devices only, parted by those, and the other trials' work there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluid.engine.estimates import Estimates
from fluid.engine.records import TrialRecord
from fluid.engine.remaining_work import RemainingWork
from fluid.engine.trials import Trials
from fluid.planning.constraints import Constraint
from fluid.planning.occupancy import Occupancy
from fluid.resources import Device, Requires


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """Trials that may get the same devices.

    Attributes:
        positions: of the trials, among those that arrive.
        devices: those that they may get, open ones.
        idle: how many of them are idle.
        others: seconds of work that other trials have left there.
    """

    positions: list[int]
    devices: list[Device]
    idle: int
    others: float


class DeviceShares:
    """Parts arriving trials by the devices that they may get.

    Another trial's work counts on a set of devices in proportion to how many of its own devices are among these. A gang
    works on all of its devices.

    Args:
        occupancy: which trial holds which device.
        estimates: what work trials have left.
        records: the trials of the session.
        work: the work of those that run or wait.
        arriving: the trials that arrive.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        estimates: Estimates,
        records: Trials,
        work: RemainingWork,
        arriving: Sequence[TrialRecord],
    ) -> None:
        self._occupancy = occupancy
        self._arriving = arriving
        self._open = {device.index: device for device in occupancy.open_devices}
        #: Seconds of work by what trials require, of those that run, wait or arrive.
        self._work: dict[Requires | None, float] = {}
        for row, seconds in work.by_row.items():
            self._count(records.by_row[row], seconds)
        for trial in arriving:
            self._count(trial, estimates.height(trial))
        self._estimates = estimates

    def parts(self, positions: Sequence[int]) -> list[DeviceShare]:
        """The arriving trials at these positions, by devices, in order of the first of each."""
        parts: dict[Requires | None, list[int]] = {}
        for position in positions:
            parts.setdefault(_requires(self._arriving[position]), []).append(position)
        return [self._share(requires, some) for requires, some in parts.items()]

    def _share(self, requires: Requires | None, positions: list[int]) -> DeviceShare:
        wanted = self._indices(requires)
        others = -sum(self._estimates.height(self._arriving[position]) for position in positions)
        for other, seconds in self._work.items():
            theirs = self._indices(other)
            others += seconds * len(theirs & wanted) / max(1, len(theirs))
        idle = sum(index in wanted for index in self._occupancy.idle_since)
        return DeviceShare(positions, [self._open[index] for index in sorted(wanted)], idle, max(0.0, others))

    def _indices(self, requires: Requires | None) -> set[int]:
        eligible = self._occupancy.eligible.of(None if requires is None else Constraint(requires))
        return set(self._open) if eligible is None else self._open.keys() & eligible

    def _count(self, trial: TrialRecord, seconds: float) -> None:
        requires = _requires(trial)
        devices = (trial.fixed_width or 1) if trial.spec.gang else 1
        self._work[requires] = self._work.get(requires, 0.0) + seconds * devices


def _requires(trial: TrialRecord) -> Requires | None:
    return None if trial.constraint is None else trial.constraint.requires
