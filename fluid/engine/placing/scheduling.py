"""Scheduling: the queue, the order in which trials start, and their devices: between records and pure planners."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import lt

import numpy as np

from fluid.devices.models import at_speeds
from fluid.devices.occupancy import Occupancy
from fluid.devices.start_queue import StartQueue
from fluid.engine import tuning
from fluid.engine.estimates.estimates import Estimates
from fluid.engine.estimates.running import RunningTable
from fluid.engine.placing.allocations import Allocations, RemainingWork
from fluid.engine.placing.lanes import Lanes
from fluid.engine.placing.placing import Placing
from fluid.engine.placing.queue import (
    PlannedTrials,
    QueueKinds,
    in_line,
    kinds_of,
    placed_as,
    share_devices,
)
from fluid.engine.placing.sharing import Sharing
from fluid.engine.policy import Policies
from fluid.engine.records import TrialRecord, Trials
from fluid.planners.arrangement import Replanner
from fluid.planners.instance import Instance
from fluid.planners.planner import Planner
from fluid.planners.rollout import start
from fluid.resources import Cluster, Device

# -- plan inputs ---------------------------------------------------------------------------------
#
# Plan inputs: trials and devices as planners see them, by the present estimates.


class PlanInputs:
    """Makes the instances that planners are given.

    Args:
        occupancy: the devices.
        estimates: what trials need, and how fast they are.
    """

    def __init__(self, occupancy: Occupancy, estimates: Estimates) -> None:
        self._occupancy = occupancy
        self._estimates = estimates
        self._cluster: Cluster | None = None

    def forget_devices(self) -> None:
        """Has to be called when devices came or went."""
        self._cluster = None

    def open_cluster(self) -> Cluster:
        """All devices that trials are placed on."""
        if self._cluster is None:
            self._cluster = Cluster(tuple(self._occupancy.open_devices), self._occupancy.memory.watermark)
        return self._cluster

    def instance(self, trials: Sequence[TrialRecord], cluster: Cluster) -> tuple[Instance, list[float]]:
        """The planner's input, and the seconds of work left of each trial."""
        estimates = self._estimates
        of_keys = [estimates.of_key(trial) for trial in trials]
        heights = [estimates.height(trial) for trial in trials]
        needs = [estimates.typical_need(trial) for trial in trials]
        instance = Instance.build(
            [max(height, tuning.LEAST_HEIGHT_S) for height in heights],
            cluster,
            alpha=[estimate.alpha for estimate in of_keys],
            beta=[estimate.beta for estimate in of_keys],
            c=[estimates.packing(trial) for trial in trials],
            d=[estimates.widest(trial) for trial in trials],
            fused=[estimate.fused for estimate in of_keys],
            epsilon=estimates.epsilon,
            threshold=-math.inf,  # c comes from measurements; alpha must not lower it a second time
            trial_ids=[trial.trial_id for trial in trials],
            priority=[trial.spec.priority for trial in trials],
            sigma=[estimates.sigma(trial) for trial in trials],
            needs=[need if need is None or need.peak_bytes <= cluster.rooms[-1] else None for need in needs],
        )
        return instance, heights

    def at_measured_speeds(
        self, instance: Instance, trials: Sequence[TrialRecord], heights: Sequence[float]
    ) -> Instance:
        """The instance on devices of the speeds that were measured for its trials (:func:`speeds_of_all`).

        Args:
            instance: on devices as they are described.
            trials: its trials.
            heights: seconds of work left of each.
        """
        if not self._occupancy.models.are_several:
            return instance
        work: dict[str, float] = {}
        for trial, height in zip(trials, heights, strict=True):
            key = trial.spec.profile_key
            work[key] = work.get(key, 0.0) + max(height, tuning.LEAST_HEIGHT_S)
        speeds = self._estimates.speeds_of_all(work)
        return instance if speeds is None else replace(instance, cluster=at_speeds(instance.cluster, speeds))


# -- critical paths ------------------------------------------------------------------------------
#
# Critical paths: which of the trials that arrive start first, as others wait for them or are worth having early.


