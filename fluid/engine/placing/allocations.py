"""Allocations: what each trial is given (devices, width, memory), and how much work it has left.

Messages read these from the trial's record, placement from occupancy and its memory ledger, planners from the running
table's columns. All of them are written here and nowhere else, so that they agree.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Set
from typing import Protocol

from fluid.devices.occupancy import Occupancy
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.estimates.running import RunningTable, snapshots_by_devices
from fluid.engine.records import Move, TrialRecord, Trials
from fluid.planners.arrangement import Running
from fluid.resources import TOLERANCE, MemoryNeed

# -- remaining work ------------------------------------------------------------------------------
#
# The work that is left in all, kept up to date so that an arrival does not have to sum over every trial.


#: Paths that are gone stay in the heap until there are as many of them as others, and so many more.
_SLACK = 64


class _PathLengths:
    """Seconds to the end of the critical path that begins with a trial, of one owner's trials with follow-ups."""

    def __init__(self) -> None:
        self._paths: dict[int, float] = {}
        #: Heap of (-seconds, row): all of those, and some that were removed or changed since.
        self._longest: list[tuple[float, int]] = []

    @property
    def longest(self) -> float:
        heap, paths = self._longest, self._paths
        while heap and paths.get(heap[0][1]) != -heap[0][0]:
            heapq.heappop(heap)
        return -heap[0][0] if heap else 0.0

    def set(self, row: int, seconds: float) -> None:
        self._paths[row] = seconds
        heapq.heappush(self._longest, (-seconds, row))
        if len(self._longest) > 2 * len(self._paths) + _SLACK:
            self._longest = [(-each, key) for key, each in self._paths.items()]
            heapq.heapify(self._longest)

    def forget(self, row: int) -> bool:
        """Returns whether none is left."""
        self._paths.pop(row, None)
        return not self._paths


class WorkCounts(Protocol):
    """Is told how much work trials that run or wait have left."""

    def join(self, trial: TrialRecord, seconds: float) -> None:
        """Counts a trial that now runs or waits."""

    def leave(self, trial: TrialRecord, seconds: float) -> None:
        """Counts a trial no more, which had so much work left."""

    def change(self, trial: TrialRecord, seconds: float, count: int = 1) -> None:
        """Adds to the work that each of so many trials like this one has left."""

    def do(self, trial: TrialRecord, seconds: float) -> None:
        """Counts work that a trial has done."""


class RemainingWork:
    """Seconds of work left of each trial that runs or waits, at width 1 and speed 1, as last predicted.

    Args:
        trials: the trials of the session, by row.
        counts: is told of every change.
    """

    def __init__(self, trials: Mapping[int, TrialRecord], counts: WorkCounts) -> None:
        self.by_row: dict[int, float] = {}
        self.counts = counts
        self._trials = trials
        self._total = 0.0
        #: by owner, of those of which a trial has follow-up iterations
        self._paths: dict[int, _PathLengths] = {}

    @property
    def total(self) -> float:
        """Seconds of all trials together."""
        return max(0.0, self._total)

    @property
    def has_paths(self) -> bool:
        """Whether any trial has follow-up iterations."""
        return bool(self._paths)

    def longest_path(self, owner: int) -> float:
        """Seconds to the end of an owner's longest critical path; 0 if none of its trials has follow-up iterations."""
        paths = self._paths.get(owner)
        return 0.0 if paths is None else paths.longest

    def set(self, row: int, seconds: float) -> None:
        """Sets the work that a trial has left."""
        before = self.by_row.get(row)
        if before is None:
            before = 0.0
            self.counts.join(self._trials[row], seconds)
        elif seconds != before:
            self.counts.change(self._trials[row], seconds - before)
        self._total += seconds - before
        self.by_row[row] = seconds

    def set_all(self, rows: Collection[int], seconds: float) -> None:
        """Sets the work that each of these trials of one job has left, which was the same for all."""
        first = next(iter(rows))
        before = self.by_row[first]
        self._total += (seconds - before) * len(rows)
        self.counts.change(self._trials[first], seconds - before, len(rows))
        self.by_row.update(dict.fromkeys(rows, seconds))

    def set_path(self, row: int, seconds: float) -> None:
        """Sets the length of the critical path that begins with a trial."""
        self._paths.setdefault(self._trials[row].owner, _PathLengths()).set(row, seconds)

    def forget(self, row: int) -> None:
        """Removes a trial that neither runs nor waits any more."""
        trial = self._trials.get(row)
        if trial is None:
            return
        seconds = self.by_row.pop(row, None)
        if seconds is not None:
            self._total -= seconds
            self.counts.leave(trial, seconds)
        if trial.owner in self._paths and self._paths[trial.owner].forget(row):
            del self._paths[trial.owner]
        if not self.by_row:
            self._total = 0.0  # rounding must not add up through a long session
            self.by_row.clear()  # An empty dict keeps the room that its members took.


