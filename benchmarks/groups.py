"""Mean completion of many groups on unlike devices, by group policy: the real engine on simulated devices.

    python benchmarks/groups.py [--seeds N] [--workloads even,small] [--pauses | --supply] [--jobs N] [--out FILE]

50 groups of independent trials, of one device each, arrive by a Poisson process, 30 minutes apart on average. There are
32 devices of 4 kinds: 8 plain ones, 8 with much compute, 8 with much memory, and 8 with both. A group requires nothing
(general), compute, memory, or both, each with the same odds. Its number of trials and their number of iterations are
drawn from log-uniform distributions; all iterations of a session take as long. Workloads differ in which of the groups
drawn are kept: all (even); those with less or more device time in all than the mean group has (small, large); those
with fewer or more trials at once (low, high).

Policies differ only where groups queue. So the seconds of an iteration are scaled, in each session, such that the
groups want :data:`LOAD` times as many device-seconds as all devices have until the last arrival.

Trials run from start to end on one device. With --pauses they may pause, and go on elsewhere: the same sessions run
with the default planner, each iteration is :data:`PIECES` shorter ones, and a pause costs :data:`PAUSE_S` seconds.

Random matching, the baseline of Venn's authors, gives each idle device to a group that is drawn from those that wait
for one like it. Speed-ups over it are by workload, and by what groups require.

With --supply, devices come and go, each by itself or all of a kind together, for times that are drawn exponentially
(:data:`SUPPLIES`), and groups wait for those that they require. IRS runs with the average of what there was, and with
what there is at the time.

A group's fair time is M times what it takes alone on all devices that it may use, M being the mean number of groups
that are open while it is, itself included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any
from unittest import mock

import numpy as np
from measuring import about

from fluid import Cluster, Device, Requires
from fluid.devices.start_queue import StartQueue
from fluid.forecasting.scenario import ArrivingWorkload, DeviceChange, Runtimes, Scenario
from fluid.planners.portfolio import make_planner
from fluid.policies.owners.shares import GROUP_POLICIES, Job, plan_groups
from fluid.policies.owners.supply import Supply
from fluid.simulation.simulate import simulate
from fluid.simulation.simulation_result import SimulationResult

GROUPS = 50
BETWEEN_S = 1800.0
#: Device time wanted until the last arrival, over that which there is.
LOAD = 2.0
#: With pauses: iterations for one without, and seconds that a pause costs.
PIECES = 10
PAUSE_S = 60.0
CLASSES = {
    "general": None,
    "compute": Requires(tags=("compute",)),
    "memory": Requires(tags=("memory",)),
    "both": Requires(tags=("compute", "memory")),
}
#: How many devices of each kind, by tags.
KINDS = {(): 8, ("compute",): 8, ("memory",): 8, ("compute", "memory"): 8}
WORKLOADS = ("even", "small", "large", "low", "high")
TRIALS = (2, 32)
ITERATIONS = (1, 4)
#: Groups from which the workloads' means are taken.
_DRAWN = 20_000
_FAIRNESS = 2.0
#: With --supply: mean seconds for which devices are there, and are gone; the tags of those that come and go; whether
#: all of a kind do so together.
SUPPLIES = {
    "each device, 2 h and 2 h": (7200.0, 7200.0, tuple(KINDS), False),
    "each of the scarce, 1 h and 3 h": (3600.0, 10800.0, tuple(KINDS)[1:], False),
    "the scarce kinds, 2 h and 2 h": (7200.0, 7200.0, tuple(KINDS)[1:], True),
    "compute alone, 1 h and 5 h": (3600.0, 18000.0, (("compute",),), True),
}
RANDOM = "random matching"
#: Policy and fairness of each run of a session.
RUNS = {
    **{policy: (policy, 0.0) for policy in GROUP_POLICIES},
    "irs fair": ("irs", _FAIRNESS),
    RANDOM: ("fifo", 0.0),
}


@dataclass(frozen=True)
class Shape:
    """A group before its requirements are drawn."""

    trials: int
    iterations: int

    @property
    def work(self) -> int:
        """Iterations of all its trials."""
        return self.trials * self.iterations


def cluster() -> Cluster:
    """32 devices of 4 kinds."""
    tags = [tags for tags, count in KINDS.items() for _ in range(count)]
    return Cluster(tuple(Device(index, kind="gpu", tags=each) for index, each in enumerate(tags)))


def draw_shape(rng: np.random.Generator) -> Shape:
    """Draws the numbers of a group's trials and iterations, log-uniformly."""
    trials, iterations = (math.exp(rng.uniform(*np.log(bounds))) for bounds in (TRIALS, ITERATIONS))
    return Shape(round(trials), round(iterations))


