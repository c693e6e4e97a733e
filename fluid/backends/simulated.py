"""Runs a scenario on a virtual clock, with the planning code that decides about real trials.

Deterministic by the scenario's seed: under every planner the same trials take the same time and stop at the same
point of their budget.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from fluid.arrangement import Replanner, Resize
from fluid.bounds import malleable_lower_bound
from fluid.instance import Instance
from fluid.planner import Planner
from fluid.resources import Cluster, Device
from fluid.runtime_model import TOLERANCE, stretch_of, width_limit
from fluid.scenario import DeviceChange, Scenario
from fluid.strips import Segment, Strips
from fluid.workloads import Ask, GroupAsk, Scores, make_algorithm

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class GroupResult:
    """One TrialGroup's times, in seconds since the start."""

    name: str
    submitted: float
    finished: float
    trials: int


@dataclass(frozen=True)
class SimulationResult:
    """What happened.

    Attributes:
        planner: its name.
        n: devices at the start.
        makespan: seconds from the first start to the last finish.
        busy_device_seconds: device-seconds in which at least one trial held the device.
        utilisation: their share of the device-seconds there were.
        lower_bound: seconds no schedule of the work that was run can beat.
        device_hours: device-hours there were, used or not: what is paid for.
        resizes: how often a running trial's width changed.
        trials: trials asked for, each counted once.
        stopped: runs that the algorithm stopped early; a trial asked for again may count twice.
        groups: in order of submission.
        segments: who held what and when, if recorded.
        trial_ids: a name for each row of the segments.
        cluster: the devices at the start.
        device_changes: (seconds, device, whether it was added), in order.
    """

    planner: str
    n: int
    makespan: float
    busy_device_seconds: float
    utilisation: float
    lower_bound: float
    device_hours: float
    resizes: int
    trials: int
    stopped: int
    groups: tuple[GroupResult, ...]
    segments: tuple[Segment, ...]
    trial_ids: tuple[str, ...]
    cluster: Cluster
    device_changes: tuple[tuple[float, int, bool], ...]


def simulate(scenario: Scenario, planner: Planner, *, record: bool = False) -> SimulationResult:
    """Runs a scenario to its end.

    Args:
        scenario: what to run; its ``c`` and ``d`` count, not the planner's.
        planner: who plans.
        record: whether to keep the segments, for drawings.
    """
    return _Run(scenario, planner, record).run()


