"""Sessions of trials that can be fused: the engine on simulated lanes, whose steps take T(rows)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command, LimitRows, Notice, Report, ReportEnd, StopLane
from fluid.engine.events import (
    DeviceAdded,
    Event,
    FusionLimited,
    GroupSubmitted,
    IterationDone,
    LaneLost,
    Tick,
    TrialSpec,
)
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import FusedRates
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device, MemoryNeed
from fluid.testing.validate import validate_state

#: T(k)/T(1) of MLPs of width 32, of networks that gain a little, and of convolutions that get slower.
MLP = FusedRates.of({2: 1.05, 4: 1.1, 8: 1.3, 16: 2.0, 32: 3.6, 64: 7.2})
SHORT_GAIN = FusedRates.of({2: 1.2, 4: 1.8, 8: 3.6})
CONVOLUTION = FusedRates.of({2: 4.0})
#: Times that events are handled at one instant.
_MOST_AT_ONCE = 500


@dataclass
class Shape:
    """Trials alike: how many, how long, and how they take their steps.

    Attributes:
        lane_rows: most rows that a lane turns out to fuse; 1 if its self-check refuses; ``None`` for no limit.
    """

    trials: int
    budget: int
    rates: FusedRates | None = None
    seconds: float = 0.1
    alpha: float = 1.0
    max_width: int = 1
    profile_key: str = "net"
    lane_rows: int | None = None


@dataclass
class FusedSession:
    """What happened.

    Attributes:
        steps: (seconds, device, trials) of each step, in order.
        makespan: seconds.
        ends: trial -> how it ended.
        limits: rows that lanes were told, in order.
        deaths: times that a lane died, with those that ran in it.
    """

    state: EngineState
    backend: SimulatedBackend
    steps: list[tuple[float, int, tuple[str, ...]]] = field(default_factory=list)
    makespan: float = 0.0
    ends: dict[str, str] = field(default_factory=dict)
    limits: list[int] = field(default_factory=list)
    deaths: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def ramp(self) -> list[int]:
        """Rows of the steps, each number where it first came."""
        return list(dict.fromkeys(len(trials) for _, _, trials in self.steps))


def run_fused(
    shapes: Mapping[str, Shape],
    *,
    devices: int = 1,
    planner: str = "portfolio",
    max_packing: int = 1,
    max_fused: int = 64,
    max_width: int = 1,
    insists: bool = False,
    culprit: str | None = None,
    memory_bytes: float | None = None,
    need: Callable[[int], MemoryNeed] | None = None,
    profile: Profile | None = None,
    later: Sequence[tuple[float, Event]] = (),
    on_report: Callable[[FusedSession, Report], None] | None = None,
) -> FusedSession:
    """Runs one group of trials ``shape-number`` to its end; every state of the engine is validated.

    Args:
        shapes: by name.
        max_packing, max_fused, max_width, insists, profile: of the engine.
        culprit: a trial whose steps end their lane.
        memory_bytes: of each device.
        need: what a lane measures of each of so many rows; ``None`` if nothing.
        later: further events, and when they happen, seconds.
        on_report: called with each report.
    """

    def truth_of(trial_id: str, _: object) -> Truth:
        shape = shapes[trial_id.split("-")[0]]
        key = None if shape.rates is None else trial_id.split("-")[0]
        return Truth(shape.seconds, alpha=shape.alpha, beta=1.05, fusion_key=key, fused=shape.rates)

    available = [Device(index, memory_bytes=memory_bytes) for index in range(devices)]
    backend = SimulatedBackend(truth_of, available, epsilon=0.05)
    state = EngineState(
        make_planner(planner, c=max_packing, d=max_width),
        profile or Profile(),
        max_packing=max_packing,
        max_fused=max_fused,
        insists_on_fusing=insists,
        max_width=max_width,
    )
    session = FusedSession(state, backend)
    instant = [0.0, 0.0]

    def handle(*events: Event) -> None:
        instant[:] = backend.now(), instant[1] + 1 if backend.now() == instant[0] else 0
        assert instant[1] < _MOST_AT_ONCE, "it goes on for ever, and no time passes"
        commands = state.handle(*events)
        validate_state(state)
        note(commands)
        backend.execute([command for command in commands if not isinstance(command, Notice)])

    def note(commands: list[Command]) -> None:
        session.limits += [command.rows for command in commands if isinstance(command, LimitRows)]
        for command in commands:
            if isinstance(command, Report) and on_report is not None:
                on_report(session, command)
            elif isinstance(command, ReportEnd):
                session.ends[command.trial_id] = command.state

    def spoil(events: list[Event]) -> list[Event]:
        """Notes steps, and what they need; has lanes die of the culprit, and find their limits."""
        if need is not None:
            events = [
                structs.replace(event, memory=need(event.rows)) if isinstance(event, IterationDone) else event
                for event in events
            ]
        by_lane: dict[int, list[IterationDone]] = {}
        for event in events:
            if isinstance(event, IterationDone):
                by_lane.setdefault(event.lane_id, []).append(event)
        told: list[Event] = []
        for lane_id, done in by_lane.items():
            trials = tuple(sorted(event.trial_id for event in done))
            if culprit in trials:
                session.deaths.append(trials)
                backend.execute([StopLane(lane_id)])
                events = [event for event in events if getattr(event, "lane_id", None) != lane_id]
                told.append(LaneLost(backend.now(), lane_id, "killed by signal 11"))
                continue
            assert all(event.rows == len(done) for event in done)
            session.steps.append((done[0].at, state.lanes[lane_id].device_id, trials))
            most = shapes[trials[0].split("-")[0]].lane_rows
            if most is not None and len(trials) > most:
                told.append(FusionLimited(backend.now(), trials[0], lane_id, rows=most, reason="they differ"))
        return events + told

    for device in backend.devices():
        handle(DeviceAdded(0.0, device))
    specs = [
        TrialSpec(
            f"{name}-{number}",
            shape.budget,
            profile_key=shape.profile_key,
            max_width=shape.max_width,
            fusible=shape.rates is not None,
            config=() if shape.rates is None else (("lr", str(number)), ("shape", name)),
        )
        for name, shape in shapes.items()
        for number in range(shape.trials)
    ]
    handle(GroupSubmitted(0.0, "group", tuple(specs)))
    coming = sorted(later, key=lambda item: item[0])
    while any(not trial.state.ended for trial in state.trials.values()) or coming:
        alarm = state.alarm_at
        if coming and coming[0][0] <= backend.next_at():
            at, event = coming.pop(0)
            backend.clock.advance_to(max(at, backend.now()))
            if isinstance(event, DeviceAdded):
                backend.add_devices([event.device])
            handle(structs.replace(event, at=backend.now()))
        elif alarm is not None and alarm < backend.next_at():
            raise AssertionError(f"a trial is waited for: {session.steps[-3:]}")
        else:
            assert backend.next_at() < float("inf"), "it waits for ever"
            handle(*spoil(backend.poll()))
        while state.wants_tick:
            handle(Tick(backend.now()))
    session.makespan = backend.now()
    return session