def is_in(workload: str, shape: Shape, mean_work: float, mean_trials: float) -> bool:
    """Whether a group is kept in a workload."""
    return {
        "even": True,
        "small": shape.work < mean_work,
        "large": shape.work >= mean_work,
        "low": shape.trials < mean_trials,
        "high": shape.trials >= mean_trials,
    }[workload]


def scenario(workload: str, seed: int, groups: int = GROUPS) -> Scenario:
    """One session's groups."""
    population = np.random.default_rng(0)
    shapes = [draw_shape(population) for _ in range(_DRAWN)]
    means = fmean(shape.work for shape in shapes), fmean(shape.trials for shape in shapes)
    rng = np.random.default_rng([seed, WORKLOADS.index(workload)])
    arrivals = np.cumsum(rng.exponential(BETWEEN_S, groups)) - BETWEEN_S
    arrivals = np.maximum(0.0, arrivals)
    kept: list[Shape] = []
    while len(kept) < groups:
        shape = draw_shape(rng)
        if is_in(workload, shape, *means):
            kept.append(shape)
    classes = rng.choice(list(CLASSES), groups)
    there = cluster()
    seconds = LOAD * float(arrivals[-1]) * len(there) / sum(shape.work for shape in kept)
    return Scenario(
        there,
        runtimes=Runtimes("constant", seconds),
        name=workload,
        c=1,
        d=1,
        seed=seed,
        workloads=tuple(
            ArrivingWorkload(
                "random", shape.trials, shape.iterations, at=float(at), name=f"{index}-{kind}", requires=CLASSES[kind]
            )
            for index, (shape, at, kind) in enumerate(zip(kept, arrivals, classes, strict=True))
        ),
    )


def with_pauses(session: Scenario) -> Scenario:
    """The same session, of shorter iterations between which trials may pause."""
    runtimes = session.runtimes
    return replace(
        session,
        runtimes=replace(runtimes, seconds_per_iteration=runtimes.seconds_per_iteration / PIECES),
        epsilon=PAUSE_S,
        workloads=tuple(replace(each, max_iterations=PIECES * each.max_iterations) for each in session.workloads),
    )


def with_supply(session: Scenario, name: str) -> Scenario:
    """The same session of shorter iterations, on devices that come and go for three times as long as groups arrive."""
    there_s, gone_s, tags, together = SUPPLIES[name]
    rng = np.random.default_rng([session.seed, 1])
    changes: list[DeviceChange] = []
    end = 3.0 * session.workloads[-1].at
    for kind in tags:
        members = [device for device in session.cluster.devices if device.tags == kind]
        for some in [members] if together else [[device] for device in members]:
            at, is_there = float(rng.exponential(there_s)), True
            while at < end or not is_there:  # All are there in the end.
                is_there = not is_there
                for device in some:
                    changed = DeviceChange(at, device=device) if is_there else DeviceChange(at, lost=device.index)
                    changes.append(changed)
                at += float(rng.exponential(there_s if is_there else gone_s))
    shorter = with_pauses(session)
    waiting = [
        replace(each, requires=None if each.requires is None else replace(each.requires, wait=True))
        for each in shorter.workloads
    ]
    changes.sort(key=lambda change: change.at)
    return replace(shorter, epsilon=0.0, workloads=tuple(waiting), changes=tuple(changes))


def run(session: Scenario, *, pauses: bool = False) -> SimulationResult:
    """Runs a session; trials of one device each need no planner of widths, and the one that never pauses does."""
    return simulate(session, make_planner("portfolio" if pauses else "fifo", c=1, d=1))


