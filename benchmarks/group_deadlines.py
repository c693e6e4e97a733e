"""Deadlines of groups: how many are met by each order of groups, on the real engine and simulated devices.

    python benchmarks/group_deadlines.py [--seeds N] [--mixed N] [--modes 2,3] [--groups N] [--jobs N] [--out FILE]

Groups of independent trials, of one device each, arrive by a Poisson process at 8 alike devices. They are of 5
applications. The seconds of a trial's iterations have 2 to 8 modes, as the requests that Orloj serves: the modes of an
application are a geometric sequence, drawn with unequal odds, from 1 to between 4 and 12 times the shortest; trials of
a mode differ by a sigma of 0.1. Numbers of trials and of iterations are drawn from log-uniform distributions. Nothing
is known of an application before its first trials have run. The groups want :data:`LOAD` times the device-seconds that
there are while they arrive, so that not every deadline can be met.

The deadline of a group is 1.5 to 2 times the 99th percentile of its time alone on all devices. In the mix, every
second group has none. The orders that it is compared with are told nothing of deadlines, but for EDF: the group that
is due first is first, met or missed, and those without a deadline come last. All of them plan trials in the same way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from measuring import about

from fluid import Device
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import ReportEnd
from fluid.engine.core import SessionState
from fluid.engine.events import GroupDeadline, GroupSubmitted, GroupTerms, TrialSpec
from fluid.engine.policy import Policy
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.testing.play import Session

DEVICES = 8
GROUPS = 30
LOAD = 1.0
MODES = (2, 3, 4, 6, 8)
APPLICATIONS = 5
TRIALS = (4, 48)
ITERATIONS = (1, 6)
FACTORS = (1.5, 2.0)
#: Draws of a group's time alone.
_DRAWS = 200
ORDERS = ("deadlines", "edf", "irs", "srsf", "fifo")


@dataclass(frozen=True)
class Application:
    """What a group's trials run.

    Attributes:
        modes: seconds per iteration of each.
        odds: of each.
    """

    modes: tuple[float, ...]
    odds: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> list[float]:
        """Draws the seconds per iteration of so many trials."""
        chosen = rng.choice(self.modes, count, p=self.odds)
        return [float(each) for each in chosen * np.exp(0.1 * rng.standard_normal(count))]


@dataclass(frozen=True)
class Group:
    """A group that arrives.

    Attributes:
        application: number of its application.
        at: when it arrives, seconds.
        iterations: of each trial.
        paces: seconds per iteration of each trial.
        deadline: seconds after it has arrived; ``None`` for no deadline.
    """

    application: int
    at: float
    iterations: int
    paces: tuple[float, ...]
    deadline: float | None


def application(rng: np.random.Generator, modes: int) -> Application:
    """Draws an application."""
    shortest, ratio = math.exp(rng.uniform(math.log(10.0), math.log(60.0))), rng.uniform(4.0, 12.0)
    odds = rng.dirichlet(np.full(modes, 3.0))
    return Application(tuple(shortest * ratio ** (np.arange(modes) / (modes - 1))), tuple(odds))


def time_alone(paces: list[float], iterations: int) -> float:
    """Seconds that trials take on all devices, started in order."""
    free = [0.0] * DEVICES
    for pace in paces:
        first = free.index(min(free))
        free[first] += pace * iterations
    return max(free)


def session(modes: int, seed: int, groups: int, *, mixed: bool) -> list[Group]:
    """The groups of a session, in order of arrival."""
    rng = np.random.default_rng([seed, modes])
    applications = [application(rng, modes) for _ in range(APPLICATIONS)]
    drawn = []
    for _ in range(groups):
        kind = int(rng.integers(APPLICATIONS))
        trials, iterations = (round(math.exp(rng.uniform(*np.log(bounds)))) for bounds in (TRIALS, ITERATIONS))
        paces = applications[kind].draw(rng, trials)
        alone = [time_alone(applications[kind].draw(rng, trials), iterations) for _ in range(_DRAWS)]
        deadline = float(rng.uniform(*FACTORS) * np.percentile(alone, 99))
        drawn.append((kind, iterations, tuple(paces), deadline))
    work = sum(iterations * sum(paces) for _, iterations, paces, _ in drawn)
    between = work / (LOAD * DEVICES * groups)
    arrivals = np.cumsum(rng.exponential(between, groups))
    without = rng.permutation(groups)[: groups // 2] if mixed else ()
    return [
        Group(kind, float(at), iterations, paces, None if place in without else deadline)
        for place, ((kind, iterations, paces, deadline), at) in enumerate(zip(drawn, arrivals, strict=True))
    ]


class EarliestDue(Policy):
    """Ranks groups by when they are due, whatever the engine would do.

    Args:
        core: the state of the session.
        due: when, by group, seconds.
    """

    def __init__(self, core: SessionState, due: dict[str, float]) -> None:
        self._core, self._due = core, due

    def begin_round(self) -> None:
        """Sets the ranks."""
        core = self._core
        open_groups = [group for group in core.groups.values() if group.open]
        order = sorted(open_groups, key=lambda group: (self._due.get(group.group_id, math.inf), group.owner))
        core.queue.ranks = {group.owner: rank for rank, group in enumerate(order)} if len(order) > 1 else {}


def run(groups: list[Group], order: str, planner: str = "portfolio") -> list[float]:
    """Runs a session in an order; returns when each group has ended, seconds after it has arrived."""
    due = {str(place): group.at + group.deadline for place, group in enumerate(groups) if group.deadline is not None}
    pace = {f"{place}-{number}": each for place, group in enumerate(groups) for number, each in enumerate(group.paces)}
    backend = SimulatedBackend(
        lambda trial_id, config: Truth(seconds=pace[trial_id]),
        [Device(index) for index in range(DEVICES)],
        record=False,
    )
    engine = EngineState(
        make_planner(planner, c=1, d=1),
        max_packing=1,
        group_policy="irs" if order == "deadlines" else "fifo" if order == "edf" else order,
        further=[lambda core: EarliestDue(core, due)] if order == "edf" else [],
    )
    played = Session(engine, backend, checked=False)
    for place, group in enumerate(groups):
        while backend.now() < group.at and not (played.is_over and backend.now() >= group.at):
            played.step(group.at)
        has = order == "deadlines" and group.deadline is not None
        trials = tuple(
            TrialSpec(f"{place}-{number}", group.iterations, profile_key=f"application {group.application}")
            for number in range(len(group.paces))
        )
        terms = GroupTerms(deadline=GroupDeadline(((group.deadline, 1.0),)) if has else None)
        played.tell(GroupSubmitted(backend.now(), str(place), trials, terms))
    played.run()
    ends = [0.0] * len(groups)
    for end in played.told(ReportEnd):
        place = int(end.trial_id.partition("-")[0])
        ends[place] = max(ends[place], end.at - groups[place].at)
    return ends


def measure(case: tuple[int, int, int, bool]) -> dict[str, Any]:
    """The share of deadlines that each order meets in a session, and what becomes of groups without one.

    Args:
        case: modes, seed, number of groups, and whether every second one has no deadline.
    """
    modes, seed, count, mixed = case
    groups = session(modes, seed, count, mixed=mixed)
    figures: dict[str, Any] = {"modes": modes, "seed": seed, "mixed": mixed}
    for order in ORDERS:
        ends = run(groups, order)
        with_deadline = [(end, group.deadline) for end, group in zip(ends, groups, strict=True) if group.deadline]
        figures[order] = {
            "met": fmean(end <= deadline for end, deadline in with_deadline),
            "worst": max(end / deadline for end, deadline in with_deadline),
        }
        if mixed:
            others = [end for end, group in zip(ends, groups, strict=True) if group.deadline is None]
            figures[order]["others_h"] = fmean(others) / 3600.0
    return figures


def summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """What is claimed of the orders: in all, by number of modes, and of the mix."""
    plain, mixed = ([case for case in cases if case["mixed"] is kind] for kind in (False, True))

    def mean(some: list[dict[str, Any]], figure: str) -> dict[str, float]:
        return {order: round(fmean(case[order][figure] for case in some), 3) for order in ORDERS}

    found: dict[str, Any] = {"sessions": len(plain)}
    if plain:
        found["met"] = mean(plain, "met")
        found["worst_end_over_deadline"] = mean(plain, "worst")
        found["met_by_modes"] = {
            modes: mean([case for case in plain if case["modes"] == modes], "met")
            for modes in sorted({case["modes"] for case in plain})
        }
    if mixed:
        found["mixed"] = {"met": mean(mixed, "met"), "mean_hours_without_deadline": mean(mixed, "others_h")}
    return found


def results(cases: list[tuple[int, int, int, bool]], jobs: int) -> Iterator[dict[str, Any]]:
    """Measures sessions side by side; each as it ends, in order."""
    if jobs == 1:
        yield from map(measure, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(measure, cases)


def main() -> int:
    """Runs the sessions, prints a line for each, and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="sessions of each number of modes (default: 20)")
    parser.add_argument("--mixed", type=int, default=1, help="of them also with the mix (default: 1)")
    parser.add_argument("--modes", default=",".join(map(str, MODES)), help="which, with commas (default: all)")
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"in each session (default: {GROUPS})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--out", help="JSON file")
    arguments = parser.parse_args()
    modes = [int(each) for each in arguments.modes.split(",")]
    begun, load, cases = time.perf_counter(), os.getloadavg()[0], []
    sessions = [
        (each, seed, arguments.groups, mixed)
        for seed in range(arguments.seeds)
        for each in modes
        for mixed in ((False, True) if seed < arguments.mixed else (False,))
    ]
    for case in results(sessions, arguments.jobs):
        cases.append(case)
        met = ", ".join(f"{order} {case[order]['met']:.2f}" for order in ORDERS)
        print(f"{case['modes']} modes{', mixed' if case['mixed'] else ''}, {case['seed']:2d}: {met}", flush=True)
    figures = summary(cases)
    print(json.dumps(figures, indent=1))
    if arguments.out:
        facts = {
            **about(),
            "seconds": round(time.perf_counter() - begun),
            "load": round(load, 1),
        }
        text = json.dumps({**facts, **figures, "cases": cases}, indent=1)
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
