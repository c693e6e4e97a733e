"""The refiner: which of a re-plan's width changes are made, and that no predicted end is later for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from planning_helpers import CLOSE, Case, Scene, cases, scenes

import fluid.planners.refiner
from fluid.planners.arrangement import Running, WidthChange
from fluid.planners.instance import Instance
from fluid.planners.portfolio import candidates
from fluid.planners.refiner import MOST_ROLLED_OUT, Appraisal, Ends, Refined, Waiting, appraise, ends_after, greedy
from fluid.planners.rollout import roll_out
from fluid.planners.water_fill import WaterFill


def running(remaining: list[float], widths: list[float], **columns: Any) -> Running:
    """Trials of width at most 1 on a device each, unless ``device`` and ``residents`` say otherwise."""
    m = len(remaining)
    values: dict[str, Any] = {
        "rows": np.arange(10, 10 + m),
        "residents": np.ones(m, dtype=np.int64),
        "device": np.arange(m),
        "speed": np.ones(m),
        "alpha": np.full(m, 1.2),
        "beta": np.ones(m),
        "c": np.full(m, 4),
        "d": np.full(m, 8),
        "free": 0,
        "n": m,
        "epsilon": 0.0,
    }
    found = {key: np.array(value) if isinstance(value, list) else value for key, value in columns.items()}
    return Running(remaining=np.array(remaining), widths=np.array(widths), **{**values, **found})


class Wants:
    """A re-planner that wants certain changes once, and none later."""

    moves_only_devices = True

    def __init__(self, *changes: WidthChange) -> None:
        self._changes = list(changes)
        self._asked = False

    def replan(self, running: Running) -> list[WidthChange]:
        first, self._asked = not self._asked, True
        return self._changes if first else []

    def make_room(self, running: Running, waiting: Any) -> list[WidthChange]:
        return self.replan(running)


# -- what a change is worth -------------------------------------------------------------------------------------------


def test_a_gain_has_the_own_pause_taken_off_and_a_stall_is_of_all_beside() -> None:
    snapshot = running(
        [100.0, 40.0, 30.0], [0.5, 0.5, 1.0], device=[0, 0, 1], residents=[2, 2, 1], free=1, n=3, epsilon=5.0
    )
    leaves, widens, opens = appraise(snapshot, [WidthChange(10, 1.0), WidthChange(12, 2.0), WidthChange(12, 0.5)])
    assert leaves.gain == pytest.approx(100.0 * 1.2 - 100.0 - 5.0)
    assert (leaves.stall, leaves.devices) == (10.0, 1), "the other one on its device stands still, too"
    assert widens.gain == pytest.approx(30.0 - 15.0 - 5.0)
    assert (widens.stall, widens.devices) == (5.0, 1)
    assert opens == (WidthChange(12, 0.5), 0.0, 0.0, 0, 0.0), "it stays where it is"


def test_an_uncertain_gain_has_noise() -> None:
    snapshot = running([100.0], [1.0], free=1, n=2, epsilon=5.0, sigma=[0.5])
    assert appraise(snapshot, [WidthChange(10, 2.0)])[0].noise == pytest.approx(1.0)


# -- the greedy choice ------------------------------------------------------------------------------------------------


def appraisal(row: int, gain: float, stall: float, devices: int = 1, noise: float = 0.0) -> Appraisal:
    return Appraisal(WidthChange(row, 2.0), gain, stall, devices, noise)


def test_what_gains_less_than_others_stand_still_is_rejected() -> None:
    snapshot = running([9.0] * 3, [0.25] * 3, device=[0, 1, 2], residents=[4, 4, 4], free=3, n=6, epsilon=2.0)
    wanted = [appraisal(10, 7.0, 8.0), appraisal(11, 6.0, 8.0), appraisal(12, 5.0, 8.0)]
    assert greedy(snapshot, wanted) == {10}, "three others stand still for 2 s each: a gain of 6 s is not above that"


def test_two_changes_on_a_device_share_a_stall() -> None:
    snapshot = running([9.0] * 2, [0.25] * 2, device=[0, 0], residents=[4, 4], free=2, n=3, epsilon=2.0)
    assert greedy(snapshot, [appraisal(10, 7.0, 8.0), appraisal(11, 1.0, 8.0)]) == {10, 11}


def test_devices_of_a_rejected_change_are_not_given_up() -> None:
    snapshot = running([9.0] * 2, [4.0, 1.0], n=5, epsilon=3.0)
    gives = appraisal(10, -5.0, 3.0, devices=-3)
    assert greedy(snapshot, [gives, appraisal(11, 4.0, 3.0, devices=3)]) == {10, 11}
    assert greedy(snapshot, [gives, appraisal(11, 2.0, 3.0, devices=3)]) == set()
    assert greedy(snapshot, [appraisal(11, 4.0, 3.0, devices=3)]) == set(), "there are no devices for it"


def test_gains_below_their_noise_are_none() -> None:
    snapshot = running([9.0], [1.0], free=1, n=2, epsilon=3.0)
    assert greedy(snapshot, [appraisal(10, 0.5, 3.0, noise=0.4)]) == {10}
    assert greedy(snapshot, [appraisal(10, 0.5, 3.0, noise=0.5)]) == set()


# -- with a lookahead -------------------------------------------------------------------------------------------------


@given(scene=scenes())
def test_without_pauses_all_is_done_that_the_replanner_wants(scene: Scene) -> None:
    snapshot = replace(scene.running, epsilon=0.0)
    assert Refined(WaterFill()).replan(snapshot) == WaterFill().replan(snapshot)
    assert Refined(WaterFill()).refine(snapshot).rejected == ()


@settings(max_examples=40)
@given(case=cases(priorities=True))
def test_no_rollout_is_longer_with_the_refiner(case: Case) -> None:
    candidate = next(candidates(case.instance))
    unrefined = roll_out(case.instance, candidate)
    refined = roll_out(case.instance, replace(candidate, replanner=Refined(candidate.replanner)))
    assert refined.now <= unrefined.now * (1 + 4 * CLOSE)


def test_a_widening_waits_for_the_departure_that_makes_it_pay_once() -> None:
    # The long trial would be widened to two devices now and to four at 2 s, for a pause of 8 s each time.
    snapshot = running([60.0, 2.0, 2.0], [1.0, 1.0, 1.0], free=1, n=4, epsilon=8.0)
    wanted = WaterFill().replan(snapshot)
    assert wanted == [WidthChange(10, 2.0)]
    refinement = Refined(WaterFill()).refine(snapshot)
    assert refinement.kept == []
    assert [each.change for each in refinement.rejected] == wanted
    assert ends_after(snapshot, [], WaterFill()).last == pytest.approx(2.0 + 8.0 + 58.0 / 4)
    assert ends_after(snapshot, wanted, WaterFill()).last > 2.0 + 8.0 + 58.0 / 4


def test_trials_that_wait_get_devices_only_if_the_pause_pays() -> None:
    waiting = Waiting(Instance.build([3.0], 2, c=1, d=1, epsilon=9.0), np.array([1.0]))
    narrows = WidthChange(10, 1.0)
    soon = running([20.0], [2.0], n=2, c=[1], epsilon=9.0)  # The two devices are free in 10 s anyway.
    assert Refined(Wants(narrows)).refine_room(soon, waiting).kept == []
    late = running([2000.0], [2.0], n=2, c=[1], beta=[1.9], epsilon=9.0)  # Two devices hardly speed it up.
    assert Refined(Wants(narrows)).refine_room(late, waiting).kept == [narrows]


def test_many_trials_are_not_rolled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fluid.planners.refiner, "ends_after", lambda *_, **__: pytest.fail("it was rolled out"))
    m = MOST_ROLLED_OUT + 1
    snapshot = running([100.0] * m, [1.0] * m, free=2, n=m + 2, epsilon=5.0)
    wanted = [WidthChange(10, 2.0), WidthChange(11, 2.0)]
    assert Refined(Wants(*wanted)).refine(snapshot).kept == wanted


def test_ends_compare_by_the_last_and_then_by_all() -> None:
    assert Ends(9.0, 30.0).are_earlier(Ends(10.0, 20.0))
    assert Ends(10.0, 19.0).are_earlier(Ends(10.0, 20.0))
    assert not Ends(10.0, 20.0).are_earlier(Ends(10.0, 20.0))
