"""Trials of several devices on unlike ones: a trial runs at the pace of its slowest device."""

from __future__ import annotations

from engine_helpers import Hand, Known

from fluid.engine.commands import StartLane
from fluid.engine.events import Alarm, LaneReady


def hand_of(*speeds: float) -> Hand:
    hand = Hand(0, profile=Known(packing=1))
    for index, speed in enumerate(speeds):
        for command in hand.add_device(index, speed=speed):
            if isinstance(command, StartLane):
                hand.do(LaneReady(hand.now, command.lane_id))
    return hand


def held(hand: Hand, trial_id: str) -> tuple[int, ...]:
    devices: tuple[int, ...] = hand.state.occupancy.held.get(hand.trial(trial_id).row, ())
    return devices


def gang(hand: Hand, trial_id: str, budget: int) -> None:
    hand.submit(trial_id, devices=2, gang=True, profile_key="gang", budget=budget)


def test_an_elastic_trial_leaves_out_devices_on_which_it_would_be_slower() -> None:
    hand = hand_of(4.0, 4.0, 1.0, 1.0)
    hand.submit("a", budget=10, max_width=4)
    assert held(hand, "a") == (0, 1)
    assert hand.trial("a").width == 2.0
    hand.started("a")
    for _ in range(4):
        hand.iterate("a", seconds=0.125)
        assert held(hand, "a") == (0, 1), "nor does it take them later"


def test_an_elastic_trial_takes_slower_devices_where_they_make_it_faster() -> None:
    hand = hand_of(1.1, 1.0, 1.0, 1.0)
    hand.submit("a", budget=10, max_width=4)
    assert held(hand, "a") == (0, 1, 2, 3)


def test_a_gang_waits_for_a_second_fast_device_where_it_then_ends_sooner() -> None:
    hand = hand_of(4.0, 4.0, 1.0)
    hand.submit("s", devices=1, budget=12)
    assert held(hand, "s") == (0,), "3 s at speed 4"
    gang(hand, "short", 3)
    assert held(hand, "short") == (1, 2), "3 s at speed 1; or 3.75 s with the wait for device 0"
    hand.stop("short")
    hand = hand_of(4.0, 4.0, 1.0)
    hand.submit("s", devices=1, budget=12)
    gang(hand, "long", 100)
    assert hand.states()["long"] == "QUEUED" and hand.state.placing.reserved_devices == {0, 1}
    lane = hand.lane("s")
    hand.started("s")
    hand.stop("s")
    hand.released("s", lane)
    assert held(hand, "long") == (0, 1)


def test_a_gang_waits_no_longer_than_was_predicted() -> None:
    hand = hand_of(4.0, 4.0, 1.0)
    hand.submit("s", devices=1, budget=12)
    hand.started("s")
    gang(hand, "long", 100)
    assert hand.states()["long"] == "QUEUED"
    hand.extend("s", 1000)
    hand.now = 3.5
    hand.add_device(3, speed=0.5)
    assert held(hand, "long") == (1, 2), "device 0 is not idle after 3 s"


def test_a_gang_is_woken_when_it_has_waited_for_as_long_as_was_predicted() -> None:
    hand = hand_of(4.0, 4.0, 1.0)
    hand.submit("s", devices=1, budget=12)
    hand.started("s")
    gang(hand, "long", 100)
    hand.extend("s", 1000)
    assert hand.state.alarm_at == 3.0, "nothing else need happen until then"
    hand.now = 3.0
    hand.do(Alarm(hand.now))
    assert held(hand, "long") == (1, 2)
