"""The makespan part of predict.py: sweeps of bimodal trials on the real engine and the simulated backend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command, ReportEnd
from fluid.engine.engine import EngineError
from fluid.engine.events import BudgetExtended, Event, GroupSubmitted, GroupTerms, TrialSpec
from fluid.forecasting.scenario import Runtimes, Scenario, Workload
from fluid.measure.cohorts.tree import CohortTree, ConfigTexts, Prediction
from fluid.measure.profile import Profile
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Cluster, MemoryNeed
from fluid.simulation.simulate import simulate
from fluid.simulation.trial_outcomes import OracleProfile, TrialOutcomes
from fluid.simulation.workloads import GroupRequest, Scores, make_algorithm
from fluid.testing.play import Session

#: How trials are predicted. "all known": runtimes and overheads are known from the start, in place of being measured.
#: "known runtimes": overheads are measured. "cohorts" and "one key" know nothing at the start.
WAYS = ("all known", "known runtimes", "cohorts", "one key")
#: Widths of the trials; those of the largest take long.
WIDTHS = (64, 128, 256, 512)
#: The profile key of all trials.
KEY = "Net"


class KnownRuntimes(CohortTree):
    """A tree that knows the seconds of each trial, and finds no cohorts.

    Attributes:
        seconds: per iteration, by config.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[ConfigTexts, float] = {}

    def predict(self, config: ConfigTexts) -> Prediction:
        """The seconds of the trial with this config."""
        return Prediction(seconds=self.seconds[config])

    def learn(
        self, trial_id: str, config: ConfigTexts, *, seconds: float | None = None, need: MemoryNeed | None = None
    ) -> bool:
        """Does nothing."""
        return False


class Sweep:
    """One sweep whose trials all have one profile key, and configs that tell how long they take.

    A trial with the largest width is one that takes longer in the scenario. Its other fields say nothing about that.

    Args:
        scenario: devices, algorithm, runtimes and overheads; the same trials as under ``simulate``.
        way: one of :data:`WAYS`.
    """

    def __init__(self, scenario: Scenario, way: str) -> None:
        trials_rng, scores_rng = np.random.default_rng(scenario.seed).spawn(2)
        self._scenario, self._way = scenario, way
        self._outcomes = TrialOutcomes(scenario, trials_rng)
        self._configs = np.random.default_rng([scenario.seed, 1])
        self._algorithm = make_algorithm(scenario.workload, Scores(scores_rng), len(scenario.cluster))
        self._backend = SimulatedBackend(
            lambda trial_id, _: Truth(self._seconds(int(trial_id)), scenario.alpha, scenario.beta, int(trial_id)),
            scenario.cluster.devices,
            epsilon=scenario.epsilon,
            saves=False,
        )
        self._paces: dict[str, float] = {}
        self.profile = OracleProfile(scenario, self._paces) if way == "all known" else Profile(cohorts=way != "one key")
        self._known = KnownRuntimes()
        if way == "known runtimes":
            self.profile.cohorts[KEY] = self._known
        planner = make_planner("portfolio")
        engine = EngineState(planner, self.profile, max_packing=scenario.c, max_width=scenario.d)
        self._session = Session(engine, self._backend, checked=False)
        self._open: set[str] = set()

    def run(self) -> float:
        """Returns the makespan, seconds."""
        self._submit(self._algorithm.start())
        while self._open:
            self._hear(self._session.step())
        return self._backend.now()

    def _seconds(self, trial: int) -> float:
        return self._outcomes.pace(trial) * self._outcomes.slowdown(trial)

    def _config(self, pace: float) -> ConfigTexts:
        rng = self._configs
        quick = int(rng.choice(WIDTHS[:-1]))
        width = WIDTHS[-1] if pace > self._scenario.runtimes.seconds_per_iteration else quick
        config: dict[str, Any] = {"width": width, "optimizer": ("sgd", "adam")[rng.integers(2)]}
        config |= {"lr": float(10 ** rng.uniform(-5, -1)), "dropout": float(rng.uniform(0, 0.5))}
        config["seed"] = int(rng.integers(10**6))
        return tuple(sorted((name, str(value)) for name, value in config.items()))

    def _hear(self, commands: Iterable[Command]) -> None:
        ended = [command.trial_id for command in commands if isinstance(command, ReportEnd)]
        self._open.difference_update(ended)
        if ended:
            self._submit(self._algorithm.ended(sorted((int(trial_id), False) for trial_id in ended)))

    def _submit(self, groups: list[GroupRequest]) -> None:
        now, events = self._backend.now(), list[Event]()
        for number, group in enumerate(groups):
            fresh = []
            for wanted in group.requests:
                trial_id, later = str(wanted.trial), wanted.follow_up_iterations
                self._open.add(trial_id)
                if trial_id in self._session.engine.trials:
                    events.append(BudgetExtended(now, trial_id, wanted.iterations, follow_up_iterations=later))
                else:
                    fresh.append(self._spec(wanted.trial, wanted.iterations, later))
            if fresh:
                events.append(GroupSubmitted(now, f"{now} {number}", tuple(fresh), GroupTerms("workload")))
        if events:
            self._hear(self._session.tell(*events))

    def _spec(self, trial: int, budget: int, later: int) -> TrialSpec:
        # The oracle tells trials apart by their keys.
        key = str(trial) if self._way == "all known" else KEY
        self._paces[key] = self._outcomes.pace(trial)
        config = self._config(self._outcomes.pace(trial))
        self._known.seconds[config] = self._seconds(trial)
        return TrialSpec(
            str(trial),
            budget,
            profile_key=key,
            max_width=self._scenario.d,
            follow_up_iterations=later,
            config=config,
        )