class RandomQueue(StartQueue):
    """Offers each device to the groups in an order that is drawn anew.

    Args:
        seed: of the draws.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = np.random.default_rng(seed)

    def start(self, place: Callable[[int], bool], *args: Any, **kwargs: Any) -> list[int]:
        """Offers rows to ``place`` until none of them fits, one start at a time."""
        started: list[int] = []
        while True:
            self.ranks = dict(enumerate(self._rng.permutation(GROUPS).tolist()))
            found: list[int] = []

            def first(row: int, found: list[int] = found) -> bool:
                if not found and place(row):
                    found.append(row)
                    return True
                return False

            super().start(first, *args, **kwargs)
            if not found:
                return started
            started += found


def run_at_random(session: Scenario, *, pauses: bool = False) -> SimulationResult:
    """Runs a session whose devices are given to waiting groups at random."""
    with mock.patch("fluid.policies.engine.StartQueue", lambda: RandomQueue(session.seed)):
        return run(session, pauses=pauses)


def class_means_h(result: SimulationResult) -> dict[str, float]:
    """The mean completion of the groups of each class that has any, hours."""
    found: dict[str, list[float]] = {}
    for each in result.workloads:
        found.setdefault(each.name.partition("-")[2], []).append(each.completion / 3600.0)
    return {name: fmean(found[name]) for name in CLASSES if name in found}


def fair_ratios(session: Scenario, result: SimulationResult) -> list[float]:
    """The completion of each group over its fair time."""
    ratios = []
    for workload, own in zip(session.workloads, result.workloads, strict=True):
        devices = sum(workload.can_run_on([device]) for device in session.cluster.devices)
        rounds = math.ceil(workload.trials / devices)
        alone = rounds * workload.max_iterations * session.runtimes.seconds_per_iteration
        beside = sum(
            max(0.0, min(own.finished, other.finished) - max(own.arrived, other.arrived)) for other in result.workloads
        )
        ratios.append(own.completion / (alone * beside / own.completion))
    return ratios


def measure(case: tuple[str, int, int, bool]) -> dict[str, Any]:
    """The mean completions of a session under each policy, in hours, and what is fair of them.

    Args:
        case: workload, seed, number of groups, and whether trials may pause.
    """
    workload, seed, groups, pauses = case
    session = scenario(workload, seed, groups)
    session = with_pauses(session) if pauses else session
    figures: dict[str, Any] = {"workload": workload, "seed": seed}
    for name, (policy, fairness) in RUNS.items():
        if pauses and name == RANDOM:
            continue  # It is a baseline for trials that run from start to end.
        play = run_at_random if name == RANDOM else run
        result = play(replace(session, group_policy=policy, fairness=fairness), pauses=pauses)
        ratios = fair_ratios(session, result)
        figures[name] = {
            "mean_h": result.mean_completion / 3600.0,
            "mean_h_by_class": class_means_h(result),
            "busy": result.utilisation,
            "within_fair": fmean(ratio <= 1.0 for ratio in ratios),
            "worst_over_fair": max(ratios),
        }
    return figures


def measure_supply(case: tuple[str, str, int, int]) -> dict[str, Any]:
    """The mean completions of IRS by average and by present counts, hours.

    Args:
        case: name of the supply, workload, seed, and number of groups.
    """
    name, workload, seed, groups = case
    session = with_supply(scenario(workload, seed, groups), name)
    average = run(session).mean_completion / 3600.0
    with mock.patch.object(Supply, "averages", return_value=None):
        present = run(session).mean_completion / 3600.0
    return {"supply": name, "workload": workload, "seed": seed, "average_h": average, "present_h": present}


def supply_summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean completion by present counts over that by averages: geometric mean, least and most."""
    found = {}
    for name in SUPPLIES:
        ratios = [case["present_h"] / case["average_h"] for case in cases if case["supply"] == name]
        found[name] = {
            "present_over_average": round(geometric_mean(ratios), 4),
            "least": round(min(ratios), 3),
            "most": round(max(ratios), 3),
        }
    return found


def planning_ms(groups: int = 1000, kinds: int = 50, repeats: int = 7) -> float:
    """Median milliseconds to rank groups and to allocate devices, each group with an eligible set of its own draw."""
    rng = np.random.default_rng(0)
    sets = [
        int(sum(1 << int(kind) for kind in rng.choice(kinds, rng.integers(1, kinds), replace=False))) for _ in range(50)
    ]
    jobs = [
        Job(
            owner,
            sets[int(rng.integers(len(sets)))],
            float(rng.uniform(1.0, 1e4)),
            int(rng.integers(1, 20)),
            float(owner),
        )
        for owner in range(groups)
    ]
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        plan_groups("irs", jobs, [4.0] * kinds)
        taken.append(1e3 * (time.perf_counter() - begun))
    return median(taken)


def over(cases: list[dict[str, Any]], policy: str) -> float:
    """Geometric mean of a policy's mean completion over that of IRS."""
    return geometric_mean(case[policy]["mean_h"] / case["irs"]["mean_h"] for case in cases)


def speed_ups(cases: list[dict[str, Any]]) -> dict[str, float]:
    """How many times as long as under each policy the mean completion is under random matching; geometric means."""
    return {
        policy: round(geometric_mean(case[RANDOM]["mean_h"] / case[policy]["mean_h"] for case in cases), 3)
        for policy in GROUP_POLICIES
    }


