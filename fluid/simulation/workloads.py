"""The shapes of search algorithms: which trials they request, and when.

Each trial has a score drawn in advance, which decides promotions. So synchronous algorithms request the same work under
every planner; asynchronous ones decide by the trials reported so far, as real ones do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fluid.simulation.scenario import Workload


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


class RandomSearch:
    """Grid or random search: all trials at once, each with the whole budget."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def start(self) -> list[GroupRequest]:
        """Returns one group of all trials."""
        requests = tuple(RunRequest(trial, self._workload.max_iterations) for trial in range(self._workload.trials))
        return [GroupRequest("all trials", requests, stage=0)]

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupRequest]:
        """Returns nothing."""
        return []


class SuccessiveHalving:
    """One bracket of Successive Halving: the best 1/eta of each rung are promoted with ``eta`` times the budget.

    Args:
        name: prefix of the groups' names.
        trials: numbers of the trials of the first rung.
        rungs: rungs after the first; the last one has ``max_iterations``.
        workload: ``max_iterations`` and ``eta``.
        scores: which trials are better.
        first_stage: stage number of the first rung.
        number: number of the bracket among concurrent ones.
    """

    def __init__(
        self,
        name: str,
        trials: range,
        rungs: int,
        workload: Workload,
        scores: Scores,
        first_stage: int = 0,
        number: int = 0,
    ) -> None:
        self._name = name
        self._trials = list(trials)
        self._workload = workload
        self._scores = scores
        self._reached = 0
        self._rungs = rungs
        self._target = self._budget(0)
        self._rung = 0
        self._first_stage = first_stage
        self._number = number
        self._waiting: set[int] = set()
        self._survivors: list[int] = []
        self.started = False
        self.finished = False

    def start(self) -> list[GroupRequest]:
        """Returns the next rung."""
        self.started = True
        iterations = self._target - self._reached
        self._waiting, self._survivors = set(self._trials), []
        follow_up_iterations = self._workload.max_iterations - self._target
        requests = tuple(RunRequest(trial, iterations, follow_up_iterations) for trial in self._trials)
        name, stage = f"{self._name} rung {self._rung}", self._first_stage + self._rung
        return [GroupRequest(name, requests, stage, self._number)]

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupRequest]:
        """Returns the next rung once the last trial of this one has ended."""
        for trial, stopped in trials:
            if trial in self._waiting:
                self._waiting.remove(trial)
                if not stopped:
                    self._survivors.append(trial)
        if self._waiting or self.finished or not self.started:
            return []
        keep = len(self._trials) // self._workload.eta
        best = sorted(self._survivors, key=lambda trial: (-self._scores[trial], trial))[:keep]
        self._rung += 1
        if not best or self._target >= self._workload.max_iterations:
            self.finished = True
            return []
        self._trials = best
        self._reached, self._target = self._target, self._budget(self._rung)
        return self.start()

    def _budget(self, rung: int) -> int:
        """Iterations a trial has run by the end of a rung."""
        return max(1, self._workload.max_iterations // int(self._workload.eta ** (self._rungs - rung)))


def successive_halving(workload: Workload, scores: Scores) -> SuccessiveHalving:
    """One bracket of ``workload.trials`` trials whose last rung has the whole budget."""
    rungs = 0
    while workload.eta ** (rungs + 1) <= min(workload.trials, workload.max_iterations):
        rungs += 1
    return SuccessiveHalving("bracket 0", range(workload.trials), rungs, workload, scores)


class Hyperband:
    """Hyperband's brackets, all at once, or one after another as SyncBOHB's model requires.

    Args:
        workload: ``max_iterations`` and ``eta``.
        scores: which trials are better.
        one_by_one: whether a bracket starts only when the one before has finished.
    """

    def __init__(self, workload: Workload, scores: Scores, *, one_by_one: bool) -> None:
        self._one_by_one = one_by_one
        self._brackets: list[SuccessiveHalving] = []
        s_max = 0
        while workload.eta ** (s_max + 1) <= workload.max_iterations:
            s_max += 1
        first_trial, first_stage = 0, 0
        for s in range(s_max, -1, -1):
            count = -(-(s_max + 1) * workload.eta**s // (s + 1))
            trials = range(first_trial, first_trial + count)
            name, beside = f"bracket {s_max - s}", 0 if one_by_one else s_max - s
            self._brackets.append(SuccessiveHalving(name, trials, s, workload, scores, first_stage, beside))
            first_trial += count
            first_stage += s + 1 if one_by_one else 0

    def start(self) -> list[GroupRequest]:
        """Returns the first rung of the first bracket, or of each."""
        first = self._brackets[:1] if self._one_by_one else self._brackets
        return [request for bracket in first for request in bracket.start()]

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupRequest]:
        """Returns the rungs that follow."""
        requests = [request for bracket in self._brackets for request in bracket.ended(trials)]
        waiting = [bracket for bracket in self._brackets if not bracket.started]
        if waiting and all(bracket.finished for bracket in self._brackets if bracket.started):
            requests += waiting[0].start()
        return requests


class Asha:
    """ASHA, stopping variant: a trial that reaches a rung goes on if it is among the best 1/eta that reached it.

    Args:
        workload: trials in all, rungs by ``eta`` and ``max_iterations``.
        scores: which trials are better.
        concurrency: trials to keep running.
    """

    def __init__(self, workload: Workload, scores: Scores, concurrency: int) -> None:
        self._workload = workload
        self._scores = scores
        self._concurrency = concurrency
        self._next = 0
        self._rung: dict[int, int] = {}
        self._seen: list[list[float]] = []
        self._targets = [1]
        while self._targets[-1] < workload.max_iterations:
            self._targets.append(min(self._targets[-1] * workload.eta, workload.max_iterations))

    def start(self) -> list[GroupRequest]:
        """Returns the first ``concurrency`` trials."""
        count = min(self._concurrency, self._workload.trials)
        return [GroupRequest("first trials", tuple(self._fresh() for _ in range(count)))]

    def ended(self, trials: list[tuple[int, bool]]) -> list[GroupRequest]:
        """Returns each promoted trial's next rung, and a new trial for each one that ends here."""
        requests = []
        for trial, stopped in trials:
            if not stopped and self._promoted(trial):
                rung = self._rung[trial] = self._rung[trial] + 1
                requests.append(RunRequest(trial, self._targets[rung] - self._targets[rung - 1]))
            elif self._next < self._workload.trials:
                requests.append(self._fresh())
        return [GroupRequest("next trials", tuple(requests))] if requests else []

    def _fresh(self) -> RunRequest:
        trial, self._next = self._next, self._next + 1
        self._rung[trial] = 0
        return RunRequest(trial, self._targets[0])

    def _promoted(self, trial: int) -> bool:
        rung = self._rung[trial]
        while len(self._seen) <= rung:
            self._seen.append([])
        self._seen[rung].append(self._scores[trial])
        if rung + 1 == len(self._targets):
            return False
        best = sorted(self._seen[rung], reverse=True)
        return self._scores[trial] >= best[(len(best) - 1) // self._workload.eta]


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
    if workload.algorithm == "successive_halving":
        return successive_halving(workload, scores)
    if workload.algorithm in ("hyperband", "syncbohb"):
        return Hyperband(workload, scores, one_by_one=workload.algorithm == "syncbohb")
    if workload.algorithm == "asha":
        return Asha(workload, scores, workload.concurrency or devices)
    if workload.algorithm == "pbt":
        return Pbt(workload)
    return RandomSearch(workload)
