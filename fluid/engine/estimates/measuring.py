"""Measuring: what the engine learns from iterations, starts, saves and resizes, for the profile and for estimates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fluid.devices.occupancy import Occupancy
from fluid.engine.commands import NoteMeasured
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.estimates.key_estimates import KeyEstimate
from fluid.engine.events import IterationDone, Restoring
from fluid.engine.placing.allocations import Allocations
from fluid.engine.records import LaneRecord, TrialRecord, Trials, smooth
from fluid.measure.profile import Profile
from fluid.resources import MemoryNeed


class Measuring:
    """Learns the pace, overheads and memory of trials while they run.

    Args:
        trials: the trials of the session.
        profile: takes what is measured.
        occupancy: its number of devices says how much work is worth a trial of further packing.
        estimates: are brought up to date with the profile.
        allocations: are brought up to date with the estimates.
    """

    def __init__(
        self,
        trials: Trials,
        profile: Profile,
        occupancy: Occupancy,
        estimates: Estimates,
        allocations: Allocations,
    ) -> None:
        self._trials = trials
        self._profile = profile
        self._occupancy = occupancy
        self._estimates = estimates
        self._allocations = allocations
        #: Whether a key packs less, so that devices may hold more trials than are of use there.
        self.packs_less = False
        #: Estimates of which c, d, speed or first pace changed while their trials run or wait, or of a trial that may
        #: try a further width from now on, by key and model.
        self.ramp_changes: dict[tuple[str, str | None], KeyEstimate] = {}

    def pop_ramp_changes(self) -> list[KeyEstimate]:
        """The keys of which c, d or the first pace changed since the last call, or which a trial may try more of."""
        changed, self.ramp_changes = self.ramp_changes, {}
        return list(changed.values())

    def observe(
        self,
        trial: TrialRecord,
        co_residents: Sequence[TrialRecord],
        done: IterationDone,
    ) -> None:
        """Learns from an iteration of a running trial, or a run of several, while its co-residency did not change.

        Args:
            trial: the trial.
            co_residents: the trials on its device, itself included, all of which iterated.
            done: the iteration, or the run, from which the profile learns once.
        """
        seconds, memory, busy = done.typical_seconds, done.memory, done.busy
        estimate = self._estimates.of_key(trial)
        residents = len(co_residents)
        width = 1 if trial.spec.gang else max(1, round(trial.width))
        if memory is not None:
            self.observe_memory(trial, memory)
        if seconds <= 0.0:
            return
        alone = residents == width == 1
        learns = estimate.worth_observing(residents, width, done.count)
        is_tried = estimate.is_tried(residents, width)
        if alone:
            learns |= busy is not None and not estimate.busy_known
            estimate.busy_known |= busy is not None
            estimate.seconds_alone += seconds * done.count
        if learns:
            self._learn(trial, estimate, co_residents, seconds, width=width, busy=busy)
        if alone:
            speed = self._estimates.speed(trial, self._occupancy.held[trial.row])
            trial.pace.solo = smooth(trial.pace.solo, seconds * speed, done.count)
        stretch = self._estimates.stretch(trial)
        if is_tried:
            self._observe_own(trial, estimate, seconds / stretch, done.count)
        self._estimates.observe_pace(trial, done, stretch, estimate.model)

    def _observe_own(self, trial: TrialRecord, estimate: KeyEstimate, seconds: float, count: int) -> None:
        """Learns a trial's own pace from iterations at a packing or width that was measured before."""
        if trial.pace.own is None and estimate.tried < estimate.width:
            self._note_change(estimate)  # The trial may try a further width from now on.
        trial.pace.own = smooth(trial.pace.own, seconds, count)

    def observe_step(self, trial: TrialRecord, event: IterationDone, *, is_first: bool, packs: int | None) -> None:
        """Learns from a step of fused trials, or of one that takes turns with others in its lane.

        Args:
            trial: one of them.
            event: its iteration.
            is_first: whether it is the first that reports this step.
            packs: how many lanes on its device train so many trials; ``None`` if they do not all train as many.
        """
        estimate, rows = self._estimates.of_key(trial), event.rows
        if event.memory is not None:
            self.observe_memory(trial, event.memory, rows)
        if event.typical_seconds <= 0.0:
            return
        fusing, speed = estimate.fusing, self._occupancy.speed(self._occupancy.held[trial.row])
        seconds = event.typical_seconds * speed
        if not event.settled:
            if is_first:
                fusing.prepared(seconds, rows, estimate.pace)
            return
        if packs is None:
            return
        if is_first and packs == 1 and rows == fusing.rows and event.busy is not None:
            fusing.busy.append(event.busy)
        if is_first and fusing.worth_observing(packs, rows):
            self._profile.observe(estimate.key, seconds, model=estimate.model, co_residents=packs, rows=rows)
            self._update(trial, estimate, event.typical_seconds)
            if rows == packs == 1:
                self._update_other_models(estimate, alone=True)
        known = packs == 1 and (rows == 1 or (fusing.rates is not None and rows in fusing.rates.rows))
        if known:
            stretch = 1.0 if rows == 1 or fusing.rates is None else fusing.rates.stretch(rows)
            self._observe_own(trial, estimate, seconds / stretch, event.count)
            self._estimates.observe_pace(trial, event, stretch / speed, estimate.model)

    def observe_turn(self, trial: TrialRecord, done: IterationDone, lanes: int) -> None:
        """Learns from iterations of a trial that takes turns in one of so many lanes of its device."""
        estimate = self._estimates.of_key(trial)
        if done.typical_seconds <= 0.0:
            return
        speed = self._occupancy.speed(self._occupancy.held[trial.row])
        seconds, is_tried = done.typical_seconds * speed, estimate.is_tried(lanes, 1)
        if estimate.worth_observing(lanes, 1, done.count):
            typical = seconds if lanes == 1 else _as_typical(trial, estimate, seconds, lanes)
            self._profile.observe(estimate.key, typical, model=estimate.model, co_residents=lanes)
            estimate.add_observed(lanes, trial.row)
            self._update(trial, estimate, seconds)
        stretch = estimate.alpha ** (lanes - 1)
        if is_tried:
            self._observe_own(trial, estimate, seconds / stretch, done.count)
        self._estimates.observe_pace(trial, done, stretch / speed, estimate.model)

    def estimate_changed(self, estimate: KeyEstimate) -> None:
        """Brings an estimate up to date: a lane has found how far its trials can be fused, or a cohort begins."""
        self._estimates.update(estimate, work=self._work_per_device)
        self._note_change(estimate)

    def _learn(
        self,
        trial: TrialRecord,
        estimate: KeyEstimate,
        co_residents: Sequence[TrialRecord],
        seconds: float,
        *,
        width: int,
        busy: float | None,
    ) -> None:
        """Adds an iteration to the profile, in seconds on a device of speed 1 if the user gave speeds."""
        residents = len(co_residents)
        alone = residents == width == 1
        if width > 1 and trial.pace.solo is None and estimate.is_tried(residents, width):
            # Few trials are wide: what one takes that was never alone tells of the trial, not of the width.
            self._learn_first_pace(trial, estimate, seconds)
            return
        model = estimate.model
        typical = seconds if alone else _as_typical(trial, estimate, seconds, residents, width)
        typical *= self._occupancy.speed(self._occupancy.held[trial.row])
        if width > 1:
            comparable = self._estimates.scaling_seconds(trial, typical)
            if comparable is not None:
                model, typical = estimate.scaling_model, comparable
            elif len({self._occupancy.device(index).model for index in self._occupancy.held[trial.row]}) > 1:
                # Which of these models was the slowest is not known, so that the seconds are those of none.
                self._learn_first_pace(trial, estimate, seconds)
                return
        self._profile.observe(estimate.key, typical, model=model, co_residents=residents, width=width, busy=busy)
        for other in co_residents if residents > 1 else ():
            self._estimates.of_key(other).add_observed(residents, trial.row)
        self._update(trial, estimate, seconds)
        if residents == 1:
            self._update_other_models(estimate, alone=alone)

    def observe_memory(self, trial: TrialRecord, memory: MemoryNeed, rows: int = 1) -> None:
        """Learns what a running trial, or each of the rows of its pack, was seen to need, whatever ran beside it."""
        estimate = self._estimates.of_key(trial)
        if rows == 1 and estimate.memory is not None and estimate.memory.covers(memory):
            return
        if self._profile.observe_memory(estimate.key, memory, model=estimate.model, rows=rows):
            estimate.update_memory(self._profile)
            self._allocations.update_needs(estimate.key)

    def observe_arrival(self, trial: TrialRecord) -> None:
        """Learns that a trial comes to a device, which others may hold: in time, one of them must be observed there."""
        rows = self._occupancy.residents[self._occupancy.held[trial.row][0]]
        if len(rows) == 1 or (trial.takes_turns and self._estimates.of_key(trial).takes_turns):
            return  # Of trials that take turns, some are always observed.
        records = (self._trials.by_row[row] for row in rows if row in self._trials.by_row)
        for estimate in {id(found): found for found in map(self._estimates.of_key, records)}.values():
            gives_up = len(rows) >= estimate.processes and estimate.add_arrival(self._profile, len(self._occupancy))
            if gives_up and self._estimates.update(estimate, work=0.0):
                self._note_change(estimate)

    def observe_start(self, trial: TrialRecord, seconds: float, restoring: Restoring | None = None) -> None:
        """Learns how long a trial took to start, afresh or from a checkpoint."""
        estimate = self._estimates.of_key(trial)
        estimate.starts.append(seconds)
        if restoring is not None:
            estimate.set_ups.append(max(0.0, seconds - restoring.seconds))
            self._profile.restores.observe(estimate.key, restoring.source, restoring.seconds)
            for each in self._estimates.all_of(estimate.key):
                each.restores = self._profile.restores.of(estimate.key)

    def observe_warm_up(self, trial: TrialRecord, seconds: float) -> None:
        """Learns how much longer a trial took to its second iteration, from an unused lane on, than an iteration."""
        self._estimates.of_key(trial).warm_ups.append(max(0.0, seconds))

    def observe_save(self, trial: TrialRecord, seconds: float) -> None:
        """Learns how long a trial took to be saved."""
        self._estimates.of_key(trial).saves.append(seconds)

    def observe_resize(self, seconds: float) -> None:
        """Learns how long a resize took."""
        self._profile.observe_resize(seconds)

    def _update(self, trial: TrialRecord, estimate: KeyEstimate, seconds: float) -> None:
        """Brings a key's estimate up to date with the profile, which learnt from an iteration of a trial."""
        self._learn_first_pace(trial, estimate, seconds)
        processes = estimate.processes
        if self._estimates.update(estimate, work=self._work_per_device):
            self._note_change(estimate)
        if estimate.processes < processes:
            self.packs_less = True

    def _learn_first_pace(self, trial: TrialRecord, estimate: KeyEstimate, seconds: float) -> None:
        """Books the pace of a key of which none was known, as an iteration of a trial tells it."""
        if estimate.pace is None:
            estimate.pace, estimate.is_rough = seconds / self._estimates.stretch(trial), True
            self._note_change(estimate)
            self._allocations.update_works(estimate.key)

    def _update_other_models(self, estimate: KeyEstimate, *, alone: bool) -> None:
        """Books what an iteration alone, or a wide one, says about a key on all models: speeds, or beta and d."""
        if len(self._occupancy.models) <= 1:
            return
        if alone:
            for key in self._allocations.update_speeds(estimate.key):
                for each in self._estimates.all_of(key):
                    self._note_change(each)
            return
        for other in self._estimates.all_of(estimate.key):
            if other is not estimate and self._estimates.update(other, work=self._work_per_device):
                self._note_change(other)

    def _note_change(self, estimate: KeyEstimate) -> None:
        self.ramp_changes[estimate.key, estimate.model] = estimate

    @property
    def _work_per_device(self) -> float:
        """Seconds of work left, which may repay trying what has a cost."""
        return self._allocations.work.total / max(1, len(self._occupancy))


