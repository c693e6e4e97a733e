"""The engine's part of cluster.py: as many devices and trials as no machine has processes for, simulated.

The engine runs over the simulated backend, with the planner and the profile that an executor uses. Trials run one to
five iterations of about a second of virtual time. Two workloads: "group" submits all trials at once; "stream" keeps
two trials per device under way, as ASHA does: whenever one ends, the best third of its rung is extended, and a new
trial comes in a group of its own; trials that are not extended are stopped and forgotten.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fluid import FluidExecutor, Trial, TrialGroup
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command, NoteMeasured, Notice, ReportEnd
from fluid.engine.events import (
    Alarm,
    BudgetExtended,
    DeviceAdded,
    Event,
    GroupSubmitted,
    StopRequested,
    Tick,
    TrialForgotten,
    TrialSpec,
)
from fluid.measure.profile import Profile
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.session.pump import Ticks
from fluid.trialgroup import TrialState

#: Packing overhead and scaling overhead of every trial.
ALPHA, BETA = 1.15, 1.1
#: Budgets of ASHA's rungs, and the share of a rung that is extended.
RUNGS, EXTENDED = (1, 2, 4), 3
PER_DEVICE = 2


class Calls:
    """The CPU seconds of the engine's calls, by what they were about."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._events: dict[str, int] = defaultdict(int)
        self._collecting = 0.0
        self._pauses: list[float] = []
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        """Counts garbage collections apart: the heap decides when one comes, and how long it takes."""
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self._pauses.append(time.thread_time() - self._begun)
            self._collecting += self._pauses[-1]

    def time(self, state: EngineState, events: Sequence[Event]) -> list[Command]:
        """Lets the engine handle events of one instant."""
        collecting, begun = self._collecting, time.thread_time()
        commands = state.handle(*events)
        seconds = time.thread_time() - begun - (self._collecting - collecting)
        kind = _kind_of(events, commands)
        self._seconds[kind].append(seconds)
        self._events[kind] += len(events)
        return commands

    def figures(self) -> dict[str, Any]:
        """Microseconds per event, and the mean, the 99th percentile and the longest of each kind of call."""
        usual = np.array([each for kind, seconds in self._seconds.items() if kind != "submit" for each in seconds])
        events = sum(count for kind, count in self._events.items() if kind != "submit")
        pauses = self._pauses or [0.0]
        return {
            "events": events,
            "us_per_event": float(usual.sum()) / events * 1e6,
            "us_of_a_call_p99": float(np.percentile(usual, 99)) * 1e6,
            "garbage_us_per_event": sum(pauses) / events * 1e6,
            "longest_garbage_ms": max(pauses) * 1e3,
            "calls": {
                kind: {
                    "calls": len(seconds),
                    "events": self._events[kind],
                    "mean_ms": float(np.mean(seconds)) * 1e3,
                    "p99_ms": float(np.percentile(seconds, 99)) * 1e3,
                    "longest_ms": max(seconds) * 1e3,
                }
                for kind, seconds in sorted(self._seconds.items())
            },
        }


def _kind_of(events: Sequence[Event], commands: Sequence[Command]) -> str:
    """What a call was about: its most expensive part."""
    if isinstance(events[0], (GroupSubmitted, DeviceAdded)) and (
        isinstance(events[0], DeviceAdded) or len(events[0].trials) > 1
    ):
        return "submit"
    if isinstance(events[0], Tick):
        return "re-plan of what runs"
    if any(isinstance(command, NoteMeasured) for command in commands):
        return "re-plan of the queue"
    return "event"