class CriticalPaths:
    """Knows how long the work is that begins with a trial.

    Args:
        trials: the trials of the session.
        occupancy: the devices.
        estimates: how fast trials are.
        table: the running trials.
        work: is told the critical paths.
    """

    def __init__(
        self, trials: Trials, occupancy: Occupancy, estimates: Estimates, table: RunningTable, work: RemainingWork
    ) -> None:
        self._trials = trials
        self._occupancy = occupancy
        self._estimates = estimates
        self._table = table
        self._work = work

    def measure(self, trials: Sequence[TrialRecord]) -> None:
        """Sets the critical paths of trials; the pace of the follow-up iterations, of other trials, is a guess."""
        leading = [trial for trial in trials if trial.progress.follow_up_iterations > 0]
        pace = self._estimates.usual_pace() if leading else 0.0
        for trial in leading:
            follow_up = trial.progress.follow_up_iterations * pace
            self._work.set_path(trial.row, self._estimates.height(trial) + follow_up)

    def to_start_early(self, trials: Sequence[TrialRecord]) -> set[int]:
        """Rows of an owner's first trials without follow-up iterations: with those that run, as many as their share.

        That is their share of its work.

        The others fill the devices at the end; but results of whole trials are of use from the beginning.
        """
        by_owner: dict[int, list[TrialRecord]] = {}
        for trial in trials:
            by_owner.setdefault(trial.owner, []).append(trial)
        return set().union(*(self._early_of(owner, some) for owner, some in by_owner.items()))

    def _early_of(self, owner: int, trials: Sequence[TrialRecord]) -> set[int]:
        others = [trial.row for trial in trials if trial.progress.follow_up_iterations == 0]
        if len(others) == len(trials) or not others:
            return set()
        heights = {trial.row: self._height(trial) for trial in trials}
        share = sum(heights[row] for row in others) / sum(heights.values())
        running = [trial for row in self._table if (trial := self._trials.by_row[row]).owner == owner]
        led = sum(trial.progress.follow_up_iterations == 0 for trial in running)
        return set(others[: max(0, round(share * len(self._occupancy)) - led)])

    def _height(self, trial: TrialRecord) -> float:
        """Seconds of work left, more than 0: a trial that is queued for a call has run its budget."""
        return max(self._estimates.height(trial), tuning.LEAST_HEIGHT_S)


# -- scheduling ----------------------------------------------------------------------------------