def _as_typical(trial: TrialRecord, estimate: KeyEstimate, seconds: float, residents: int, width: int = 1) -> float:
    """Seconds that a packed or wide iteration would have taken a trial of its key's usual pace.

    Trials of a key differ, and overheads are factors: which of them happened to be packed or wide must not count. Of
    one that was never alone, its iterations at packings and widths that were measured before tell its pace; what those
    at this one tell follows from the very overhead that is sought.
    """
    pace = trial.pace.solo
    if pace is None and not estimate.is_tried(residents, width):
        pace = trial.pace.own
    return seconds if pace is None or estimate.pace is None else seconds * estimate.pace / pace


def notes_of(keys: list[KeyEstimate], now: float) -> list[NoteMeasured]:
    """Makes the notices of what is measured of these keys, at a time in seconds."""
    return [
        NoteMeasured(
            key.key,
            at=now,
            model=key.model,
            seconds=key.pace,
            packing=key.packing,
            width=key.width,
            alpha=key.alpha,
            beta=key.beta,
            rows=key.fusing.rows,
            fused_gain=key.fusing.gain,
        )
        for key in keys
    ]


# -- iteration timing ----------------------------------------------------------------------------
#
# Iteration timing: which iterations were timed while the trials on their device all iterated, and so can be compared.
#
# A trial that starts, loads data or compiles takes seconds or minutes before it competes with its co-residents.


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
