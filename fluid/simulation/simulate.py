"""Runs a scenario on the real engine and the simulated backend.

Deterministic by the scenario's seed: under every planner the same trials take the same time and stop at the same
point of their budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command, Notice, Report, ReportEnd
from fluid.engine.events import (
    Alarm,
    BudgetExtended,
    DeviceAdded,
    DeviceLost,
    Event,
    GroupSubmitted,
    StopRequested,
    Tick,
)
from fluid.engine.state import EngineError, EngineState
from fluid.engine.trial_spec import TrialSpec
from fluid.planning.bounds import malleable_lower_bound
from fluid.planning.instance import Instance
from fluid.planning.planner import Planner
from fluid.planning.rollout import Segment
from fluid.planning.runtime_model import TOLERANCE
from fluid.resources import Cluster, Device
from fluid.simulation.scenario import Scenario
from fluid.simulation.trial_outcomes import OracleProfile, TrialOutcomes
from fluid.simulation.workloads import GroupRequest, Scores, make_algorithm
from fluid.trialgroup import TrialState

_SECONDS_PER_HOUR = 3600.0
#: Profile key and fusion key of trials that can be fused.
_FUSED = "fused"


@dataclass(frozen=True)
class GroupResult:
    """One TrialGroup's times, in seconds since the start."""

    name: str
    submitted: float
    finished: float
    trials: int


