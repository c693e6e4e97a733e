"""Measures how fast the engine decides, and how fast a resident trial pauses and resumes.

    python benchmarks/engine.py [--quick] [--json FILE]

A synthetic session drives the engine without a backend: 1,000 trials of all lengths start, iterate, end and are
extended, on 8 and on 1,000 devices, with the real planner. Only the engine's own time counts. Then two trials that are
resident in one lane of the local backend take turns: the lane pauses one and runs the other. One level up, a trial of
an executor is extended by an empty iteration, while another one is resident too.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from fluid.backends.local import LocalBackend
from fluid.engine.commands import (
    Command,
    Pause,
    ReportEnd,
    Resize,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopTrial,
)
from fluid.engine.events import (
    BudgetExtended,
    Checkpoint,
    DeviceAdded,
    Event,
    GroupSubmitted,
    IterationDone,
    LaneReady,
    PausePurpose,
    ResizeDone,
    Tick,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialSpec,
    TrialStarted,
)
from fluid.executor import FluidExecutor
from fluid.measure.profile import Profile
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.results.records import Result
from fluid.session.listeners import TrialListener
from fluid.trainables.payload import payload_of
from fluid.trialgroup import Trial, TrialGroup

TRIALS = 1_000
#: One trial in so many is extended when it is done.
EXTENDED = 4


class Known(Profile):
    """A profile with packing and widths measured: the planner has all its choices from the start."""

    def measured_packing(self, key: str, model: str | None = None) -> int:
        return 4

    def needs_measuring(self, key: str, model: str | None = None, *, co_residents: int = 1, width: int = 1) -> bool:
        return False


class Session:
    """Answers the engine's commands at once, and ends iterations in order of time; measures the engine alone.

    Args:
        devices: number of devices.
        iterations: of the median trial.
    """

    def __init__(self, devices: int, iterations: int) -> None:
        self._rng = np.random.default_rng(0)
        self._state = EngineState(make_planner("portfolio"), Known())
        self._now = 0.0
        self._left: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._lane: dict[str, int] = {}
        self._due: list[tuple[float, int, str]] = []
        self._version: dict[str, int] = {}
        self._answers: list[Event] = []
        self._to_extend = {f"t{row}" for row in range(0, TRIALS, EXTENDED)}
        self.events = 0
        self.seconds = 0.0
        #: Seconds of each call with iterations alone, per event.
        self.iteration: list[float] = []
        self._tell([DeviceAdded(0.0, Device(index)) for index in range(devices)])
        budgets = np.ceil(iterations * np.exp(self._rng.standard_normal(TRIALS))).astype(int).tolist()
        specs = [TrialSpec(f"t{row}", budget, max_width=8) for row, budget in enumerate(budgets)]
        self._tell([GroupSubmitted(0.0, "g", tuple(specs))])

    def run(self) -> None:
        """Runs until every trial has ended."""
        while self._answers or self._due:
            if self._answers:
                events, self._answers = self._answers, []
                self._tell(events)
            elif self._state.wants_tick:
                self._tell([Tick(self._now)])
            else:
                self._iterate()

    def _iterate(self) -> None:
        self._now, version, trial_id = heapq.heappop(self._due)
        if self._version.get(trial_id) != version or not self._left[trial_id]:
            return
        self._done[trial_id] += 1
        self._left[trial_id] -= 1
        event = IterationDone(self._now, trial_id, self._lane[trial_id], iteration=self._done[trial_id], seconds=1.0)
        if self._left[trial_id]:
            self._schedule(trial_id)
        before = self.seconds
        self._tell([event])
        self.iteration.append(self.seconds - before)

    def _tell(self, events: Sequence[Event]) -> None:
        begun = time.perf_counter()
        commands = self._state.handle(*events)
        self.seconds += time.perf_counter() - begun
        self.events += len(events)
        for command in commands:
            self._carry_out(command)

    def _schedule(self, trial_id: str) -> None:
        version = self._version[trial_id] = self._version.get(trial_id, 0) + 1
        seconds = 0.5 + float(self._rng.random())
        heapq.heappush(self._due, (self._now + seconds, version, trial_id))

    def _run(self, trial_id: str, lane_id: int, iterations: int) -> None:
        idle = not self._left.get(trial_id)
        self._lane[trial_id] = lane_id
        self._left[trial_id] = self._left.get(trial_id, 0) + iterations
        if idle and iterations:
            self._schedule(trial_id)

    def _carry_out(self, command: Command) -> None:
        now, answers = self._now, self._answers
        if isinstance(command, StartLane):
            answers.append(LaneReady(now, command.lane_id))
        elif isinstance(command, StartTrial):
            done = self._done[command.trial_id] = command.checkpoint.iteration if command.checkpoint else 0
            answers.append(TrialStarted(now, command.trial_id, command.lane_ids[0], iteration=done, seconds=0.0))
            self._left[command.trial_id] = 0
            self._run(command.trial_id, command.lane_ids[0], command.iterations)
        elif isinstance(command, RunIteration):
            self._run(command.trial_id, command.lane_ids[0], command.iterations)
        elif isinstance(command, Pause):
            self._left[command.trial_id] = 0
            answers.append(
                TrialPaused(
                    now,
                    command.trial_id,
                    command.lane_ids[0],
                    iteration=self._done[command.trial_id],
                    purpose=command.purpose,
                )
            )
        elif isinstance(command, Resize):
            answers.append(ResizeDone(now, command.trial_id, 0.1, command.lane_ids[0]))
            self._run(command.trial_id, command.lane_ids[0], command.iterations)
        elif isinstance(command, Save):
            checkpoint = Checkpoint(self._done[command.trial_id], "")
            answers.append(TrialSaved(now, command.trial_id, command.lane_ids[0], checkpoint, dropped=command.drop))
        elif isinstance(command, StopTrial):
            answers += [TrialReleased(now, command.trial_id, lane_id) for lane_id in command.lane_ids]
        elif isinstance(command, ReportEnd) and command.trial_id in self._to_extend:
            self._to_extend.remove(command.trial_id)
            answers.append(BudgetExtended(now, command.trial_id, 10))


class Cost(NamedTuple):
    """Microseconds of the engine.

    Attributes:
        mean: per event of a whole session, with planning, starts and resizes.
        iteration: median of an iteration that changes nothing.
        events: number of events.
    """

    mean: float
    iteration: float
    events: int


def engine(devices: int, iterations: int, runs: int) -> Cost:
    """Returns the cost of a session, the median of several."""
    sessions = []
    for _ in range(runs):
        session = Session(devices, iterations)
        session.run()
        sessions.append(session)
    return Cost(
        statistics.median(session.seconds / session.events for session in sessions) * 1e6,
        statistics.median(statistics.median(session.iteration) for session in sessions) * 1e6,
        sessions[0].events,
    )


# -- pause and resume -----------------------------------------------------------------------------------------------


class Idle:
    """A trainable whose iterations do nothing."""

    def setup(self, config: dict[str, Any]) -> None:
        pass

    def step(self) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, folder: str) -> None:
        pass

    def load_checkpoint(self, folder: str) -> None:
        pass


def _wait_for(backend: LocalBackend, matches: Callable[[Event], bool]) -> None:
    while not any(map(matches, backend.poll())):
        pass


def lane_turns(turns: int) -> list[float]:
    """Returns the seconds from the command to pause one resident and run the other to the other's iteration."""
    names, seconds = ("a", "b"), []
    with LocalBackend(1) as backend:
        backend.execute([StartLane(0, 0)])
        _wait_for(backend, lambda event: isinstance(event, LaneReady))
        for name in names:
            backend.register(name, payload_of(Idle, {}))
            backend.execute([StartTrial(name, (0,), iterations=1)])
            _wait_for(backend, lambda event: isinstance(event, IterationDone))
        for turn in range(turns):
            going, coming = names[turn % 2], names[1 - turn % 2]
            begun = time.perf_counter()
            backend.execute([Pause(going, (0,), purpose=PausePurpose.PREEMPT), RunIteration(coming, (0,), 1)])
            _wait_for(backend, lambda event: isinstance(event, IterationDone))
            seconds.append(time.perf_counter() - begun)
    return seconds


