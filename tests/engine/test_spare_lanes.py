"""Spare lanes: where they are, who gets them, and when there is none."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only
from engine_session import random_session

from fluid.engine import tuning
from fluid.engine.commands import Command, StartLane, StartTrial, StopLane
from fluid.engine.events import Alarm, DeviceDraining, LaneLost, LaneReady, SessionDraining
from fluid.errors import InvalidFieldError
from fluid.resources import MemoryNeed

GB = 1e9


def session(*names: str, devices: int, budget: int = 100, **options: Any) -> Hand:
    """A session in which these trials run, on a device each, and spare lanes were not looked at."""
    profile = options.pop("profile", None) or Known(packing=1, width=1)
    hand = Hand(devices=devices, profile=profile, **{"spare_lanes": 1, **options})
    for name in names:
        hand.submit(name, budget=budget)
        hand.started(name)
    return hand


def look(hand: Hand) -> list[Command]:
    """The alarm at which spare lanes are looked at."""
    assert hand.state.alarm_at is not None
    hand.now = max(hand.now, hand.state.alarm_at)
    return hand.do(Alarm(hand.now))


def device_of(hand: Hand, name: str) -> int:
    return int(hand.state.lanes[hand.lane(name)].device_id)


def test_the_trial_of_a_killed_lane_gets_the_spare_one_at_once_and_another_one_is_started() -> None:
    hand = session("a", devices=1)
    spare = only(look(hand), StartLane)
    assert spare.device_id == 0 and hand.now == tuning.SPARE_AFTER_S
    hand.ready(spare.lane_id)
    hand.iterate("a", 3)
    commands = hand.lose(hand.lane("a"), culprit="a")
    assert only(commands, StartTrial).lane_ids == (spare.lane_id,)
    assert only(commands, StartLane).device_id == 0
    assert none(look(hand), StartLane) and len(hand.state.lanes) == 2


def test_without_spare_lanes_nothing_is_started_ahead_and_no_alarm_is_asked_for() -> None:
    hand = session("a", devices=1, spare_lanes=0)
    assert hand.state.alarm_at is None or hand.state.alarm_at > tuning.SPARE_LOOK_S
    killed = hand.lose(hand.lane("a"), culprit="a")
    assert none(killed, StartTrial), "its lane is not ready"
    assert len(hand.state.lanes) == 1


def test_the_spare_lane_is_on_the_device_of_the_longest_path_and_moves_only_for_a_much_longer_one() -> None:
    hand = session("a", devices=3)
    hand.submit("b", budget=50, follow_up_iterations=100)
    hand.submit("c", budget=60)
    for name in "bc":
        hand.started(name)
    spare = only(look(hand), StartLane)
    assert spare.device_id == device_of(hand, "b"), "it leads to 150 iterations"
    hand.ready(spare.lane_id)
    hand.iterate("b", 49)  # It has 101 left, and the first one 100.
    assert none(look(hand), StartLane)
    hand.extend("a", 40)
    assert none(look(hand), StartLane), "140 are not much more"
    hand.extend("a", 40)
    commands = look(hand)
    assert only(commands, StopLane).lane_id == spare.lane_id
    assert only(commands, StartLane).device_id == device_of(hand, "a")


def test_an_idle_lane_of_an_idle_device_is_a_spare_one_and_the_trial_goes_there() -> None:
    hand = session("a", devices=2)
    assert none(look(hand), StartLane)
    device = device_of(hand, "a")
    commands = hand.lose(hand.lane("a"), culprit="a")
    started = only(commands, StartTrial)
    assert hand.state.lanes[started.lane_ids[0]].device_id == 1 - device
    assert only(commands, StartLane).device_id == device


def test_a_lane_that_a_trial_has_left_on_a_device_in_use_is_a_spare_one() -> None:
    hand = Hand(devices=1, profile=Known(packing=2), spare_lanes=1)
    hand.submit("a", "b", budget=100)
    for command in [each for each in hand.log if isinstance(each, StartLane)][1:]:
        hand.ready(command.lane_id)
    for name in "ab":
        hand.started(name)
    spare = only(look(hand), StartLane)
    hand.ready(spare.lane_id)
    hand.do(Alarm(hand.now + tuning.SPARE_LOOK_S))
    assert len(hand.state.lanes) == 3
    hand.iterate("b", 100)  # Its lane is idle now, and so are two.
    hand.now += tuning.SPARE_LOOK_S
    assert none(look(hand), StartLane)


def test_each_host_has_as_many_spare_lanes_as_were_asked_for_and_a_device_has_one() -> None:
    hand = Hand(devices=0, profile=Known(packing=1, width=1), spare_lanes=2)
    for index in range(5):
        for command in hand.add_device(index, host="here" if index < 3 else "there"):
            if isinstance(command, StartLane):
                hand.ready(command.lane_id)
    for number, name in enumerate("abcde"):
        hand.submit(name, budget=100 + number)
        hand.started(name)
    devices = [command.device_id for command in look(hand) if isinstance(command, StartLane)]
    assert sorted(devices)[-2:] == [3, 4] and len(devices) == len(set(devices)) == 4
    left = next(iter({0, 1, 2} - set(devices)))
    shortest = min((name for name in "abcde" if device_of(hand, name) < 3), key=lambda name: hand.trial(name).limit)
    assert device_of(hand, shortest) == left


def test_none_is_started_for_a_trial_that_ends_soon_or_is_not_tried_again() -> None:
    assert none(look(session("a", devices=1, budget=int(tuning.LEAST_SPARED_S) - 1)), StartLane)
    assert none(look(session("a", devices=1, max_failures=0)), StartLane)
    assert not none(look(session("a", devices=1, budget=int(tuning.LEAST_SPARED_S))), StartLane)


def test_none_is_started_before_the_trials_lanes_are_ready_and_their_pace_is_known() -> None:
    hand = Hand(devices=1, ready=False, spare_lanes=1)
    hand.submit("a", budget=100)
    assert none(look(hand), StartLane)
    hand.ready(0)
    assert none(look(hand), StartLane), "it is being set up"
    hand.started("a")
    begun = hand.now
    assert not none(look(hand), StartLane) and hand.now - begun <= tuning.SPARE_LOOK_SOON_S


def test_what_comes_or_goes_brings_the_next_look_forward() -> None:
    hand = session("a", devices=1)
    hand.ready(only(look(hand), StartLane).lane_id)
    assert none(look(hand), StartLane)
    assert hand.state.alarm_at is not None and hand.state.alarm_at > hand.now + tuning.SPARE_AFTER_S
    hand.lose(hand.lane("a"), culprit="a")
    assert hand.state.alarm_at == hand.now + tuning.SPARE_AFTER_S


def test_memory_and_the_limit_of_processes_keep_a_spare_lane_away() -> None:
    need = MemoryNeed(30 * GB, 10 * GB)

    def shared(memory: float, most: int | None = None) -> list[Command]:
        profile = Known(packing=2, width=1, memory=need)
        hand = Hand(devices=1, memory=memory, profile=profile, ready=False, spare_lanes=1)
        hand.state.lanes.most_per_device = most
        hand.do(LaneReady(hand.now, 0, own_bytes=2 * GB))
        hand.submit("a", budget=100)
        hand.started("a")
        return look(hand)

    watermark = Hand(devices=1, memory=1.0).state.memory.watermark
    assert only(shared(43 * GB / watermark), StartLane).device_id == 0
    assert none(shared(41 * GB / watermark), StartLane), "the trial takes 40, and the lane's context 2"
    assert none(shared(43 * GB / watermark, most=1), StartLane)
    assert only(shared(43 * GB / watermark, most=2), StartLane).device_id == 0


def test_a_trial_that_needs_the_memory_of_a_spare_lane_has_it_ended() -> None:
    hand = Hand(devices=1, memory=50 * GB, profile=Known(packing=1, width=1), ready=False, spare_lanes=1)
    hand.do(LaneReady(hand.now, 0, own_bytes=5 * GB))
    hand.submit("a", budget=100, memory=MemoryNeed(10 * GB, 0.0))
    hand.started("a")
    spare = only(look(hand), StartLane)
    hand.do(LaneReady(hand.now, spare.lane_id, own_bytes=5 * GB))
    usable = hand.state.memory.usable_bytes(0)
    assert usable is not None
    hand.submit("b", budget=100, memory=MemoryNeed(usable - GB, 0.0))
    hand.stop("a")
    commands = hand.released("a", hand.lane("a"))
    assert only(commands, StopLane) and hand.state.occupancy.held.get(hand.trial("b").row) == (0,)
    hand.started("b")
    assert none(look(hand), StartLane), "the trial leaves no room"


def test_a_spare_lane_that_cannot_start_costs_its_device_nothing_and_is_not_tried_again_soon() -> None:
    hand = session("a", devices=1)
    spare = only(look(hand), StartLane)
    commands = hand.do(LaneLost(hand.now, spare.lane_id, "cannot use its device", failed_position=0))
    assert none(commands, StartLane) and not hand.state.occupancy.caps and hand.states() == {"a": "RUNNING"}
    assert none(look(hand), StartLane)
    hand.now += tuning.SPARE_REFUSED_S
    assert only(look(hand), StartLane).device_id == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_drain_ends_the_spare_lane(whole: bool) -> None:
    hand = session("a", devices=1)
    spare = only(look(hand), StartLane)
    hand.ready(spare.lane_id)
    until = hand.now + 1000.0
    hand.do(SessionDraining(hand.now, until) if whole else DeviceDraining(hand.now, 0, until))
    assert only(look(hand), StopLane).lane_id == spare.lane_id


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="spare_lanes"):
        Hand(spare_lanes=-1)


@pytest.mark.parametrize("seed", range(30))
def test_random_sessions_with_spare_lanes_keep_their_invariants_and_end(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPARE_AFTER_S", "LEAST_SPARED_S"):  # The trials of these sessions are short.
        monkeypatch.setattr(tuning, name, 0.0)
    monkeypatch.setattr(tuning, "SPARE_LOOK_S", 1.0)
    random_session(seed, steps=200, spare_lanes=1 + seed % 2)