@dataclass(frozen=True)
class SimulationResult:
    """A simulation's times and counts.

    Attributes:
        planner: its name.
        n: devices at the start.
        makespan: seconds from the first start to the last finish.
        busy_device_seconds: device-seconds in which at least one trial held the device.
        utilisation: their share of the available device-seconds.
        lower_bound: seconds; no schedule of the same work is shorter.
        device_hours: available device-hours, used or not: what is paid for.
        resizes: number of resizes of running trials.
        trials: trials requested, each counted once.
        stopped: trials the algorithm stopped early.
        groups: in order of submission.
        segments: which trial held which devices when, if recorded.
        trial_ids: a name for each row of the segments.
        cluster: the devices at the start.
        device_changes: (seconds, device, whether it was added), in order.
        peak_rows: most trials that took a step together; ``None`` if the scenario's trials cannot be fused.
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
    peak_rows: int | None = None


def simulate(scenario: Scenario, planner: Planner, *, record: bool = False) -> SimulationResult:
    """Runs a scenario to its end.

    Example:
        >>> from fluid import Cluster, Fifo
        >>> from fluid.simulation.scenario import Runtimes, Scenario, Workload
        >>> scenario = Scenario(Cluster.of(2), Workload("random", trials=3, max_iterations=5), Runtimes("constant"))
        >>> simulate(scenario, Fifo()).makespan
        10.0

    Args:
        scenario: what to run, with its own ``c`` and ``d`` in place of the planner's.
        planner: the planner.
        record: whether to keep the segments, for charts.
    """
    return _Simulation(scenario, planner, record).run()


@dataclass
class _RequestedRun:
    """One run of a trial that the algorithm requested."""

    group: int
    trial: int
    first: int  # iterations done before it
    iterations: int
    stop_after: int
    stopped: bool = False
    ran: int = 0


class _Simulation:
    """One scenario under one planner."""

    def __init__(self, scenario: Scenario, planner: Planner, record: bool) -> None:
        self._scenario = scenario
        self._planner = planner
        self._record = record
        trials_rng, scores_rng = np.random.default_rng(scenario.seed).spawn(2)
        self._outcomes = TrialOutcomes(scenario, trials_rng)
        self._paces: dict[str, float] = {}
        self._algorithm = make_algorithm(scenario.workload, Scores(scores_rng), len(scenario.cluster))
        self._backend = SimulatedBackend(
            lambda trial_id, _: self._truth(trial_id),
            scenario.cluster.devices,
            epsilon=scenario.epsilon,
            saves=any(change.lost is not None for change in scenario.changes),
        )
        profile = OracleProfile(scenario, self._paces)
        fused = 1 if scenario.fused is None else scenario.max_fused
        self._state = EngineState(planner, profile, max_packing=scenario.c, max_fused=fused, max_width=scenario.d)
        self._peak_rows = 1
        #: The next one last; those of one instant in the order given.
        self._changes = sorted(scenario.changes, key=lambda change: change.at)[::-1]
        self._changed: list[tuple[float, int, bool]] = []
        self._groups: list[GroupRequest] = []
        self._submitted: list[float] = []
        self._finished: list[float] = []
        self._requested: list[_RequestedRun] = []
        self._open: dict[str, _RequestedRun] = {}
        self._ids: dict[int, str] = {}

    def run(self) -> SimulationResult:
        self._handle(DeviceAdded(0.0, device) for device in self._backend.devices())
        self._submit(self._algorithm.start())
        while self._open:
            change_at = self._changes[-1].at if self._changes else math.inf
            if self._backend.next_at() > self._backend.now() and self._state.wants_tick:
                self._tick()  # all events of this instant are handled
            elif change_at < self._backend.next_at() * (1.0 - TOLERANCE):  # iterations that end then count
                self._change()
            elif self._state.alarm_at is not None and self._state.alarm_at < self._backend.next_at():
                self._alarm(self._state.alarm_at)
            elif math.isinf(self._backend.next_at()):
                stories = {trial_id: list(self._state.trials[trial_id].story) for trial_id in self._open}
                raise EngineError(f"no event is left for the trials that have not ended: {stories}")
            else:
                self._handle(self._backend.poll())
        return self._result()

    # -- one event after another ---------------------------------------------------------------------------

    def _handle(self, events: Iterable[Event]) -> None:
        """Passes events to the engine, its commands to the backend, and ended trials to the algorithm."""
        commands = self._state.handle(*events)
        self._execute(commands)
        stops: dict[str, Event] = {}
        ended: list[tuple[int, bool]] = []
        for command in commands:
            if isinstance(command, Report):
                self._peak_rows = max(self._peak_rows, command.rows)
                if self._is_to_stop(command):
                    stops[command.trial_id] = StopRequested(self._backend.now(), command.trial_id)
            elif isinstance(command, ReportEnd):
                ended.append(self._end(command))
                stops.pop(command.trial_id, None)
        if stops:
            self._handle(stops.values())
        if ended:
            self._submit(self._algorithm.ended(sorted(ended)))

    def _tick(self) -> None:
        self._execute(self._state.handle(Tick(self._backend.now())))

    def _alarm(self, at: float) -> None:
        self._backend.clock.advance_to(max(at, self._backend.now()))
        self._execute(self._state.handle(Alarm(self._backend.now())))

    def _execute(self, commands: Iterable[Command]) -> None:
        self._backend.execute([command for command in commands if not isinstance(command, Notice)])

    def _is_to_stop(self, report: Report) -> bool:
        request = self._open[report.trial_id]
        request.ran = report.iteration - request.first
        request.stopped |= request.stop_after <= request.ran < request.iterations
        return request.stopped

    def _end(self, end: ReportEnd) -> tuple[int, bool]:
        request = self._open.pop(end.trial_id)
        self._finished[request.group] = self._backend.now()
        return request.trial, request.stopped

    def _submit(self, groups: list[GroupRequest]) -> None:
        now = self._backend.now()
        events: list[Event] = []
        for group in groups:
            index, fresh = len(self._groups), []
            for wanted in group.requests:
                trial_id = self._id_of(wanted.trial)
                first = self._state.trials[trial_id].progress.done if trial_id in self._state.trials else 0
                key = self._key_of(trial_id)
                self._paces[key] = self._outcomes.pace(wanted.trial)
                stop_after = math.ceil(self._outcomes.stop_at(wanted.trial) * wanted.iterations)
                self._open[trial_id] = _RequestedRun(index, wanted.trial, first, wanted.iterations, stop_after)
                self._requested.append(self._open[trial_id])
                if trial_id in self._state.trials:
                    events.append(
                        BudgetExtended(
                            now, trial_id, wanted.iterations, follow_up_iterations=wanted.follow_up_iterations
                        )
                    )
                else:
                    width, follow_up_iterations = self._scenario.d, wanted.follow_up_iterations
                    fresh.append(
                        TrialSpec(
                            trial_id,
                            wanted.iterations,
                            priority=1.0,
                            profile_key=key,
                            max_width=width,
                            follow_up_iterations=follow_up_iterations,
                            fusible=self._scenario.fused is not None,
                        )
                    )
            if fresh:
                events.append(GroupSubmitted(now, f"{index}", tuple(fresh)))
            self._groups.append(group)
            self._submitted.append(now)
            self._finished.append(now)
        if events:
            self._handle(events)

    def _id_of(self, trial: int) -> str:
        """The engine's id of a trial; a stopped trial that is requested again gets a new one."""
        trial_id = self._ids.get(trial, f"trial-{trial}")
        if trial_id in self._state.trials and self._state.trials[trial_id].state is TrialState.STOPPED:
            trial_id += "+"
        self._ids[trial] = trial_id
        return trial_id

    def _key_of(self, trial_id: str) -> str:
        """The profile key of a trial: its own, as its pace is; that of all, where they can be fused."""
        return trial_id if self._scenario.fused is None else _FUSED

    def _change(self) -> None:
        change = self._changes.pop()
        self._backend.clock.advance_to(max(change.at, self._backend.now()))
        if change.device is not None:
            self._backend.add_devices([change.device])
            self._changed.append((change.at, change.device.index, True))
            self._handle([DeviceAdded(change.at, change.device)])
        elif change.lost is not None:
            self._changed.append((change.at, change.lost, False))
            self._handle([DeviceLost(change.at, change.lost)])

    def _truth(self, trial_id: str) -> Truth:
        trial = int(trial_id.rstrip("+").split("-")[1])
        scenario = self._scenario
        seconds = self._outcomes.pace(trial) * self._outcomes.slowdown(trial)
        key = None if scenario.fused is None else _FUSED
        return Truth(seconds, scenario.alpha, scenario.beta, trial, fusion_key=key, fused=scenario.fused)

    # -- the result ----------------------------------------------------------------------------------------

    def _result(self) -> SimulationResult:
        scenario, makespan = self._scenario, self._backend.now()
        available = self._device_seconds(makespan)
        segments = self._backend.segments
        busy = _busy_device_seconds(segments)
        return SimulationResult(
            planner=self._planner.name,
            n=len(scenario.cluster),
            makespan=makespan,
            busy_device_seconds=busy,
            utilisation=min(1.0, busy / available) if available else 0.0,
            lower_bound=self._lower_bound(),
            device_hours=available / _SECONDS_PER_HOUR,
            resizes=self._backend.resizes,
            trials=len(self._ids),
            stopped=sum(request.stopped for request in self._requested),
            groups=tuple(
                GroupResult(group.name, submitted, finished, len(group.requests))
                for group, submitted, finished in zip(self._groups, self._submitted, self._finished, strict=True)
            ),
            segments=tuple(segments) if self._record else (),
            trial_ids=tuple(_name(trial) for trial in range(len(self._ids))),
            cluster=scenario.cluster,
            device_changes=tuple(self._changed),
            peak_rows=None if scenario.fused is None else self._peak_rows,
        )

    def _device_seconds(self, until: float) -> float:
        """Device-seconds available until the end."""
        total = len(self._scenario.cluster) * until
        for at, _, added in self._changed:
            total += (1 if added else -1) * max(0.0, until - at)
        return total

    def _lower_bound(self) -> float:
        """mLB of the work that was run, by true runtimes, on all devices that the cluster ever had.

        Stages of a bracket wait for each other, so their bounds add up; groups of one stage, and all groups of an
        algorithm without stages, count as one. Brackets run concurrently: the bound is that of the longest bracket, or
        of all work as one group.
        """
        scenario = self._scenario
        gained = [change.device for change in scenario.changes if change.device]
        devices: dict[int, Device] = {}
        for device in sorted([*scenario.cluster.devices, *gained], key=lambda device: device.speed):
            devices[device.index] = device  # a device that returned with another speed counts with the greater one
        cluster = Cluster(tuple(devices.values()))
        everything: dict[int, float] = {}
        work: dict[int, dict[int | None, dict[int, float]]] = {}
        for request in self._requested:
            group = self._groups[request.group]
            for seconds in (everything, work.setdefault(group.bracket, {}).setdefault(group.stage, {})):
                done = request.ran * self._truth(_name(request.trial)).seconds
                seconds[request.trial] = seconds.get(request.trial, 0.0) + done

        def bound(seconds: dict[int, float]) -> float:
            heights = [height for height in seconds.values() if height > 0.0]
            if not heights:
                return 0.0
            instance = Instance.build(
                heights, cluster, alpha=scenario.alpha, beta=scenario.beta, c=scenario.c, d=scenario.d
            )
            if scenario.fused is None:
                return malleable_lower_bound(instance)
            rates, alpha, beta = [scenario.fused] * len(heights), scenario.alpha, scenario.beta
            packs = Instance.build(
                heights, cluster, alpha=alpha, beta=beta, c=scenario.max_fused, d=scenario.d, fused=rates
            )
            return min(malleable_lower_bound(instance), malleable_lower_bound(packs))

        return max(bound(everything), *(sum(map(bound, stages.values())) for stages in work.values()))


def _name(trial: int) -> str:
    return f"trial-{trial}"


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