#: Overheads and limits by setting: without packing and widening, the order of trials alone decides.
SETTINGS: dict[str, dict[str, Any]] = {
    "narrow": {"c": 1, "d": 1},
    "packed": {"c": 4, "d": 1, "alpha": 1.2},
    "elastic": {"c": 1, "d": 8, "beta": 1.1, "epsilon": 1.0},
}


def scenario(algorithm: str, trials: int, setting: str, seed: int, *, error: float = 0.0, devices: int = 8) -> Scenario:
    """Returns a bimodal instance: one trial in four takes three times as long.

    Args:
        algorithm: "random" or "successive_halving".
        trials: how many.
        setting: one of :data:`SETTINGS`.
        seed: of the trials.
        error: sigma of what differs between trials of one config besides.
        devices: how many.
    """
    return Scenario(
        Cluster.of(devices),
        Workload(algorithm, trials=trials, max_iterations=27),
        Runtimes("bimodal", 10.0, 0.5),
        runtime_error=error,
        seed=seed,
        **SETTINGS[setting],
    )


#: Sweeps by name: algorithm and trials.
SWEEPS = {
    "random search, 64 trials": ("random", 64),
    "random search, 200 trials": ("random", 200),
    "halving, 81 trials": ("successive_halving", 81),
}


def compare(
    algorithm: str, trials: int, setting: str, seeds: int, *, ways: Iterable[str] = WAYS, error: float = 0.0
) -> dict[str, Any]:
    """Returns the makespan by way of predicting over that of known runtimes: mean, median and largest over seeds."""
    spans: dict[str, list[float]] = {}
    for seed in range(seeds):
        one = scenario(algorithm, trials, setting, seed, error=error)
        for way in ways:
            spans.setdefault(way, []).append(Sweep(one, way).run())
        bound = simulate(one, make_planner("portfolio"))
        if not math.isclose(bound.makespan, spans["all known"][-1]):
            raise EngineError(f"seed {seed}: this drives the engine otherwise than fluid simulate does")
        spans.setdefault("lower bound", []).append(bound.lower_bound)
    found: dict[str, Any] = {}
    for way, each in spans.items():
        ratios = [span / known for span, known in zip(each, spans["known runtimes"], strict=True)]
        found[way] = {
            "seconds": statistics.mean(each),
            "ratio": sum(each) / sum(spans["known runtimes"]),
            "mean_ratio": statistics.mean(ratios),
            "median_ratio": statistics.median(ratios),
            "p90_ratio": float(np.quantile(ratios, 0.9)),
            "max_ratio": max(ratios),
        }
    return found
