"""Iteration timing: which iterations were timed while the trials on their device all iterated, and so can be compared.

A trial that starts, loads data or compiles takes seconds or minutes before it competes with its co-residents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fluid.devices.occupancy import Occupancy
from fluid.engine.lane_record import LaneRecord
from fluid.engine.records import TrialRecord
from fluid.engine.trials import Trials


class IterationTiming:
    """Marks iterations whose seconds say nothing about packing.

    Args:
        trials: the trials of the session.
        occupancy: which trial holds which device.
    """

    def __init__(self, trials: Trials, occupancy: Occupancy) -> None:
        self._trials = trials
        self._occupancy = occupancy

    def invalidate(self, trial: TrialRecord) -> None:
        """Marks the iterations in flight on a trial's devices: it comes there or leaves."""
        trial.placement.disturbed, trial.placement.settled = True, False
        move = trial.placement.move
        self._disturb(self._occupancy.held.get(trial.row, ()))
        self._disturb(move.old_devices if move is not None else ())

    def placed(self, trial: TrialRecord, lanes: Sequence[LaneRecord], now: float) -> None:
        """Records that a trial was placed in these lanes; its start is timed in a lane that has to load everything."""
        unused = len(lanes) == 1 and not lanes[0].used
        trial.placement.placed_at, trial.placement.settled_after = now if unused else None, None

    def lane_launched(self, lane: LaneRecord, at: float) -> None:
        """Times the start of the trial that holds a lane from the lane's launch on, seconds, if it waited for that.

        A lane waits for the MPS daemon of its GPU, for instance, once in a session: that says nothing of later starts.
        """
        for trial_id in lane.holders:
            trial = self._trials.get(trial_id)
            if trial is not None and trial.placement.placed_at is not None:
                trial.placement.placed_at = max(trial.placement.placed_at, at)

    def started(self, trial: TrialRecord) -> None:
        """Marks the iterations in flight beside a trial that begins to iterate."""
        self._disturb(self._occupancy.held[trial.row])

    def resumed(self, trial: TrialRecord) -> None:
        """Records that a trial goes on in the lane that has kept its state: it loads and compiles nothing there."""
        trial.placement.disturbed, trial.placement.settled = False, True

    def settle(self, trial: TrialRecord, now: float, *, is_usual: bool) -> None:
        """Records that a trial has finished its first iteration where it is.

        Marks those in flight beside it, unless it took as long as usual: then the trial competed all the time. Trials
        of few iterations would never be measured otherwise.
        """
        if not is_usual:
            self._disturb(self._occupancy.held[trial.row])
        place = trial.placement
        place.settled = True
        place.settled_after = None if place.placed_at is None else now - place.placed_at
        place.placed_at = None

    def co_residents(self, trial: TrialRecord) -> list[TrialRecord] | None:
        """The trials on a trial's device, itself included; ``None`` unless all of them have settled there."""
        rows = self._occupancy.residents[self._occupancy.held[trial.row][0]]
        if len(rows) == 1:
            return [trial]
        records = self._trials.by_row
        # A row without a record belongs to a trial that is being resized, which may be at a standstill.
        found = [records[row] for row in rows if row in records and records[row].placement.settled]
        return found if len(found) == len(rows) else None

    def _disturb(self, devices: Iterable[int]) -> None:
        records = self._trials.by_row
        for device in devices:
            rows = self._occupancy.residents.get(device, ())
            if len(rows) > 1:
                for row in rows:
                    if row in records:
                        records[row].placement.disturbed = True