class Scheduling:
    """Queues the trials of a session and places them.

    Args:
        planner: gives trials that arrive widths and an order.
        trials: the trials of the session.
        queue: the trials that wait; changed here only.
        occupancy: which trial holds which device.
        lanes: which trial runs in which lane.
        estimates: what trials need, and how fast they are.
        table: the columns of the running trials.
        allocations: gives trials devices.
        sharing: ranks the trials' owners, and shares devices out among them.
        policies: may keep devices from trials, and choose where they go.

    Attributes:
        replanner: the planner's re-planner of the latest arrival.
        joined: trials queued since this was last emptied, for :class:`fluid.policies.waits.Waits`.
        renamed: queue lines that got another width since this was last emptied, from old to new, for the same.
        placing: finds devices for the trials of the queue.
    """

    def __init__(
        self,
        planner: Planner,
        trials: Trials,
        queue: StartQueue,
        occupancy: Occupancy,
        lanes: Lanes,
        estimates: Estimates,
        table: RunningTable,
        allocations: Allocations,
        sharing: Sharing,
        policies: Policies,
    ) -> None:
        self.replanner: Replanner = planner.replanner()
        self.joined: list[TrialRecord] = []
        self.placing = Placing(trials, queue, occupancy, lanes, estimates, allocations, sharing, policies)
        self.renamed: list[Mapping[Hashable, Hashable]] = []
        #: The kinds of the queued trials; ``None`` where trials were queued since all were planned at once.
        self._kinds: QueueKinds | None = None
        self._queue = queue
        self._planner = planner
        self._trials = trials
        self._occupancy = occupancy
        self._lanes = lanes
        self._estimates = estimates
        self._allocations = allocations
        self._work = allocations.work
        self._paths = CriticalPaths(trials, occupancy, estimates, table, allocations.work)
        self._inputs = PlanInputs(occupancy, estimates)
        self._sharing = sharing
        self._policies = policies

    # -- arrivals ------------------------------------------------------------------------------------------

    def arrive(self, trials: Sequence[TrialRecord]) -> None:
        """Gives trials widths and queues them."""
        self._sharing.update(trials)
        if trials:
            is_whole, plan = not self._queue, self._plan(trials)
            self._enqueue_all(trials, plan)
            if is_whole:
                self._kinds = self._kinds_of(trials, plan)

    def forget_kinds(self) -> None:
        """Has to be called when a queued trial may no longer be like those that it was queued with."""
        self._kinds = None

    def plan_queue_again(self, *, anew: bool = False) -> None:
        """Gives queued trials widths by the present estimates.

        Args:
            anew: whether trials that were alike may differ now, so that all of them have to be sorted in again.
        """
        if not anew and self._plan_kinds_again():
            return
        waiting = [self._trials.by_row[row] for row in self._queue]
        for trial in waiting:
            self._work.forget(trial.row)
        if not waiting:
            return
        plan = self._plan(waiting)
        if anew or not self._stay_in_line(waiting, plan):
            self._queue.clear()
            self._enqueue_all(waiting, plan)
        self._kinds = self._kinds_of(waiting, plan)

    def _plan(self, trials: Sequence[TrialRecord]) -> PlannedTrials:
        plan = self._plan_widths(trials)
        if self._estimates.turns > 1:
            plan = share_devices(plan, trials, self._estimates)
        for reorder in self._policies.reorder:
            plan = reorder(plan, trials)
        return plan

    def _plan_widths(self, trials: Sequence[TrialRecord]) -> PlannedTrials:
        if len(trials) == 1 and trials[0].constraint is None and self._has_one_width(trials[0]):
            self.replanner = self._planner.replanner()
            return PlannedTrials([0], [1.0], [self._estimates.height(trials[0])], [0])
        if self._trials.constrained or self._sharing.restricts:
            return self._plan_constrained(trials)
        return self._plan_alike(trials, self._inputs.open_cluster(), self._work.total, self._occupancy.free_count)

    def _plan_alike(self, trials: Sequence[TrialRecord], cluster: Cluster, others: float, idle: int) -> PlannedTrials:
        """Plans trials that may get the same devices.

        Args:
            trials: at least one.
            cluster: those devices.
            others: seconds of work of the trials that run or wait.
            idle: number of idle devices.
        """
        # Most trials of a long queue are alike to the planner: what it sees is computed once for all of these.
        first, kind_of = kinds_of(trials)
        instance, heights = self._inputs.instance(first, cluster)
        if len(first) < len(trials):
            instance = instance.take(kind_of, [trial.spec.trial_id for trial in trials])
            heights = [heights[kind] for kind in kind_of]
        if others > 0.0 or self._work.by_row:
            arrangement = self._planner.join(instance, np.array([others]), idle)
        else:
            instance = self._inputs.at_measured_speeds(instance, trials, heights)
            arrangement = self._planner.arrange(instance)
        self.replanner = arrangement.replanner
        widths = arrangement.widths.tolist()
        if arrangement.replan_at_start:
            # If all trials start and leave devices idle, they get those before anything runs, without epsilon.
            started = start(instance, arrangement)
            widths = [float(started.width(position)) for position in range(len(trials))]
        return PlannedTrials(arrangement.order.tolist(), widths, heights, kind_of)

    def _has_one_width(self, trial: TrialRecord) -> bool:
        """Whether any planner gives a trial one device: it is alone, or no trial can share a device with it."""
        has_own_device = not self._work.by_row or self._estimates.packing(trial) == 1
        return has_own_device and self._estimates.widest(trial) == 1

    def _plan_constrained(self, trials: Sequence[TrialRecord]) -> PlannedTrials:
        """Plans trials of which some may get certain devices only, or have a fixed width."""
        heights = [self._estimates.height(trial) for trial in trials]
        widths = [float(trial.fixed_width or 1) for trial in trials]
        free = [position for position, trial in enumerate(trials) if trial.fixed_width is None]
        order = [position for position, trial in enumerate(trials) if trial.fixed_width is not None]
        order.sort(key=lambda position: (-trials[position].spec.priority, -widths[position], -heights[position]))
        for share in self._sharing.parts(trials, free):
            if share.devices:
                cluster = Cluster(tuple(share.devices), self._occupancy.memory.watermark)
                some = [trials[position] for position in share.positions]
                plan = self._plan_alike(some, cluster, share.others, share.idle)
                order += [share.positions[each] for each in plan.order]
                for position, width in zip(share.positions, plan.widths, strict=True):
                    widths[position] = width
            else:
                order += share.positions
        return PlannedTrials(order, widths, heights, kinds_of(trials)[1])

    def _enqueue_all(self, trials: Sequence[TrialRecord], plan: PlannedTrials) -> None:
        self._paths.measure(trials)
        early = self._paths.to_start_early([trials[position] for position in plan.order])
        paths = {owner: self._work.longest_path(owner) for owner in {trial.owner for trial in trials}}
        for position in plan.order:
            trial, path = trials[position], paths[trials[position].owner]
            self._enqueue(trial, plan.widths[position], plan.heights[position], path, early=trial.row in early)

    def _stay_in_line(self, trials: list[TrialRecord], plan: PlannedTrials) -> bool:
        """Gives queued trials new widths if their order stays; returns whether it does.

        Queuing a hundred thousand trials again takes five times as long.
        """
        if not in_line(trials, plan.order) or not self._keeps_places(trials):
            return False
        if not self._set_widths({trial.row: width for trial, width in zip(trials, plan.widths, strict=True)}):
            return False
        for trial, width, height in zip(trials, plan.widths, plan.heights, strict=True):
            trial.width = width
            self._work.set(trial.row, height)
        return True

    def _keeps_places(self, trials: Iterable[TrialRecord]) -> bool:
        """Whether places in the queue follow from the plan alone.

        A trial with a state or with follow-up iterations may get another place.
        """
        if self._work.has_paths or self._policies.reorder:
            return False
        return not any(trial.residence.device is not None or trial.progress.follow_up_iterations for trial in trials)

    def _set_widths(self, width_of: Mapping[int, float]) -> bool:
        """Gives the queue's lines new widths; returns whether its rows stay in line."""
        by_row = self._trials.by_row
        renamed = self._queue.set_widths(width_of, lambda row: placed_as(by_row[row], self._estimates, self._occupancy))
        if renamed is None:
            return False
        self.renamed.append(renamed)
        return True

    def _kinds_of(self, trials: Sequence[TrialRecord], plan: PlannedTrials) -> QueueKinds | None:
        """The kinds of trials that are the whole queue; ``None`` where it cannot be planned again by kinds."""
        if len(trials) < tuning.LONG_QUEUE or not self._keeps_places(trials) or self._estimates.turns > 1:
            return None
        kinds = QueueKinds(trials, plan)
        widths = set(zip(plan.kind_of, plan.widths, strict=True))
        return kinds if len(widths) == len(kinds.trials) else None

    def _plan_kinds_again(self) -> bool:
        """Plans the queue by kinds of trials, with the result of planning it trial by trial; returns whether it could.

        It cannot if trials were queued since it was last planned as a whole, or have to change places.
        """
        kinds, work = self._kinds, self._work
        if kinds is None or not kinds.trials or work.has_paths or len(self._queue) == len(work.by_row):
            return False
        if self._trials.constrained or self._sharing.restricts:
            return False
        first = [next(iter(trials.values())) for trials in kinds.trials.values()]
        instance, heights = self._inputs.instance(first, self._inputs.open_cluster())
        counts = np.array([len(trials) for trials in kinds.trials.values()])
        widths = self._planner.join_alike(instance, counts, self._occupancy.free_count)
        if widths is None:
            return False
        in_order = zip(instance.priority, widths, instance.late_heights, strict=True)
        places = dict(zip(kinds.trials, in_order, strict=True))
        order = [places[kind] for kind in kinds.order if kind in places]
        width_of = {trial.row: width for trial, width in zip(first, widths.tolist(), strict=True)}
        if any(map(lt, order, order[1:])) or not self._set_widths(width_of):
            return False
        for one, trials, height in zip(first, kinds.trials.values(), heights, strict=True):
            if height != work.by_row[one.row]:
                work.set_all(trials, height)
            width = width_of[one.row]
            if width != one.width:
                for trial in trials.values():
                    trial.width = width
        self.replanner = self._planner.replanner()
        return True

    # -- the queue -----------------------------------------------------------------------------------------

    def enqueue(self, trial: TrialRecord, width: float, *, again: bool = False, early: bool = False) -> None:
        """Queues a trial that is to get this width.

        Args:
            trial: a trial that does not wait.
            width: of a device, or in devices.
            again: whether it was interrupted, and starts before those that are otherwise like it.
            early: whether it starts with those that have follow-up iterations.
        """
        if again:
            self._paths.measure([trial])
        height, path = self._estimates.height(trial), self._work.longest_path(trial.owner)
        self._enqueue(trial, width, height, path, again=again, early=early)

    def _enqueue(
        self, trial: TrialRecord, width: float, height: float, path: float, *, again: bool = False, early: bool = False
    ) -> None:
        """Queues a trial that has ``height`` seconds of work left; the longest critical path takes ``path`` seconds."""
        row, spec = trial.row, trial.spec
        pinned = trial.pinned
        # A pinned trial can use only the device of its lane.
        trial.width = width = min(width, 1.0) if pinned and not trial.spec.gang else width
        self._work.set(row, height)
        kind = placed_as(trial, self._estimates, self._occupancy)
        # It has follow-up iterations, or is by itself longer than the longest critical path.
        leads = path > 0.0 and (trial.progress.follow_up_iterations > 0 or height > tuning.OVERTAKES * path)
        critical = self._planner.preempts and (early or leads)
        self._queue.push(
            row,
            width,
            spec.priority,
            kind,
            critical=critical,
            in_front=again,
            bound=pinned,
            constraint=trial.constraint,
            owner=trial.owner,
            group_priority=trial.group_priority,
        )
        self.joined.append(trial)
        self._kinds = None

    def withdraw(self, trial: TrialRecord) -> None:
        """Takes a trial out of the queue; one that is not queued is passed over."""
        if trial.row in self._queue:
            self._queue.remove(trial.row)
            self._left_queue(trial)
        self._work.forget(trial.row)

    def _left_queue(self, trial: TrialRecord) -> None:
        if self._kinds is not None:
            self._kinds.remove(trial.row)

    # -- placing -------------------------------------------------------------------------------------------

    def dispatch(self) -> list[TrialRecord]:
        """Places every queued trial that fits; returns them."""
        started = [self._trials.by_row[row] for row in self.placing.place_all()]
        for trial in started:
            self._left_queue(trial)
            self._allocations.mark_running(trial)
        return started

    def start_where_kept(self, trial: TrialRecord) -> bool:
        """Places a queued trial on the device that keeps its state, though memory is short, if no trial runs there."""
        lane = trial.residence.lane
        if lane is None or self.placing.lane_is_busy(trial):
            return False
        devices = self._lanes[lane].device_ids
        if any(self._occupancy.residents[device] for device in devices):
            return False
        self._queue.remove(trial.row)
        self._left_queue(trial)
        self._allocations.hold(trial, devices)
        self._allocations.mark_running(trial)
        return True

    def start_on(self, trial: TrialRecord, device: int) -> bool:
        """Places a queued trial on this device, ahead of those that have waited longer; returns whether it fits."""
        if not self.placing.place_near(trial, device, only=True):
            return False
        self._queue.remove(trial.row)
        self._left_queue(trial)
        self._allocations.mark_running(trial)
        return True

    # -- devices -------------------------------------------------------------------------------------------

    def add_device(self, device: Device) -> None:
        """Adds an idle device."""
        self._occupancy.add_device(device)
        self._forget_devices(device.index)
        self._allocations.update_speeds()

    def close_device(self, device_id: int) -> None:
        """Places no further trial on a device; queued trials get no more devices than are left."""
        self._occupancy.close_device(device_id)
        self._lanes.changed_on.add(device_id)
        self._cap_widths(device_id)

    def reopen_device(self, device_id: int) -> None:
        """Places trials on a closed device again."""
        self._occupancy.reopen_device(device_id)
        self._forget_devices(device_id)
        self._lanes.changed_on.add(device_id)

    def remove_device(self, device_id: int) -> None:
        """Removes a device that no trial runs on; queued trials get no more devices than are left."""
        self._occupancy.remove_device(device_id)
        self._cap_widths(device_id)

    def _forget_devices(self, changed: int) -> None:
        self._inputs.forget_devices()
        self._sharing.forget_devices(changed)

    def _cap_widths(self, changed: int) -> None:
        self._forget_devices(changed)
        most = max(1, len(self._occupancy))
        for row in list(self._queue):
            trial = self._trials.by_row[row]
            if trial.width > most and trial.fixed_width is None:
                self._queue.remove(row)
                self._left_queue(trial)
                self.enqueue(trial, float(most))