class _Ends(TrialListener):
    """Records when results arrive."""

    def __init__(self) -> None:
        self.at = 0.0

    def on_result(self, result: Result) -> None:
        self.at = time.perf_counter()


def executor_turns(turns: int) -> tuple[list[float], list[float]]:
    """Two residents of one lane take turns: seconds from ``extend`` to the result, in the listener and in ``wait``."""
    names, notified, waited, listener = ("a", "b"), [], [], _Ends()
    with (
        tempfile.TemporaryDirectory() as folder,
        FluidExecutor("local", 1, packing="off", run_dir=folder, verbose=0) as executor,
    ):
        group = TrialGroup([Trial(Idle, trial_id=name) for name in names])
        handle = executor.submit_trialgroup(group, listener)
        handle.wait()
        for turn in range(turns):
            begun = time.perf_counter()
            handle.extend(names[turn % 2], 1)
            handle.wait()
            waited.append(time.perf_counter() - begun)
            notified.append(listener.at - begun)
    return notified, waited


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Returns median and 95th percentile, without the first tenth, which is warm-up."""
    kept = np.array(seconds[len(seconds) // 10 :]) * 1e3
    return {"median": float(np.median(kept)), "p95": float(np.percentile(kept, 95))}


def main() -> None:
    """Runs the benchmark and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="short sessions and few turns")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    console = Console()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    console.print(f"{machine}, numpy {np.__version__}, {time.strftime('%Y-%m-%d')}")

    table = Table(title=f"microseconds of the engine, {TRIALS:,} trials")
    for column in ("devices", "events", "per event", "an iteration that changes nothing"):
        table.add_column(column, justify="right")
    costs = {}
    for devices in (8, 1_000):
        cost = costs[devices] = engine(devices, 5 if options.quick else 20, 1 if options.quick else 5)
        table.add_row(f"{devices:,}", f"{cost.events:,}", f"{cost.mean:.1f}", f"{cost.iteration:.1f}")
    console.print(table)

    turns = 50 if options.quick else 1_000
    notified, waited = executor_turns(turns)
    figures = {
        "lane: pause one resident, run the other": milliseconds(lane_turns(turns)),
        "executor: extend() to the listener's result": milliseconds(notified),
        "executor: extend() to wait() returning": milliseconds(waited),
    }
    table = Table(title=f"pause and resume of a resident trial, milliseconds, {turns:,} turns")
    for column in ("what", "median", "p95"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, figure in figures.items():
        table.add_row(name, f"{figure['median']:.3f}", f"{figure['p95']:.3f}")
    console.print(table)
    if options.json:
        content = {
            "machine": machine,
            "date": time.strftime("%Y-%m-%d"),
            "engine_microseconds": {f"{devices} devices": cost._asdict() for devices, cost in costs.items()},
            "turn_milliseconds": figures,
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)


if __name__ == "__main__":
    main()