class Session:
    """An engine over a simulated backend, and a submitter.

    Args:
        devices: number of devices.
        trials: number of trials in all.
    """

    def __init__(self, devices: int, trials: int) -> None:
        self._rng = np.random.default_rng(0)
        seconds = np.exp(0.5 * self._rng.standard_normal(trials)).tolist()
        self._backend = SimulatedBackend(
            lambda trial_id, _: Truth(seconds[int(trial_id[1:])], ALPHA, BETA), map(Device, range(devices)), epsilon=0.2
        )
        self._state = EngineState(make_planner("portfolio"), Profile())
        self._ticks = Ticks(self._state)
        self._trials = trials
        self._submitted = self._ended = 0
        self._groups = 0
        self._rungs: list[list[float]] = [[] for _ in RUNGS]
        self._rung: dict[str, int] = {}
        self.calls = Calls()
        self._tell([DeviceAdded(0.0, device) for device in self._backend.devices()])

    def run_group(self) -> None:
        """Runs one group of all trials."""
        budgets = self._rng.integers(1, 6, self._trials).tolist()
        specs = tuple(TrialSpec(f"t{row}", budget, max_width=8) for row, budget in enumerate(budgets))
        self._tell([GroupSubmitted(0.0, "g", specs)])
        while self._ended < self._trials:
            self._ended += len(self._ends(self._step()))

    def run_stream(self) -> None:
        """Runs trials as ASHA submits them."""
        first = min(self._trials, PER_DEVICE * len(self._state.devices))
        ended = self._ends(self._tell([self._group(first)]))
        while self._ended < self._trials:
            for trial_id in ended:
                ended = self._answer(trial_id)
            ended = self._ends(self._step())

    def _step(self) -> list[Command]:
        """Does as an executor does."""
        backend, state = self._backend, self._state
        now, next_at = backend.now(), backend.next_at()
        if state.alarm_at is not None and state.alarm_at < next_at:
            backend.clock.advance_to(max(state.alarm_at, now))
            return self._tell([Alarm(backend.now())])
        until = self._ticks.until(now)
        if until is not None and next_at > now + until:
            backend.clock.advance_to(now + until)
            return self._tick()
        events = backend.poll()
        self._ticks.heard(events)
        commands = self._tell(events)
        if self._ticks.is_overdue(backend.now(), next_at - now):
            commands += self._tick()
        return commands

    def _tick(self) -> list[Command]:
        now, begun = self._backend.now(), time.thread_time()
        commands = self._tell([Tick(now)])
        self._ticks.ticked(now, now + time.thread_time() - begun)
        return commands

    def _tell(self, events: Sequence[Event]) -> list[Command]:
        commands = self.calls.time(self._state, events)
        self._backend.execute([command for command in commands if not isinstance(command, Notice)])
        return commands

    @staticmethod
    def _ends(commands: Iterable[Command]) -> list[str]:
        return [
            command.trial_id
            for command in commands
            if isinstance(command, ReportEnd) and command.state is TrialState.DONE
        ]

    def _group(self, size: int) -> GroupSubmitted:
        names = [f"t{row}" for row in range(self._submitted, self._submitted + size)]
        self._submitted += size
        self._groups += 1
        self._rung.update(dict.fromkeys(names, 0))
        specs = tuple(TrialSpec(name, RUNGS[0]) for name in names)
        return GroupSubmitted(self._backend.now(), str(self._groups), specs)

    def _answer(self, trial_id: str) -> list[str]:
        """Extends a trial that is among the best of its rung, or else stops it and submits another one."""
        now, rung, score = self._backend.now(), self._rung[trial_id], float(self._rng.random())
        scores = self._rungs[rung]
        scores.append(score)
        if rung + 1 < len(RUNGS) and score < 1.0 / EXTENDED:
            self._rung[trial_id] += 1
            return self._ends(self._tell([BudgetExtended(now, trial_id, RUNGS[rung + 1] - RUNGS[rung])]))
        self._ended += 1
        self._tell([StopRequested(now, trial_id, TrialState.DONE)])
        self._tell([TrialForgotten(now, trial_id)])
        return self._ends(self._tell([self._group(1)])) if self._submitted < self._trials else []


def engine(workload: str, devices: int, trials: int) -> dict[str, Any]:
    """Runs a workload; returns the figures of the engine's calls."""
    session = Session(devices, trials)
    begun = time.thread_time()
    session.run_group() if workload == "group" else session.run_stream()
    return {**session.calls.figures(), "cpu_s_with_the_backend": time.thread_time() - begun}


# -- memory of a whole session ------------------------------------------------------------------------------


def _train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    """A trainable that the simulated backend never loads."""
    yield {"loss": config["lr"]}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory(devices: int, trials: int, *, traced: bool) -> dict[str, float]:
    """Runs one group of all trials through an executor, as users do; its handle keeps every result.

    Args:
        devices: number of devices.
        trials: number of trials.
        traced: whether to count by tracemalloc; else by the growth of the resident set.

    Returns:
        Bytes per trial once all have ended: of all that the driver holds, and of the user's own trials in that.
    """
    rng = np.random.default_rng(0)
    seconds = np.exp(0.5 * rng.standard_normal(trials)).tolist()
    backend = SimulatedBackend(
        lambda trial_id, _: Truth(seconds[int(trial_id[1:])], ALPHA, BETA),
        map(Device, range(devices)),
        epsilon=0.2,
        record=False,
    )
    budgets = rng.integers(1, 6, trials).tolist()
    with tempfile.TemporaryDirectory() as folder, FluidExecutor(backend, run_dir=folder, verbose=0) as executor:
        warm = executor.submit_trialgroup(TrialGroup([Trial(_train, {"lr": 0.1}, trial_id="t0")]))
        warm.wait()
        if traced:
            tracemalloc.start()
        measure = (lambda: tracemalloc.get_traced_memory()[0]) if traced else _resident_bytes
        gc.collect()
        before, begun = measure(), time.process_time()
        group = TrialGroup(
            Trial(_train, {"lr": 0.1 * row}, budget=budgets[row], trial_id=f"t{row}") for row in range(1, trials)
        )
        gc.collect()
        own = measure() - before
        handle = executor.submit_trialgroup(group)
        handle.wait()
        gc.collect()
        grown, cpu = measure() - before, time.process_time() - begun
        iterations = sum(1 for _ in handle.results())
    return {
        "bytes_per_trial": grown / trials,
        "users_bytes_per_trial": own / trials,
        "iterations": iterations,
        "cpu_us_per_iteration": cpu / iterations * 1e6,
    }
