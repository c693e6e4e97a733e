"""Device shares: trials that may get certain devices only, parted by those, and the other trials' work there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluid.devices.constraints import Constraint
from fluid.devices.occupancy import Occupancy
from fluid.engine.estimates import Estimates
from fluid.engine.group_shares import GroupShares
from fluid.engine.open_jobs import OpenJobs
from fluid.engine.records import TrialRecord
from fluid.resources import Device, Requires

#: What trials require of their devices, and those that they get first; ``None`` for nothing, and for any.
_Where = tuple[Requires | None, frozenset[int] | None]


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
        jobs: the work of those that run or wait.
        arriving: the trials that arrive.
        shares: the devices that each job gets first; the others count for nothing, as they may be other jobs' for long.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        estimates: Estimates,
        jobs: OpenJobs,
        arriving: Sequence[TrialRecord],
        shares: GroupShares,
    ) -> None:
        self._occupancy = occupancy
        self._arriving = arriving
        self._open = {device.index: device for device in occupancy.open_devices}
        self._shares = shares
        #: Seconds of work by the devices for which it is, of the trials that run, wait or arrive.
        self._work: dict[_Where, float] = {}
        for job, seconds in jobs.work.items():
            self._count(job, seconds)
        for trial in arriving:
            self._count(trial.job, estimates.height(trial))
        self._estimates = estimates

    def parts(self, positions: Sequence[int]) -> list[DeviceShare]:
        """The arriving trials at these positions, by devices, in order of the first of each."""
        parts: dict[_Where, list[int]] = {}
        for position in positions:
            parts.setdefault(self._where(self._arriving[position].job), []).append(position)
        return [self._share(where, some) for where, some in parts.items()]

    def _share(self, where: _Where, positions: list[int]) -> DeviceShare:
        wanted = self._indices(where)
        others = -sum(self._estimates.height(self._arriving[position]) for position in positions)
        for other, seconds in self._work.items():
            theirs = self._indices(other)
            others += seconds * len(theirs & wanted) / max(1, len(theirs))
        idle = sum(index in wanted for index in self._occupancy.idle_since)
        return DeviceShare(positions, [self._open[index] for index in sorted(wanted)], idle, max(0.0, others))

    def _indices(self, where: _Where) -> set[int]:
        requires, share = where
        if share:  # Those without a share of their own get what others leave, anywhere.
            return self._open.keys() & share
        eligible = self._occupancy.eligible.of(None if requires is None else Constraint(requires))
        return set(self._open) if eligible is None else self._open.keys() & eligible

    def _count(self, job: int, seconds: float) -> None:
        where = self._where(job)
        self._work[where] = self._work.get(where, 0.0) + seconds * self._shares.terms_of(job).devices

    def _where(self, job: int) -> _Where:
        return self._shares.terms_of(job).requires, self._shares.share_of_job(job)
