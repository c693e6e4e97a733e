"""Outcomes of a scenario's trials (pace, stop), the same under every planner, and the profile that predicts them."""

from __future__ import annotations

import math

import numpy as np

from fluid.forecasting.scenario import Runtimes, Scenario
from fluid.measure.measurements import MIN_OBSERVATIONS
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import FusedRates, packing_limit, width_limit
from fluid.resources import MemoryNeed

#: The profile key under which packs are measured.
_PACKS = "packs"


class TrialOutcomes:
    """Each trial's pace and stop, drawn once, the same under every planner.

    Args:
        scenario: its errors of prediction and stops.
        rng: of all draws.
        runtimes: the distribution of the paces; by default the scenario's.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator, runtimes: Runtimes | None = None) -> None:
        self._scenario = scenario
        self._runtimes = runtimes or scenario.runtimes
        self._seeds = rng
        self._generators: list[np.random.Generator] = []
        self._paces: list[float] = []
        self._slowdowns: list[float] = []

    def pace(self, trial: int) -> float:
        """Predicted seconds per iteration of a trial at width 1."""
        while len(self._paces) <= trial:
            generator = self._seeds.spawn(1)[0]
            self._generators.append(generator)
            self._paces.append(self._runtimes.draw(generator))
            self._slowdowns.append(math.exp(self._scenario.runtime_error * float(generator.standard_normal())))
        return self._paces[trial]

    def slowdown(self, trial: int) -> float:
        """True over predicted runtime."""
        self.pace(trial)
        return self._slowdowns[trial]

    def stop_at(self, trial: int) -> float:
        """Share of the next budget after which the algorithm stops the trial; 1 if it does not."""
        self.pace(trial)
        rng = self._generators[trial]
        stops, moment = rng.random(), rng.random()
        return max(moment, 1e-3) if stops < self._scenario.early_stop else 1.0


def _measured_packs(scenario: Scenario) -> Profile:
    """A profile that has measured packs of 1, 2, 4, ... rows as the scenario has them."""
    profile, rows = Profile(), 1
    while scenario.fused is not None and rows <= scenario.max_fused:
        for _ in range(MIN_OBSERVATIONS):
            profile.observe(_PACKS, scenario.fused.stretch(rows), rows=rows)
        rows *= 2
    return profile


class OracleProfile(Profile):
    """A profile that knows a scenario's overheads and predicted paces in advance, and learns nothing.

    Args:
        scenario: the overheads and limits.
        paces: predicted seconds per iteration by profile key.
    """

    def __init__(self, scenario: Scenario, paces: dict[str, float]) -> None:
        super().__init__(cohorts=False)
        self._scenario = scenario
        self._paces = paces
        self._c = packing_limit(scenario.alpha, c_max=scenario.c)
        self._packs = _measured_packs(scenario)

    def observe(
        self,
        key: str,
        seconds: float,
        *,
        model: str | None = None,
        co_residents: int = 1,
        width: int = 1,
        rows: int = 1,
        iterations: int = 1,
        memory: MemoryNeed | None = None,
        busy: float | None = None,
    ) -> None:
        """Does nothing."""

    def observe_resize(self, seconds: float) -> None:
        """Does nothing."""

    @property
    def epsilon(self) -> float:
        """The scenario's value."""
        return self._scenario.epsilon

    def seconds_per_iteration(self, key: str, model: str | None = None) -> float | None:
        """The predicted pace."""
        return self._paces[key]

    def spread(self, key: str, model: str | None = None) -> float:
        """The scenario's error of prediction."""
        return self._scenario.runtime_error

    def alpha(self, key: str, model: str | None = None) -> float:
        """The scenario's value."""
        return self._scenario.alpha

    def beta(self, key: str, model: str | None = None) -> float:
        """The scenario's value."""
        return self._scenario.beta

    def measured_packing(self, key: str, model: str | None = None) -> int:
        """The scenario's c, as its alpha allows: everything counts as measured."""
        return self._c

    def width_limit(self, key: str, model: str | None = None, *, n: int, d_max: int) -> int:
        """The scenario's d, as its beta allows."""
        return width_limit(self._scenario.beta, n=n, d_max=d_max)

    def packing_limit(self, key: str, c_max: int, model: str | None = None) -> int:
        """The scenario's c, as its alpha allows."""
        return min(self._c, c_max)

    def needs_measuring(self, key: str, model: str | None = None, *, co_residents: int = 1, width: int = 1) -> bool:
        """Always false."""
        return False

    def fused_rates(self, key: str, model: str | None = None) -> FusedRates | None:
        """The scenario's rates."""
        return self._scenario.fused

    def fused_measured(self, key: str, model: str | None = None) -> int:
        """The scenario's limit of rows: everything counts as measured."""
        return self._packs.fused_measured(_PACKS)

    def fused_limit(self, key: str, most: int, model: str | None = None) -> int:
        """As many rows as pay by the scenario's rates."""
        return self._packs.fused_limit(_PACKS, most)

    def memory(self, key: str, model: str | None = None) -> MemoryNeed | None:
        """Always ``None``: memory does not bound packing."""
        return None
