"""Faster devices: which running trials go to an idle device that is faster for them, and end sooner there.

What it gains: trials on unlike devices leave the slow ones once the queue is empty; ``benchmarks/paper_shapes.py``
and ``benchmarks/groups.py`` run with it, and no figure is of it alone.
"""

from __future__ import annotations

from typing import NamedTuple

from fluid.devices.occupancy import Occupancy
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.placing.allocations import Allocations
from fluid.engine.records import TrialRecord, Trials
from fluid.trialgroup import TrialState


class DeviceMove(NamedTuple):
    """A trial that is to go to another device.

    Attributes:
        device: index of the device, which is idle.
        gain: predicted seconds by which the trial ends earlier, above 0: what the move costs is taken off.
    """

    trial: TrialRecord
    device: int
    gain: float


class FasterDevices:
    """Chooses trials that are alone on a device, and faster devices for them.

    Placement gives a trial the fastest device that is idle when it starts. A faster one that becomes idle later, while
    no trial waits for it, is for the trial that ends last of those that gain more there than the move costs. No other
    trial is slowed down by that, so by what is predicted, none ends later.

    Args:
        trials: the trials of the session.
        occupancy: which trial holds which device.
        estimates: how fast trials are where, and what a move costs.
        allocations: knows which trials are alone.
    """

    def __init__(self, trials: Trials, occupancy: Occupancy, estimates: Estimates, allocations: Allocations) -> None:
        self._trials = trials
        self._occupancy = occupancy
        self._estimates = estimates
        self._allocations = allocations

    def choose(self) -> list[DeviceMove]:
        """The moves that are predicted to gain more than they cost, that of the trial that ends last first.

        A device is the target of at most one of them.
        """
        if not self._occupancy.free_count or not self._occupancy.is_unlike:
            return []
        alone = [self._trials.by_row[row] for row in self._allocations.alone()]
        #: By profile key and the model that a trial leaves.
        idle: dict[tuple[str, str | None], dict[int, float]] = {}
        moves: list[DeviceMove] = []
        taken: set[int] = set()
        for trial in sorted(filter(_may_move, alone), key=self._estimates.seconds_left, reverse=True):
            held = self._occupancy.held[trial.row]
            key = trial.spec.profile_key, self._occupancy.device(held[0]).model
            if key not in idle:
                idle[key] = self._known_speeds(trial)
            now = self._estimates.speed(trial, held)
            if now >= max(idle[key].values(), default=0.0):
                continue
            faster = {index for index, speed in idle[key].items() if speed > now and index not in taken}
            move = self._move(trial, faster) if faster else None
            if move is not None:
                moves.append(move)
                taken.add(move.device)
        return moves

    def _known_speeds(self, trial: TrialRecord) -> dict[int, float]:
        """How fast each idle device is for a trial, where that is known."""
        estimates, held = self._estimates, self._occupancy.held[trial.row]
        return {
            index: estimates.speed(trial, (index,))
            for index in self._occupancy.idle_since
            if estimates.compares(trial.spec.profile_key, (*held, index))
        }

    def _move(self, trial: TrialRecord, faster: set[int]) -> DeviceMove | None:
        """The move to the fastest of some idle devices on which a trial fits, if it gains by that."""
        estimates, occupancy = self._estimates, self._occupancy
        (held,) = occupancy.held[trial.row]
        eligible = occupancy.eligible.of(trial.constraint)
        allowed = (faster if eligible is None else faster & eligible) - {trial.limits.avoids}
        allowed = {index for index in allowed if self._has_room(trial, held, index)}
        host = occupancy.device(held).host
        need, by_model = estimates.need(trial), estimates.by_model(trial)
        device = occupancy.fastest_idle(need, host, allowed, by_model)
        gain = 0.0 if device is None else estimates.seconds_gained_on(trial, device)
        return None if device is None or gain <= 0.0 else DeviceMove(trial, device, gain)

    def _has_room(self, trial: TrialRecord, held: int, index: int) -> bool:
        """Whether a device has room for what a trial needs where it is, or, if that is unknown, as much memory.

        What its key was measured to need there is not enough: trials of a key may need more than those measured, and
        this one runs.
        """
        memory = self._occupancy.memory
        need, room, usable = memory.need_of(trial.row), memory.usable_bytes(held), memory.usable_bytes(index)
        if usable is None or need is not None:
            return memory.fits(index, need)
        return room is not None and usable >= room


def _may_move(trial: TrialRecord) -> bool:
    """Whether a trial can be moved, and has an iteration left after the one in flight."""
    runs = trial.state is TrialState.RUNNING and trial.placement.preemption is None
    return runs and trial.spec.can_save and not trial.spec.gang and trial.progress.left > 1
