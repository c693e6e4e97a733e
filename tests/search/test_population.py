"""Population based training as a state machine: options, who exploits whom, and new configs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.search import PBT, lograndint, loguniform, make_space, randint, uniform, when
from fluid.search.population import Explorer, Population, Standing
from fluid.search.rungs import RungDecision
from fluid.search.space import Space

OPEN = make_space({"x": uniform(0.0, 1.0)})


def explorer(space: Any = None, *, resample: float = 0.0, perturb: tuple[float, ...] = (1.2, 0.8)) -> Explorer:
    made = OPEN if space is None else make_space(space)
    assert isinstance(made, Space)
    return Explorer(made, resample, perturb, np.random.default_rng(3))


class Members:
    """A population whose members run as they are told.

    Attributes:
        iterations: that each has done.
        states: of what iteration others would start; as many as each has done, but for those that are set.
    """

    def __init__(self, options: PBT, *, samples: int, budget: int = 40) -> None:
        self.population = Population(options, budget, samples, explorer())
        self.population.standing = self.standing
        self.iterations = [0] * samples
        self.states: dict[int, int | None] = {}
        self.targets = {begun.trial: begun.budget for begun in iter(self.population.start, None)}

    def standing(self, number: int, loser: int) -> Standing:
        at = self.iterations[number]
        return Standing({"x": (number + 1) / 100}, at, self.states.get(number, at))

    def reach(self, number: int, score: float) -> RungDecision:
        self.iterations[number] = self.targets[number]
        decision = self.population.reached(number, score)
        self.targets |= {one.trial: one.budget for one in (*decision.promoted, *decision.forked)}
        return decision


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"ready": 0}, "ready=0: must be at least 1"),
        ({"ready": 1.5}, "ready=1.5: must be a whole number"),
        ({"quantile": 0.6}, "quantile=0.6: must be at most 0.5"),
        ({"quantile": "0.2"}, "quantile='0.2': must be a number, without quotes"),
        ({"resample": -0.1}, "resample=-0.1: must be at least 0"),
        ({"resample": 2}, "resample=2: must be at most 1"),
        ({"perturb": 1.2}, r"perturb=1.2: must be at least one factor, such as \(1.2, 0.8\)"),
        ({"perturb": ()}, "perturb=.*at least one factor"),
        ({"perturb": (1.2, 0)}, "perturb=.*greater than 0"),
        ({"perturb": (1.2, math.nan)}, "perturb=nan"),
        ({"synchronous": 1}, "synchronous=1: must be True or False"),
    ],
)
def test_options_that_cannot_be_used(given: Mapping[str, Any], error: str) -> None:
    with pytest.raises(InvalidFieldError, match=error):
        PBT(**given)


def test_a_member_is_ready_every_tenth_of_the_budget() -> None:
    assert [PBT().interval(budget) for budget in (1, 9, 10, 27, 100)] == [1, 1, 1, 2, 10]
    assert PBT(ready=7).interval(100) == 7
    assert PBT(perturb=[2, 0.5]).perturb == (2.0, 0.5)


def test_the_worst_goes_on_from_the_best_and_nobody_waits() -> None:
    members = Members(PBT(ready=5), samples=4)
    assert set(members.targets.values()) == {5}
    for number in range(3):
        assert members.reach(number, -float(number)).promoted[0].budget == 10
    members.iterations[2] = 8  # The best one is under way by now.
    members.states[2] = 9
    decision = members.reach(3, 9.0)
    assert not decision.promoted and not decision.ended
    (exploit,) = decision.forked
    assert (exploit.trial, exploit.parent, exploit.at) == (3, 2, None)
    assert exploit.config["x"] in (pytest.approx(0.036), pytest.approx(0.024))
    assert (exploit.budget, exploit.follow_up_iterations) == (14, 26)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_member_keeps_its_state_if_the_other_has_ended_meanwhile(synchronous: bool) -> None:
    members = Members(PBT(ready=5, synchronous=synchronous), samples=2)
    members.reach(0, 0.0)
    assert members.reach(1, 1.0).forked[0].trial == 1
    assert members.population.keeps(1).budget == 10


def test_the_first_one_to_come_has_nobody_to_exploit() -> None:
    members = Members(PBT(ready=5), samples=4)
    assert members.reach(2, 9.0).promoted[0].trial == 2


def test_no_exploit_without_a_state_or_where_nothing_is_left_to_run() -> None:
    for state in (None, 40, 41):
        members = Members(PBT(ready=5), samples=2)
        members.reach(0, 0.0)
        members.states[0] = state
        assert members.reach(1, 1.0).promoted[0].budget == 10


def test_members_end_at_the_budget_and_are_no_longer_compared() -> None:
    members = Members(PBT(ready=30), samples=3, budget=40)
    members.reach(0, 0.0)
    assert members.targets[0] == 40
    assert members.reach(0, 0.0).ended == (0,)
    members.reach(1, 5.0)
    assert members.reach(2, 9.0).forked[0].parent == 1


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_member_without_a_number_exploits_another(score: float) -> None:
    members = Members(PBT(ready=5, quantile=0.25), samples=4)
    members.reach(0, 1.0)
    assert members.reach(1, score).forked[0].parent == 0, "the only one that has a number"
    members.reach(2, 2.0)
    assert members.reach(3, score).forked[0].parent == 0
    assert members.reach(0, score).forked[0].parent in (2,)
    assert members.reach(2, score).promoted, "none is left that has a number"


def test_nobody_exploits_with_a_quantile_of_0() -> None:
    members = Members(PBT(ready=5, quantile=0), samples=4)
    assert all(not members.reach(number, score).forked for number, score in enumerate([0.0, 1.0, math.nan, 9.0]))


def test_synchronous_members_wait_and_start_from_where_the_best_stands() -> None:
    members = Members(PBT(ready=5, synchronous=True), samples=8)
    scores = [3.0, 0.0, 7.0, 4.0, 6.0, 2.0, 1.0]
    assert all(members.reach(number, score) == RungDecision() for number, score in enumerate(scores))
    decision = members.reach(7, 5.0)
    assert [one.trial for one in decision.forked] == [2, 4], "the worst first"
    assert {one.parent for one in decision.forked} <= {1, 6}
    assert {(one.at, one.budget) for one in decision.forked} == {(5, 10)}
    assert [(one.trial, one.budget) for one in decision.promoted] == [(number, 10) for number in (0, 1, 3, 5, 6, 7)]


def test_synchronous_members_go_on_if_one_for_which_they_wait_ends() -> None:
    members = Members(PBT(ready=5, synchronous=True), samples=3)
    members.reach(0, 0.0)
    members.reach(1, 1.0)
    decision = members.population.ended(2)
    assert [one.trial for one in decision.promoted] == [0] and [one.trial for one in decision.forked] == [1]
    members.population.retried(2)  # It is on its way to the first comparison again.
    members.targets |= {one.trial: one.budget for one in (*decision.promoted, *decision.forked)}
    members.reach(0, 0.0)
    members.reach(1, 2.0)
    assert {one.trial for one in members.reach(2, 1.0).promoted} == {0, 2}


def test_what_ranks_say_of_checkpoints() -> None:
    members = Members(PBT(ready=5), samples=8)
    rung = members.population.rung_of(0)
    assert (rung.iterations, rung.size, rung.places, rung.parents) == (0, 8, 6, 2)
    together = Members(PBT(ready=5, synchronous=True), samples=8).population
    assert together.rung_of(0).iterations == 5


# -- explore ---------------------------------------------------------------------------------------------


def values(space: Any, config: Mapping[str, Any], *, resample: float = 0.0, count: int = 60) -> list[Any]:
    made = explorer(space, resample=resample)
    return [made.explore(config)["x"] for _ in range(count)]


def test_numbers_are_multiplied_and_stay_within_the_space() -> None:
    assert set(values({"x": uniform(0.0, 1.0)}, {"x": 0.5})) == {0.5 * 1.2, 0.5 * 0.8}
    greatest = math.nextafter(1.0, 0.0)
    assert set(values({"x": uniform(0.0, 1.0)}, {"x": 0.9})) == {greatest, 0.9 * 0.8}
    assert set(values({"x": loguniform(0.1, 1.0)}, {"x": 0.1})) == {0.1, 0.1 * 1.2}
    assert set(values({"x": uniform(-1.0, 1.0)}, {"x": -0.5})) == {-0.6, -0.4}


def test_whole_numbers_and_steps_always_move() -> None:
    assert set(values({"x": randint(0, 10)}, {"x": 1})) == {0, 2}
    assert set(values({"x": randint(0, 10)}, {"x": 0})) == {0, 1}
    assert set(values({"x": randint(-5, 6)}, {"x": -1})) == {-2, 0}
    assert set(values({"x": lograndint(1, 1000)}, {"x": 100})) == {80, 120}
    assert set(values({"x": randint(0, 100, 10)}, {"x": 20})) == {10, 30}
    assert set(values({"x": uniform(0.0, 0.5, step=0.25)}, {"x": 0.25})) == {0.0, 0.5}
    assert set(values({"x": randint(7, 8)}, {"x": 7})) == {7}


def test_choices_step_to_a_neighbour() -> None:
    assert set(values({"x": ["a", "b", "c", "d"]}, {"x": "b"})) == {"a", "c"}
    assert set(values({"x": ["a", "b", "c"]}, {"x": "a"})) == {"a", "b"}
    assert set(values({"x": [True, False]}, {"x": True})) == {True, False}


def test_the_distributions_of_others() -> None:
    tune = pytest.importorskip("ray.tune")
    assert set(values({"x": tune.choice([1, 10, 100])}, {"x": 10})) == {1, 100}
    assert set(values({"x": tune.quniform(0.0, 1.0, 0.5)}, {"x": 0.5})) == {0.0, 1.0}
    assert set(values({"x": tune.randn(10, 2)}, {"x": 10.0})) == {12.0, 8.0}
    optuna = pytest.importorskip("optuna")
    assert set(values({"x": optuna.distributions.IntDistribution(1, 8)}, {"x": 1})) == {1, 2}


@given(resample=st.sampled_from([0.25, 1.0]), value=st.floats(0.0, 1.0, exclude_max=True))
def test_values_are_drawn_anew(resample: float, value: float) -> None:
    found = values({"x": uniform(0.0, 1.0)}, {"x": value}, resample=resample, count=200)
    new = len(set(found) - {value * 0.8, value * 1.2})
    assert all(0.0 <= one < 1.0 for one in found)
    assert new > 20 and (new > 190) == (resample == 1.0)


def test_conditions_constants_and_nested_names() -> None:
    space = {
        "optimizer": ["sgd", "adam"],
        "momentum": when("optimizer", "sgd", uniform(0.0, 1.0)),
        "model": {"depth": randint(1, 9), "name": "resnet"},
    }
    made = explorer(space)
    seen = [made.explore({"optimizer": "adam", "model": {"depth": 4, "name": "resnet"}}) for _ in range(40)]
    assert {one["model"]["depth"] for one in seen} == {3, 5} and {one["model"]["name"] for one in seen} == {"resnet"}
    assert all(("momentum" in one) == (one["optimizer"] == "sgd") for one in seen)
    assert len({one["momentum"] for one in seen if "momentum" in one}) > 5, "drawn where there was none"
