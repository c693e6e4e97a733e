"""Restores from disk by what leaves host memory: by value or least recently used, on simulated devices.

    python benchmarks/checkpoint_values.py [--seeds N] [--jobs N] [--out FILE]

The real schedulers and the real engine decide; devices and the stores of hosts are simulated. Trials of successive
halving, Hyperband and ASHA (81 trials, rungs 1, 3, 9, 27, 81, eta 3) have a quality of their own, which a score at a
rung shows the better the later the rung is. 24 trials of PBT train in turn; at each of 16 intervals the worst quarter
goes on from states of the best quarter. No state stays on a device, so that each promotion is a restore. Host memory
holds a share of the states of all trials. Prefetched checkpoints are read from disk in the background; they are counted
apart.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Protocol

import numpy as np
from measuring import about

from fluid import Device
from fluid.backends.hosts.checkpoints.values import StoredCheckpoint, Worth, choose_evictions
from fluid.backends.simulated.backend import Truth
from fluid.engine.commands import Command, Notice, ReportEnd
from fluid.engine.events import (
    BudgetExtended,
    DeviceAdded,
    Event,
    GroupSubmitted,
    RungReached,
    StopRequested,
    TrialsAdded,
    TrialSpec,
)
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.search.brackets import Brackets
from fluid.search.rungs import halving_shape, hyperband_shapes, rungs_of
from fluid.search.schedulers import AsynchronousHalving, RungScheduler
from fluid.search_shape import Rung
from fluid.testing.stores import InMemory, SimulatedStores, StoringBackend, least_recently_used
from fluid.trialgroup import TrialState

#: By what checkpoints leave memory: what is worth least by the rule of the hosts, or what was used least recently.
POLICIES = ("value", "lru")
ALGORITHMS = ("sha", "hyperband", "asha", "pbt")
SHARES = (0.2, 0.35, 0.5)
DEVICES, ETA, BUDGET, SAMPLES = 4, 3, 81, 81
#: Trials of ASHA under way at once.
CONCURRENCY = 5 * DEVICES
POPULATION, INTERVALS, QUANTILE = 24, 16, 0.25
BYTES = 2e8
#: Standard deviation of a score at one iteration, over that of the trials' qualities.
NOISE = 1.0


class Search(Protocol):
    """A search: it answers the end of a trial with requests to the engine."""

    states: int

    def start(self, at: float) -> list[Event]:
        """Returns the first requests."""
        ...

    def ended(self, trial_id: str, at: float) -> list[list[Event]]:
        """A trial is done with its budget; returns requests, each list of one instant of its own."""
        ...


class Halving:
    """A search by one of the schedulers of :func:`fluid.run`."""

    def __init__(self, algorithm: str, draw: np.random.Generator) -> None:
        rungs = rungs_of(BUDGET, ETA, 1)
        self._scheduler: RungScheduler
        if algorithm == "asha":
            self._scheduler = AsynchronousHalving(rungs=rungs, eta=ETA, samples=SAMPLES)
        elif algorithm == "sha":
            self._scheduler = Brackets([halving_shape(SAMPLES, rungs, ETA)])
        else:
            self._scheduler = Brackets(hyperband_shapes(rungs, ETA))
        self._most = CONCURRENCY if algorithm == "asha" else None
        self._draw = draw
        self._quality: dict[int, float] = {}
        self._budget: dict[int, int] = {}
        self._open = 0
        all_brackets = sum(shape.sizes[0] for shape in hyperband_shapes(rungs, ETA))
        self.states = all_brackets if algorithm == "hyperband" else SAMPLES

    def start(self, at: float) -> list[Event]:
        return [GroupSubmitted(at, "sweep", tuple(self._fresh()))]

    def _fresh(self) -> Iterator[TrialSpec]:
        while (self._most is None or self._open < self._most) and (start := self._scheduler.start()) is not None:
            self._open += 1
            self._budget[start.trial] = start.budget
            self._quality[start.trial] = float(self._draw.normal())
            yield TrialSpec(
                f"t{start.trial}", budget=start.budget, follow_up_iterations=start.follow_up_iterations, max_width=1
            )

    def ended(self, trial_id: str, at: float) -> list[list[Event]]:
        trial = int(trial_id[1:])
        self._open -= 1
        noise = NOISE / math.sqrt(self._budget[trial])
        score = self._quality[trial] + noise * float(self._draw.normal())
        requests: list[list[Event]] = [[RungReached(at, trial_id, self._scheduler.rung_of(trial), score)]]
        decision = self._scheduler.reached(trial, score)
        for grant in decision.promoted:
            self._open += 1
            further = grant.budget - self._budget[grant.trial]
            self._budget[grant.trial] = grant.budget
            requests.append(
                [BudgetExtended(at, f"t{grant.trial}", further, follow_up_iterations=grant.follow_up_iterations)]
            )
        requests += [[StopRequested(at, f"t{number}", TrialState.STOPPED)] for number in decision.ended]
        if fresh := tuple(self._fresh()):
            requests.append([TrialsAdded(at, "sweep", fresh)])
        return requests


class Population:
    """Synchronous PBT, as Ray Tune decides: at each interval the worst quarter goes on from states of the best."""

    states = POPULATION

    def __init__(self, draw: np.random.Generator, copies: dict[str, str]) -> None:
        self._draw = draw
        self._copies = copies
        self._score = dict.fromkeys((f"m{member}.0" for member in range(POPULATION)), 0.0)
        self._waiting: set[str] = set()
        self._interval = 1

    def start(self, at: float) -> list[Event]:
        return [GroupSubmitted(at, "sweep", tuple(map(self._spec, self._score)))]

    def _spec(self, trial_id: str) -> TrialSpec:
        left = INTERVALS - self._interval
        return TrialSpec(trial_id, budget=1, follow_up_iterations=left, max_width=1)

    def ended(self, trial_id: str, at: float) -> list[list[Event]]:
        self._waiting.add(trial_id)
        self._score[trial_id] += float(self._draw.normal())
        size, parents = POPULATION, math.ceil(POPULATION * QUANTILE)
        rung = Rung(self._interval, size, size - parents if self._interval < INTERVALS else 0, parents=parents)
        requests: list[list[Event]] = [[RungReached(at, trial_id, rung, self._score[trial_id])]]
        if len(self._waiting) < size:
            return requests
        ranked = sorted(self._score, key=self._score.__getitem__)
        self._waiting.clear()
        self._interval += 1
        if self._interval > INTERVALS:
            return [*requests, *([StopRequested(at, name, TrialState.STOPPED)] for name in ranked)]
        left = INTERVALS - self._interval
        fresh = []
        for name in ranked:
            if name not in ranked[-parents:]:
                requests.append([BudgetExtended(at, name, 1, follow_up_iterations=left)])
                continue
            parent = ranked[int(self._draw.integers(parents))]
            member, turn = name[1:].split(".")
            child = f"m{member}.{int(turn) + 1}"
            self._copies[child] = parent
            self._score[child] = self._score[parent]
            del self._score[name]
            fresh.append(self._spec(child))
            requests.append([StopRequested(at, name, TrialState.STOPPED)])
        return [*requests, [TrialsAdded(at, "sweep", tuple(fresh))]]


@dataclass(frozen=True)
class Case:
    """One search: with one share of its states in memory, one seed, and one policy."""

    algorithm: str
    share: float
    seed: int
    policy: str


def worth_least(held: Sequence[InMemory], excess: float) -> list[str]:
    """Returns what leaves memory by the rule of the hosts."""
    stored = [StoredCheckpoint(one.trial_id, one.trial_id, 1, int(one.bytes), one.used) for one in held]
    worth = {
        one.trial_id: Worth(one.value.pinned, one.value.returns * one.saved_s / one.bytes, one.used) for one in held
    }
    return [one.path for one in choose_evictions(stored, math.ceil(excess), worth)]


def run(case: Case) -> dict[str, Any]:
    """Runs a search; returns its restores."""
    draw = np.random.default_rng([case.seed, ALGORITHMS.index(case.algorithm)])
    copies: dict[str, str] = {}
    search: Search = Population(draw, copies) if case.algorithm == "pbt" else Halving(case.algorithm, draw)
    seconds = {number: float(pace) for number, pace in enumerate(np.exp(draw.normal(0.0, 0.3, 512)))}
    slots = max(1, round(case.share * search.states))
    by_value = case.policy == "value"
    rule = worth_least if by_value else least_recently_used
    stores = SimulatedStores(memory_bytes=slots * BYTES, checkpoint_bytes=BYTES, rule=rule, fetches=by_value)

    def truth(trial_id: str, config: Any) -> Truth:
        return Truth(seconds=10.0 * seconds[int(trial_id[1:].split(".")[0])])

    devices = [Device(index) for index in range(DEVICES)]
    backend = StoringBackend(truth, devices, stores=stores, copies=copies, record=False)
    state = EngineState(make_planner("portfolio"), max_packing=1, max_width=1, resident_limit=0)
    pending: list[list[Event]] = [[DeviceAdded(0.0, device) for device in devices], search.start(0.0)]
    while True:
        while pending:
            pending += _carry_out(state.handle(*pending.pop(0)), search, backend)
        events = backend.poll(0.0 if math.isinf(backend.next_at()) else None)
        if not events:
            break
        pending.append(events)
    assert not any(group.open for group in state.groups.values())
    restored = {"memory": backend.restored["memory"], "disk": backend.restored["disk"]}
    return {**case.__dict__, **restored, "fetched": backend.fetched}


def _carry_out(commands: list[Command], search: Search, backend: StoringBackend) -> list[list[Event]]:
    requests: list[list[Event]] = []
    backend.execute([command for command in commands if not isinstance(command, Notice)])
    for command in commands:
        if isinstance(command, ReportEnd) and command.state is TrialState.DONE:
            requests += search.ended(command.trial_id, backend.now())
        elif isinstance(command, ReportEnd):
            backend.drop(command.trial_id)
    return requests


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compares the policies, by algorithm and share of the states in memory."""
    rows = []
    for algorithm in ALGORITHMS:
        for share in SHARES:
            cases = [each for each in found if (each["algorithm"], each["share"]) == (algorithm, share)]
            by = {policy: {each["seed"]: each for each in cases if each["policy"] == policy} for policy in POLICIES}
            pairs = [(by["value"][seed], by["lru"][seed]) for seed in by["value"]]
            hits = [{name: sum(pair[side][name] for pair in pairs) for name in ("memory", "disk")} for side in (0, 1)]
            rows.append(
                {
                    "algorithm": algorithm,
                    "share": share,
                    "fewer": geometric_mean([(lru["disk"] + 1) / (value["disk"] + 1) for value, lru in pairs]),
                    "worse": sum(value["disk"] > lru["disk"] for value, lru in pairs),
                    "read_more": sum(value["disk"] + value["fetched"] > lru["disk"] for value, lru in pairs),
                    "hits_value": hits[0]["memory"] / sum(hits[0].values()),
                    "hits_lru": hits[1]["memory"] / sum(hits[1].values()),
                    "disk_value": hits[0]["disk"] / len(pairs),
                    "disk_lru": hits[1]["disk"] / len(pairs),
                    "fetched": sum(value["fetched"] for value, _ in pairs) / len(pairs),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cases = [
        Case(algorithm, share, seed, policy)
        for algorithm in ALGORITHMS
        for share in SHARES
        for seed in range(arguments.seeds)
        for policy in POLICIES
    ]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(run, cases, chunksize=4))
    rows = summary(found)
    print(f"{'search':10}{'memory':>7}{'disk':>8}{'LRU':>8}{'fewer':>7}{'worse':>6}{'hits':>7}{'LRU':>7}{'fetched':>9}")
    for row in rows:
        print(
            f"{row['algorithm']:10}{row['share']:7.0%}{row['disk_value']:8.1f}{row['disk_lru']:8.1f}"
            f"{row['fewer']:7.2f}{row['worse']:6}{row['hits_value']:7.0%}{row['hits_lru']:7.0%}{row['fetched']:9.1f}"
        )
    mean = geometric_mean([row["fewer"] for row in rows])
    worse = sum(row["worse"] for row in rows)
    print(f"fewer restores from disk, in the geometric mean: {mean:.2f}x; worse than LRU: {worse}")
    if arguments.out is not None:
        result = {
            **about(),
            "seeds": arguments.seeds,
            "mean": mean,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
