"""What ends a trial, or a sweep, early."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.search import Plateau, Target, TrialPlateau
from fluid.search.stop_rules import StopRules, TrialStop

LOSS = {"loss": True}


def feed(rules: StopRules, trial: int, *scores: float) -> list[bool]:
    """Whether each of a trial's scores stops it."""
    return [rules.result(trial, score, {"loss": score}.get) is not None for score in scores]


def test_no_rule_stops_nothing() -> None:
    rules = StopRules(None, LOSS)
    assert feed(rules, 0, 1.0, -math.inf, math.nan) == [False] * 3
    rules.decided(0, is_over=True)
    assert rules.reason is None
    assert not rules.end_sweep


def test_the_metric_is_compared_by_its_mode_and_others_are_reached_from_below() -> None:
    rules = StopRules({"loss": 0.5, "epochs": 10}, LOSS)
    assert rules.result(0, 0.6, {"loss": 0.6, "epochs": 9}.get) is None
    assert rules.result(0, 0.5, {"loss": 0.5}.get) == TrialStop(is_success=True)
    assert rules.result(0, 0.6, {"loss": 0.6, "epochs": 10}.get) == TrialStop(is_success=True)
    accuracy = StopRules({"accuracy": 0.9}, {"accuracy": False})
    assert accuracy.result(0, -0.8, {"accuracy": 0.8}.get) is None
    assert accuracy.result(0, -0.9, {"accuracy": 0.9}.get) is not None


def test_a_trial_on_a_plateau() -> None:
    rules = StopRules(TrialPlateau(iterations=2, min_delta=0.1), LOSS)
    assert feed(rules, 0, 1.0, 0.8, 0.75, 0.71) == [False, False, False, True]
    assert feed(rules, 1, 1.0, 1.0, 0.8, 1.0, 1.0) == [False, False, False, False, True], "each trial by itself"


def test_a_trial_without_a_number_is_on_a_plateau_too() -> None:
    assert feed(StopRules(TrialPlateau(iterations=3), LOSS), 0, math.inf, math.inf, math.inf) == [False, False, True]


def test_a_target_ends_the_sweep() -> None:
    rules = StopRules([Target(0.5)], LOSS)
    assert rules.end_sweep
    assert feed(rules, 0, 0.6) == [False]
    assert rules.reason is None
    assert feed(rules, 0, 0.5) == [False]
    assert rules.reason == "the metric reached the target 0.5"
    assert StopRules(Target(0.9), {"accuracy": False}).result(0, -0.95, {}.get) is None


def test_a_plateau_of_the_sweep() -> None:
    rules = StopRules(Plateau(trials=2, min_delta=0.1), LOSS)
    for trial, score in enumerate((1.0, 0.8, 0.75, 0.9)):
        assert rules.reason is None
        feed(rules, trial, score)
        rules.decided(trial, is_over=True)
    assert rules.reason == "the best value did not improve in 2 trials"


@pytest.mark.parametrize("stop", ["soon", 3, [Target(1.0), 3], {"": 1.0}, {"loss": math.nan}, {3: 1.0}])
def test_other_rules_are_refused(stop: Any) -> None:
    with pytest.raises(InvalidFieldError, match="stop"):
        StopRules(stop, LOSS)


def test_bad_fields_are_refused() -> None:
    for make in (lambda: Target(math.nan), lambda: Plateau(trials=0), lambda: TrialPlateau(min_delta=-1.0)):
        with pytest.raises(InvalidFieldError):
            make()
