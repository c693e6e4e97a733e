"""Tests of simulated sweeps of fused trials: shorter by what the rates promise, and no longer where these are bad."""

from __future__ import annotations

import pytest

from fluid.forecasting.scenario import Runtimes, Scenario, Workload
from fluid.measure.runtime_model import FusedRates
from fluid.planners.portfolio import make_planner
from fluid.resources import Cluster
from fluid.simulation.simulate import simulate
from fluid.simulation.simulation_result import SimulationResult

GOOD = FusedRates.of({2: 1.1, 4: 1.3, 8: 1.7, 16: 2.4})
BAD = FusedRates.of({2: 4.0})


def run(workload: Workload, rates: FusedRates | None, devices: int = 1, max_fused: int = 16) -> SimulationResult:
    runtimes = Runtimes("constant")
    scenario = Scenario(Cluster.of(devices), workload, runtimes, c=1, d=1, fused=rates, max_fused=max_fused)
    return simulate(scenario, make_planner("portfolio", c=1, d=1))


def test_a_population_is_faster_by_what_the_rates_promise() -> None:
    workload = Workload("pbt", trials=32, max_iterations=40, interval=4)
    alone, fused = run(workload, None), run(workload, GOOD)
    assert alone.peak_rows is None
    assert fused.peak_rows == 16
    assert fused.makespan == pytest.approx(alone.makespan / (16 / 2.4), rel=0.15)
    assert fused.lower_bound <= fused.makespan


@pytest.mark.parametrize("algorithm", ["asha", "hyperband", "pbt", "random"])
@pytest.mark.parametrize("devices", [1, 4])
def test_fusing_helps_where_it_pays_and_costs_nothing_elsewhere(algorithm: str, devices: int) -> None:
    workload = Workload(algorithm, trials=48, max_iterations=27, concurrency=48)
    alone = run(workload, None, devices)
    assert run(workload, GOOD, devices).makespan < 0.8 * alone.makespan
    assert run(workload, BAD, devices).makespan <= 1.05 * alone.makespan
    assert run(workload, GOOD, devices, max_fused=1).makespan == alone.makespan