# -- allocations ---------------------------------------------------------------------------------


class Allocations:
    """Gives trials devices, and keeps every copy of what they were given.

    Args:
        trials: the trials of the session.
        occupancy: which trial holds which device.
        estimates: what trials need, and how much work they have left.
        table: the columns of the running trials.
        counts: is told of the work that trials have left.

    Attributes:
        work: seconds of work left of the trials that run or wait.
    """

    def __init__(
        self, trials: Trials, occupancy: Occupancy, estimates: Estimates, table: RunningTable, counts: WorkCounts
    ) -> None:
        self.work = RemainingWork(trials.by_row, counts)
        self._trials = trials
        self._occupancy = occupancy
        self._estimates = estimates
        self._table = table
        #: Rows of trials that are being resized: they hold devices, and planners do not see them.
        self._moving: set[int] = set()
        #: Rows whose work has changed since a planner asked last how uncertain it is; more iterate than planners ask.
        self._unsure: set[int] = set()

    @property
    def running(self) -> list[int]:
        """Rows of the trials that run, or are about to, and are not being resized; ascending."""
        return sorted(self._table)

    def alone(self) -> list[int]:
        """Rows of those among them that have one device, and that for themselves; ascending."""
        return self._table.alone(self._occupancy)

    def snapshot(self) -> Running:
        """The trials that run and are not being resized, by ascending row."""
        for row in self._unsure:
            if row in self._table:
                self._table.set_sigma(row, self._estimates.sigma(self._trials.by_row[row]))
        self._unsure.clear()
        return self._table.snapshot(self._occupancy, self._estimates.epsilon)

    def snapshots(self) -> list[Running]:
        """What a re-planner sees: those of them whose width it may change, by the devices that they may get."""
        if not self._table.constraints:
            return [self.snapshot()]
        return snapshots_by_devices(self.snapshot(), self._table.constraints, self._occupancy)

    # -- devices and width ---------------------------------------------------------------------------------

    def place(
        self,
        trial: TrialRecord,
        *,
        near: int | None,
        only: bool,
        own_state: float,
        host: str | None,
        allowed: Set[int] | None = None,
    ) -> bool:
        """Gives a trial that holds nothing devices for its width, as :meth:`Occupancy.place` does.

        Returns:
            Whether it fits now.
        """
        need, width, by_model = self._estimates.need(trial), trial.width, self._estimates.by_model(trial)
        self.update_group(trial)
        placed = self._occupancy.place(
            trial.row,
            width,
            need,
            near=near,
            only=only,
            own_state=own_state,
            host=host,
            allowed=allowed,
            one_host=trial.spec.gang,
            by_model=by_model,
        )
        if placed is not None and trial.fixed_width is None:
            part = self._estimates.fastest_part(trial, placed)
            if part != placed:
                self._occupancy.release(trial.row)
                self._occupancy.hold(trial.row, part, float(len(part)), need)
                self.set_width(trial, float(len(part)))
        if placed is not None and by_model is not None and width < 1.0:
            # The width was planned for the model on which most trials can be packed.
            self.set_width(trial, max(width, 1.0 / by_model[self._occupancy.device(placed[0]).model].packing))
        if placed is not None and len(self._occupancy.models) > 1:
            self._occupancy.memory.place(trial.row, self._estimates.need(trial))  # on the model that it got
        return placed is not None

    def hold(self, trial: TrialRecord, devices: tuple[int, ...]) -> None:
        """Gives a trial that holds nothing these devices, whether or not there is room."""
        self.update_group(trial)
        self._occupancy.hold(trial.row, devices, trial.width, self._estimates.need(trial))

    def update_group(self, trial: TrialRecord) -> None:
        """Books with which trials alone a trial shares a device."""
        groups, move, group = self._occupancy.groups.of, trial.placement.move, trial.sharing_group
        if group != groups.get(trial.row, group):
            self._occupancy.memory.forget_placing([trial.row])
        if group is not None:
            estimate, before = self._estimates.of_key(trial), self._occupancy.groups.rows.get(group, 0)
            rows = self._occupancy.groups.rows[group] = estimate.turns if trial.takes_turns else estimate.fusing.rows
            if rows < before:
                self._occupancy.memory.forget_placing([row for row, other in groups.items() if other == group])
        for row in (trial.row,) if move is None else (trial.row, move.old_devices_row):
            if group is not None:
                groups[row] = group
            else:
                groups.pop(row, None)
            for device in self._occupancy.held.get(row, ()):
                self._occupancy.memory.request_check(device)  # It may need more lanes now.

    def has_company(self, trial: TrialRecord) -> bool:
        """Whether other trials are on a trial's devices."""
        residents, held = self._occupancy.residents, self._occupancy.held.get(trial.row, ())
        return any(len(residents[device]) > 1 for device in held)

    def set_width(self, trial: TrialRecord, width: float) -> None:
        """Changes the width of a trial that waits, or that keeps its devices."""
        trial.width = width
        if trial.row in self._occupancy.held:
            self._occupancy.tolerate(trial.row, width)
            self._table.set_width(trial.row, width)

    def allow_packing(self, trial: TrialRecord, width: float) -> None:
        """Opens a trial's device to as many others as fit beside that width; that costs only their company."""
        if width < trial.width - TOLERANCE:
            self.set_width(trial, width)

    def move(
        self,
        trial: TrialRecord,
        devices: tuple[int, ...],
        width: float,
        need: MemoryNeed | None,
        *,
        old_devices_row: int | None = None,
    ) -> None:
        """Gives a trial other devices; until :meth:`mark_running`, planners do not see it.

        Args:
            trial: a trial that holds devices.
            devices: its new devices.
            width: its new width.
            need: device memory, where it is known.
            old_devices_row: row that keeps the devices it leaves until :meth:`release_old_devices`.
        """
        if old_devices_row is not None and trial.sharing_group is not None:
            self._occupancy.groups.of[old_devices_row] = trial.sharing_group
        self._occupancy.move(trial.row, devices, width, need, old_devices_row=old_devices_row)
        trial.width = width
        self._table.remove(trial.row)
        self._moving.add(trial.row)

    def move_back(self, trial: TrialRecord, move: Move) -> None:
        """Gives a trial that has not moved yet what it had before."""
        self._occupancy.release(trial.row)
        self.release_old_devices(move)
        self._occupancy.hold(trial.row, move.old_devices, move.old_width, move.old_need)
        self.update_need(trial)
        trial.width = move.old_width

    def release_old_devices(self, move: Move) -> None:
        """Frees the devices that a moved trial has left."""
        if move.old_devices_row in self._occupancy.held:
            self._occupancy.release(move.old_devices_row)
        self._occupancy.groups.of.pop(move.old_devices_row, None)

    def mark_running(self, trial: TrialRecord) -> None:
        """Adds a trial to those that planners may resize: it runs, or is about to, on the devices it holds."""
        devices = self._occupancy.held[trial.row]
        self._moving.discard(trial.row)
        self._table.add(
            trial,
            devices,
            speed=self._estimates.speed(trial, devices),
            work=self.work.by_row[trial.row],
            model=self._estimates.of_key(trial).model,
        )
        self._unsure.add(trial.row)

    def rekey(self, trial: TrialRecord) -> None:
        """Books the estimates of another profile key for a trial."""
        if trial.row in self._table:
            self._table.remove(trial.row)
            self.mark_running(trial)
        if trial.row in self._occupancy.held:
            self.update_need(trial)
        if trial.row in self.work.by_row:
            self.update_work(trial)

    def release(self, trial: TrialRecord) -> None:
        """Frees everything that a trial holds."""
        self._table.remove(trial.row)
        self._moving.discard(trial.row)
        self._unsure.discard(trial.row)
        self.work.forget(trial.row)
        if trial.row in self._occupancy.held:
            self._occupancy.release(trial.row)
        self._occupancy.groups.of.pop(trial.row, None)
        if trial.placement.move is not None:
            self.release_old_devices(trial.placement.move)

    # -- memory --------------------------------------------------------------------------------------------

    def update_need(self, trial: TrialRecord) -> None:
        """Books the present estimate of a trial's need on the devices it holds."""
        need, move = self._estimates.need(trial), trial.placement.move
        for row in (trial.row,) if move is None else (trial.row, move.old_devices_row):
            if row in self._occupancy.held:
                self._occupancy.memory.set_need(row, need)

    def update_needs(self, profile_key: str) -> None:
        """Books a key's need for all of its trials, also for those placed before the need was measured."""
        for row in self._occupancy.held:
            trial = self._trials.by_row.get(row)
            if trial is not None and trial.spec.profile_key == profile_key and trial.spec.memory is None:
                self.update_need(trial)

    @property
    def waiting_work(self) -> float:
        """Seconds of work left of the trials that wait."""
        moving = sum(self.work.by_row[row] for row in self._moving)
        return max(0.0, self.work.total - self._table.total_work - moving)

    # -- work left -----------------------------------------------------------------------------------------

    def update_work(self, trial: TrialRecord) -> None:
        """Books the present estimate of the work that a running or waiting trial has left."""
        height, before = self._estimates.height(trial), self.work.by_row.get(trial.row, 0.0)
        self.work.set(trial.row, height)
        if height < before:
            self.work.counts.do(trial, before - height)
        self._table.set_work(trial.row, height)
        self._unsure.add(trial.row)

    def update_speeds(self, profile_key: str | None = None) -> set[str]:
        """Books how fast device models were measured to be.

        Args:
            profile_key: the key of which something was learnt; ``None`` if devices came or went.

        Returns:
            The keys of which a speed has changed.
        """
        changed = self._estimates.update_speeds(profile_key)
        for key in changed:
            for estimate in self._estimates.all_of(key):
                self._estimates.update(estimate, work=0.0)  # Not known here; asked with the next observation.
        for trial in self._trials.by_row.values() if changed else ():
            factors = changed.get(trial.spec.profile_key)
            if factors is None:
                continue
            trial.pace.rescale(factors.get(trial.pace.model, 1.0))
            if trial.row in self.work.by_row:
                self.update_work(trial)
            if trial.row in self._table:
                self._table.set_speed(trial.row, self._estimates.speed(trial, self._occupancy.held[trial.row]))
        return set(changed)

    def update_works(self, profile_key: str) -> None:
        """Books the work left of all trials of a key, of whose pace there was only a guess before."""
        for row in list(self.work.by_row):
            trial = self._trials.by_row.get(row)
            if trial is not None and trial.spec.profile_key == profile_key:
                self.update_work(trial)
