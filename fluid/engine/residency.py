"""States of trials that do not run: kept in a lane, saved out of it, or let go."""

from __future__ import annotations

from fluid.engine.commands import Save, StopTrial
from fluid.engine.core import Core
from fluid.engine.events import Checkpoint, TrialSaved
from fluid.engine.records import TrialRecord, TrialState

#: How many more states than usual a device keeps of trials that cannot be saved, before it lets them go.
_PINNED_ALLOWANCE = 8


class Residency:
    """Keeps, saves and lets go of the states of trials that do not run."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def settle_in(self, trial: TrialRecord, lane_id: int) -> None:
        """Leaves a trial's state resident in its lane, and makes room if there are too many."""
        core = self._core
        trial.resident, trial.home = lane_id, core.lanes[lane_id].device_id
        core.lanes.keep(lane_id, trial.trial_id, core.scheduling.kept_bytes(trial))
        self._limit_residents(trial.home)

    def _limit_residents(self, device: int) -> None:
        core = self._core
        limit = core.lanes.resident_limit
        kept = [core.trials[trial_id] for _, trial_id in core.lanes.kept_on(device)]
        if len(kept) <= limit:
            return
        savable = [other for other in kept if other.spec.can_save and not other.saving]
        self._evict_oldest(savable, len(savable) - limit)
        pinned = [other for other in kept if not other.spec.can_save]
        self._evict_oldest(pinned, len(pinned) - limit * _PINNED_ALLOWANCE)

    def _evict_oldest(self, trials: list[TrialRecord], surplus: int) -> None:
        """Evicts those that have been done for longest; a trial that waits to go on stays where it is."""
        if surplus > 0:
            done = [trial for trial in trials if trial.state is TrialState.DONE]
            for trial in sorted(done, key=_since)[:surplus]:
                self.evict(trial)

    def evict(self, trial: TrialRecord) -> None:
        """Has a resident leave its lane: saved, or given up where it cannot be."""
        if trial.resident is None or trial.saving:
            return
        if trial.spec.can_save:
            self.save_out(trial)
        else:
            self.let_go(trial)
            trial.given_up = True
            self._core.tell(trial, "its state was given up to make room")

    def save_out(self, trial: TrialRecord) -> None:
        """Has a resident saved, and leave its lane."""
        assert trial.resident is not None and not trial.saving
        trial.saving = True
        self._core.commands.append(Save(trial.trial_id, (trial.resident,), drop=True))
        self._core.tell(trial, f"is saved out of lane {trial.resident}")

    def let_go(self, trial: TrialRecord) -> None:
        """Has a resident leave its lane unsaved."""
        if trial.resident is not None:
            self._core.commands.append(StopTrial(trial.trial_id, (trial.resident,)))
            self._core.lanes.dismiss(trial.resident, trial.trial_id)
            trial.resident = trial.home = None
            trial.saving = False

    def saved(self, event: TrialSaved) -> TrialRecord | None:
        """Notes a checkpoint; returns the trial if its state has left the lane that kept it."""
        trial = self._core.trials.get(event.trial_id)
        if trial is None:
            return None
        self._note_checkpoint(trial, event.checkpoint)
        if not event.dropped:
            return None
        self._core.lanes.take_up(event.lane_id, trial.trial_id)
        self._core.changed = True  # memory that it held is free
        if trial.resident != event.lane_id:
            return None
        trial.resident = trial.home = None
        trial.saving = False
        return trial

    def _note_checkpoint(self, trial: TrialRecord, checkpoint: Checkpoint) -> None:
        if checkpoint.iteration > trial.reported:
            return  # by a lane it has left, whose last reports do not count: those iterations are run again
        if trial.checkpoint is None or checkpoint.iteration >= trial.checkpoint.iteration:
            trial.checkpoint = checkpoint
        if checkpoint.in_memory:
            return
        if trial.durable is None or checkpoint.iteration >= trial.durable.iteration:
            trial.durable = checkpoint

    def lose(self, trial: TrialRecord, why: str) -> None:
        """Sets a trial whose state is gone back to its newest checkpoint."""
        if trial.resident is not None:
            self._core.lanes.take_up(trial.resident, trial.trial_id)
        trial.resident = trial.home = None
        trial.saving = False
        if not trial.state.ended:
            trial.done = trial.restart_at
        self._core.tell(trial, f"lost its state: {why}")

    def lose_host(self, host: str) -> None:
        """Forgets checkpoints that were in the memory of a machine that is gone."""
        for trial in self._core.trials.values():
            checkpoint = trial.checkpoint
            if checkpoint is not None and checkpoint.in_memory and checkpoint.host == host:
                trial.checkpoint = trial.durable

    def make_room(self) -> list[TrialRecord]:
        """Evicts residents where nothing but their memory keeps a queued trial from an idle device.

        Returns:
            Trials that can go on only on a device whose other residents can neither be saved nor let go: they are to
            start in spite of those.
        """
        scheduling, occupancy = self._core.scheduling, self._core.scheduling.occupancy
        if not occupancy.reserved:
            return []
        cramped = []
        for position, row in enumerate(scheduling.queue):
            trial = scheduling.records[row]
            need = scheduling.need(trial)
            if need is None or (position > 0 and not trial.pinned):
                continue
            idle = [index for index, rows in occupancy.residents.items() if not rows]
            if trial.pinned:
                idle = [index for index in idle if index == trial.home]
            lacking = max(1, round(trial.width))
            for device in sorted(idle, key=lambda index: occupancy.reserved.get(index, 0.0)):
                usable = occupancy.usable_bytes(device)
                if usable is not None and need.peak_bytes > usable:
                    continue
                fits = usable is None or occupancy.filled_bytes(device) + need.peak_bytes <= usable
                if fits or self._empty(device, need.peak_bytes, trial):
                    lacking -= 1
                elif trial.pinned:
                    cramped.append(trial)
                if lacking == 0:
                    break
        return cramped

    def _empty(self, device: int, wanted: float, trial: TrialRecord) -> bool:
        """Evicts residents of a device until so many bytes are free; returns whether any of them is leaving."""
        core = self._core
        usable, reserved = core.scheduling.occupancy.usable_bytes(device), core.scheduling.occupancy.reserved
        kept = [core.trials[trial_id] for _, trial_id in core.lanes.kept_on(device)]
        staying = {other.trial_id for other in kept if not other.saving}
        held = {key: memory for lane in core.lanes.on(device) for key, memory in lane.reserved.items()}
        leaving = [memory for key, memory in held.items() if key not in staying]
        stays = trial.width <= 1.0  # where its state is, which is then counted with it
        own = held.get(trial.trial_id, 0.0) if stays else 0.0
        excess = reserved.get(device, 0.0) + wanted - (usable or 0.0) - sum(leaving) - own
        evicted = False
        for other in sorted(kept, key=_cost_of_eviction):
            if excess > 0.0 and not (other is trial and stays) and not other.saving and _can_be_evicted(other):
                excess -= held.get(other.trial_id, 0.0)
                self.evict(other)
                evicted = True
        return evicted or bool(leaving)


def _can_be_evicted(trial: TrialRecord) -> bool:
    return trial.state is TrialState.DONE or (trial.state is TrialState.QUEUED and trial.spec.can_save)


def _cost_of_eviction(trial: TrialRecord) -> tuple[bool, bool, float, int]:
    return not trial.spec.can_save, trial.state is not TrialState.DONE, *_since(trial)


def _since(trial: TrialRecord) -> tuple[float, int]:
    """When its latest transition was."""
    return trial.story[-1][0], trial.row
