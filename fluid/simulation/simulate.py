"""Runs a scenario on the real engine and the simulated backend.

Deterministic by the scenario's seed: under every planner the same trials take the same time and stop at the same
point of their budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command, NoteDeviceLost, Notice, Report, ReportEnd
from fluid.engine.engine import EngineError
from fluid.engine.events import (
    Alarm,
    BudgetExtended,
    DeviceAdded,
    DeviceLost,
    Event,
    GroupSubmitted,
    StopRequested,
    Tick,
    TrialSpec,
)
from fluid.errors import InvalidFieldError
from fluid.forecasting.scenario import Scenario
from fluid.planners.bounds import malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.planners.planner import Planner
from fluid.planners.rollout import Segment
from fluid.policies.engine import EngineState
from fluid.resources import TOLERANCE, Cluster, Device
from fluid.simulation.simulation_result import GroupResult, SimulationResult
from fluid.simulation.sweeps import RequestedRun, Sweep, make_sweeps
from fluid.simulation.trial_outcomes import OracleProfile
from fluid.simulation.workloads import GroupRequest
from fluid.trialgroup import TrialState

# -- work bound ----------------------------------------------------------------------------------
#
# How fast the work of a scenario could be done at best.


def work_bound(scenario: Scenario, cluster: Cluster, seconds: Iterable[float]) -> float:
    """Returns a time, in seconds, that no schedule of independent trials beats.

    Args:
        scenario: the overheads and limits, and the rates of fused trials.
        cluster: the devices.
        seconds: of each trial, alone on a device of speed 1; those of 0 do not count.
    """
    heights = [height for height in seconds if height > 0.0]
    if not heights:
        return 0.0
    alpha, beta, d = scenario.alpha, scenario.beta, scenario.d
    instance = Instance.build(heights, cluster, alpha=alpha, beta=beta, c=scenario.c, d=d)
    if scenario.fused is None:
        return malleable_lower_bound(instance)
    rates = [scenario.fused] * len(heights)
    packs = Instance.build(heights, cluster, alpha=alpha, beta=beta, c=scenario.max_fused, d=d, fused=rates)
    return min(malleable_lower_bound(instance), malleable_lower_bound(packs))


# -- device holder -------------------------------------------------------------------------------
#
# What holds the devices of a simulation, asking for some and giving others back, and how long they were busy.


class DeviceHolder(Protocol):
    """Asks for devices and gives them back while a scenario runs.

    Attributes:
        provision_s: seconds from asking for a device until it comes.
    """

    provision_s: float

    @property
    def next_at(self) -> float:
        """When it wants to act next, seconds; infinite for never."""
        ...

    def begin(self, state: EngineState, backend: SimulatedBackend) -> None:
        """Takes the engine to read, and the backend to ask for devices."""
        ...

    def requested(self, trial: int, trial_id: str, granted: int, bracket: int, predicted: float) -> None:
        """A trial was requested, up to so many iterations, which are predicted to take these seconds each."""
        ...

    def ended(self, trial: int, stopped: bool) -> None:
        """A trial has run as far as requested, or was stopped early."""
        ...

    def heard(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Takes what happened, and what the engine answered."""
        ...

    def act(self, now: float) -> list[Event]:
        """Decides at a time that it wanted; returns what the engine is to be told."""
        ...


def busy_device_seconds(segments: list[Segment]) -> float:
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


# -- simulate ------------------------------------------------------------------------------------


_SECONDS_PER_HOUR = 3600.0


