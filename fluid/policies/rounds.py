"""Rounds: all trials advance together, an iteration each in turn, though they do not all fit at once.

Trials that share a lane take turns there by the lane's policy. This is about those that wait for a device: a running
trial makes room once it has done as many iterations as one that waits.

What it gains (``benchmarks/lanes.py``): 16 configs have their first results after 1.045 times 16 iterations, one
after another after 7.8 times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fluid.engine.core import SessionState
from fluid.engine.events import Event, PausePurpose, TrialPaused
from fluid.engine.placing.queue import PlannedTrials
from fluid.engine.policy import Check, Handler, Policy
from fluid.engine.records import TrialRecord
from fluid.engine.trials.lifecycle import Lifecycle
from fluid.engine.trials.residency import Residency
from fluid.trialgroup import TrialState


class Rotation(Policy):
    """Lets running trials make room for waiting ones after each iteration.

    Lanes are told to run one iteration at a time as long as trials wait: else each trial would run a further iteration
    before it is told to pause.
    """

    def __init__(self, core: SessionState, lifecycle: Lifecycle, residency: Residency) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._residency = residency
        #: Trials whose states leave a device: that device, and the iterations done by the trial that gets the room.
        self._leaving: dict[str, tuple[int, int]] = {}
        #: Devices that states are leaving, for trials that have done at most so many iterations.
        self._kept: dict[int, int] = {}

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """Trials that have paused for others."""
        return {TrialPaused: (None, self._paused)}

    def _paused(self, event: TrialPaused) -> None:
        if event.purpose is PausePurpose.PREEMPT:
            self._make_room(self._core.trials.get(event.trial_id))

    @property
    def keeps_devices(self) -> bool:
        """Whether states are leaving devices."""
        return bool(self._kept)

    @property
    def kept_devices(self) -> frozenset[int]:
        """The devices that states are leaving."""
        return frozenset(self._kept)

    def forbidden_to(self, trial: TrialRecord) -> frozenset[int]:
        """The devices that states leave for trials that have done fewer iterations; none for a pinned trial."""
        if trial.pinned:
            return frozenset()
        return frozenset(device for device, done in self._kept.items() if trial.progress.done > done)

    def resumed(self, trial: TrialRecord) -> None:
        """Times a trial that goes on: it runs one iteration at a time, and would never be measured."""
        self._core.timing.resumed(trial)

    def reorder(self, plan: PlannedTrials, trials: Sequence[TrialRecord]) -> PlannedTrials:
        """Trials that have done the fewest iterations start first."""
        return _fewest_done_first(plan, trials)

    def dispatched(self) -> None:
        """Lanes are told to run one iteration at a time as long as others wait for their turn."""
        self._core.stepwise |= bool(self._core.queue)

    def after_starts(self) -> None:
        """Lets those that are ahead make room, and the others go on; to be called once all that fits has started."""
        core = self._core
        were_stepwise, core.stepwise = core.stepwise, bool(core.queue)
        if not (were_stepwise or core.stepwise):
            return
        running = [core.trials.by_row[row] for row in core.allocations.running]
        able = [trial for trial in running if trial.state is TrialState.RUNNING and trial.placement.preemption is None]
        if core.stepwise:
            self._rotate(running, [trial for trial in able if not trial.calls and _is_at_end(trial)])
        for trial in (*able, *core.resizing.values()):
            core.top_up(trial)

    def _rotate(self, running: list[TrialRecord], able: list[TrialRecord]) -> None:
        """Preempts trials that have done as many iterations as others that wait, one for each."""
        core = self._core
        if not able:
            return
        waiting = sorted((core.trials.by_row[row] for row in core.queue), key=_done)
        # The first of them get the room that others are making now.
        coming = iter(waiting[sum(trial.placement.preemption is not None for trial in running) :])
        following = next(coming, None)
        for trial in sorted(able, key=_done, reverse=True):
            if following is None or trial.progress.done < following.progress.done:
                return
            if trial.group_priority > following.group_priority or not self._can_leave(trial):
                continue
            if self._is_being_measured(trial):
                continue
            self._lifecycle.preempt(trial, why=f"makes room for {following.trial_id!r}, as trials advance in rounds")
            following = next(coming, None)

    def _is_being_measured(self, trial: TrialRecord) -> bool:
        """Whether as many trials as are being tried run on a trial's device: their iterations are to be comparable."""
        estimates = self._core.estimates
        return estimates.of_key(trial).is_trying and estimates.co_residents(trial) >= estimates.of_key(trial).processes

    def _can_leave(self, trial: TrialRecord) -> bool:
        """Whether a trial's device is free for others once it has paused: its state stays, or can be fetched back."""
        bounded = any(self._core.memory.usable_bytes(device) for device in self._core.occupancy.held[trial.row])
        return trial.spec.can_save or not bounded

    def _make_room(self, trial: TrialRecord | None) -> None:
        """Evicts states from the device that a trial has just left, until the next waiting trial fits there."""
        core = self._core
        device = None if trial is None else trial.residence.device
        if device is None:
            return
        first = min((core.trials.by_row[row] for row in core.queue), key=_done, default=None)
        usable = core.memory.usable_bytes(device)
        if first is None or usable is None:
            return
        need = core.estimates.need_on(first, device)
        excess = core.memory.filled_bytes(device) + core.memory.added_bytes(device, need) - usable
        kept = [(core.trials[trial_id], lane_id) for lane_id, trial_id in core.lanes.kept_on(device)]
        for other, lane_id in sorted(kept, key=lambda each: -_done(each[0])):
            if excess > 0.0 and (other.residence.saving or self._may_be_evicted(other, first)):
                excess -= core.lanes.kept_bytes(lane_id, other.trial_id)
                self._residency.evict(other)
                self._leaving[other.trial_id] = device, first.progress.done
        self.after_events()

    @staticmethod
    def _may_be_evicted(trial: TrialRecord, first: TrialRecord) -> bool:
        waits = trial.state is TrialState.QUEUED or trial.rests
        return waits and trial is not first and trial.spec.can_save and not trial.calls and _done(trial) >= _done(first)

    def after_events(self) -> None:
        """Lets all trials have the room of states that have left, or will not."""
        trials = self._core.trials
        for trial_id in list(self._leaving):
            if trial_id not in trials or not trials[trial_id].residence.saving:
                del self._leaving[trial_id]
                self._core.changed |= bool(self._core.queue)
        self._kept.clear()
        for device, done in self._leaving.values():
            self._kept[device] = min(done, self._kept.get(device, done))


def _fewest_done_first(plan: PlannedTrials, trials: Sequence[TrialRecord]) -> PlannedTrials:
    """The plan with those first that have done the fewest iterations, and of these, those that have waited longest."""
    return replace(plan, order=sorted(range(len(trials)), key=lambda position: trials[position].progress.done))


def _done(trial: TrialRecord) -> int:
    return trial.progress.done


def _is_at_end(trial: TrialRecord) -> bool:
    """Whether a trial has run what its lanes were told to; or they were told before others waited, and it runs on."""
    granted, done = trial.progress.granted, trial.progress.done
    return trial.placement.move is None and done > 0 and (granted <= done or granted > done + 1)
