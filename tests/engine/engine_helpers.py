"""An engine driven by hand: short names for events, and commands by kind."""

from __future__ import annotations

from typing import Any, TypeVar

from fluid.engine.commands import Command, Pause, Report, ReportCall, ReportEnd, StartLane
from fluid.engine.events import (
    PLAIN_TERMS,
    BudgetExtended,
    CallRequested,
    Checkpoint,
    DeviceAdded,
    DeviceLost,
    Event,
    Failure,
    GroupSubmitted,
    GroupTerms,
    IterationDone,
    LaneLost,
    LaneReady,
    ResizeDone,
    StopRequested,
    Tick,
    TrialCalled,
    TrialFailed,
    TrialForgotten,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialSpec,
    TrialStarted,
)
from fluid.measure.profile import Profile
from fluid.planners.planner import Planner
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device, MemoryNeed
from fluid.testing.validate import validate_state

AnyCommand = TypeVar("AnyCommand", bound=Command)


class Known(Profile):
    """A profile for which everything is measured beforehand: packing and widening begin at once.

    Args:
        packing: c.
        width: d.
        seconds: per iteration.
        memory: of each trial.
    """

    def __init__(
        self, packing: int = 4, width: int = 8, seconds: float = 1.0, memory: MemoryNeed | None = None
    ) -> None:
        super().__init__()
        self._c, self._d, self._seconds, self._need = packing, width, seconds, memory

    def observe(self, key: str, seconds: float, **more: Any) -> None:
        pass

    def observe_resize(self, seconds: float) -> None:
        pass

    def seconds_per_iteration(self, key: str, model: str | None = None) -> float | None:
        return self._seconds

    def measured_packing(self, key: str, model: str | None = None) -> int:
        return self._c

    def packing_limit(self, key: str, c_max: int, model: str | None = None) -> int:
        return min(self._c, c_max)

    def width_limit(self, key: str, model: str | None = None, *, n: int, d_max: int) -> int:
        return min(self._d, d_max)

    def needs_measuring(self, key: str, model: str | None = None, *, co_residents: int = 1, width: int = 1) -> bool:
        return False

    def memory(self, key: str, model: str | None = None) -> MemoryNeed | None:
        return self._need


