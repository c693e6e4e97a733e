"""Demand: how many further devices the waiting trials could use, and which devices are idle since when."""

from __future__ import annotations

import pytest
from engine_helpers import Hand, Known

from fluid.engine.commands import StartLane
from fluid.engine.events import DeviceDraining, SessionDraining


def names(count: int, prefix: str = "t") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_without_devices_each_trial_counts_one() -> None:
    hand = Hand(0)
    hand.submit(*names(3))
    assert (hand.state.demand.devices, hand.state.demand.trials_wait) == (3, True)
    hand.add_device(0)
    assert hand.state.demand.devices == 0, "one device holds them all"


def test_a_waiting_trial_of_width_one_counts_one_device() -> None:
    hand = Hand(2, profile=Known(packing=1))
    hand.submit(*names(5), max_width=1)
    assert hand.state.demand.devices == 3
    hand.stop("t4")
    assert hand.state.demand.devices == 2
    hand.add_device(2)
    hand.add_device(3)
    assert (hand.state.demand.devices, hand.state.demand.trials_wait) == (0, False)


@pytest.mark.parametrize(("trials", "devices"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_waiting_trials_that_are_to_be_packed_share_a_device(trials: int, devices: int) -> None:
    hand = Hand(1, planner="static", profile=Known(packing=4))
    hand.submit(*names(trials), max_width=1)
    assert hand.state.demand.devices == devices


def test_an_elastic_trial_counts_one_and_none_once_it_runs() -> None:
    hand = Hand(1, profile=Known(packing=1, width=4))
    hand.submit("a", "b", "c", max_width=4, budget=9)
    assert hand.state.demand.devices == 2
    hand.add_device(1)
    hand.add_device(2)
    assert hand.state.demand.devices == 0, "they run, though each could use three devices"


def test_a_trial_that_can_go_on_in_one_lane_only_does_not_count() -> None:
    hand = Hand(1, profile=Known(packing=1))
    hand.submit("kept", budget=1, can_save=False)
    hand.started("kept")
    hand.iterate("kept")
    hand.submit("other", budget=9, max_width=1)
    hand.extend("kept")
    assert hand.states() == {"kept": "QUEUED", "other": "STARTING"}
    assert (hand.state.demand.devices, hand.state.demand.trials_wait) == (0, False)


def test_a_session_that_drains_wants_nothing() -> None:
    hand = Hand(1, profile=Known(packing=1))
    hand.submit(*names(3), max_width=1)
    assert hand.state.demand.devices == 2
    hand.do(SessionDraining(hand.now, 100.0))
    assert hand.state.demand.devices == 0 and hand.state.demand.idle_since == {}


def test_devices_are_idle_since_the_last_trial_left_them_the_longest_first() -> None:
    hand = Hand(2, profile=Known(packing=1))
    assert list(hand.state.demand.idle_since.items()) == [(0, 0.0), (1, 0.0)]
    hand.submit("a", "b", budget=2, max_width=1)
    for trial_id in ("a", "b"):
        hand.started(trial_id)
    assert hand.state.demand.idle_since == {}
    device_of_b = hand.state.lanes[hand.lane("b")].device_id
    hand.iterate("a", 2)
    hand.iterate("b", 2)
    hand.now = 7.0
    hand.add_device(5)
    assert list(hand.state.demand.idle_since.items()) == [(1 - device_of_b, 2.0), (device_of_b, 4.0), (5, 7.0)]
    hand.lose_device(0)
    assert set(hand.state.demand.idle_since) == {1, 5}


def test_a_device_that_drains_is_not_idle() -> None:
    hand = Hand(2)
    hand.submit("a", budget=1)
    hand.started("a")
    hand.iterate("a")  # its state is kept, and has to be saved
    device = next(index for index in (0, 1) if list(hand.state.lanes.kept_on(index)))
    hand.do(DeviceDraining(hand.now, device, 100.0))
    assert set(hand.state.demand.idle_since) == {1 - device}


@pytest.mark.parametrize(
    ("spec", "may_go"),
    [({}, True), ({"can_save": False}, True), ({"can_save": False, "follow_up_iterations": 3}, False)],
)
def test_a_device_may_go_unless_it_keeps_what_cannot_be_saved_and_may_run_again(
    spec: dict[str, object], may_go: bool
) -> None:
    hand = Hand(1)
    hand.submit("a", budget=1, **spec)
    hand.started("a")
    hand.iterate("a")
    assert list(hand.state.lanes.kept_on(0)) and hand.state.demand.may_give_back(0) is may_go


@pytest.mark.parametrize("hosts", [("elsewhere", "elsewhere"), ("localhost", "elsewhere")])
@pytest.mark.parametrize("follow_up", [0, 2])
def test_the_last_device_of_a_machine_stays_while_only_that_has_a_state_that_is_needed(
    hosts: tuple[str, str], follow_up: int
) -> None:
    hand = Hand(0)
    for index, host in enumerate(hosts):
        for command in hand.add_device(index, host=host):
            if isinstance(command, StartLane):
                hand.ready(command.lane_id)
    hand.submit("other", budget=9, max_width=1)
    hand.submit("a", budget=1, max_width=1, follow_up_iterations=follow_up)
    hand.started("other")
    hand.started("a")
    lane_id = hand.lane("a")
    assert hand.state.lanes[lane_id].device_id == 1
    hand.iterate("a")
    assert list(hand.state.lanes.kept_on(1))
    is_needed = follow_up > 0 and hosts[0] != hosts[1]
    assert hand.state.demand.may_give_back(1) is not is_needed
    hand.saved("a", lane_id, 1, dropped=True, host="elsewhere", in_memory=True)
    assert not list(hand.state.lanes.kept_on(1))
    assert hand.state.demand.may_give_back(1) is not is_needed
    hand.saved("a", lane_id, 1, host="elsewhere")
    assert hand.state.demand.may_give_back(1), "it is on a disk that stays"


def test_a_device_whose_lane_is_called_may_not_go() -> None:
    hand = Hand(1)
    hand.submit("a", budget=1)
    hand.started("a")
    hand.iterate("a")
    lane_id = next(iter(hand.state.lanes.kept_on(0)))[0]
    hand.call("a")
    assert not hand.state.demand.may_give_back(0)
    hand.called("a", lane_id)
    assert hand.state.demand.may_give_back(0)
