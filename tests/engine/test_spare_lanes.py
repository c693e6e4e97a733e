"""Spare lanes: when one is started, who gets it, and when there is none."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import Command, StartLane, StartTrial, StopLane
from fluid.engine.events import DeviceDraining, LaneLost, LaneOutdated, LaneReady, SessionDraining, TrialReleased
from fluid.errors import InvalidFieldError
from fluid.policies import spare_lanes
from fluid.resources import MemoryNeed
from fluid.testing.random_sessions import random_session

GB = 1e9


def session(*names: str, devices: int = 1, **options: Any) -> Hand:
    """A session in which these trials run, each in a process of its own on a device of its own."""
    profile = options.pop("profile", None) or Known(packing=1, width=1)
    hand = Hand(devices=devices, profile=profile, **{"spare_lanes": 1, **options})
    for name in names:
        hand.submit(name, budget=9, isolated=True)
        hand.started(name)
    return hand


def spare_of(commands: list[Command]) -> int:
    """The lane that is started ahead."""
    return only(commands, StartLane).lane_id


def test_a_spare_lane_is_started_as_soon_as_the_last_one_was_taken_and_the_next_trial_starts_there() -> None:
    hand = Hand(devices=1, profile=Known(packing=1), spare_lanes=1)
    assert len(hand.state.lanes) == 1, "it waits for the first trial"
    spare = spare_of(hand.submit("a", budget=1, isolated=True, extends=False))
    hand.ready(spare)
    hand.submit("b", budget=1, isolated=True, extends=False)
    hand.started("a")
    assert spare_of(hand.iterate("a")) not in (0, spare), "the next trial has taken it"
    commands = hand.released("a", 0)
    assert only(commands, StartTrial).lane_ids == (spare,)
    assert only(commands, StopLane).lane_id == 0


def test_the_trial_of_a_killed_lane_goes_on_in_the_spare_one_at_once_and_another_one_is_started() -> None:
    hand = session("a")
    (spare,) = (lane.lane_id for lane in hand.state.lanes if lane.is_unused)
    hand.ready(spare)
    hand.iterate("a", 3)
    commands = hand.lose(hand.lane("a"), culprit="a")
    assert only(commands, StartTrial).lane_ids == (spare,)
    assert spare_of(commands) != spare and len(hand.state.lanes) == 2


def test_without_spare_lanes_nothing_is_started_ahead() -> None:
    hand = session("a", spare_lanes=0)
    killed = hand.lose(hand.lane("a"), culprit="a")
    assert none(killed, StartTrial), "its lane is not ready"
    assert len(hand.state.lanes) == 1


def test_none_is_started_beside_a_lane_that_is_starting() -> None:
    hand = Hand(devices=1, profile=Known(packing=1), ready=False, spare_lanes=2)
    assert none(hand.submit(*"abcd", isolated=True), StartLane)
    first = spare_of(hand.ready(0))
    second = spare_of(hand.ready(first))
    assert none(hand.ready(second), StartLane)


def spares(hand: Hand) -> int:
    """How many spare lanes there are once all that the engine asked for are ready."""
    while starting := [lane.lane_id for lane in hand.state.lanes if not lane.ready]:
        hand.ready(starting[0])
    return sum(lane.is_unused for lane in hand.state.lanes)


def test_as_many_are_at_hand_as_trials_lately_ended_there_at_one_instant_but_no_more_than_wait() -> None:
    hand = Hand(devices=1, profile=Known(packing=4), max_packing=4, spare_lanes=1)
    hand.submit(*"abcd", budget=1, isolated=True, extends=False)
    hand.submit(*"efghijk", budget=9, isolated=True)
    assert spares(hand) == 1

    def end(*names: str) -> None:
        for name in names:
            hand.started(name)
        lanes = {name: hand.lane(name) for name in names}
        for name in names:
            hand.iterate(name) if name in "abcd" else hand.stop(name)
        hand.do(*(TrialReleased(hand.now, name, lanes[name]) for name in names))

    end(*"abcd")
    assert len(hand.state.queue) == 3 and spares(hand) == 3, "four ended at once"
    end(*"ef")
    assert len(hand.state.queue) == 1 and spares(hand) == 1


def test_more_spare_lanes_than_one_are_kept_while_trials_wait() -> None:
    hand = Hand(devices=1, profile=Known(packing=1, width=1), spare_lanes=3)
    hand.submit(*"abc", budget=9, isolated=True)
    assert spares(hand) == 2, "two trials wait"
    for name, waiting in ("a", 1), ("b", 0):
        hand.started(name)
        lane = hand.lane(name)
        hand.stop(name)
        hand.released(name, lane)
        assert len(hand.state.queue) == waiting
        assert spares(hand) == 1, "one is left for the trial of a lane that dies"


def test_memory_and_the_limit_of_processes_keep_a_spare_lane_away() -> None:
    need = MemoryNeed(30 * GB, 10 * GB)

    def shared(memory: float, most: int | None = None) -> list[Command]:
        profile = Known(packing=2, width=1, memory=need)
        hand = Hand(devices=1, memory=memory, profile=profile, ready=False, spare_lanes=1)
        hand.state.lanes.most_per_device = most
        hand.do(LaneReady(hand.now, 0, own_bytes=2 * GB))
        hand.log.clear()
        hand.submit("a", budget=100, isolated=True)
        return hand.log

    watermark = Hand(devices=1, memory=1.0).state.memory.watermark
    assert only(shared(43 * GB / watermark), StartLane).device_id == 0
    assert none(shared(41 * GB / watermark), StartLane), "the trial takes 40, and the lane's context 2"
    assert none(shared(43 * GB / watermark, most=1), StartLane)
    assert only(shared(43 * GB / watermark, most=2), StartLane).device_id == 0


def test_a_trial_that_needs_the_memory_of_a_spare_lane_has_it_ended() -> None:
    hand = Hand(devices=1, memory=50 * GB, profile=Known(packing=1, width=1), ready=False, spare_lanes=1)
    hand.do(LaneReady(hand.now, 0, own_bytes=5 * GB))
    spare = spare_of(hand.submit("a", budget=100, memory=MemoryNeed(10 * GB, 0.0), isolated=True))
    hand.started("a")
    hand.do(LaneReady(hand.now, spare, own_bytes=5 * GB))
    usable = hand.state.memory.usable_bytes(0)
    assert usable is not None
    hand.submit("b", budget=100, memory=MemoryNeed(usable - GB, 0.0), isolated=True)
    hand.stop("a")
    commands = hand.released("a", hand.lane("a"))
    assert only(commands, StartTrial).lane_ids == (spare,), "it runs there"
    assert none(commands, StartLane), "and leaves no room"


def test_a_spare_lane_makes_way_for_one_that_has_more_modules_loaded() -> None:
    hand = session("a")
    (spare,) = (lane.lane_id for lane in hand.state.lanes if lane.is_unused)
    hand.ready(spare)
    assert none(hand.do(LaneOutdated(hand.now, hand.lane("a"))), StopLane), "a trial runs there"
    commands = hand.do(LaneOutdated(hand.now, spare))
    assert only(commands, StopLane).lane_id == spare
    assert spare_of(commands) != spare
    assert none(hand.do(LaneOutdated(hand.now, spare)), StopLane), "it is gone"


def test_a_spare_lane_that_cannot_start_costs_its_device_nothing_and_is_not_tried_again_soon() -> None:
    hand = session("a")
    (spare,) = (lane.lane_id for lane in hand.state.lanes if lane.is_unused)
    commands = hand.do(LaneLost(hand.now, spare, "cannot use its device", failed_position=0))
    assert none(commands, StartLane) and not hand.state.occupancy.caps and hand.states() == {"a": "RUNNING"}
    hand.submit("b", budget=9, isolated=True)
    hand.stop("a")
    hand.released("a", hand.lane("a"))
    (of_b,) = (lane.lane_id for lane in hand.state.lanes)
    assert none(hand.ready(of_b), StartLane)
    hand.now += spare_lanes.SPARE_REFUSED_S
    hand.submit("c", budget=9, isolated=True)
    hand.lose(of_b, culprit="b")
    (again,) = (lane.lane_id for lane in hand.state.lanes)
    assert only(hand.ready(again), StartLane).device_id == 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_drain_ends_the_spare_lane(whole: bool) -> None:
    hand = session("a")
    (spare,) = (lane.lane_id for lane in hand.state.lanes if lane.is_unused)
    until = hand.now + 1000.0
    commands = hand.do(SessionDraining(hand.now, until) if whole else DeviceDraining(hand.now, 0, until))
    assert only(commands, StopLane).lane_id == spare


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="spare_lanes"):
        Hand(spare_lanes=-1)


@pytest.mark.parametrize("seed", range(30))
def test_random_sessions_with_spare_lanes_keep_their_invariants_and_end(seed: int) -> None:
    random_session(seed, steps=200, spare_lanes=1 + seed % 2)
