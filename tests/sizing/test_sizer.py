"""The sizer's decisions, with forecasts given as functions."""

import math

import numpy as np
import pytest

from fluid.errors import InvalidFieldError
from fluid.planners.instance import EndDistribution
from fluid.sizing.goals import Goals
from fluid.sizing.sizer import EndOn, Sizer


def shared(work: float, spread: float = 0.0, longest: float = 0.0) -> EndOn:
    """Work in device-seconds that any number of devices shares, with a share of spread; no shorter than the longest."""
    factors = np.linspace(1.0 - spread, 1.0 + spread, 11)
    return lambda devices: EndDistribution.of_draws(max(longest, work / devices) * factors)


def unknown(devices: int) -> None:
    return None


class TestDeadline:
    def test_fewest_devices_whose_odds_suffice(self) -> None:
        end_on = shared(3600.0, spread=0.2)
        sizing = Sizer(Goals(deadline=1000.0), most=64, provision_s=0.0).decide(0.0, 0, end_on, useful=64)
        margin = 0.95 * 1000.0
        assert end_on(sizing.devices).odds_by(margin) >= 0.9 > end_on(sizing.devices - 1).odds_by(margin)
        assert sizing.meets and sizing.earliest_s is None and sizing.odds >= 0.9

    @pytest.mark.parametrize("held", [0, 1, 2, 3, 4])
    def test_what_is_held_does_not_change_how_many_suffice(self, held: int) -> None:
        sizer = Sizer(Goals(deadline=1000.0), most=64, provision_s=0.0)
        assert sizer.decide(0.0, held, shared(3600.0), useful=64).devices == math.ceil(3600.0 / 950.0)

    def test_asks_for_few_forecasts(self) -> None:
        asked: list[int] = []

        def end_on(devices: int) -> EndDistribution:
            asked.append(devices)
            return shared(3600.0)(devices)

        Sizer(Goals(deadline=1000.0), most=1024).decide(0.0, 0, end_on, useful=1024)
        assert len(asked) == len(set(asked)) <= 13
        asked.clear()
        # What is held is enough.
        Sizer(Goals(deadline=1000.0), most=1024).decide(0.0, 4, end_on, useful=1024)
        assert asked == [4]

    def test_a_deadline_that_cannot_be_met_is_said_with_the_earliest_that_can(self) -> None:
        sizing = Sizer(Goals(deadline=100.0), most=8, provision_s=0.0).decide(0.0, 8, shared(3600.0), useful=8)
        assert sizing.meets is False and sizing.devices == 8
        assert sizing.earliest_s == pytest.approx(450.0)

    def test_a_deadline_that_is_met_without_a_margin_is_no_missed_one(self) -> None:
        sizing = Sizer(Goals(deadline=460.0), most=8, provision_s=0.0).decide(0.0, 0, shared(3600.0), useful=8)
        assert sizing.devices == 8 and sizing.meets and sizing.earliest_s is None

    def test_devices_that_would_not_help_a_missed_deadline_are_not_held(self) -> None:
        end_on = shared(3600.0, longest=900.0)
        sizing = Sizer(Goals(deadline=100.0), most=32, provision_s=0.0).decide(0.0, 0, end_on, useful=32)
        assert sizing.meets is False and sizing.devices == 4

    def test_never_more_than_are_useful(self) -> None:
        sizing = Sizer(Goals(deadline=1000.0), most=16).decide(0.0, 2, shared(7200.0), useful=3)
        assert sizing.devices == 3

    def test_devices_that_must_come_first_come_late(self) -> None:
        goals = Goals(deadline=1000.0)
        at_once = Sizer(goals, most=64, provision_s=0.0).decide(0.0, 1, shared(3600.0), useful=64)
        late = Sizer(goals, most=64, provision_s=300.0).decide(0.0, 1, shared(3600.0), useful=64)
        assert at_once.devices == 4 and late.devices > at_once.devices

    def test_the_deadline_counts_from_its_beginning(self) -> None:
        sizer = Sizer(Goals(deadline=1000.0), most=64, provision_s=0.0)
        assert [sizer.decide(now, 0, shared(1800.0), useful=64).devices for now in (0.0, 500.0, 900.0)] == [2, 4, 19]