def class_speed_ups(cases: list[dict[str, Any]], policy: str) -> dict[str, float]:
    """The same of the groups of each class, under one policy."""
    ratios: dict[str, list[float]] = {}
    for case in cases:
        for name, mean in case[policy]["mean_h_by_class"].items():
            ratios.setdefault(name, []).append(case[RANDOM]["mean_h_by_class"][name] / mean)
    return {name: round(geometric_mean(some), 3) for name, some in ratios.items()}


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """What is claimed of the policies: in all, and by workload."""
    by_workload = {name: [case for case in cases if case["workload"] == name] for name in WORKLOADS}
    fair = [case["irs fair"] for case in cases]
    return {
        "sessions": len(cases),
        "srsf_over_irs": round(over(cases, "srsf"), 3),
        "fifo_over_irs": round(over(cases, "fifo"), 3),
        "by_workload": {
            name: {
                "srsf_over_irs": round(over(own, "srsf"), 3),
                "fifo_over_irs": round(over(own, "fifo"), 3),
                **({"over_random": speed_ups(own)} if RANDOM in own[0] else {}),
            }
            for name, own in by_workload.items()
            if own
        },
        **(
            {
                "over_random": speed_ups(cases),
                "over_random_by_class": {policy: class_speed_ups(cases, policy) for policy in GROUP_POLICIES},
            }
            if RANDOM in cases[0]
            else {}
        ),
        "fairness_2": {
            "mean_over_irs": round(over(cases, "irs fair"), 3),
            "within_fair": round(fmean(each["within_fair"] for each in fair), 3),
            "worst_over_fair": round(max(each["worst_over_fair"] for each in fair), 2),
        },
        "fairness_0": {
            "within_fair": round(fmean(case["irs"]["within_fair"] for case in cases), 3),
            "worst_over_fair": round(max(case["irs"]["worst_over_fair"] for case in cases), 2),
        },
        "planning_1000_groups_50_kinds_ms": round(planning_ms(), 2),
    }


def results(play: Callable[[Any], dict[str, Any]], cases: list[Any], jobs: int) -> Iterator[dict[str, Any]]:
    """Measures sessions side by side; each as it ends, in order."""
    if jobs == 1:
        yield from map(play, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(play, cases)


#: Ways of running whose figures are an entry of their own.
WAYS = ("pauses", "supply")


def write(path: Path, found: dict[str, Any], *, way: str | None = None) -> None:
    """Writes the figures of one way of running, one of :data:`WAYS` or the plain one; those of the others stay."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if way is not None:
        found = {**before, way: found}
    else:
        found = {**found, **{name: before[name] for name in WAYS if name in before}}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Runs the sessions, prints a line for each, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="sessions of each workload (default: 20)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="which, with commas (default: all)")
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"in each session (default: {GROUPS})")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--pauses", action="store_true", help="let trials pause, with the default planner")
    ways.add_argument("--supply", action="store_true", help="let devices come and go")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--out", help="JSON file; with --pauses or --supply, that entry of it is replaced")
    arguments = parser.parse_args()
    workloads = arguments.workloads.split(",")
    if unknown := set(workloads) - set(WORKLOADS):
        parser.error(f"--workloads: {', '.join(unknown)} are none of {', '.join(WORKLOADS)}")
    begun, load, cases = time.perf_counter(), os.getloadavg()[0], []
    way = next((name for name in WAYS if getattr(arguments, name)), None)
    numbers = range(arguments.seeds)
    if arguments.supply:
        supplies = [(each, name, seed, arguments.groups) for each in SUPPLIES for seed in numbers for name in workloads]
        for case in results(measure_supply, supplies, arguments.jobs):
            cases.append(case)
            print(
                {name: round(value, 2) if isinstance(value, float) else value for name, value in case.items()},
                flush=True,
            )
        figures = supply_summary(cases)
    else:
        sessions = [(name, seed, arguments.groups, arguments.pauses) for seed in numbers for name in workloads]
        for case in results(measure, sessions, arguments.jobs):
            cases.append(case)
            means = ", ".join(f"{name} {case[name]['mean_h']:6.2f} h" for name in RUNS if name in case)
            print(f"{case['workload']:>6} {case['seed']:2d}: {means}", flush=True)
        figures = summary(cases)
    print(json.dumps(figures, indent=1))
    if arguments.out:
        facts = {
            **about(),
            "seconds": round(time.perf_counter() - begun),
            "load": round(load, 1),
        }
        write(Path(arguments.out), {**facts, **figures, "cases": cases}, way=way)
    return 0


if __name__ == "__main__":
    sys.exit(main())
