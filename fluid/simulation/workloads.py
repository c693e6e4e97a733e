"""Search algorithms in a simulation: which trials they request, and when.

Each trial has a score drawn in advance, which decides promotions. So synchronous algorithms request the same work under
every planner; asynchronous ones decide by the trials reported so far, as real ones do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fluid.forecasting.scenario import Workload
from fluid.forecasting.search_now import scheduler_of, shape_of
from fluid.search.rungs import RungBudget


@dataclass(frozen=True)
class RunRequest:
    """A request to run one trial for some more iterations.

    Attributes:
        trial: number of the trial; later requests may name it again.
        iterations: how many to run, at least 1.
        follow_up_iterations: how many later rungs may add.
    """

    trial: int
    iterations: int
    follow_up_iterations: int = 0


@dataclass(frozen=True)
class GroupRequest:
    """Trials requested together.

    Attributes:
        name: for display.
        asks: at least one.
        stage: groups of one stage number run at the same time; ``None`` where the algorithm has no stages.
        bracket: stages of one bracket run one after the other; brackets run concurrently.
    """

    name: str
    requests: tuple[RunRequest, ...]
    stage: int | None = None
    bracket: int = 0


class Algorithm(Protocol):
    """Requests trials at the start and whenever trials end."""

    def start(self) -> list[GroupRequest]:
        """Returns the first requests."""
        ...

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupRequest]:
        """Takes trials that ended at one instant, each with whether it was stopped early; returns new requests."""
        ...


class Scores:
    """A score for each trial, drawn on first use in order of trial number; higher is better."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._drawn: list[float] = []

    def __getitem__(self, trial: int) -> float:
        while len(self._drawn) <= trial:
            self._drawn.append(float(self._rng.random()))
        return self._drawn[trial]


class ScheduledSearch:
    """An algorithm of :mod:`fluid.search`, driven as :func:`fluid.run` drives it: trials report the scores drawn.

    Args:
        workload: the algorithm, its trials, ``max_iterations`` and ``eta``.
        scores: which trials are better.
        devices: trials that ASHA keeps under way, unless the workload says how many.

    Attributes:
        over: trials that will not continue, in the order in which that was decided.
    """

    def __init__(self, workload: Workload, scores: Scores, devices: int) -> None:
        self._shape = shape_of(workload)
        self._one_by_one = self._shape.one_by_one
        self._scheduler = scheduler_of(workload)
        self._scores = scores
        #: Most trials under way at once.
        self._most = math.inf if self._shape.concurrency is None else self._shape.concurrency or devices
        #: Trials that start together when no other is under way: those of a bracket.
        self._together = [sizes[0] for sizes in self._shape.brackets] if self._one_by_one else []
        self._under_way = 0
        self.over: list[int] = []
        #: Iterations that each trial was granted.
        self._granted: dict[int, int] = {}

    def start(self) -> list[GroupRequest]:
        """Returns the first requests."""
        return self._grouped(self._start(), "first trials")

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupRequest]:
        """Returns the trials that are promoted, and new ones where there is room."""
        promoted: list[RungBudget] = []
        for trial, stopped in trials:
            self._under_way -= 1
            scheduler = self._scheduler
            decision = scheduler.ended(trial) if stopped else scheduler.reached(trial, -self._scores[trial])
            self._under_way += len(decision.promoted)
            promoted += decision.promoted
            self.over += decision.ended
        return self._grouped([*promoted, *self._start()], "next trials")

    def _start(self) -> list[RungBudget]:
        """Starts new trials."""
        room = self._most - self._under_way
        if self._one_by_one:
            room = self._together.pop(0) if self._together and not self._under_way else 0
        started: list[RungBudget] = []
        while len(started) < room and (fresh := self._scheduler.start()) is not None:
            started.append(fresh)
        self._under_way += len(started)
        return started

    def _grouped(self, budgets: list[RungBudget], name: str) -> list[GroupRequest]:
        """The requests of trials that run further: those of each rung of a bracket together."""
        groups: dict[tuple[int, int], list[RunRequest]] = {}
        for each in budgets:
            rung = self._scheduler.rung_of(each.trial)
            more = each.budget - self._granted.get(each.trial, 0)
            self._granted[each.trial] = each.budget
            request = RunRequest(each.trial, more, each.follow_up_iterations)
            groups.setdefault((rung.bracket, each.budget), []).append(request)
        if self._shape.algorithm == "full":
            return [GroupRequest("all trials", tuple(requests), stage=0) for requests in groups.values()]
        if self._shape.algorithm != "halving":
            requests = tuple(request for of_rung in groups.values() for request in of_rung)
            return [GroupRequest(name, requests)] if requests else []
        return [self._of_rung(bracket, budget, tuple(requests)) for (bracket, budget), requests in groups.items()]

    def _of_rung(self, bracket: int, budget: int, requests: tuple[RunRequest, ...]) -> GroupRequest:
        sizes, rungs = self._shape.brackets, self._shape.rungs
        rung = rungs.index(budget) - (len(rungs) - len(sizes[bracket]))
        name = f"bracket {bracket} rung {rung}"
        if self._one_by_one:
            return GroupRequest(name, requests, sum(map(len, sizes[:bracket])) + rung)
        return GroupRequest(name, requests, rung, bracket)


class Pbt:
    """Population based training: a fixed population, each member of which runs interval after interval."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._done: dict[int, int] = {}

    def start(self) -> list[GroupRequest]:
        """Returns the population's first interval."""
        members = range(self._workload.trials)
        return [GroupRequest("population", tuple(request for member in members for request in self._interval(member)))]

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupRequest]:
        """Returns the next interval of each; a copy of another member replaces a stopped one."""
        requests = [request for trial, _ in trials for request in self._interval(trial)]
        return [GroupRequest("next interval", tuple(requests))] if requests else []

    def _interval(self, member: int) -> list[RunRequest]:
        done = self._done.get(member, 0)
        iterations = min(self._workload.interval, self._workload.max_iterations - done)
        self._done[member] = done + iterations
        follow_up_iterations = self._workload.max_iterations - self._done[member]
        return [RunRequest(member, iterations, follow_up_iterations)] if iterations > 0 else []


def make_algorithm(workload: Workload, scores: Scores, devices: int) -> Algorithm:
    """Makes the algorithm a workload names; ASHA's concurrency is the number of devices unless it is given."""
    return Pbt(workload) if workload.algorithm == "pbt" else ScheduledSearch(workload, scores, devices)