class TestHysteresis:
    def test_busy_devices_are_kept(self) -> None:
        sizing = Sizer(Goals(deadline=1000.0), most=64).decide(0.0, 16, shared(3600.0), useful=64)
        assert sizing.devices == 16 and not sizing.interrupts

    def test_devices_that_were_asked_for_and_are_not_needed_any_more_are_not_waited_for(self) -> None:
        sizer = Sizer(Goals(deadline=1000.0), most=64, provision_s=0.0)
        assert sizer.decide(0.0, 3, shared(3600.0), useful=64, asked=8).devices == 4
        assert sizer.decide(0.0, 5, shared(3600.0), useful=64, asked=8).devices == 5

    def test_idle_devices_are_given_back_if_they_can_come_back_in_time(self) -> None:
        goals = Goals(deadline=1000.0)
        end_on = shared(3600.0)
        kept = Sizer(goals, most=8, provision_s=600.0).decide(0.0, 8, end_on, useful=2)
        given_back = Sizer(goals, most=8, provision_s=60.0).decide(0.0, 8, end_on, useful=2)
        assert kept.devices == 8 and given_back.devices == 2 and not given_back.interrupts

    def test_devices_asked_for_count_as_held(self) -> None:
        sizer = Sizer(Goals(deadline=1000.0), most=64, provision_s=10.0)
        asked = sizer.decide(0.0, 2, shared(3600.0), useful=64).devices
        assert sizer.decide(1.0, 2, shared(3600.0), useful=64, asked=asked - 2).devices == asked

    def test_all_may_be_lost_while_others_are_to_come(self) -> None:
        def end_on(devices: int) -> EndDistribution | None:
            assert devices >= 1
            return shared(3600.0)(devices)

        assert Sizer(Goals(deadline=8000.0), most=8).decide(0.0, 0, end_on, useful=8, asked=6).devices == 1


class TestUnmeasured:
    def test_a_few_devices_measure(self) -> None:
        sizing = Sizer(Goals(deadline=1000.0), most=64).decide(0.0, 0, unknown, useful=64)
        assert 1 <= sizing.devices < 64
        assert sizing.odds is None and sizing.meets is None and sizing.cost_usd is None

    def test_what_is_held_is_kept(self) -> None:
        assert Sizer(Goals(deadline=1000.0), most=64).decide(0.0, 30, unknown, useful=64).devices == 30

    def test_more_measure_the_longer_it_takes(self) -> None:
        sizer = Sizer(Goals(deadline=1000.0), most=64)
        counts = [sizer.decide(now, 0, unknown, useful=64).devices for now in (0.0, 25.0, 45.0, 500.0)]
        assert counts == sorted(set(counts)) and counts[-1] == 64

    def test_no_more_than_are_useful(self) -> None:
        assert Sizer(Goals(deadline=1000.0), most=64).decide(900.0, 0, unknown, useful=2).devices == 2


class TestBudget:
    def test_all_that_are_useful_without_a_deadline(self) -> None:
        goals = Goals(budget_usd=100.0, price_per_device_hour=1.0)
        sizing = Sizer(goals, most=16).decide(0.0, 1, shared(36000.0), useful=12)
        assert sizing.devices == 12 and sizing.within_budget and sizing.cost_usd == pytest.approx(10.0)

    def test_no_more_than_the_budget_pays(self) -> None:
        goals = Goals(budget_usd=1.5, price_per_device_hour=1.0)
        # Each device beyond the second waits for the longest trial.
        end_on = shared(3600.0, longest=1800.0)
        sizing = Sizer(goals, most=16).decide(0.0, 1, end_on, useful=16)
        assert sizing.within_budget

    def test_a_budget_that_does_not_suffice_is_said(self) -> None:
        goals = Goals(deadline=1000.0, budget_usd=0.5, price_per_device_hour=1.0)
        sizing = Sizer(goals, most=16, provision_s=0.0).decide(0.0, 8, shared(3600.0), useful=16)
        assert sizing.within_budget is False and sizing.cost_usd == pytest.approx(1.0)
        assert sizing.devices == 1 and sizing.meets is False

    def test_it_is_said_when_the_money_ends(self) -> None:
        goals = Goals(budget_usd=2.0, price_per_device_hour=3.6)
        sizer = Sizer(goals, most=2)
        sizing = sizer.decide(0.0, 2, shared(36000.0), useful=2, spent_device_s=1000.0)
        assert sizing.devices == 1
        # 1 dollar is left, for the two devices that are still held.
        assert sizing.money_ends_in_s == pytest.approx(500.0)
        assert Sizer(Goals(deadline=9.0), most=2).decide(0.0, 2, shared(1.0), useful=2).money_ends_in_s is None


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidFieldError, match="least"):
        Sizer(Goals(), most=2, least=3)
    with pytest.raises(InvalidFieldError, match="provision_s"):
        Sizer(Goals(), most=2, provision_s=-1.0)


def test_mean_of_an_end() -> None:
    assert EndDistribution.certain(7.0).mean == 7.0
    assert EndDistribution.of_draws([1.0, 2.0, 6.0]).mean == pytest.approx(0.5 * 1.5 + 0.5 * 4.0)
