"""States of trials that do not run: kept resident in a lane, saved out of it, or dropped.

A state stays on its device while there is room, which is counted in bytes where those are known. The least recently
used one is evicted first, to host memory, or to disk where that is full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from fluid.devices.constraints import Constraint
from fluid.devices.models import ByModel
from fluid.engine import tuning
from fluid.engine.commands import LimitMemory, Save, StartTrial, StopTrial
from fluid.engine.core import SessionState, is_to_be_kept, newest_to_keep
from fluid.engine.events import Checkpoint, StateMeasured, TrialNotKept, TrialSaved
from fluid.engine.records import LaneRecord, TrialRecord
from fluid.engine.trials.calls import Calls
from fluid.resources import MemoryNeed
from fluid.trialgroup import TrialState

# -- memory limits -------------------------------------------------------------------------------
#
# Memory limits: how much of a shared device's memory the process of each trial there may take.
#
# A trial that grows beyond its need then runs out of memory itself, instead of a neighbour that asks for the last
# bytes.


class MemoryLimits:
    """Limits trials that share a device whose memory is known; a trial that is alone has no limit."""

    def __init__(self, core: SessionState) -> None:
        self._core = core
        #: device -> (trial's row, lane) -> the limit that the lane was told, bytes.
        self._told: dict[int, dict[tuple[int, int], float]] = {}

    def update(self) -> None:
        """Tells the lanes of devices on which trials, needs or memory have changed; a trial that starts, with that."""
        changed, commands = self._core.memory.pop_changed(), self._core.commands
        if changed:
            starts = {each.trial_id: index for index, each in enumerate(commands) if isinstance(each, StartTrial)}
            for device in changed:
                self._update(device, starts)

    def _update(self, device: int, starts: Mapping[str, int]) -> None:
        told, kept = self._told.pop(device, {}), {}
        commands = self._core.commands
        for trial, limit in self._limits(device):
            lane_id = trial.placement.lanes[0]
            before = told.pop((trial.row, lane_id), None)
            start = starts.get(trial.trial_id)
            if start is not None:  # Its lane knows of no limit yet.
                command = commands[start]
                assert isinstance(command, StartTrial)
                commands[start] = structs.replace(command, limit_bytes=limit)
                before = limit
            elif limit is None or before is None or not _is_close(before, limit):
                if limit is not None or before is not None:
                    commands.append(LimitMemory(trial.trial_id, (lane_id,), limit))
                before = limit
            if before is not None:
                kept[trial.row, lane_id] = before
        records = self._core.trials.by_row
        # A trial that rests in its lane has its limit still, and is told if it has none when it runs again.
        kept.update({key: limit for key, limit in told.items() if _rests(records.get(key[0]), key[1])})
        if kept:
            self._told[device] = kept

    def _limits(self, device: int) -> list[tuple[TrialRecord, float | None]]:
        """The trials whose code runs on a device alone, and the limit that each is to have; ``None`` for none.

        Each gets a part of the memory that is left over, and may exceed its need a little in any case: needs of trials
        of a key differ, and the share of the device beyond the watermark is free.
        """
        core = self._core
        rows, usable = core.occupancy.residents.get(device, ()), core.memory.usable_bytes(device)
        if usable is None:
            return []
        spare = max(0.0, usable - core.memory.taken_bytes(device)) / max(1, len(rows))
        found: list[tuple[TrialRecord, float | None]] = []
        for row in rows:
            trial = core.trials.by_row.get(row)
            if trial is None or not _runs_in_one_lane(trial):
                continue
            least = None if len(rows) == 1 else core.memory.part_bytes(device, row)
            limit = None if least is None else max(tuning.MEMORY_TOLERANCE * least, least + spare)
            found.append((trial, limit or None))
        return found


def _runs_in_one_lane(trial: TrialRecord) -> bool:
    if len(trial.placement.lanes) != 1 or not trial.placement.launched or trial.spec.gang:
        return False
    return trial.state in (TrialState.STARTING, TrialState.RUNNING)


def _rests(trial: TrialRecord | None, lane_id: int) -> bool:
    return trial is not None and trial.residence.lane == lane_id


def _is_close(told: float, limit: float) -> bool:
    """Whether a limit need not be told again: it was a little less before, or hardly more."""
    return tuning.LOOSE_LIMIT * limit <= told <= tuning.TIGHT_LIMIT * limit


# -- residency -----------------------------------------------------------------------------------


class Residency:
    """Keeps, saves and drops the states of trials that do not run; writes their :class:`Residence`.

    Args:
        core: the session.
        calls: handed to the lane that keeps a trial's state.
    """

    def __init__(self, core: SessionState, calls: Calls) -> None:
        self._core = core
        self._calls = calls
        self._limits = MemoryLimits(core)

    def keep(self, trial: TrialRecord, lane_id: int) -> None:
        """Keeps a trial's state resident in its lane, and evicts others if the device keeps too many."""
        core, device = self._core, self._core.lanes[lane_id].device_id
        trial.residence = replace(trial.residence, lane=lane_id, device=device)
        core.lanes.keep(lane_id, trial.trial_id, self._kept_bytes(trial))
        self._calls.deliver(trial)
        self._trim_residents(device)

    def let_go(self, trial: TrialRecord, *, saves: bool = True) -> None:
        """Has a trial that is done leave its lane, which ends then, if nothing says that it goes on.

        If it ``saves``, its state is saved first, if it can be, for its submitter may extend it all the same.
        """
        progress, residence, spec = trial.progress, trial.residence, trial.spec
        if residence.lane is None or residence.saving or trial.calls or not _is_over(trial):
            return
        if residence.keeping:
            return  # It is being saved for good.
        may_be_extended = spec.extends is None and not progress.finished_early
        if saves and may_be_extended and spec.can_save and not residence.checkpoint_is_current:
            self._core.watching.saving_last(trial.trial_id, residence.lane, self._core.now)
            self.save_out(trial)
        else:
            self.drop(trial)

    def _kept_bytes(self, trial: TrialRecord) -> float:
        """Device memory that a trial's state takes at rest: as its lane measured, else as its key's usually does."""
        held = trial.residence.held_bytes
        return self._core.estimates.kept_bytes(trial) if held is None else held

    def measured(self, event: StateMeasured) -> None:
        """A lane has measured what a trial's state takes; if it is less than was booked, queued trials may fit."""
        core, trial = self._core, self._core.trials.get(event.trial_id)
        if trial is None:
            return
        if trial.residence.lane == event.lane_id:
            trial.residence = replace(trial.residence, held_bytes=event.held_bytes)
            core.lanes.keep(event.lane_id, event.trial_id, event.held_bytes)
            core.changed |= bool(core.queue)
        elif core.holder(event.trial_id, event.lane_id) is trial:
            trial.residence = replace(trial.residence, held_bytes=event.held_bytes)

    @staticmethod
    def is_measured_again(trial: TrialRecord) -> None:
        """A lane sets a trial up anew: what its state took before says nothing."""
        if trial.residence.held_bytes is not None:
            trial.residence = replace(trial.residence, held_bytes=None)

    def leave_lane(self, trial: TrialRecord) -> None:
        """Ends the residence of a trial that runs again in the lane that kept its state."""
        assert trial.residence.lane is not None
        self._core.lanes.remove_resident(trial.residence.lane, trial.trial_id)
        trial.residence = trial.residence.without_lane()

    def restored(self, trial: TrialRecord, iteration: int) -> None:
        """A lane has set the trial up from a checkpoint of that iteration, maybe not the newest one."""
        if iteration != trial.progress.done:
            trial.outdate_checkpoint()

    @staticmethod
    def set_back(trial: TrialRecord, checkpoint: Checkpoint | None) -> None:
        """A lane could use no later checkpoint than this one: later ones are damaged or gone."""
        durable = trial.residence.durable
        if checkpoint is None or (durable is not None and durable.iteration > checkpoint.iteration):
            durable = None
        if checkpoint is not None and not checkpoint.in_memory:
            durable = checkpoint
        is_current = checkpoint is not None
        trial.residence = replace(
            trial.residence, checkpoint=checkpoint, checkpoint_is_current=is_current, durable=durable
        )

    def answered(self, trial: TrialRecord) -> None:
        """Lets a resident whose last call was answered be evicted again."""
        device = trial.residence.device
        if device is not None:
            self._core.changed = True
            self._core.lanes.check_memory(trial.residence.lane)
            self._trim_residents(device)
            self.let_go(trial)

    def _trim_residents(self, device: int) -> None:
        """Evicts states if a device keeps too many: rare where their bytes are known (:meth:`evict_excess`)."""
        core = self._core
        bounded = core.memory.usable_bytes(device) is not None
        kept = core.lanes.kept_on(device)
        self._trim_idle_lanes(device, [core.trials[trial_id] for _, trial_id in kept])
        kept = [(lane_id, trial_id) for lane_id, trial_id in kept if not core.trials[trial_id].spec.isolated]
        trials = [core.trials[trial_id] for _, trial_id in kept]
        known = [bounded and core.lanes.kept_bytes(lane_id, trial_id) > 0.0 for lane_id, trial_id in kept]
        limit = core.lanes.resident_limit
        for measured, allowance in ((True, tuning.MEASURED_ALLOWANCE), (False, 1)):
            alike = [trial for trial, is_known in zip(trials, known, strict=True) if is_known is measured]
            savable = [trial for trial in alike if trial.spec.can_save and not trial.residence.saving]
            self._evict_oldest(savable, len(savable) - limit * allowance)
        pinned = [trial for trial in trials if not trial.spec.can_save]
        self._evict_oldest(pinned, len(pinned) - limit * tuning.PINNED_ALLOWANCE)

    def _trim_idle_lanes(self, device: int, kept: list[TrialRecord]) -> None:
        """Evicts states that have a lane of their own if a device keeps too many of these.

        Those that cannot be saved stay as long as the machine has processes for them: their trials would begin again.
        """
        alone = [trial for trial in kept if trial.spec.isolated and not (trial.residence.saving or _is_over(trial))]
        lanes, limit = self._core.lanes, self._core.occupancy.limit(device)
        surplus, beyond = len(alone) - lanes.most_idle_beside(limit), len(alone) - lanes.most_processes
        for trial in sorted(filter(_can_be_evicted, alone), key=self._cost_of_eviction) if surplus > 0 else ():
            if surplus > 0 and (trial.spec.can_save or beyond > 0):
                self.evict(trial)
                surplus, beyond = surplus - 1, beyond - 1

    def evict_excess(self) -> bool:
        """Evicts states that can be fetched back until the known bytes on each device fit there; limits what runs.

        Returns:
            Whether trials that wait may fit now: a lane that was ended may have had other devices, too.
        """
        while grown := self._core.memory.pop_grown():  # A lane that is ended changes what others count.
            for device in grown:
                self._evict_excess(device)
        self._limits.update()
        may_fit = self._core.lanes.pop_freed() and bool(self._core.queue)
        self._core.changed |= may_fit
        return may_fit

    def _evict_excess(self, device: int) -> None:
        core = self._core
        usable = core.memory.usable_bytes(device)
        if usable is None:
            return
        # Lanes without a trial go first: they are started faster than a state is saved and restored.
        core.lanes.retire(device, core.commands, while_=lambda: core.memory.taken_bytes(device) > usable)
        excess = core.memory.taken_bytes(device) - usable
        if excess <= self._leaving_bytes(device):
            return
        for trial in sorted(self._kept(device).values(), key=self._cost_of_eviction):
            if trial.spec.can_save and _can_be_evicted(trial):
                self.evict(trial)
                if excess <= self._leaving_bytes(device):
                    return

    def _evict_oldest(self, trials: list[TrialRecord], surplus: int) -> None:
        """Evicts the trials that have rested for longest; one that waits to go on stays where it is."""
        if surplus > 0:
            resting = [trial for trial in trials if trial.rests and not trial.calls and not _must_stay(trial)]
            for trial in sorted(resting, key=_since)[:surplus]:
                self.evict(trial)

    def _cost_of_eviction(self, trial: TrialRecord) -> tuple[bool, bool, float, float, int]:
        """Those whose states cost less come first; of states that can be saved, what is expected of a byte of them."""
        lane_id = trial.residence.lane
        worth = self._odds(trial) * self._core.estimates.of_key(trial).interruption()
        freed = self._lane_bytes(trial)
        freed += 0.0 if lane_id is None else self._core.lanes.kept_bytes(lane_id, trial.trial_id)
        # Measured bytes differ a little where states are alike: then the least recently used one leaves first.
        steps = round(2.0 * math.log2(worth / max(1.0, freed))) if worth > 0.0 else -math.inf
        return not trial.spec.can_save, not trial.rests, steps, *_since(trial)

    def _lane_bytes(self, trial: TrialRecord) -> float:
        """Device memory that the lane which keeps a trial's state takes for itself, if it ends with that."""
        lane_id = trial.residence.lane
        return self._core.lanes[lane_id].own_bytes if lane_id is not None and trial.spec.isolated else 0.0

    def _kept(self, device: int) -> dict[str, TrialRecord]:
        """Trials whose state a device keeps and that are not being saved out of it."""
        core = self._core
        kept = {trial_id: core.trials[trial_id] for _, trial_id in core.lanes.kept_on(device)}
        return {trial_id: trial for trial_id, trial in kept.items() if not trial.residence.saving}

    def _leaving_bytes(self, device: int, also: Sequence[TrialRecord] = ()) -> float:
        """Bytes that become free on a device once the states that were told to leave it have, and ``also`` these.

        A lane of a trial that is to have a process of its own ends with its state.
        """
        lanes, usual = self._core.lanes.on(device), self._core.lanes.usual_bytes
        staying = self._kept(device).keys() - {trial.trial_id for trial in also}
        freed = own = left = 0.0
        for lane in lanes:
            freed += sum(memory for name, memory in lane.reserved.items() if name not in staying)
            own += lane.own_bytes
            ends = lane.used and not lane.shared and not lane.holders and staying.isdisjoint(lane.residents)
            left += 0.0 if ends else lane.own_bytes
        return freed + max(0.0, own - usual) - max(0.0, left - usual)

    def _held_bytes(self, device: int) -> dict[str, float]:
        """Bytes that a device holds of trials that do not run there, by trial."""
        return {key: memory for lane in self._core.lanes.on(device) for key, memory in lane.reserved.items()}

    def evict(self, trial: TrialRecord) -> None:
        """Removes a resident from its lane: saved, or given up if it cannot be saved."""
        if trial.residence.lane is None or trial.residence.saving:
            return
        if trial.spec.can_save:
            self.save_out(trial)
        else:
            self.drop(trial)
            self._core.note(trial, "its state was given up to make room for others: it cannot be saved")

    def save_out(self, trial: TrialRecord, *, durable: bool = False) -> None:
        """Tells a resident's lane to save it, to disk if ``durable``, and drop it."""
        lane_id = trial.residence.lane
        assert lane_id is not None and not trial.residence.saving
        trial.residence = replace(trial.residence, saving=True)
        # Host memory may go with a device that is closed.
        durable |= any(map(self._core.occupancy.is_closed, self._core.lanes[lane_id].device_ids))
        self._core.commands.append(Save(trial.trial_id, (lane_id,), drop=True, durable=durable))
        self._core.log(trial, f"is saved out of lane {lane_id}")

    def not_kept(self, event: TrialNotKept) -> None:
        """Notes that a checkpoint which was to outlive the run does not exist."""
        trial = self._core.trials.get(event.trial_id)
        if trial is not None:
            kept_at, keeping = trial.residence.kept_at, trial.residence.keeping
            trial.residence = replace(
                trial.residence,
                kept_at=0 if kept_at == event.iteration else kept_at,
                keeping=0 if keeping == event.iteration else keeping,
            )
            self._core.note(trial, f"the checkpoint of iteration {event.iteration} is not kept: {event.reason}")
            if _is_over(trial) and not trial.residence.saving and not trial.calls:
                self.drop(trial)  # It would not be saved in another way, either.

    def drop(self, trial: TrialRecord, *, ends: bool = False) -> None:
        """Tells a resident's lane to drop it: unsaved, unless it ``ends`` and its last checkpoint outlives the run."""
        lane_id = trial.residence.lane
        if lane_id is not None:
            keep = ends and is_to_be_kept(trial)
            self._core.commands.append(StopTrial(trial.trial_id, (lane_id,), keep=keep))
            self._core.lanes.dismiss(lane_id, trial.trial_id)
            self._core.watching.cleaning_up(trial.trial_id, lane_id, self._core.now)
            trial.residence = trial.residence.without_lane()

    def saved(self, event: TrialSaved) -> TrialRecord | None:
        """Records a checkpoint; returns the trial if its state has left the lane that kept it."""
        trial = self._core.trials.get(event.trial_id)
        if trial is not None:
            if not event.copied:
                self._core.measuring.observe_save(trial, event.seconds)
            if event.kept is not None:
                kept_at = max(trial.residence.kept_at, event.checkpoint.iteration)
                keeping = 0 if event.lane_id is not None else trial.residence.keeping
                trial.residence = replace(trial.residence, kept_at=kept_at, keeping=keeping)
            self._add_checkpoint(trial, event.checkpoint)
            if event.kept is not None and not event.dropped:
                self.let_go(trial)
        if not event.dropped or event.lane_id is None:
            return None
        self._core.watching.left(event.trial_id, event.lane_id)
        self._core.lanes.remove_resident(event.lane_id, event.trial_id)
        self._core.changed = True  # the memory that it held is free
        if trial is None or trial.residence.lane != event.lane_id:
            return None
        trial.residence = trial.residence.without_lane()
        return trial

    @staticmethod
    def _add_checkpoint(trial: TrialRecord, checkpoint: Checkpoint) -> None:
        if checkpoint.iteration > trial.progress.reported:
            return  # of a lane that the trial has left, whose last reports do not count: those iterations run again
        residence = trial.residence
        if residence.checkpoint is None or checkpoint.iteration >= residence.checkpoint.iteration:
            is_current = checkpoint.iteration == trial.progress.done
            trial.residence = replace(trial.residence, checkpoint=checkpoint, checkpoint_is_current=is_current)
        if checkpoint.in_memory:
            return
        if residence.durable is None or checkpoint.iteration >= residence.durable.iteration:
            trial.residence = replace(trial.residence, durable=checkpoint)

    @staticmethod
    def copied(trial: TrialRecord, original: Checkpoint, copy: Checkpoint) -> None:
        """Replaces a checkpoint in memory by its copy on disk; the trial may have a newer one by now."""
        residence = trial.residence
        if residence.durable is None or copy.iteration >= residence.durable.iteration:
            trial.residence = replace(trial.residence, durable=copy)
        if residence.checkpoint == original:
            trial.residence = replace(trial.residence, checkpoint=copy)

    def forget_later_checkpoints(self, trial: TrialRecord) -> None:
        """Forgets checkpoints beyond the last iteration of a trial that was set back and then finished earlier."""
        residence, done = trial.residence, trial.progress.done
        if residence.durable is not None and residence.durable.iteration > done:
            residence = trial.residence = replace(residence, durable=None)
        if residence.checkpoint is not None and residence.checkpoint.iteration > done:
            trial.residence = residence.without_newest()

    def lose_state(self, trial: TrialRecord, why: str) -> None:
        """Sets a trial whose state is gone back to its newest checkpoint."""
        if trial.residence.lane is not None:
            self.leave_lane(trial)
        told = trial.residence.keeping
        if told:
            trial.residence = replace(trial.residence, keeping=0)
        if not trial.state.ended:
            trial.progress.go_back_to(trial.residence.restart_at)
        elif told and trial.state is TrialState.DONE:
            self._core.commands += newest_to_keep(trial)
        self._core.log(trial, f"lost its state: {why}")
        self._calls.recall(trial)

    def lose_host(self, host: str) -> None:
        """Forgets checkpoints that were in the memory of a lost machine."""
        for trial in self._core.trials.values():
            residence = trial.residence
            checkpoint = residence.checkpoint
            if checkpoint is not None and checkpoint.in_memory and checkpoint.host == host:
                trial.residence = residence.without_newest()

    def _odds(self, trial: TrialRecord) -> float:
        """Probability that a trial goes on from its state."""
        known = (odds(trial) for odds in self._core.policies.odds)
        return next((each for each in known if each is not None), 1.0)

    def make_room(self) -> list[TrialRecord]:
        """Evicts residents from devices that a queued trial would get but for the memory of those residents.

        Returns:
            Trials that can go on only on a device whose other residents cannot be evicted: they start beside them.
        """
        core = self._core
        if not core.memory.reserved and not core.lanes.usual_bytes:
            return []
        cramped = []
        seen: set[Constraint | None] = set()
        kept = {row: device for policy in core.policies.room_for for row, device in policy.room_for.items()}
        for row in [*kept, *(row for row in core.queue if row not in kept)] if kept else core.queue:
            trial = core.trials.by_row[row]
            if row not in kept:
                if trial.constraint in seen and not trial.pinned:
                    continue  # the first of those that may get the same devices comes first
                seen.add(trial.constraint)
            # One whose need is unknown needs at least a device that is not overfull.
            need = core.estimates.need(trial) or MemoryNeed()
            lacking = max(1, round(trial.width))
            by_model = core.estimates.by_model(trial)
            for device in (kept[row],) if row in kept else self._open_to(trial, by_model):
                there = need if by_model is None else by_model[core.occupancy.device(device).model].need or MemoryNeed()
                usable = core.memory.usable_bytes(device)
                if usable is not None and there.peak_bytes > usable:
                    continue
                added = core.memory.added_bytes(device, there)
                fits = usable is None or core.memory.filled_bytes(device) + added <= usable
                if fits or self._empty(device, added, usable or 0.0, trial):
                    lacking -= 1
                elif trial.pinned:
                    cramped.append(trial)
                if lacking == 0:
                    break
        return cramped

    def _open_to(self, trial: TrialRecord, by_model: ByModel | None) -> list[int]:
        """The devices that a queued trial may get but for their memory, the emptiest first; of one host for a gang."""
        core, width = self._core, trial.width
        open_ = [index for index in core.occupancy.residents if core.occupancy.is_open(index, width, by_model)]
        lane = trial.residence.lane
        if trial.pinned and lane is not None:
            open_ = [index for index in open_ if index in core.lanes[lane].device_ids]
        if core.scheduling.placing.restricts:
            allowed = core.scheduling.placing.allowed(trial)
            open_ = [index for index in open_ if allowed is None or index in allowed]
        open_.sort(key=self._crowd)
        if not trial.spec.gang:
            return open_
        hosts = [core.occupancy.device(index).host for index in open_]
        host = next((name for name in hosts if hosts.count(name) >= width), None)
        return [index for index, name in zip(open_, hosts, strict=True) if name == host]

    def is_emptying(self, device: int) -> bool:
        """Whether states are about to leave a device."""
        return len(self._held_bytes(device).keys() - self._kept(device).keys()) > 0

    def _crowd(self, device: int) -> tuple[int, float]:
        return len(self._core.occupancy.residents[device]), self._core.memory.filled_bytes(device)

    def _empty(self, device: int, wanted: float, usable: float, trial: TrialRecord) -> bool:
        """Evicts residents and ends empty lanes of a device until so many of its usable bytes are free.

        Where other trials run, only states of trials that rest and can be fetched back are evicted.

        Returns:
            Whether there is room now, or room is being made.
        """
        core, occupancy = self._core, self._core.occupancy
        stays = trial.width <= 1.0  # the trial runs where its state is, so that is counted once
        own = self._held_bytes(device).get(trial.trial_id, 0.0) if stays else 0.0

        def excess_bytes() -> float:
            return core.memory.filled_bytes(device, own_state=own) + wanted - usable

        alone = not occupancy.residents[device]
        if alone:
            core.lanes.retire(device, core.commands, while_=lambda: excess_bytes() > 0.0)
        excess, kept = excess_bytes(), self._kept(device).values()
        going = [other for other in kept if not (other is trial and stays) and _can_be_evicted(other)]
        if not alone:
            going = [other for other in going if other.rests and other.spec.can_save]
            if self._leaving_bytes(device, going) < excess:
                return False  # another trial has to leave first
        for other in sorted(going, key=self._cost_of_eviction):
            if excess > self._leaving_bytes(device):
                self.evict(other)
        return self._leaving_bytes(device) > 0.0 or excess <= 0.0

    def clear_for(self, trial: TrialRecord) -> None:
        """Evicts states that can be fetched back from the devices of a trial whose need is unknown.

        The trial runs alone there to be measured, with as much memory as possible.
        """
        core = self._core
        if core.estimates.need(trial) is None:
            for other in self._neighbours_at_rest(trial):
                resting = other.rests and not other.calls
                if resting and other.spec.can_save and not other.residence.saving:
                    self.evict(other)
            if self._leaving(trial):
                core.clearing[trial.row] = trial
        if self._cleaning_up(trial):
            core.clearing[trial.row] = trial

    def is_clear(self, trial: TrialRecord) -> bool:
        """Whether a trial may start: the states that were evicted for it have left, and ended trials were cleaned up.

        An ended trial may hold a lock, a port or memory until then that the one that starts in its place needs.
        """
        clearing = self._core.clearing
        if trial.row in clearing and not self._leaving(trial) and not self._cleaning_up(trial):
            del clearing[trial.row]
        return trial.row not in clearing

    def _cleaning_up(self, trial: TrialRecord) -> list[LaneRecord]:
        """The lanes of a trial's devices, other than its own, that others which have ended were told to leave."""
        core, own = self._core, trial.placement.lanes
        return [
            lane
            for device in core.occupancy.held.get(trial.row, ())
            for lane in core.lanes.on(device)
            if lane.used and not lane.shared and lane.lane_id not in own and self._is_being_cleaned_up(lane)
        ]

    def _is_being_cleaned_up(self, lane: LaneRecord) -> bool:
        if lane.draining or lane.dismissed:
            return True
        trials = self._core.trials
        return any(trials[name].residence.saving and _is_over(trials[name]) for name in lane.residents)

    def _leaving(self, trial: TrialRecord) -> bool:
        return any(other.residence.saving for other in self._neighbours_at_rest(trial))

    def _neighbours_at_rest(self, trial: TrialRecord) -> list[TrialRecord]:
        """Trials whose kept state takes memory on a trial's devices; none where memory does not bound packing."""
        core, occupancy = self._core, self._core.occupancy
        return [
            core.trials[trial_id]
            for device in occupancy.held.get(trial.row, ())
            if core.memory.usable_bytes(device) is not None
            for lane_id, trial_id in core.lanes.kept_on(device)
            if trial_id != trial.trial_id and core.lanes.kept_bytes(lane_id, trial_id) > 0.0
        ]


def _is_over(trial: TrialRecord) -> bool:
    """Whether a trial with a process of its own is done, and nothing says that it goes on."""
    spec, is_done = trial.spec, trial.state is TrialState.DONE
    return is_done and spec.isolated and not spec.extends and not trial.progress.follow_up_iterations


def _can_be_evicted(trial: TrialRecord) -> bool:
    if trial.state is TrialState.QUEUED:  # Calls that wait for its further iterations are made where it runs then.
        return all(call.lane_id is None for call in trial.calls) and not _must_stay(trial)
    return trial.rests and not trial.calls and not _must_stay(trial)


def _must_stay(trial: TrialRecord) -> bool:
    """Whether a trial that will go on would lose its state if it left its lane."""
    return trial.state is not TrialState.DONE and not trial.spec.can_save


def _since(trial: TrialRecord) -> tuple[float, int]:
    """When the trial's latest transition was."""
    return trial.story[-1][0], trial.row
