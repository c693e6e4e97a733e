"""Rebalancing: which running trials get another width, and which leave a device that is packed too much.

What it gains: widening, ``benchmarks/stragglers.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from fluid.engine.core import SessionState
from fluid.engine.estimates.running import RunningTable
from fluid.engine.policy import Policy, Preempt, Proposal, Reallocate
from fluid.engine.records import TrialRecord
from fluid.planners.arrangement import Replanner, WidthChange
from fluid.policies.faster_devices import FasterDevices
from fluid.trialgroup import TrialState


class Overpacking(Policy):
    """Trials that leave devices which too many share.

    Args:
        core: the state of the session.
        table: the columns of the running trials.
    """

    def __init__(self, core: SessionState, table: RunningTable) -> None:
        self._trials = core.trials
        self._occupancy = core.occupancy
        self._estimates = core.estimates
        self._measuring = core.measuring
        self._table = table

    def propose(self) -> list[Proposal]:
        """Trials that pause, so that the others of their device get more done."""
        return [Preempt(trial) for trial in self.overpacked()]

    @property
    def has_overpacking(self) -> bool:
        """Whether trials may be packed too much, or run wider than helps."""
        return self._measuring.packs_less or bool(self._table.too_wide())

    def overpacked(self) -> list[TrialRecord]:
        """One trial of each device on which fewer would get more done than all do, as was measured since they came.

        If that trial cannot be paused now, or a further one may have to be, the next call checks the devices again.
        """
        if not self._measuring.packs_less:
            return []
        found = []
        self._measuring.packs_less = False
        for device, rows in self._occupancy.residents.items():
            if self._occupancy.is_closed(device):
                continue
            trials = [self._trials.by_row[row] for row in reversed(rows) if row in self._table]
            lanes = Counter(trial.placement.lanes for trial in trials)
            many = [trial for trial in trials if self._packing_hurts(trial, len(rows), lanes)]
            self._measuring.packs_less |= bool(many)
            if not any(trial.placement.preemption is not None for trial in many):
                running = [trial for trial in many if trial.state is TrialState.RUNNING]
                found += sorted(running, key=lambda trial: trial.group_priority)[:1]
        return found

    def _packing_hurts(self, trial: TrialRecord, residents: int, lanes: Mapping[tuple[int, ...], int]) -> bool:
        """Whether so many trials on a device get less done than one fewer would: p / alpha^(p-1) falls with p.

        Trials in one lane take turns if too many of them are fused: that costs nothing, unless they are not to be fused
        at all, and so could each have a lane.

        Args:
            trial: one of them.
            residents: how many there are.
            lanes: how many there are in each lane.
        """
        estimate = self._estimates.of_key(trial)
        if trial.sharing_group is not None:
            return False
        if lanes[trial.placement.lanes] > 1:
            return True
        return residents > max(1, estimate.packing) and estimate.alpha * (residents - 1) > residents


class Rebalancing(Policy):
    """Chooses other widths and devices for running trials.

    Each change is weighed by what its trial gains. Sets of changes are not rolled out to the end: that pays only for
    groups that come alone, as no rollout foresees a further group, from which trials that are left wide keep devices.

    Args:
        core: the state of the session.
        table: the columns of the running trials.
        moves: whether trials go to faster devices; not under a planner that leaves trials where they start.
    """

    def __init__(self, core: SessionState, table: RunningTable, *, moves: bool) -> None:
        self._core = core
        self._trials = core.trials
        self._queue = core.queue
        self._occupancy = core.occupancy
        self._estimates = core.estimates
        self._table = table
        self._allocations = core.allocations
        self._moves = moves
        self._faster = FasterDevices(core.trials, core.occupancy, core.estimates, core.allocations)

    def propose(self) -> list[Reallocate]:
        """The widths and devices that the planner wants now."""
        return self.rebalance(self._core.scheduling.replanner)

    def rebalance(self, replanner: Replanner) -> list[Reallocate]:
        """Resizes to make now: to make room for queued trials, or to use idle or faster devices once none is queued."""
        if not self._table:
            return []
        # First, trials that run wider than was measured to help are narrowed.
        changes = [WidthChange(row, float(width)) for row, width in self._table.too_wide()]
        if not changes and self._queue:
            changes = self._make_room(replanner)
        elif not changes and not self._has_nothing_to_move(replanner):
            changes = [change for part in self._allocations.snapshots() for change in replanner.replan(part)]
        by_row = self._trials.by_row
        allowed = [Reallocate(by_row[row], width) for row, width in changes if self._allowed(by_row[row], width)]
        # Last, those that have to leave their host, or to spread over several: they leave the others the near devices.
        allowed.sort(key=lambda each: self._leaves_host(each.trial, each.width))
        return self._with_moves(allowed) if self._moves and not self._queue else allowed

    def _with_moves(self, resizes: list[Reallocate]) -> list[Reallocate]:
        """Adds moves to faster devices; a trial that could also be widened does what gains more.

        A move comes after the trial's resize, for the case that the devices for that turn out to be too slow.
        """
        moves = {move.trial.row: move for move in self._faster.choose()}
        chosen = []
        for trial, width, _ in resizes:
            move = moves.get(trial.row)
            if move is not None and width > 1.0 and self._estimates.seconds_gained(trial, width) < move.gain:
                continue
            chosen.append(Reallocate(trial, width))
        return chosen + [Reallocate(move.trial, move.trial.width, move.device) for move in moves.values()]

    def _leaves_host(self, trial: TrialRecord, width: float) -> bool:
        """Whether a trial is to be wider than its host has room for."""
        is_wider = width > max(1.0, trial.width)
        return is_wider and not self._occupancy.can_widen_in_place(trial.row, width)

    def _has_nothing_to_move(self, replanner: Replanner) -> bool:
        free = self._occupancy.free_count > 0 or self._table.has_several_devices
        return replanner.moves_only_devices and not free

    def _make_room(self, replanner: Replanner) -> list[WidthChange]:
        narrowest = min(self._queue.widths())
        for row in self._table.packed_wider_than(narrowest):
            trial = self._trials.by_row[row]
            self._allocations.allow_packing(trial, max(narrowest, 1.0 / self._estimates.packing(trial)))
        if not self._table.can_narrow():
            return []
        waiting = np.array([self._allocations.waiting_work])
        return [change for part in self._allocations.snapshots() for change in replanner.make_room(part, waiting)]

    def _allowed(self, trial: TrialRecord, width: float) -> bool:
        """Whether a trial can be resized now, and a wider one ends sooner."""
        if trial.state is not TrialState.RUNNING or trial.placement.preemption is not None:
            return False
        if width > max(1.0, trial.width) and not self._pays(trial, width):
            return False
        stays = self._estimates.co_residents(trial) == 1 and max(trial.width, width) <= 1.0
        return stays or trial.spec.can_save

    def _pays(self, trial: TrialRecord, width: float) -> bool:
        """Whether a wider trial ends sooner, though the iteration in flight still runs at its present width."""
        return self._estimates.may_try(trial, width) and self._estimates.seconds_gained(trial, width) > 0.0