class _Run:
    """One scenario under one planner."""

    def __init__(self, scenario: Scenario, planner: Planner, record: bool) -> None:
        self._scenario = scenario
        self._planner = planner
        self._record = record
        self._strips = Strips(scenario.cluster, scenario.epsilon, record=True)
        self._replanner: Replanner = planner.replanner()
        trials_rng, scores_rng = np.random.default_rng(scenario.seed).spawn(2)
        self._fates = _Fates(scenario, trials_rng)
        self._algorithm = make_algorithm(scenario.workload, Scores(scores_rng), len(scenario.cluster))
        self._cluster = scenario.cluster
        #: still to come, the next one last; changes of one instant happen in the order given.
        self._changes = sorted(scenario.changes, key=lambda change: change.at)[::-1]
        self._changed: list[tuple[float, int, bool]] = []
        # By row.
        self._trial: list[int] = []
        self._group: list[int] = []
        self._names: list[str] = []
        self._iteration: list[float] = []
        self._height: list[float] = []
        self._ends_early: list[bool] = []
        # By group.
        self._asks: list[GroupAsk] = []
        self._submitted: list[float] = []
        self._open: list[int] = []
        self._finished: list[float] = []
        #: row -> width decided for it, to be applied at the end of its iteration; a newer decision replaces it.
        self._pending: dict[int, float] = {}
        self._boundaries: list[tuple[float, int, float]] = []

    def run(self) -> SimulationResult:
        self._submit(self._algorithm.start())
        while self._strips.running or self._strips.queued:
            self._step()
        return self._result()

    # -- one event after another ---------------------------------------------------------------------------

    def _step(self) -> None:
        strips = self._strips
        change_at = self._changes[-1].at if self._changes else math.inf
        boundary_at = self._boundaries[0][0] if self._boundaries else math.inf
        ended = strips.advance(min(change_at, boundary_at))
        if ended:
            self._end(ended)
        elif change_at <= boundary_at:
            self._change(self._changes.pop())
        else:
            self._reach_boundary(*heapq.heappop(self._boundaries)[1:])

    def _end(self, rows: list[int]) -> None:
        for row in rows:
            self._pending.pop(row, None)
            group = self._group[row]
            self._open[group] -= 1
            self._finished[group] = self._strips.now
        # In order of trial, not of float noise: the algorithm sees one instant as one report.
        reports = sorted((self._trial[row], self._ends_early[row]) for row in rows)
        self._strips.dispatch()
        self._submit(self._algorithm.ended(reports))
        self._rebalance()

    def _change(self, change: DeviceChange) -> None:
        strips = self._strips
        if change.device is not None:
            strips.add_device(change.device)
            self._cluster = replace(self._cluster, devices=(*self._cluster.devices, change.device))
            self._changed.append((strips.now, change.device.index, True))
        elif change.lost is not None:
            evicted = strips.remove_device(change.lost)
            left = tuple(device for device in self._cluster.devices if device.index != change.lost)
            self._cluster = replace(self._cluster, devices=left)
            self._changed.append((strips.now, change.lost, False))
            strips.cap_queue(len(left))
            for row in evicted:
                self._pending.pop(row, None)
                self._restart(row)
        strips.limit_widths(width_limit(self._scenario.beta, n=len(self._cluster), d_max=self._scenario.d))
        strips.dispatch()
        self._rebalance()

    def _restart(self, row: int) -> None:
        """Queues a trial again that lost its device: the iteration in flight is lost with it."""
        done = self._height[row] - self._strips.remaining(row)
        whole = math.floor(done / self._iteration[row] + TOLERANCE) * self._iteration[row]
        self._strips.set_remaining(row, self._height[row] - whole)
        alone = self._instance([self._trial[row]], [self._height[row]], self._cluster)
        self._strips.requeue(row, float(self._planner.join(alone, np.zeros(0), idle=0).widths[0]))

    # -- planning ------------------------------------------------------------------------------------------

    def _submit(self, groups: list[GroupAsk]) -> None:
        """Plans what arrives at one instant as one: on an idle cluster as a whole, else beside what is there."""
        if not groups:
            return
        strips = self._strips
        asks = [(len(self._asks) + index, ask) for index, group in enumerate(groups) for ask in group.asks]
        trials = [ask.trial for _, ask in asks]
        heights = [self._fates.pace(ask.trial) * ask.iterations for _, ask in asks]
        instance = self._instance(trials, heights, self._cluster)
        if strips.running or strips.queued:
            others = np.array([*strips.snapshot().remaining, *strips.waiting_heights()])
            arrangement = self._planner.join(instance, others, strips.occupancy.free_count)
        else:
            arrangement = self._planner.arrange(instance)
        self._replanner = arrangement.replanner
        fates = [self._fates.draw(trial) for trial in trials]
        strips.submit(
            instance,
            arrangement,
            slowdown=[fate.slowdown for fate in fates],
            stop_at=[height * (1.0 - fate.stop_at) for height, fate in zip(heights, fates, strict=True)],
        )
        self._trial += trials
        self._height += heights
        self._group += [group for group, _ in asks]
        self._iteration += [height / ask.iterations for height, (_, ask) in zip(heights, asks, strict=True)]
        self._names += [_row_name(ask, groups[group - len(self._asks)]) for group, ask in asks]
        self._ends_early += [fate.stop_at < 1.0 for fate in fates]
        self._asks += groups
        self._submitted += [strips.now] * len(groups)
        self._finished += [strips.now] * len(groups)
        self._open += [len(group.asks) for group in groups]
        strips.dispatch()
        if arrangement.replan_at_start and not strips.queued and strips.occupancy.free_count:
            # Trials that start this instant are resized for nothing.
            self._decide(self._replanner.replan(strips.snapshot(epsilon=0.0)))

    def _rebalance(self) -> None:
        strips = self._strips
        if strips.queued:
            self._decide(self._replanner.make_room(strips.snapshot(), np.array(strips.waiting_heights())))
            strips.dispatch()
        elif strips.running:
            self._decide(self._replanner.replan(strips.snapshot()))

    def _instance(self, trials: list[int], heights: list[float], cluster: Cluster) -> Instance:
        scenario = self._scenario
        return Instance.build(
            heights,
            cluster,
            alpha=scenario.alpha,
            beta=scenario.beta,
            c=scenario.c,
            d=scenario.d,
            epsilon=scenario.epsilon,
            trial_ids=[f"trial-{trial}" for trial in trials],
        )

    # -- resizes -------------------------------------------------------------------------------------------

    def _decide(self, resizes: list[Resize]) -> None:
        """Notes resizes for the end of each trial's current iteration; they replace what was noted before."""
        strips = self._strips
        self._pending.clear()
        for row, width in resizes:
            at = self._next_boundary(row)
            if strips.stays(row, width) or at <= strips.now * (1.0 + TOLERANCE):
                self._apply(row, width)
            else:
                self._pending[row] = width
                heapq.heappush(self._boundaries, (at, row, width))

    def _next_boundary(self, row: int) -> float:
        """When the trial's current iteration ends; now, if it stands between two."""
        strips = self._strips
        done = (self._height[row] - strips.remaining(row)) / self._iteration[row]
        begun = done - math.floor(done + TOLERANCE)
        if begun <= TOLERANCE:
            return strips.now
        return strips.time_to_do(row, (1.0 - begun) * self._iteration[row])

    def _reach_boundary(self, row: int, width: float) -> None:
        if self._pending.get(row) != width:
            return
        at = self._next_boundary(row)
        if at > self._strips.now * (1.0 + TOLERANCE):  # its pace changed since
            heapq.heappush(self._boundaries, (at, row, width))
            return
        del self._pending[row]
        free = self._strips.occupancy.free_count
        self._apply(row, width)
        if self._strips.occupancy.free_count > free:
            self._strips.dispatch()
            self._rebalance()

    def _apply(self, row: int, width: float) -> None:
        """Resizes if it still pays: devices may have gone to others since it was decided."""
        strips, scenario = self._strips, self._scenario
        present = strips.width(row)
        if width > present:
            own = len(strips.occupancy.held[row]) if strips.is_alone(row) else 0
            width = min(width, float(own + strips.occupancy.free_count))
            if width < 1.0 or width <= present:
                return
            epsilon = 0.0 if strips.is_fresh(row) else scenario.epsilon
            work = strips.remaining(row) / strips.occupancy.speed(strips.occupancy.held[row])
            moved = epsilon + work * stretch_of(scenario.alpha, scenario.beta, width)
            if moved >= strips.seconds_left(row) * (1.0 - TOLERANCE):
                return
        if strips.resize(row, width):
            for other, its_width in self._pending.items():  # those it left or joined have another pace now
                heapq.heappush(self._boundaries, (self._next_boundary(other), other, its_width))

    # -- the result ----------------------------------------------------------------------------------------

    def _result(self) -> SimulationResult:
        strips, scenario = self._strips, self._scenario
        available = self._device_seconds()
        busy = _busy_device_seconds(strips.segments)
        return SimulationResult(
            planner=self._planner.name,
            n=len(scenario.cluster),
            makespan=strips.now,
            busy_device_seconds=busy,
            utilisation=busy / available if available else 0.0,
            lower_bound=self._lower_bound(),
            device_hours=available / _SECONDS_PER_HOUR,
            resizes=strips.resizes,
            trials=len(set(self._trial)),
            stopped=sum(self._ends_early),
            groups=tuple(
                GroupResult(ask.name, submitted, finished, len(ask.asks))
                for ask, submitted, finished in zip(self._asks, self._submitted, self._finished, strict=True)
            ),
            segments=tuple(strips.segments) if self._record else (),
            trial_ids=tuple(self._names),
            cluster=scenario.cluster,
            device_changes=tuple(self._changed),
        )

    def _device_seconds(self) -> float:
        """Device-seconds there were until the end."""
        now = self._strips.now
        total = len(self._scenario.cluster) * now
        for at, _, added in self._changed:
            total += (1 if added else -1) * max(0.0, now - at)
        return total

    def _lower_bound(self) -> float:
        """mLB of the work that was run, by true runtimes, on all devices there ever were.

        Stages of a bracket wait for one another and add up; groups of one stage, and all groups of an algorithm
        without stages, count as one. Brackets run beside one another: the longest counts, or all work as one.
        """
        gained = [change.device for change in self._scenario.changes if change.device]
        devices: dict[int, Device] = {}
        for device in sorted([*self._scenario.cluster.devices, *gained], key=lambda device: device.speed):
            devices[device.index] = device  # one that came back with another speed counts with the greater one
        cluster = Cluster(tuple(devices.values()))
        everything: dict[int, float] = {}
        work: dict[int, dict[int | None, dict[int, float]]] = {}
        for row, trial in enumerate(self._trial):
            ask = self._asks[self._group[row]]
            for seconds in (everything, work.setdefault(ask.bracket, {}).setdefault(ask.stage, {})):
                seconds[trial] = seconds.get(trial, 0.0) + self._strips.true_work(row, self._height[row])

        def bound(seconds: dict[int, float]) -> float:
            return malleable_lower_bound(self._instance(list(seconds), list(seconds.values()), cluster))

        return max(bound(everything), *(sum(map(bound, stages.values())) for stages in work.values()))