def simulate(
    scenario: Scenario,
    planner: Planner,
    *,
    record: bool = False,
    watch: Callable[[EngineState, float], None] | None = None,
    holder: DeviceHolder | None = None,
) -> SimulationResult:
    """Runs a scenario to its end.

    Example:
        >>> from fluid import Cluster, Fifo
        >>> from fluid.forecasting.scenario import Runtimes, Scenario, Workload
        >>> scenario = Scenario(Cluster.of(2), Workload("random", trials=3, max_iterations=5), Runtimes("constant"))
        >>> simulate(scenario, Fifo()).makespan
        10.0

    Args:
        scenario: what to run, with its own ``c`` and ``d`` in place of the planner's.
        planner: the planner.
        record: whether to keep the segments, for charts.
        watch: is shown the engine, and the time in seconds, after each instant; it must change nothing.
        holder: changes the devices meanwhile, beside the scenario's own changes; every iteration is then saved. Only
            for a scenario with one workload.
    """
    if holder is not None and scenario.workloads:
        raise InvalidFieldError("workloads", len(scenario.workloads), "must be one workload, given as workload, here")
    return _Simulation(scenario, planner, record, holder).run(watch)


class _Simulation:
    """One scenario under one planner."""

    def __init__(self, scenario: Scenario, planner: Planner, record: bool, holder: DeviceHolder | None) -> None:
        self._scenario = scenario
        self._holder = holder
        self._planner = planner
        self._record = record
        self._paces: dict[str, float] = {}
        self._sweeps = make_sweeps(scenario)
        #: The next one last; those of one instant in the scenario's order.
        self._coming = sorted(self._sweeps, key=lambda sweep: sweep.workload.at)[::-1]
        #: The engine's id of a trial -> whose it is, its number there, and its row among the trials of all.
        self._known: dict[str, tuple[Sweep, int, int]] = {}
        self._backend = SimulatedBackend(
            lambda trial_id, _: self._truth(trial_id),
            scenario.cluster.devices,
            epsilon=scenario.epsilon,
            start_s=scenario.start_s,
            saves=holder is not None or any(change.lost is not None for change in scenario.changes),
            boot_s=0.0 if holder is None else holder.provision_s,
        )
        profile = OracleProfile(scenario, self._paces)
        fused = 1 if scenario.fused is None else scenario.max_fused
        self._state = EngineState(
            planner,
            profile,
            max_packing=scenario.c,
            max_fused=fused,
            max_width=scenario.d,
            group_policy=scenario.group_policy,
            fairness=scenario.fairness,
        )
        self._peak_rows = 1
        #: The next one last; those of one instant in the order given.
        self._changes = sorted(scenario.changes, key=lambda change: change.at)[::-1]
        self._changed: list[tuple[float, int, bool]] = []
        #: Devices that the holder got.
        self._came: list[Device] = []
        self._groups: list[GroupRequest] = []
        self._submitted: list[float] = []
        self._finished: list[float] = []
        self._requested: list[RequestedRun] = []
        self._open: dict[str, RequestedRun] = {}
        #: Names of the trials of all workloads, in the order in which they were first requested.
        self._names: list[str] = []
        if holder is not None:
            holder.begin(self._state, self._backend)

    def run(self, watch: Callable[[EngineState, float], None] | None = None) -> SimulationResult:
        self._handle(DeviceAdded(0.0, device) for device in self._backend.devices())
        while self._coming and self._coming[-1].workload.at == 0.0:
            self._arrive()
        while self._open or self._coming:
            if watch is not None:
                watch(self._state, self._backend.now())
            change_at = self._changes[-1].at if self._changes else math.inf
            arrival_at = self._coming[-1].workload.at if self._coming else math.inf
            alarm_at = math.inf if self._state.alarm_at is None else self._state.alarm_at
            act_at = math.inf if self._holder is None else self._holder.next_at
            if self._backend.next_at() > self._backend.now() and self._state.wants_tick:
                self._tick()  # all events of this instant are handled
            elif self._holder is not None and act_at < self._backend.next_at() and act_at <= change_at:
                self._act(self._holder, act_at)
            elif change_at <= arrival_at and change_at < self._backend.next_at() * (1.0 - TOLERANCE):
                self._change()  # iterations that end then count
            elif alarm_at < self._backend.next_at() and alarm_at < arrival_at:
                self._alarm(alarm_at)
            elif arrival_at < self._backend.next_at() * (1.0 - TOLERANCE):
                self._backend.clock.advance_to(max(arrival_at, self._backend.now()))
                self._arrive()
            elif math.isinf(self._backend.next_at()):
                stories = {trial_id: list(self._state.trials[trial_id].story) for trial_id in self._open}
                raise EngineError(f"no event is left for the trials that have not ended: {stories}")
            else:
                self._handle(self._backend.poll())
        return self._result()

    # -- one event after another ---------------------------------------------------------------------------

    def _handle(self, events: Iterable[Event]) -> None:
        """Passes events to the engine, its commands to the backend, and ended trials to the algorithm."""
        events = list(events)
        commands = self._state.handle(*events)
        self._execute(commands)
        if self._holder is not None:
            self._holder.heard(events, commands)
            self._note_devices(events, commands)
        stops: dict[str, Event] = {}
        ended: dict[Sweep, list[tuple[int, bool]]] = {}
        for command in commands:
            if isinstance(command, Report):
                self._peak_rows = max(self._peak_rows, command.rows)
                if self._is_to_stop(command):
                    stops[command.trial_id] = StopRequested(self._backend.now(), command.trial_id)
            elif isinstance(command, ReportEnd):
                sweep, trial, stopped = self._end(command)
                ended.setdefault(sweep, []).append((trial, stopped))
                stops.pop(command.trial_id, None)
        if stops:
            self._handle(stops.values())
        for sweep, trials in ended.items():
            self._submit(sweep, sweep.algorithm.ended(sorted(trials)))

    def _tick(self) -> None:
        self._handle([Tick(self._backend.now())])

    def _alarm(self, at: float) -> None:
        self._backend.clock.advance_to(max(at, self._backend.now()))
        self._handle([Alarm(self._backend.now())])

    def _act(self, holder: DeviceHolder, at: float) -> None:
        self._backend.clock.advance_to(max(at, self._backend.now()))
        events = holder.act(self._backend.now())
        if events:
            self._handle(events)

    def _note_devices(self, events: list[Event], commands: list[Command]) -> None:
        """Takes note of the devices that came after the start, and gives those back that the engine has left."""
        for event in events:
            if isinstance(event, DeviceAdded) and event.device not in self._scenario.cluster.devices:
                self._changed.append((event.at, event.device.index, True))
                self._came.append(event.device)
        for command in commands:
            if isinstance(command, NoteDeviceLost):
                self._changed.append((command.at, command.device_id, False))
                self._backend.give_back(command.device_id)

    def _execute(self, commands: Iterable[Command]) -> None:
        self._backend.execute([command for command in commands if not isinstance(command, Notice)])

    def _is_to_stop(self, report: Report) -> bool:
        request = self._open[report.trial_id]
        if request.stopped:
            return False  # It finishes the iteration that was under way, which the algorithm did not ask for.
        request.ran = report.iteration - request.first
        request.stopped = request.stop_after <= request.ran < request.iterations
        return request.stopped

    def _end(self, end: ReportEnd) -> tuple[Sweep, int, bool]:
        request = self._open.pop(end.trial_id)
        self._finished[request.group] = request.sweep.finished = self._backend.now()
        if self._holder is not None:
            self._holder.ended(request.trial, request.stopped)
        return request.sweep, request.trial, request.stopped

    def _arrive(self) -> None:
        sweep = self._coming.pop()
        self._submit(sweep, sweep.algorithm.start())

    def _submit(self, sweep: Sweep, groups: list[GroupRequest]) -> None:
        now = self._backend.now()
        events: list[Event] = []
        for group in groups:
            index, fresh = len(self._groups), []
            for wanted in group.requests:
                trial_id = self._id_of(sweep, wanted.trial)
                first = self._state.trials[trial_id].progress.done if trial_id in self._state.trials else 0
                key = sweep.fused_key or trial_id
                self._paces[key] = sweep.outcomes.pace(wanted.trial)
                stop_after = math.ceil(sweep.outcomes.stop_at(wanted.trial) * wanted.iterations)
                self._open[trial_id] = RequestedRun(sweep, index, wanted.trial, first, wanted.iterations, stop_after)
                self._requested.append(self._open[trial_id])
                if self._holder is not None:
                    granted = first + wanted.iterations
                    self._holder.requested(wanted.trial, trial_id, granted, group.bracket, self._paces[key])
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
                            isolated=self._scenario.fused is None,
                            extends=False,  # Beyond what is to follow.
                            requires=sweep.workload.requires,
                        )
                    )
            if fresh:
                events.append(GroupSubmitted(now, f"{index}", tuple(fresh), sweep.terms(now)))
            self._groups.append(group)
            self._submitted.append(now)
            self._finished.append(now)
        if events:
            self._handle(events)

    def _id_of(self, sweep: Sweep, trial: int) -> str:
        """The engine's id of a trial; a stopped trial that is requested again gets a new one."""
        trial_id = sweep.ids.get(trial)
        if trial_id is None:
            trial_id = sweep.new_id(trial)
            self._known[trial_id] = sweep, trial, len(self._names)
            self._names.append(trial_id)
        elif self._state.trials[trial_id].state is TrialState.STOPPED:
            self._known[trial_id + "+"] = self._known[trial_id]
            trial_id += "+"
        sweep.ids[trial] = trial_id
        return trial_id

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
        scenario, (sweep, trial, row) = self._scenario, self._known[trial_id]
        seconds = sweep.outcomes.pace(trial) * sweep.outcomes.slowdown(trial)
        return Truth(seconds, scenario.alpha, scenario.beta, row, fusion_key=sweep.fused_key, fused=scenario.fused)

    # -- the result ----------------------------------------------------------------------------------------

    def _result(self) -> SimulationResult:
        scenario, makespan = self._scenario, self._backend.now()
        available = self._device_seconds(makespan)
        segments = self._backend.segments
        busy = busy_device_seconds(segments)
        return SimulationResult(
            planner=self._planner.name,
            n=len(scenario.cluster),
            makespan=makespan,
            busy_device_seconds=busy,
            utilisation=min(1.0, busy / available) if available else 0.0,
            lower_bound=self._lower_bound(),
            device_hours=available / _SECONDS_PER_HOUR,
            resizes=self._backend.resizes,
            trials=len(self._names),
            stopped=sum(request.stopped for request in self._requested),
            groups=tuple(
                GroupResult(group.name, submitted, finished, len(group.requests))
                for group, submitted, finished in zip(self._groups, self._submitted, self._finished, strict=True)
            ),
            segments=tuple(segments) if self._record else (),
            trial_ids=tuple(self._names),
            cluster=scenario.cluster,
            device_changes=tuple(self._changed),
            peak_rows=None if scenario.fused is None else self._peak_rows,
            group_policy=scenario.group_policy,
            workloads=tuple(sweep.result() for sweep in self._sweeps),
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
        algorithm without stages, count as one. Brackets and workloads run concurrently: the bound is that of the
        longest bracket, from its workload's arrival, or of all work as one group.
        """
        scenario = self._scenario
        gained = [*self._came, *(change.device for change in scenario.changes if change.device)]
        devices: dict[int, Device] = {}
        for device in sorted([*scenario.cluster.devices, *gained], key=lambda device: device.speed):
            devices[device.index] = device  # a device that returned with another speed counts with the greater one
        cluster = Cluster(tuple(devices.values()))
        everything: dict[str, float] = {}
        work: dict[tuple[Sweep, int], dict[int | None, dict[str, float]]] = {}
        for request in self._requested:
            group, name = self._groups[request.group], request.sweep.new_id(request.trial)
            bracket = work.setdefault((request.sweep, group.bracket), {})
            for seconds in (everything, bracket.setdefault(group.stage, {})):
                seconds[name] = seconds.get(name, 0.0) + request.ran * self._truth(name).seconds

        def bound(seconds: dict[str, float]) -> float:
            return work_bound(scenario, cluster, seconds.values())

        brackets = (sweep.workload.at + sum(map(bound, stages.values())) for (sweep, _), stages in work.items())
        return max(bound(everything), *brackets)
