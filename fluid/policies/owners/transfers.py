"""Transfers: devices in use that go to another owner, and what the owners gain (docs/theory.md, section 15).

An owner whose work is d seconds on one device, and that uses p devices, ends in about d / p seconds. Mean completion
falls if one owner's end comes earlier by more than the other's comes later: the exchange argument of the shortest
remaining processing time first (Schrage, A proof of the optimality of the SRPT discipline, 1968), for work that is
divided over several devices.

No figure is of it alone yet: ``benchmarks/groups.py --pauses`` runs with it. Where all owners may use all devices, only
an owner that would be done before another device is idle takes one: else the plan is that of SRSF.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fluid.engine.core import SessionState
from fluid.engine.policy import Policy, Preempt, Proposal, Reallocate
from fluid.engine.records import TrialRecord
from fluid.policies.owners.shares import GroupShares
from fluid.trialgroup import TrialState

#: A trial makes room for trials of other owners so many times, and so many do at one instant.
MOST_TRANSFERS = 2
MOST_TRANSFERS_AT_ONCE = 16


class OwnerEnd(NamedTuple):
    """What decides when an owner ends.

    Attributes:
        work: seconds of work left on one device.
        devices: how many it uses.
    """

    work: float
    devices: int


def waiting_gain(waiting: OwnerEnd, wait: float) -> float:
    """Seconds by which an owner ends earlier if it gets a device now rather than ``wait`` seconds later.

    It does ``wait`` seconds more of work on that device, which its other devices then need not do.
    """
    return wait / (waiting.devices + 1)


def pause_gain(
    waiting: OwnerEnd, running: OwnerEnd, wait: float, seconds: float, stall: float, *, is_elsewhere: bool
) -> float:
    """Seconds by which completions come earlier in all if a running trial is paused for a waiting one.

    The running trial's owner waits until the waiting owner has done its work there. Or, if that is shorter and the
    device is none of its own share, it loses ``seconds`` of work on the device, which its other devices do instead. In
    its own share these go to the waiting owner, too, which comes before it: so a device only changes hands there if the
    waiting owner would be done before another one is idle.

    Args:
        waiting: the owner of the trial that waits.
        running: the owner of the trial that is paused.
        wait: seconds until another device would be idle for the waiting trial.
        seconds: predicted seconds until the running trial would end.
        stall: seconds that pausing it and resuming it elsewhere takes.
        is_elsewhere: whether the running trial's device is in none of its owner's share.
    """
    loss = waiting.work / (waiting.devices + 1)
    others = running.devices - 1
    if is_elsewhere and others > 0:
        loss = min(loss, seconds / others)
    return waiting_gain(waiting, wait) - loss - stall / max(1, running.devices)


# -- transfers -----------------------------------------------------------------------------------
#
# Transfers of devices in use: which running trials make room for waiting ones whose share their device is in.
#
# Without transfers, an owner whose trials may use few devices waits until trials that could run elsewhere end. A trial
# on such a device goes to an idle one that it may use, or is paused for the waiting trial, if the owners' completions
# gain more by that than it costs (docs/theory.md, section 15).


class DeviceTransfer(NamedTuple):
    """A running trial that makes room.

    Attributes:
        leaving: the running trial.
        coming: the waiting trial that the device is for.
        device: the idle device that the running trial goes to; ``None`` if it is paused.
    """

    leaving: TrialRecord
    coming: TrialRecord
    device: int | None


class Transfers(Policy):
    """Chooses transfers; it does not pause or move any trial.

    Args:
        core: the state of the session.
        shares: whose trials get which devices first.
    """

    def __init__(self, core: SessionState, shares: GroupShares) -> None:
        self._core = core
        self._shares = shares
        #: row -> how often a trial has made room.
        self._times: dict[int, int] = {}

    def exchange(self) -> Iterator[Proposal]:
        """Running trials that go to an idle device, or pause, for waiting ones in whose share theirs is."""
        for leaving, coming, device in self.choose():
            yield Preempt(leaving, coming) if device is None else Reallocate(leaving, leaving.width, device)
            if leaving.placement.preemption is not None or leaving.placement.move is not None:  # It was told to.
                self._times[leaving.row] = self._times.get(leaving.row, 0) + 1

    def choose(self) -> list[DeviceTransfer]:
        """The transfers to make now, at most one for each line of the queue, and one for each trial and device."""
        core = self._core
        if (
            not core.queue
            or core.resizing
            or self._shares.policy == "fifo"  # an explicit wish for the order of arrival
            or not self._shares.ranks
        ):
            return []
        by_row = core.trials.by_row
        running = [by_row[row] for row in core.allocations.alone()]
        if any(trial.placement.preemption is not None for trial in running):
            return []
        self._times = {row: times for row, times in self._times.items() if row in by_row}
        leaving = [trial for trial in running if self._may_leave(trial)]
        held = Counter(by_row[row].owner for row in core.allocations.running)
        chosen: list[DeviceTransfer] = []
        for coming in self._coming():
            if not leaving:
                break
            transfer = self._best(coming, leaving, held, {each.device for each in chosen})
            if transfer is not None:
                chosen.append(transfer)
                leaving.remove(transfer.leaving)
        return chosen

    def _coming(self) -> Iterable[TrialRecord]:
        """The first waiting trial of each line, in starting order, of those that a device in use could be for."""
        core = self._core
        first = [core.trials.by_row[row] for row, _ in core.queue.lines()]
        last = len(self._shares.ranks)
        first = [trial for trial in first if self._may_come(trial)]
        first.sort(key=lambda trial: (*(-each for each in trial.priority), self._shares.ranks.get(trial.owner, last)))
        return first[:MOST_TRANSFERS_AT_ONCE]

    def _best(
        self, coming: TrialRecord, leaving: list[TrialRecord], held: Counter[int], taken: set[int | None]
    ) -> DeviceTransfer | None:
        """The transfer for a waiting trial that gains most; ``None`` if none gains more than it costs."""
        core = self._core
        wanted = self._devices_for(coming)
        ends = [seconds for device in wanted if (seconds := self._idle_in(device)) is not None]
        if not ends:
            return None
        comes = OwnerEnd(self._shares.demands[coming.owner], held[coming.owner])
        gain = waiting_gain(comes, min(ends))
        best, most = None, 0.0
        for trial in leaving:
            (device,) = core.occupancy.held[trial.row]
            if device not in wanted or not self._makes_room(trial, coming, device):
                continue
            there = self._idle_device(trial, taken)
            seconds = core.estimates.seconds_left(trial)
            if there is not None:
                net = gain + core.estimates.seconds_gained_on(trial, there)
            elif not self._shares.outranks(coming.owner, trial.owner):
                continue  # An owner with less work left would wait behind others, too, which its loss leaves out.
            else:
                leaves = OwnerEnd(self._shares.demands[trial.owner], held[trial.owner])
                stall = core.estimates.of_key(trial).interruption()
                elsewhere = self._is_elsewhere(trial, device)
                net = pause_gain(comes, leaves, min(ends), seconds, stall, is_elsewhere=elsewhere)
            if net > most:
                best, most = DeviceTransfer(trial, coming, there), net
        return best

    def _makes_room(self, leaving: TrialRecord, coming: TrialRecord, device: int) -> bool:
        """Whether a device is rather for a waiting trial than for the one that runs there, and that fits there."""
        core = self._core
        if leaving.owner == coming.owner or leaving.group_priority > coming.group_priority:
            return False
        if not self._is_elsewhere(leaving, device) and not self._shares.outranks(coming.owner, leaving.owner):
            return False
        return core.memory.fits_in_place_of(device, core.estimates.need_on(coming, device), leaving.row)

    def _is_elsewhere(self, trial: TrialRecord, device: int) -> bool:
        """Whether a running trial's device is rather for other owners."""
        share = self._shares.share_of(trial)
        return share is not None and device not in share

    def _devices_for(self, coming: TrialRecord) -> set[int]:
        """The open devices of a waiting trial's share that it may get now."""
        core = self._core
        share, allowed = self._shares.share_of(coming), core.scheduling.placing.allowed(coming)
        found = core.occupancy.residents.keys() if allowed is None else allowed
        found = found if share is None else found & share
        return {device for device in found if not core.occupancy.is_closed(device)}

    def _idle_device(self, trial: TrialRecord, taken: set[int | None]) -> int | None:
        """An idle device to which a running trial can go."""
        core = self._core
        (held,) = core.occupancy.held[trial.row]
        allowed = core.scheduling.placing.allowed(trial)
        idle = {index for index in core.occupancy.idle_since if index not in taken}
        if allowed is not None:
            idle &= allowed
        if not idle:
            return None
        estimates = core.estimates
        return core.occupancy.fastest_idle(
            estimates.need(trial), core.occupancy.device(held).host, idle, estimates.by_model(trial)
        )

    def _idle_in(self, device: int) -> float | None:
        """Predicted seconds until a device in use is idle; ``None`` where that is unknown."""
        rows = self._core.occupancy.residents[device]
        trials = [trial for row in rows if (trial := self._core.trials.by_row.get(row)) is not None]
        if not trials or not all(self._core.estimates.is_measured(trial) for trial in trials):
            return None
        return max(self._core.estimates.seconds_left(trial) for trial in trials)

    def _may_leave(self, trial: TrialRecord) -> bool:
        if trial.state is not TrialState.RUNNING or trial.calls or trial.owner not in self._shares.demands:
            return False
        if not trial.spec.can_save or trial.spec.gang or trial.sharing_group is not None or trial.progress.left <= 1:
            return False
        rarely = self._times.get(trial.row, 0) < MOST_TRANSFERS
        return rarely and self._core.estimates.is_measured(trial)

    def _may_come(self, trial: TrialRecord) -> bool:
        if trial.width > 1.0 or trial.pinned or trial.calls or trial.sharing_group is not None:
            return False
        return trial.owner in self._shares.demands and self._core.estimates.is_measured(trial)
