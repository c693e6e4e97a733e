"""How far the seconds predicted of a trial may be off, by its key's trials and by its own iterations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fluid.engine.estimates.pace import PaceBeliefs
from fluid.engine.events import TrialSpec
from fluid.engine.records import Progress, TrialRecord
from fluid.forecasting.scenario import Scenario
from fluid.measure.measurements import log_spread
from fluid.measure.profile import Profile
from fluid.resources import Cluster
from fluid.simulation.trial_outcomes import OracleProfile


def trial(row: int = 0, budget: int = 100, key: str = "net") -> TrialRecord:
    spec = TrialSpec(f"t{row}", budget, profile_key=key)
    return TrialRecord(spec, row, "0", Progress(budget))


def observe(beliefs: PaceBeliefs, record: TrialRecord, *seconds: float) -> None:
    for each in seconds:
        beliefs.observe(record, each)
        record.pace.observe(each, None)


def test_nothing_is_known_at_first() -> None:
    beliefs, record = PaceBeliefs(Profile()), trial()
    assert beliefs.sigma(record, None) == 0.0
    observe(beliefs, record, 1.0)
    assert beliefs.sigma(record, None) == 0.0


def test_a_trial_that_has_not_run_may_be_as_far_off_as_its_keys_trials_are_apart() -> None:
    beliefs, rng = PaceBeliefs(Profile()), np.random.default_rng(0)
    for row in range(60):
        observe(beliefs, trial(row), *[float(np.exp(0.4 * rng.standard_normal()))] * 3)
    assert beliefs.sigma(trial(99), None) == pytest.approx(0.4, rel=0.3)
    assert beliefs.sigma(trial(98, key="other"), None) == 0.0


def test_few_trials_leave_more_open_than_their_own_spread() -> None:
    beliefs = PaceBeliefs(Profile())
    observe(beliefs, trial(0), 1.0)
    observe(beliefs, trial(1), 1.2)
    assert beliefs.sigma(trial(2), None) > 2.0 * log_spread([0.0, math.log(1.2)])


def test_a_prediction_from_other_configs_stands_in_for_the_key() -> None:
    beliefs, record = PaceBeliefs(Profile()), trial()
    record.pace.predicted, record.pace.predicted_sigma = 3.0, 0.25
    assert beliefs.sigma(record, None) == pytest.approx(0.25)


def test_own_iterations_narrow_what_is_left_open_to_their_noise() -> None:
    beliefs, rng = PaceBeliefs(Profile()), np.random.default_rng(1)
    record = trial(budget=1000)
    sigmas = []
    for _ in range(60):
        observe(beliefs, record, float(np.exp(0.1 * rng.standard_normal())))
        sigmas.append(beliefs.sigma(record, None))
    # The pace is a mean that forgets with the weight 1/2: it is off by sqrt(1/3) of the noise in the long run.
    assert sigmas[-1] == pytest.approx(0.1 * math.sqrt(1.0 / 3.0), rel=0.4)
    other = trial(1, budget=1000)
    observe(beliefs, other, 5.0)
    assert beliefs.sigma(other, None) > 1.3 * sigmas[-1], "one iteration says less than sixty"


def test_outliers_do_not_widen_a_belief() -> None:
    beliefs = PaceBeliefs(Profile())
    for row in range(40):
        observe(beliefs, trial(row), *([1.0 + 0.01 * (row % 3)] * 4), *([9.0] if row % 20 == 0 else []))
    assert beliefs.sigma(trial(99), None) < 0.1


def test_trials_of_two_kinds_are_seen_though_one_is_rarer() -> None:
    assert log_spread([0.0] * 30 + [1.0] * 10) > 0.3


def test_the_profile_of_an_earlier_session_says_how_far_iterations_are_apart() -> None:
    profile, rng = Profile(), np.random.default_rng(2)
    for _ in range(31):
        profile.observe("net", float(np.exp(0.3 * rng.standard_normal())))
    assert PaceBeliefs(profile).sigma(trial(), None) == pytest.approx(0.3, rel=0.35)


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_simulated_trials_are_off_by_the_error_of_their_scenario(error: float) -> None:
    profile = OracleProfile(Scenario(Cluster.of(2), runtime_error=error), {"t0": 1.0})
    record = trial(key="t0")
    assert PaceBeliefs(profile).sigma(record, None) == error
    beliefs = PaceBeliefs(profile)
    observe(beliefs, record, *[1.7] * 5)
    assert beliefs.sigma(record, None) == pytest.approx(0.0, abs=1e-9), "its pace is known once it has run"
