"""Where trials go: placement, the queue, and what the planner says about them.

The link between the state machine and the pure planners: it turns records into instances and snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from fluid.engine import tuning
from fluid.engine.estimates import Estimates
from fluid.engine.key_estimates import KeyEstimate
from fluid.engine.lanes import Lanes
from fluid.engine.records import TrialRecord
from fluid.engine.remaining_work import RemainingWork
from fluid.engine.running_table import RunningTable
from fluid.engine.trials import Trials
from fluid.planning.arrangement import Replanner, Running, WidthChange
from fluid.planning.instance import Instance
from fluid.planning.occupancy import Occupancy
from fluid.planning.planner import Planner
from fluid.planning.profile import Profile
from fluid.planning.rollout import start
from fluid.planning.runtime_model import TOLERANCE, stretch_of
from fluid.planning.start_queue import StartQueue
from fluid.resources import Cluster, Device, MemoryNeed
from fluid.trialgroup import TrialState


class Scheduling:
    """Placement and planning for the trials of one session.

    Args:
        planner: who plans.
        profile: what is known about trials.
        trials: the trials of the session.
        occupancy: who holds which device.
        lanes: who runs in which lane.
        max_packing: most trials on one device, whatever the profile says; 1 switches packing off.
        max_width: most devices for one trial.
        watermark: share of a device's memory that trials may fill.
    """

    def __init__(
        self,
        planner: Planner,
        profile: Profile,
        trials: Trials,
        occupancy: Occupancy,
        lanes: Lanes,
        *,
        max_packing: int,
        max_width: int,
        watermark: float,
    ) -> None:
        self.planner = planner
        self.profile = profile
        self.queue = StartQueue()
        self.records = trials.by_row
        #: rows that hold devices and run, or are about to; those being resized are not among them.
        self.running: set[int] = set()
        self.occupancy = occupancy
        self._lanes = lanes
        self._watermark = watermark
        self._replanner: Replanner = planner.replanner()
        self._cluster: Cluster | None = None
        self._table = RunningTable()
        self.estimates = Estimates(profile, occupancy, self._table, max_packing=max_packing, max_width=max_width)
        #: whether a device may hold more trials than are of use there.
        self._overpacked = False
        #: whether c or d of a key changed, or its pace is known at last, while its trials run or wait.
        self.ramped = False
        self.work = RemainingWork()

    # -- what is learnt of trials --------------------------------------------------------------------------

    def observe(self, trial: TrialRecord, seconds: float, memory: MemoryNeed | None, busy: float | None = None) -> None:
        """Learns from an iteration of a running trial whose co-residency did not change meanwhile."""
        facts = self.estimates.facts(trial)
        p, w = self.estimates.co_residents(trial), max(1, round(trial.placement.width))
        if memory is not None:
            self.observe_memory(trial, memory)
        if seconds <= 0.0:
            return
        if facts.worth_observing(p, w):
            typical = self._as_typical(trial, facts, seconds, alone=p == w == 1)
            self.profile.observe(trial.spec.profile_key, typical, co_residents=p, width=w, busy=busy)
            if facts.pace is None:
                self._note_pace(facts, seconds / self.estimates.stretch(trial))
            before = facts.packing
            self.ramped |= facts.update(self.profile, trying_pays=self._trying_pays())
            self._overpacked |= facts.packing < before
            self._table.set_key(facts)
        if p == w == 1:
            trial.pace.solo = seconds if trial.pace.solo is None else 0.5 * (trial.pace.solo + seconds)
        pace = seconds / self.estimates.stretch(trial)
        trial.pace.seconds = pace if trial.pace.seconds is None else 0.5 * (trial.pace.seconds + pace)

    @staticmethod
    def _as_typical(trial: TrialRecord, facts: KeyEstimate, seconds: float, *, alone: bool) -> float:
        """What a packed or wide iteration would have taken a trial of its key's usual pace.

        Trials of a key differ, and overheads are factors: which trial happened to be packed or wide must not count.
        """
        if alone or trial.pace.solo is None or facts.pace is None:
            return seconds
        return seconds * facts.pace / trial.pace.solo

    def observe_memory(self, trial: TrialRecord, memory: MemoryNeed) -> None:
        """Learns what a running trial was seen to need, whoever ran beside it."""
        facts = self.estimates.facts(trial)
        if _grows(facts.memory, memory):
            self.profile.observe_memory(facts.key, memory)
            facts.memory = self.profile.memory(facts.key)
            self._learn_needs(facts.key)

    def learn_need(self, trial: TrialRecord) -> None:
        """Has placement leave to a trial, where it is, what it is known to need by now."""
        need = self.estimates.need(trial)
        places = (trial.row,) if trial.placement.move is None else (trial.row, trial.placement.move.old_devices_row)
        for row in places:
            if row in self.occupancy.held:
                self.occupancy.memory.set_need(row, need)

    def _learn_needs(self, key: str) -> None:
        """Has placement leave as much to all of a key, also to those that were let on before one was measured."""
        for row in self.occupancy.held:
            trial = self.records.get(row)
            if trial is not None and trial.spec.profile_key == key and trial.spec.memory is None:
                self.learn_need(trial)

    def _note_pace(self, facts: KeyEstimate, pace: float) -> None:
        """Notes how long the iterations of a key take, of which until now only a guess went into the work left."""
        facts.pace = pace
        self.ramped = True
        for row in list(self.work.by_row):
            trial = self.records.get(row)
            if trial is not None and trial.spec.profile_key == facts.key:
                self.note_work(trial)

    def _trying_pays(self) -> bool:
        """Whether there is enough left to do for one more co-resident to be tried, which takes a lane to be started."""
        return self.work.total >= tuning.WORTH_TRYING_S * len(self.occupancy)

    def pop_ramp_changes(self) -> bool:
        """Whether what is known of a key that is being measured changed since this was last asked."""
        ramped, self.ramped = self.ramped, False
        return ramped

    def note_work(self, trial: TrialRecord) -> None:
        """Notes how much a trial that runs or waits has left to do."""
        height = self.estimates.height(trial)
        self.work.note(trial.row, height)
        self._table.set_work(trial.row, height)

    # -- arrivals ------------------------------------------------------------------------------------------

    def arrive(self, trials: Sequence[TrialRecord]) -> None:
        """Gives trials widths and queues them."""
        if not trials:
            return
        instance = self._instance(trials)
        if self.work.by_row:
            others = np.array([self.work.total])
            arrangement = self.planner.join(instance, others, self.occupancy.free_count)
        else:
            arrangement = self.planner.arrange(instance)
        self._replanner = arrangement.replanner
        widths = arrangement.widths.tolist()
        if arrangement.replan_at_start:
            # Where all start and devices are left idle, they are handed out before anything runs, free of epsilon.
            started = start(instance, arrangement)
            widths = [started.width(position) for position in range(len(trials))]
        self._note_paths(trials)
        order = arrangement.order.tolist()
        early = self._to_start_early([trials[position] for position in order])
        for position in order:
            trial = trials[position]
            self.enqueue(trial, float(widths[position]), early=trial.row in early)

    def plan_queue_again(self) -> None:
        """Gives queued trials the widths that fit what is known by now."""
        waiting = [self.records[row] for row in self.queue]
        self.queue.clear()
        for trial in waiting:
            self.work.forget(trial.row)
        self.arrive(waiting)

    def dispatch(self) -> list[TrialRecord]:
        """Places every queued trial that fits; returns them."""
        if not self.queue:
            return []
        started = [self.records[row] for row in self.queue.start(self._place)]
        for trial in started:
            self.mark_running(trial)
        return started

    def mark_running(self, trial: TrialRecord) -> None:
        """Notes that a trial runs on the devices it holds, and may be resized."""
        devices = self.occupancy.held[trial.row]
        self.running.add(trial.row)
        self._table.add(trial, devices, self.occupancy.speed(devices), self.work.by_row[trial.row])

    def mark_resizing(self, trial: TrialRecord) -> None:
        """Notes that a trial is being resized, and nothing is to be decided about it."""
        self.running.discard(trial.row)
        self._table.remove(trial.row)

    def start_at_home(self, trial: TrialRecord) -> bool:
        """Places a queued trial where its state is, though memory is short there, if nobody runs there."""
        if (
            trial.residence.device is None
            or self.occupancy.residents[trial.residence.device]
            or self._lane_is_busy(trial)
        ):
            return False
        self.queue.remove(trial.row)
        self.occupancy.hold(trial.row, (trial.residence.device,), trial.placement.width, self.estimates.need(trial))
        self.mark_running(trial)
        return True

    def take_over(self, trial: TrialRecord, device: int) -> bool:
        """Places a queued trial on just that device, ahead of those that wait for longer; returns whether it fits."""
        if not self._place_near(trial, device, only=True):
            return False
        self.queue.remove(trial.row)
        self.mark_running(trial)
        return True

    def enqueue(self, trial: TrialRecord, width: float, *, again: bool = False, early: bool = False) -> None:
        """Queues a trial to be given that width.

        Args:
            trial: one that does not wait.
            width: of a device, or in devices.
            again: whether it was interrupted, and is to come before those like it.
            early: whether it is to start with those that lead to more.
        """
        if again:
            self._note_paths([trial])
        # One that only its lane can go on with takes what there is.
        trial.placement.width = min(width, 1.0) if trial.pinned else width
        need = self.estimates.need(trial)
        # Where its state is, a trial fits although others that need as much do not.
        kind: Hashable = (
            trial.row if trial.pinned or (trial.residence.device is not None and need is not None) else need
        )
        self.note_work(trial)
        leads = self.planner.preempts and (early or self._is_pressing(trial))
        self.queue.push(trial.row, trial.placement.width, trial.spec.priority, kind, leads=leads, again=again)

    def _note_paths(self, trials: Sequence[TrialRecord]) -> None:
        """Notes how far it is to the end of what trials lead to, which go on at nobody knows whose pace."""
        leading = [trial for trial in trials if trial.progress.follow_up_iterations > 0]
        pace = self.estimates.usual_pace() if leading else 0.0
        for trial in leading:
            self.work.note_path(trial.row, self.estimates.height(trial) + trial.progress.follow_up_iterations * pace)

    def _to_start_early(self, trials: Sequence[TrialRecord]) -> set[int]:
        """The first of those that nobody waits for: with those that run, on their share of the devices by work.

        The others fill the devices at the end; but results of whole trials are of use from the beginning.
        """
        heights = {trial.row: self.estimates.height(trial) for trial in trials}
        others = [trial.row for trial in trials if trial.progress.follow_up_iterations == 0]
        if len(others) == len(trials) or not others:
            return set()
        share = sum(heights[row] for row in others) / sum(heights.values())
        running = sum(self.records[row].progress.follow_up_iterations == 0 for row in self.running)
        return set(others[: max(0, round(share * len(self.occupancy)) - running)])

    def _is_pressing(self, trial: TrialRecord) -> bool:
        """Whether more is to follow from a trial, or it is by itself longer than all that follows from any."""
        path = self.work.longest_path
        return path > 0.0 and (
            trial.progress.follow_up_iterations > 0 or self.work.by_row[trial.row] > tuning.OVERTAKES * path
        )

    def withdraw(self, trial: TrialRecord) -> None:
        """Takes a trial out of the queue, if it is there."""
        if trial.row in self.queue:
            self.queue.remove(trial.row)
        self.work.forget(trial.row)

    def leave(self, trial: TrialRecord) -> None:
        """Takes a trial off its devices."""
        self.mark_resizing(trial)
        self.work.forget(trial.row)
        if trial.row in self.occupancy.held:
            self.occupancy.release(trial.row)
        if trial.placement.move is not None and trial.placement.move.old_devices_row in self.occupancy.held:
            self.occupancy.release(trial.placement.move.old_devices_row)

    def _place(self, row: int) -> bool:
        trial = self.records[row]
        if trial.pinned and self._lane_is_busy(trial):
            return False
        return self._place_near(
            trial, trial.residence.device if not trial.residence.saving else None, only=trial.pinned
        )

    def _place_near(self, trial: TrialRecord, near: int | None, *, only: bool) -> bool:
        """Places a trial, on that device if it fits there; where ``only`` is set, on no other one."""
        own_state, residence = 0.0, trial.residence
        if near is not None and near == residence.device and residence.lane is not None:
            # Where its state is kept, its need includes that state, which is reserved there already.
            own_state = self._lanes.kept_bytes(residence.lane, trial.trial_id)
        need, width = self.estimates.need(trial), trial.placement.width
        placed = self.occupancy.place(trial.row, width, need, near=near, only=only, own_state=own_state)
        return placed is not None

    def _lane_is_busy(self, trial: TrialRecord) -> bool:
        return trial.residence.lane is not None and self._lanes[trial.residence.lane].trial_id is not None

    # -- resizes -------------------------------------------------------------------------------------------

    def rebalance(self) -> list[tuple[TrialRecord, float]]:
        """What to resize now: to make room for queued trials, or to use idle devices once none is queued."""
        if not self.running:
            return []
        # First of all, trials that run wider than was measured to help are narrowed.
        resizes = [WidthChange(row, float(width)) for row, width in self._table.too_wide()]
        if not resizes and self.queue:
            resizes = self._make_room()
        elif not resizes:
            resizes = self._replanner.replan(self.snapshot())
        return [(self.records[resize.row], resize.width) for resize in resizes if self._allowed(resize)]

    def _make_room(self) -> list[WidthChange]:
        narrowest = min(self.queue.widths())
        for row in self._table.packed_wider_than(narrowest):
            trial = self.records[row]
            self.allow_packing(trial, max(narrowest, 1.0 / self.estimates.packing(trial)))
        if not self._table.can_give_way():
            return []
        waiting = np.array([self.work.by_row[row] for row in self.queue])
        return self._replanner.make_room(self.snapshot(), waiting)

    def allow_packing(self, trial: TrialRecord, width: float) -> None:
        """Has a trial tolerate more neighbours on its device, which costs nothing but their company."""
        if width < trial.placement.width - TOLERANCE:
            trial.placement.width = width
            self.occupancy.tolerate(trial.row, width)
            self._table.set_width(trial.row, width)

    @property
    def has_overpacking(self) -> bool:
        """Whether trials are known to hinder each other, or to run wider than helps."""
        return self._overpacked or bool(self._table.too_wide())

    def overpacked(self) -> list[TrialRecord]:
        """One trial of each device on which fewer would get more done than all do, as was measured since they came.

        Where there is none to be told now, or there may be a further one, the devices are looked at again next time.
        """
        if not self._overpacked:
            return []
        found = []
        self._overpacked = False
        for rows in self.occupancy.residents.values():
            trials = [self.records[row] for row in reversed(rows) if row in self.running]
            many = [trial for trial in trials if self._packing_hurts(trial, len(rows))]
            self._overpacked |= bool(many)
            if not any(trial.preempting for trial in many):
                found += [trial for trial in many if trial.state is TrialState.RUNNING and not trial.stopping][:1]
        return found

    def _packing_hurts(self, trial: TrialRecord, residents: int) -> bool:
        """Whether so many trials on a device get less done than one fewer would: p / alpha^(p-1) falls with p."""
        facts = self.estimates.facts(trial)
        return residents > max(1, facts.packing) and facts.alpha * (residents - 1) > residents

    def _allowed(self, resize: WidthChange) -> bool:
        trial = self.records[resize.row]
        if trial.state is not TrialState.RUNNING or trial.stopping or trial.preempting:
            return False
        if resize.width > max(1.0, trial.placement.width) and not self._pays(trial, resize.width):
            return False
        stays = self.estimates.co_residents(trial) == 1 and max(trial.placement.width, resize.width) <= 1.0
        return stays or trial.spec.can_save

    def _pays(self, trial: TrialRecord, width: float) -> bool:
        """Whether a wider trial ends sooner, though the iteration in flight is still run at the width it has."""
        if not self.estimates.may_try(trial, width):
            return False
        facts, speed = self.estimates.facts(trial), self.occupancy.speed(self.occupancy.held[trial.row])
        after = self.estimates.height(trial) * (1.0 - 1.0 / max(1, trial.progress.left))
        moved = self.profile.epsilon + after * stretch_of(facts.alpha, facts.beta, width) / speed
        return moved < after * self.estimates.stretch(trial)

    # -- devices -------------------------------------------------------------------------------------------

    def add_device(self, device: Device) -> None:
        """Adds an idle device."""
        self._cluster = None
        self.occupancy.add_device(device)

    def remove_device(self, device_id: int) -> None:
        """Removes a device; what was on it holds nothing any more."""
        self._cluster = None
        self.occupancy.remove_device(device_id)
        for row in list(self.queue):
            trial = self.records[row]
            if trial.placement.width > max(1, len(self.occupancy)):
                self.queue.remove(row)
                self.enqueue(trial, float(max(1, len(self.occupancy))))

    # -- what planners look at -----------------------------------------------------------------------------

    def _instance(self, trials: Sequence[TrialRecord]) -> Instance:
        facts = [self.estimates.facts(trial) for trial in trials]
        if self._cluster is None:
            self._cluster = Cluster(tuple(self.occupancy.devices), self._watermark)
        return Instance.build(
            [max(self.estimates.height(trial), tuning.LEAST_HEIGHT_S) for trial in trials],
            self._cluster,
            alpha=[fact.alpha for fact in facts],
            beta=[fact.beta for fact in facts],
            c=[self.estimates.packing(trial) for trial in trials],
            d=[self.estimates.widest(trial) for trial in trials],
            epsilon=self.profile.epsilon,
            threshold=-math.inf,  # c comes from measurements; alpha must not lower it a second time
            trial_ids=[trial.trial_id for trial in trials],
            priority=[trial.spec.priority for trial in trials],
            needs=[self.estimates.need(trial) for trial in trials],
        )

    def snapshot(self) -> Running:
        """What a re-planner looks at: the trials that run and are not being resized."""
        return self._table.snapshot(self.occupancy, self.profile.epsilon)


def _grows(known: MemoryNeed | None, seen: MemoryNeed) -> bool:
    return (
        known is None or seen.persistent_bytes > known.persistent_bytes or seen.ephemeral_bytes > known.ephemeral_bytes
    )
