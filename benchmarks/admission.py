"""Measures what choosing trials by gain per byte brings where memory is scarce (docs/theory.md, section 17).

    python benchmarks/admission.py [--part choice,sweeps,cost] [--cases 300] [--seeds 10] [--quick] [--json FILE]

choice: trials of 1 to 40 GB wait for one or two empty devices of 80 GB, of which trials may fill 90 %. The gain per
second of those that are chosen, over that of the best choice there is (dynamic programming), is measured beside that of
queue order, longest first, and that of taking the greatest gain per byte, both of which skip what does not fit.

sweeps: groups of trials of 1 to 40 GB, even or skewed to small ones, on simulated devices of 80 GB (one case: of 80 and
40 GB) and the real engine, which knows bytes and seconds in advance. Makespan, mean end of trials and density (byte
seconds of trials over those that may be filled until the last trial starts) in three ways: queue order, gain per byte
alone, and as the engine does: gain per byte for those that do not make the group end later. Ratios are over those
of queue order.

cost: seconds of the engine for sweeps with many queued trials, in both ways.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command, Notice, ReportEnd
from fluid.engine.engine import EngineError
from fluid.engine.events import Alarm, DeviceAdded, Event, GroupSubmitted, Tick, TrialSpec
from fluid.forecasting.scenario import Scenario, Workload
from fluid.planners.portfolio import make_planner
from fluid.policies import admission as admitting
from fluid.policies.admission import Candidate, DeviceRoom, LateStarters, admit
from fluid.policies.engine import EngineState
from fluid.resources import Cluster, Device, MemoryNeed
from fluid.simulation.trial_outcomes import OracleProfile

PARTS = ("choice", "sweeps", "cost")
WAYS = ("queue order", "gain per byte alone", "fluid")
GB = 1e9
WATERMARK = 0.9


# -- the choice ----------------------------------------------------------------------------------------------


def best_gain(candidates: Sequence[Candidate], rooms: Sequence[DeviceRoom]) -> float:
    """The greatest gain per second of any choice, by dynamic programming over the bytes and slots of all devices.

    Args:
        candidates: trials that need whole numbers of bytes.
        rooms: at most two or three devices of few bytes, as the table has a cell for each combination of what is left.
    """
    sizes = [size for room in rooms for size in (int(room.free) + 1, room.slots + 1)]
    #: The greatest gain of the trials so far that use at most so many bytes and slots of each device.
    gains = np.zeros(sizes)
    for one in candidates:
        without, need = gains.copy(), int(one.need)
        for device, room in enumerate(rooms):
            if need > room.free or not room.slots:
                continue
            before, after = [slice(None)] * gains.ndim, [slice(None)] * gains.ndim
            before[2 * device : 2 * device + 2] = slice(None, sizes[2 * device] - need), slice(None, -1)
            after[2 * device : 2 * device + 2] = slice(need, None), slice(1, None)
            np.maximum(gains[tuple(after)], without[tuple(before)] + one.gain, out=gains[tuple(after)])
    return float(gains.max())


def first_fit(candidates: Iterable[Candidate], rooms: Sequence[DeviceRoom]) -> float:
    """The gain per second if trials take what fits in this order, and others are skipped."""
    free, slots, gain = [room.free for room in rooms], [room.slots for room in rooms], 0.0
    for one in candidates:
        for device in range(len(free)):
            if one.need <= free[device] and slots[device] > 0:
                free[device], slots[device], gain = free[device] - one.need, slots[device] - 1, gain + one.gain
                break
    return gain


def measure_choice(cases: int) -> dict[str, Any]:
    """Ratios to the best choice, by way, and the seconds of a choice."""
    found: dict[str, list[float]] = {"fluid": [], "greedy": [], "queue order": []}
    seconds = 0.0
    for seed in range(cases):
        rng = random.Random(seed)
        rooms = [DeviceRoom(device, 80.0 * WATERMARK, 8) for device in range(rng.randint(1, 2))]
        trials = [Candidate(row, 1.0 / rng.lognormvariate(3.0, 0.6), float(rng.randint(1, 40))) for row in range(24)]
        best, begun = best_gain(trials, rooms), time.perf_counter()
        chosen = admit(trials, rooms)
        seconds += time.perf_counter() - begun
        ways = {
            "fluid": sum(one.gain for one in trials if one.row in chosen),
            "greedy": first_fit(sorted(trials, key=lambda one: -one.gain / one.need), rooms),
            "queue order": first_fit(sorted(trials, key=lambda one: one.gain), rooms),
        }
        for way, gain in ways.items():
            found[way].append(gain / best)
    ratios = {way: {"mean": statistics.mean(each), "worst": min(each)} for way, each in found.items()}
    return {"cases": cases, "ratios": ratios, "milliseconds": 1e3 * seconds / cases}


# -- sweeps --------------------------------------------------------------------------------------------------


@contextmanager
def deciding(way: str) -> Iterator[None]:
    """Lets engines choose in this way, one of :data:`WAYS`."""
    before = admitting.is_scarce, admitting.late_starters
    if way == "queue order":
        admitting.is_scarce = lambda wanted, usable: False
    elif way == "gain per byte alone":
        admitting.late_starters = lambda waiting, usable, slots: LateStarters(math.inf, math.inf)
    try:
        yield
    finally:
        admitting.is_scarce, admitting.late_starters = before


class MixedSweep:
    """Groups of trials of mixed bytes and seconds, on the real engine and simulated devices.

    Args:
        memories: GB of each device.
        groups: when each is submitted, seconds, and its trials: (GB, seconds).
        c: most trials on a device.
        alpha: what each of them makes the others slower.
    """

    def __init__(
        self, memories: Sequence[float], groups: Sequence[tuple[float, Sequence[tuple[float, float]]]], *,
        c: int, alpha: float,
    ) -> None:  # fmt: skip
        devices = tuple(Device(index, kind="gpu", memory_bytes=memory * GB) for index, memory in enumerate(memories))
        trials = [trial for _, group in groups for trial in group]
        paces = {str(row): seconds / self.ITERATIONS for row, (_, seconds) in enumerate(trials)}
        scenario = Scenario(Cluster(devices), Workload("random", trials=1), c=c, d=1, alpha=alpha)
        self._backend = SimulatedBackend(
            lambda trial_id, _: Truth(paces[trial_id], alpha, 1.0, int(trial_id)), devices, saves=False
        )
        self._state = EngineState(make_planner("portfolio"), OracleProfile(scenario, paces), max_packing=c, max_width=1)
        specs = [
            TrialSpec(str(row), self.ITERATIONS, profile_key=str(row), memory=MemoryNeed(memory * GB))
            for row, (memory, _) in enumerate(trials)
        ]
        #: (when, its trials), the next one last.
        self._to_come: list[tuple[float, tuple[TrialSpec, ...]]] = []
        for at, group in groups:
            self._to_come.append((at, tuple(specs[: len(group)])))
            specs = specs[len(group) :]
        self._to_come.reverse()
        self._needs = [memory for memory, _ in trials]
        self._usable = sum(memories) * WATERMARK
        self._open = {str(row) for row in range(len(trials))}
        self.ends: dict[int, float] = {}
        #: Seconds that the engine took.
        self.engine_s = 0.0

    ITERATIONS = 5

    def run(self) -> dict[str, float]:
        """Returns makespan, mean end and density."""
        backend, state = self._backend, self._state
        self._handle(DeviceAdded(0.0, device) for device in backend.devices())
        while self._open:
            due = self._to_come[-1][0] if self._to_come else math.inf
            alarm = math.inf if state.alarm_at is None else state.alarm_at
            if backend.next_at() > backend.now() and state.wants_tick:
                self._execute(state.handle(Tick(backend.now())))
            elif due <= min(backend.next_at(), alarm):
                backend.clock.advance_to(max(due, backend.now()))
                at, specs = self._to_come.pop()
                self._handle([GroupSubmitted(backend.now(), f"group at {at:g}", specs)])
            elif alarm < backend.next_at():
                backend.clock.advance_to(max(alarm, backend.now()))
                self._execute(state.handle(Alarm(backend.now())))
            elif math.isinf(backend.next_at()):
                raise EngineError(f"no event is left for the trials that have not ended: {sorted(self._open)}")
            else:
                self._handle(backend.poll())
        ends = list(self.ends.values())
        return {"makespan": max(ends), "mean_end": statistics.mean(ends), "density": self._density()}

    def _density(self) -> float:
        segments = self._backend.segments
        last = max(segment.start for segment in segments)
        used = sum(self._needs[each.row] * (min(each.end, last) - each.start) for each in segments)
        return used / (self._usable * last) if last > 0.0 else 1.0

    def _handle(self, events: Iterable[Event]) -> None:
        begun = time.perf_counter()
        commands = self._state.handle(*events)
        self.engine_s += time.perf_counter() - begun
        for command in commands:
            if isinstance(command, ReportEnd):
                self._open.discard(command.trial_id)
                self.ends[int(command.trial_id)] = self._backend.now()
        self._execute(commands)

    def _execute(self, commands: Iterable[Command]) -> None:
        self._backend.execute([command for command in commands if not isinstance(command, Notice)])


def draw(rng: random.Random, sizes: str) -> tuple[float, float]:
    """GB, to a tenth, and seconds of a trial."""
    memory = rng.uniform(1.0, 40.0) if sizes == "even" else math.exp(rng.uniform(0.0, math.log(40.0)))
    return round(memory, 1), rng.lognormvariate(3.0, 0.6)


#: Sweeps by name: GB of the devices, trials, sizes, c, alpha.
SWEEPS: dict[str, tuple[tuple[float, ...], int, str, int, float]] = {
    "80 trials, even": ((80.0,) * 4, 80, "even", 8, 1.03),
    "80 trials, skewed": ((80.0,) * 4, 80, "skewed", 8, 1.03),
    "60 trials, even, alpha 1.1": ((80.0,) * 2, 60, "even", 6, 1.1),
    "200 trials, skewed": ((80.0,) * 8, 200, "skewed", 8, 1.05),
    "100 trials, even, 80 and 40 GB": ((80.0, 80.0, 40.0, 40.0), 100, "even", 6, 1.05),
}


def measure_sweeps(seeds: int, names: Iterable[str]) -> dict[str, Any]:
    """Makespan, mean end and density by sweep and way: means over seeds of ratios to queue order."""
    found: dict[str, Any] = {}
    for name in names:
        memories, count, sizes, c, alpha = SWEEPS[name]
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for seed in range(seeds):
            rng = random.Random(seed)
            trials = [draw(rng, sizes) for _ in range(count)]
            for way in WAYS:
                with deciding(way):
                    runs[way].append(MixedSweep(memories, [(0.0, trials)], c=c, alpha=alpha).run())
        found[name] = {
            way: {
                "makespan": _ratio(runs, way, "makespan"),
                "worst_makespan": max(_ratios(runs, way, "makespan")),
                "mean_end": _ratio(runs, way, "mean_end"),
                "density": statistics.mean(run["density"] for run in runs[way]),
            }
            for way in WAYS
        }
    return found


def _ratios(runs: dict[str, list[dict[str, float]]], way: str, figure: str) -> list[float]:
    return [run[figure] / queue[figure] for run, queue in zip(runs[way], runs["queue order"], strict=True)]


def _ratio(runs: dict[str, list[dict[str, float]]], way: str, figure: str) -> float:
    return statistics.geometric_mean(_ratios(runs, way, figure))


def measure_cost(counts: Sequence[int]) -> dict[str, Any]:
    """Seconds of the engine for sweeps of so many trials of 40 sizes on 16 devices, by way."""
    found: dict[str, Any] = {}
    for count in counts:
        rng = random.Random(0)
        trials = [(float(rng.randint(1, 40)), rng.choice((10.0, 20.0, 30.0))) for _ in range(count)]
        found[str(count)] = {}
        for way in ("queue order", "fluid"):
            with deciding(way):
                sweep = MixedSweep((80.0,) * 16, [(0.0, trials)], c=8, alpha=1.05)
                sweep.run()
            found[str(count)][way] = sweep.engine_s
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default=",".join(PARTS), help="parts to run, with commas")
    parser.add_argument("--cases", type=int, default=300, help="choices that are compared with the best one")
    parser.add_argument("--seeds", type=int, default=10, help="draws of each sweep")
    parser.add_argument("--quick", action="store_true", help="few cases, seeds and sweeps")
    parser.add_argument("--json", type=Path, help="writes the figures there")
    options = parser.parse_args(arguments)
    console, parts = Console(), options.part.split(",")
    cases, seeds = (20, 2) if options.quick else (options.cases, options.seeds)
    found: dict[str, Any] = {
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "command": f"python benchmarks/admission.py --part {options.part} --cases {cases} --seeds {seeds}",
        "date": date.today().isoformat(),
    }
    if "choice" in parts:
        found["choice"] = choice = measure_choice(cases)
        for way, ratio in choice["ratios"].items():
            console.print(f"choice, {way}: {ratio['mean']:.3f} of the best, at worst {ratio['worst']:.3f}")
        console.print(f"one choice takes {choice['milliseconds']:.2f} ms")
    if "sweeps" in parts:
        found["sweeps"] = measure_sweeps(seeds, list(SWEEPS)[:1] if options.quick else SWEEPS)
        table = Table(title=f"Over queue order, mean of {seeds} draws")
        for column in ("sweep", "way", "makespan", "at worst", "mean end", "density"):
            table.add_column(column, justify="left" if column in ("sweep", "way") else "right")
        for name, ways in found["sweeps"].items():
            for way, one in ways.items():
                figures = (one["makespan"], one["worst_makespan"], one["mean_end"], one["density"])
                table.add_row(name, way, *(f"{figure:.3f}" for figure in figures))
        console.print(table)
    if "cost" in parts:
        found["cost"] = measure_cost((100,) if options.quick else (300, 1000))
        for count, ways in found["cost"].items():
            console.print(f"{count} trials: " + ", ".join(f"{way} {one:.2f} s" for way, one in ways.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