@dataclass(frozen=True)
class _Fate:
    """What becomes of one run of a trial.

    Attributes:
        slowdown: true over predicted runtime.
        stop_at: share of its budget after which the algorithm stops it; 1 if it does not.
    """

    slowdown: float
    stop_at: float


class _Fates:
    """Paces and fates, the same for a trial's j-th run under every planner."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        self._scenario = scenario
        self._seeds = rng
        self._generators: list[np.random.Generator] = []
        self._paces: list[float] = []

    def pace(self, trial: int) -> float:
        """Predicted seconds per iteration of a trial at width 1."""
        while len(self._paces) <= trial:
            generator = self._seeds.spawn(1)[0]
            self._generators.append(generator)
            self._paces.append(self._scenario.runtimes.draw(generator))
        return self._paces[trial]

    def draw(self, trial: int) -> _Fate:
        """What becomes of the trial's next run."""
        self.pace(trial)
        rng = self._generators[trial]
        error, stops, moment = float(rng.standard_normal()), rng.random(), rng.random()
        slowdown = math.exp(self._scenario.runtime_error * error)
        return _Fate(slowdown, max(moment, 1e-3) if stops < self._scenario.early_stop else 1.0)


def _row_name(ask: Ask, group: GroupAsk) -> str:
    return f"trial {ask.trial}" if group.stage is None else f"trial {ask.trial}, stage {group.stage}"


def _busy_device_seconds(segments: list[Segment]) -> float:
    """Device-seconds in which at least one trial held the device."""
    by_device: dict[int, list[tuple[float, float]]] = {}
    for segment in segments:
        for device in segment.devices:
            by_device.setdefault(device, []).append((segment.start, segment.end))
    busy = 0.0
    for stretches in by_device.values():
        reached = 0.0
        for start, end in sorted(stretches):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
    return busy
