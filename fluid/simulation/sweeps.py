"""The workloads of a running simulation: their algorithms, their trials' outcomes, and their times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fluid.engine.events import GroupTerms
from fluid.forecasting.scenario import ArrivingWorkload, Scenario
from fluid.simulation.simulation_result import WorkloadResult
from fluid.simulation.trial_outcomes import TrialOutcomes
from fluid.simulation.workloads import Scores, make_algorithm

#: Profile key and fusion key of trials that can be fused.
_FUSED = "fused"


@dataclass
class RequestedRun:
    """One run of a trial that an algorithm requested.

    Attributes:
        sweep: whose trial it is.
        group: number of its group, among those of all workloads.
        trial: number of the trial, among those of its workload.
        first: iterations done before it.
        iterations: how many are requested.
        stop_after: how many the trial runs until its algorithm stops it.
        stopped: whether it has.
        ran: iterations done.
    """

    sweep: Sweep
    group: int
    trial: int
    first: int
    iterations: int
    stop_after: int
    stopped: bool = False
    ran: int = 0


class Sweep:
    """One workload that runs.

    Args:
        scenario: the scenario.
        workload: the workload.
        place: its place among the scenario's workloads, from 0.
        rng: of its trials and scores.

    Attributes:
        name: for display.
        owner: as the engine knows it.
        ids: its trials' numbers -> their ids in the engine.
        finished: when a trial last ended, seconds.
    """

    def __init__(self, scenario: Scenario, workload: ArrivingWorkload, place: int, rng: np.random.Generator) -> None:
        trials_rng, scores_rng = rng.spawn(2)
        self.workload = workload
        self.outcomes = TrialOutcomes(scenario, trials_rng, workload.runtimes)
        self.algorithm = make_algorithm(workload, Scores(scores_rng), len(scenario.cluster))
        self.name = workload.name or str(place + 1)
        self.owner = workload.owner or f"workload {place + 1}"
        #: Trials of one workload can be fused, as they have one pace.
        self.fused_key = None if scenario.fused is None else _FUSED if place == 0 else f"{_FUSED} {place + 1}"
        self.ids: dict[int, str] = {}
        self.finished = workload.at
        self._due = workload.due
        self._prefix = f"{self.name}-trial" if scenario.workloads else "trial"
        self._to_come = workload.trials if scenario.workloads and workload.algorithm == "asha" else None

    def new_id(self, trial: int) -> str:
        """The id of a trial that was not requested before."""
        return f"{self._prefix}-{trial}"

    def terms(self, now: float) -> GroupTerms:
        """The terms of its next group; the first one says how many trials will come, where groups follow it.

        Args:
            now: seconds since the start; its deadline counts from its arrival.
        """
        workload, to_come = self.workload, self._to_come
        self._to_come = None if to_come is None else 0
        due = None if self._due is None else self._due.after(now - workload.at)
        return GroupTerms(self.owner, workload.priority, workload.preempt, to_come, due, workload.weight)

    def result(self) -> WorkloadResult:
        """Its times."""
        due = None if self._due is None else self._due.steps[0][0]
        return WorkloadResult(self.name, self.owner, self.workload.at, self.finished, len(self.ids), due)


def make_sweeps(scenario: Scenario) -> list[Sweep]:
    """Makes the workloads of a scenario, each with random numbers of its own."""
    rng = np.random.default_rng(scenario.seed)
    return [Sweep(scenario, workload, place, rng) for place, workload in enumerate(scenario.arriving)]