class Hand:
    """Drives an engine event by event; every step is validated.

    Args:
        devices: how many there are, with a lane each that is ready.
        memory: bytes of each device.
        options: for the engine; ``planner`` as such or by name.
    """

    def __init__(
        self,
        devices: int = 1,
        *,
        planner: str | Planner = "portfolio",
        profile: Profile | None = None,
        memory: float | None = None,
        ready: bool = True,
        **options: Any,
    ) -> None:
        plans = make_planner(planner) if isinstance(planner, str) else planner
        self.state = EngineState(plans, profile or Known(), **options)
        self.now = 0.0
        self.log: list[Command] = []
        for index in range(devices):
            for command in self.add_device(index, memory):
                if ready and isinstance(command, StartLane):
                    self.do(LaneReady(self.now, command.lane_id))

    def do(self, *events: Event) -> list[Command]:
        """Handles events as one instant; returns the commands."""
        commands = self.state.handle(*events)
        validate_state(self.state)
        self.log += commands
        return commands

    # -- events --------------------------------------------------------------------------------------------

    def add_device(
        self, index: int, memory: float | None = None, host: str = "localhost", **more: Any
    ) -> list[Command]:
        kind = "cpu" if memory is None else "gpu"  # whose memory is its trials' alone
        return self.do(DeviceAdded(self.now, Device(index, kind=kind, host=host, memory_bytes=memory, **more)))

    def lose_device(self, index: int) -> list[Command]:
        return self.do(DeviceLost(self.now, index))

    def submit(
        self, *trial_ids: str, group: str | None = None, terms: GroupTerms = PLAIN_TERMS, **spec: Any
    ) -> list[Command]:
        fields = {"budget": 3, **spec}
        trials = tuple(TrialSpec(trial_id, **fields) for trial_id in trial_ids)
        return self.do(GroupSubmitted(self.now, group or f"group of {trial_ids[0]}", trials, terms))

    def extend(self, trial_id: str, iterations: int = 2) -> list[Command]:
        return self.do(BudgetExtended(self.now, trial_id, iterations))

    def stop(self, trial_id: str) -> list[Command]:
        return self.do(StopRequested(self.now, trial_id))

    def call(self, trial_id: str, call_id: int = 0) -> list[Command]:
        return self.do(CallRequested(self.now, trial_id, call_id=call_id, method="method", payload=b"payload"))

    def called(self, trial_id: str, lane_id: int, call_id: int = 0, failure: Failure | None = None) -> list[Command]:
        result = b"result" if failure is None else None
        return self.do(TrialCalled(self.now, trial_id, lane_id, call_id=call_id, result=result, failure=failure))

    def forget(self, trial_id: str) -> list[Command]:
        return self.do(TrialForgotten(self.now, trial_id))

    def tick(self) -> list[Command]:
        return self.do(Tick(self.now))

    def ready(self, lane_id: int) -> list[Command]:
        return self.do(LaneReady(self.now, lane_id))

    def lose(self, lane_id: int, culprit: str | None = None, **more: Any) -> list[Command]:
        return self.do(LaneLost(self.now, lane_id, "killed", culprit=culprit, **more))

    def started(self, trial_id: str, iteration: int = 0) -> list[Command]:
        return self.do(TrialStarted(self.now, trial_id, self.lane(trial_id), iteration=iteration, seconds=0.1))

    def start_all(self) -> None:
        """Has all lanes that are starting be ready, and all trials that are starting be set up."""
        for lane in self.state.lanes:
            if not lane.ready:
                self.ready(lane.lane_id)
        for trial_id, state in self.states().items():
            if state == "STARTING":
                self.started(trial_id, self.trial(trial_id).residence.restart_at)

    def iterate(self, trial_id: str, times: int = 1, *, seconds: float = 1.0, **more: Any) -> list[Command]:
        """Has a trial finish iterations, one instant each; returns the commands of the last."""
        commands: list[Command] = []
        for _ in range(times):
            self.now += seconds
            done = self.trial(trial_id).progress.done + 1
            commands = self.do(
                IterationDone(self.now, trial_id, self.lane(trial_id), iteration=done, seconds=seconds, **more)
            )
        return commands

    def paused(self, trial_id: str) -> list[Command]:
        """Answers the latest Pause of a trial."""
        pause = [item for item in self.log if isinstance(item, Pause) and item.trial_id == trial_id][-1]
        done = self.trial(trial_id).progress.done
        return self.do(TrialPaused(self.now, trial_id, self.lane(trial_id), iteration=done, purpose=pause.purpose))

    def saved(
        self, trial_id: str, lane_id: int, iteration: int, *, dropped: bool = False, **more: Any
    ) -> list[Command]:
        checkpoint = Checkpoint(iteration, f"{trial_id}/{iteration}", **more)
        return self.do(TrialSaved(self.now, trial_id, lane_id, checkpoint, dropped=dropped))

    def released(self, trial_id: str, lane_id: int) -> list[Command]:
        return self.do(TrialReleased(self.now, trial_id, lane_id))

    def resized(self, trial_id: str) -> list[Command]:
        return self.do(ResizeDone(self.now, trial_id, 0.1, self.trial(trial_id).placement.lanes[0]))

    def failed(self, trial_id: str, lane_id: int, kind: str = "error", *, squeezed: bool = False) -> list[Command]:
        return self.do(TrialFailed(self.now, trial_id, lane_id, Failure(kind, f"{kind}!", squeezed=squeezed)))

    # -- what there is -------------------------------------------------------------------------------------

    def trial(self, trial_id: str) -> Any:
        return self.state.trials[trial_id]

    def lane(self, trial_id: str) -> int:
        """Rank 0's lane."""
        hosts: tuple[int, ...] = self.trial(trial_id).placement.hosts
        return hosts[0]

    def states(self) -> dict[str, str]:
        return {trial_id: trial.state.value for trial_id, trial in self.state.trials.items()}

    def reports(self, trial_id: str) -> list[int]:
        """The iterations that were reported, in order."""
        return [item.iteration for item in self.log if isinstance(item, Report) and item.trial_id == trial_id]

    def answers(self, trial_id: str) -> list[tuple[int, str]]:
        """(call, kind of its failure or "") in the order of the answers."""
        calls = [item for item in self.log if isinstance(item, ReportCall) and item.trial_id == trial_id]
        return [(item.call_id, "" if item.failure is None else item.failure.kind) for item in calls]

    def ends(self, trial_id: str) -> list[str]:
        """How the trial ended, each time that was reported."""
        return [item.state for item in self.log if isinstance(item, ReportEnd) and item.trial_id == trial_id]

    def end(self, trial_id: str) -> str | None:
        """How the trial ended, as last reported."""
        ends = [item.state for item in self.log if isinstance(item, ReportEnd) and item.trial_id == trial_id]
        return ends[-1] if ends else None


def only(commands: list[Command], kind: type[AnyCommand]) -> AnyCommand:
    """The one command of that kind."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, commands
    return found[0]


def none(commands: list[Command], kind: type[Command]) -> bool:
    """Whether there is no command of that kind."""
    return not any(isinstance(command, kind) for command in commands)
