"""Scenarios on devices that come and go as the sizer decides."""

import math

import numpy as np
import pytest

from fluid import Cluster
from fluid.errors import InvalidFieldError
from fluid.forecasting.scenario import Runtimes, Scenario, Workload
from fluid.planners.planner import Planner
from fluid.planners.portfolio import make_planner
from fluid.simulation.observed_search import mean_and_spread
from fluid.simulation.simulate import simulate
from fluid.simulation.sized import HeldResult, Terms, first_sizing, simulate_fixed, simulate_sized
from fluid.sizing.goals import Goals

TERMS = Terms(most=16, profiled=False, draws=30)
ALGORITHMS = ("successive_halving", "hyperband", "asha", "random", "pbt")


def planner() -> Planner:
    return make_planner("portfolio", c=1, d=1)


def sweep(algorithm: str = "successive_halving", *, seed: int = 0, early_stop: float = 0.0) -> Scenario:
    """Trials of 9 iterations of 60 s in the median, as they really take; all are predicted alike."""
    return Scenario(
        Cluster.of(1),
        Workload(algorithm, trials=18, max_iterations=9),
        Runtimes("constant", 60.0),
        c=1,
        d=1,
        runtime_error=0.5,
        early_stop=early_stop,
        seed=seed,
    )


def check_account(result: HeldResult) -> None:
    """What is paid for is what was held."""
    times = [at for at, _ in result.held] + [result.simulation.makespan]
    held = sum(count * (until - at) for (at, count), until in zip(result.held, times[1:], strict=True))
    assert result.device_s == pytest.approx(held)
    assert result.device_s == pytest.approx(3600.0 * result.simulation.device_hours)
    assert result.device_s >= result.simulation.busy_device_seconds * (1.0 - 1e-9)


@pytest.mark.parametrize("devices", [1, 5])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_fixed_number_is_as_without_holder(algorithm: str, devices: int) -> None:
    result = simulate_fixed(sweep(algorithm), planner(), devices, TERMS)
    check_account(result)
    workload = Workload(algorithm, trials=18, max_iterations=9, concurrency=16)
    scenario = Scenario(Cluster.of(devices), workload, Runtimes("constant", 60.0), c=1, d=1, runtime_error=0.5)
    plain = simulate(scenario, planner())
    assert result.simulation.makespan == pytest.approx(plain.makespan)
    assert result.device_s == pytest.approx(devices * plain.makespan)
    assert result.decisions == ()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_generous_deadline_is_met_at_little_more_than_the_cost_of_the_work(algorithm: str) -> None:
    scenario = sweep(algorithm)
    alone = simulate_fixed(scenario, planner(), 1, TERMS)
    result = simulate_sized(scenario, planner(), Goals(deadline=alone.simulation.makespan / 2.0), TERMS)
    check_account(result)
    assert result.simulation.makespan <= alone.simulation.makespan / 2.0
    # Asynchronous algorithms run other trials further on more devices.
    assert result.device_s <= 1.3 * alone.device_s


def test_devices_that_a_rung_does_not_use_are_given_back() -> None:
    scenario = sweep()
    quickest = simulate_fixed(scenario, planner(), 16, TERMS)
    goals = Goals(deadline=1.3 * quickest.simulation.makespan)
    result = simulate_sized(scenario, planner(), goals, TERMS)
    assert result.simulation.makespan <= goals.deadline_s
    assert result.device_s < 0.5 * quickest.device_s
    assert result.held[-1][1] <= 2


def test_devices_that_were_asked_for_come_after_a_while() -> None:
    terms = Terms(most=16, provision_s=77.0, profiled=False, draws=30)
    result = simulate_sized(sweep(), planner(), Goals(deadline=1200.0), terms)
    counts = [count for _, count in result.held]
    first_growth = next(i for i in range(1, len(counts)) if counts[i] > counts[i - 1])
    assert result.held[first_growth][0] >= 77.0
    assert max(counts) > counts[0]


def test_a_deadline_that_cannot_be_met_is_said_at_once() -> None:
    terms = Terms(most=4)
    sizing = first_sizing(sweep(), Goals(deadline=60.0), terms)
    assert sizing.meets is False and sizing.devices == 4 and sizing.earliest_s > 60.0
    later = first_sizing(sweep(), Goals(deadline=2.0 * sizing.earliest_s), terms)
    assert later.meets and later.earliest_s is None


def test_a_missed_deadline_is_missed_by_little() -> None:
    quickest = simulate_fixed(sweep("random"), planner(), 16, TERMS)
    result = simulate_sized(sweep("random"), planner(), Goals(deadline=300.0), TERMS)
    assert result.simulation.makespan <= quickest.simulation.makespan + 3.0 * TERMS.provision_s


def test_nothing_is_known_before_the_first_iteration() -> None:
    goals = Goals(deadline=1200.0)
    firsts = []
    for seed in (0, 1):
        result = simulate_sized(sweep(seed=seed), planner(), goals, TERMS)
        observed_at = next(at for at, sizing in result.decisions if sizing.meets is not None)
        assert observed_at > 10.0
        firsts.append([(at, sizing) for at, sizing in result.decisions if at < 10.0])
    assert firsts[0] == firsts[1]


@pytest.mark.parametrize("fixed", [True, False])
def test_devices_that_are_taken_back_are_replaced(fixed: bool) -> None:
    terms = Terms(most=16, preempt_every_s=900.0, profiled=False, draws=30)
    scenario, goals = sweep(), Goals(deadline=3600.0)
    held = simulate_fixed(scenario, planner(), 4, terms) if fixed else simulate_sized(scenario, planner(), goals, terms)
    check_account(held)
    assert held.preempted > 0
    undisturbed = simulate_fixed(scenario, planner(), 4, TERMS)
    assert held.simulation.trials == undisturbed.simulation.trials
    # Iterations are lost at most as devices are: those in flight.
    assert held.device_s < 2.0 * undisturbed.device_s


def test_trials_that_stop_early_leave_devices_to_give_back() -> None:
    result = simulate_sized(sweep("random", early_stop=0.5), planner(), Goals(deadline=1800.0), TERMS)
    check_account(result)
    assert result.simulation.stopped > 0
    assert result.simulation.makespan <= 1800.0


def test_a_budget_limits_the_devices() -> None:
    goals = Goals(budget_usd=1e-6, price_per_device_hour=1.0)
    result = simulate_sized(sweep(), planner(), goals, TERMS)
    assert result.decisions[-1][1].within_budget is False
    assert result.held[-1][1] == 1


def test_paces_of_iterations_under_way_count() -> None:
    rng = np.random.default_rng(0)
    logs = rng.normal(4.0, 0.5, 400)
    limit = float(np.median(logs))
    ended = [float(each) for each in logs if each <= limit]
    mean, sigma = mean_and_spread(ended, [limit] * (len(logs) - len(ended)))
    assert mean == pytest.approx(4.0, abs=0.1) and sigma == pytest.approx(0.5, abs=0.1)
    assert sum(ended) / len(ended) < 3.7, "those that have ended are the fast ones"


@pytest.mark.parametrize(
    ("field", "value"),
    [("most", 0), ("provision_s", -1.0), ("preempt_every_s", 0.0), ("notice_s", math.nan), ("draws", 0)],
)
def test_bad_terms_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidFieldError, match=field):
        Terms(**{field: value})
