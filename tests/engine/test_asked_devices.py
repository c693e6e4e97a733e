"""Trials that ask for devices: eligible ones only, alone, shared, of a fixed number, or as a gang."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import StartLane, StartTrial, StopLane
from fluid.engine.events import (
    DeviceAdded,
    GroupSubmitted,
    LaneLost,
    LaneReady,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    TrialSetAside,
    TrialSpec,
)
from fluid.errors import InvalidFieldError
from fluid.resources import Device, MemoryNeed, Requires


def held(hand: Hand, trial_id: str) -> tuple[int, ...]:
    devices: tuple[int, ...] = hand.state.occupancy.held.get(hand.trial(trial_id).row, ())
    return devices


def gang(hand: Hand, trial_id: str, devices: int, **spec: Any) -> list[Any]:
    return hand.submit(trial_id, devices=devices, gang=True, profile_key=f"{devices}", **spec)


def test_a_gang_is_started_in_one_lane_of_several_devices() -> None:
    hand = Hand(4)
    commands = gang(hand, "a", 3)
    lane = only(commands, StartLane)
    assert lane.device_ids == (0, 1, 2)
    started = only(hand.do(LaneReady(hand.now, lane.lane_id)), StartTrial)
    assert started.lane_ids == (lane.lane_id,)
    assert held(hand, "a") == (0, 1, 2)


def test_a_gang_waits_for_devices_of_one_host() -> None:
    hand = Hand(0)
    for index, host in enumerate(("x", "x", "y", "y")):
        hand.add_device(index, host=host)
    hand.submit("s", devices=1)
    on = held(hand, "s")[0]
    hosts = {0: "x", 1: "x", 2: "y", 3: "y"}
    gang(hand, "a", 2)
    gang(hand, "b", 2)
    assert {hosts[index] for index in held(hand, "a")} == {"y" if hosts[on] == "x" else "x"}
    assert hand.states()["b"] == "QUEUED", "the two idle devices are of one host and busy"


def test_devices_are_reserved_for_a_gang_that_others_would_pass_for_ever() -> None:
    hand = Hand(2, profile=Known(packing=1))
    hand.submit("long", budget=9)
    gang(hand, "a", 2)
    assert hand.states()["a"] == "QUEUED" and hand.state.placing.reserved_devices == {0, 1}
    hand.submit("late", budget=20)
    assert hand.states()["late"] == "QUEUED", "it would end after the gang could start"
    hand.stop("late")
    hand.submit("short", budget=2)
    assert hand.states()["short"] == "STARTING", "it ends before the gang can start"


@pytest.mark.parametrize("leave", [StopRequested, PauseRequested, TrialSetAside])
def test_devices_that_were_reserved_for_a_gang_that_leaves_the_queue_are_free_for_others_at_once(leave: Any) -> None:
    hand = Hand(2, profile=Known(packing=1))
    hand.submit("long", budget=9)
    gang(hand, "a", 2)
    hand.submit("late", budget=20)
    assert hand.states()["late"] == "QUEUED", "it would end after the gang could start"
    hand.do(leave(hand.now, "a"))
    assert hand.states()["late"] == "STARTING"


def test_a_trial_that_can_start_nowhere_else_is_not_held_up_by_a_reservation() -> None:
    """The reservation may wait for the very state that the trial keeps there: they would wait for each other."""
    hand = Hand(2, profile=Known(packing=1), memory=100.0)
    hand.submit("pinned", can_save=False, budget=9, memory=MemoryNeed(30.0, 10.0))
    hand.started("pinned")
    hand.iterate("pinned")
    hand.do(PauseRequested(hand.now, "pinned"))
    hand.paused("pinned")
    hand.submit("wide", devices=2, max_width=4, memory=MemoryNeed(40.0, 40.0), budget=3)
    assert hand.states()["wide"] == "QUEUED" and hand.state.placing.reserved_devices == {0, 1}
    hand.do(ResumeRequested(hand.now, "pinned"))
    assert hand.states() == {"pinned": "RUNNING", "wide": "QUEUED"}


def test_a_lane_of_a_gang_is_reused_by_the_next_and_ended_for_single_trials() -> None:
    hand = Hand(2)
    lane = only(gang(hand, "a", 2, budget=1), StartLane)
    hand.ready(lane.lane_id)
    hand.stop("a")
    hand.released("a", lane.lane_id)
    assert hand.states()["a"] == "STOPPED"
    commands = gang(hand, "b", 2, budget=1)
    assert none(commands, StartLane) and only(commands, StartTrial).lane_ids == (lane.lane_id,)
    hand.stop("b")
    hand.released("b", lane.lane_id)
    commands = hand.submit("single")
    assert only(commands, StopLane).lane_id == lane.lane_id


@pytest.mark.parametrize(("most", "ended"), [(None, []), (3, []), (2, [0]), (1, [0, 2, 1])])
def test_idle_lanes_are_ended_where_a_device_takes_no_further_process(most: int | None, ended: list[int]) -> None:
    """Warm lanes that are idle are clients of MPS, too."""
    hand = Hand(2)
    lanes = hand.state.lanes
    hand.ready(lanes.start(0, []).lane_id)
    lanes.most_per_device = most
    assert [[lane.lane_id for lane in lanes.on(device)] for device in (0, 1)] == [[0, 2], [1]]
    commands = gang(hand, "a", 2, budget=1)
    assert [command.lane_id for command in commands if isinstance(command, StopLane)] == ended
    assert only(commands, StartLane).device_ids == (0, 1)


def test_lanes_that_hold_something_stay_where_a_device_takes_no_further_process() -> None:
    """What would be lost with them is worth more than a start that may fail, and is tried again."""
    hand = Hand(2)
    hand.state.lanes.most_per_device = 1
    hand.submit("single", devices=1, budget=1)
    hand.started("single")
    hand.iterate("single")
    lane = hand.trial("single").residence.lane
    assert lane is not None
    commands = gang(hand, "a", 2, budget=1)
    assert lane not in [command.lane_id for command in commands if isinstance(command, StopLane)]


def test_memory_that_an_ended_gang_lane_frees_on_its_other_devices_is_used_at_once() -> None:
    hand = Hand(2, memory=100.0, ready=False)
    lane = only(gang(hand, "a", 2, budget=1), StartLane)
    for each in [command for command in hand.log if isinstance(command, StartLane)]:
        hand.do(LaneReady(hand.now, each.lane_id, own_bytes=40.0))
    hand.stop("a")
    hand.released("a", lane.lane_id)
    small, large = MemoryNeed(10.0, 10.0), MemoryNeed(30.0, 30.0)
    specs = (TrialSpec("small", 3, memory=small, devices=1), TrialSpec("large", 3, memory=large, devices=1))
    commands = hand.do(GroupSubmitted(hand.now, "g", specs))
    assert only(commands, StopLane).lane_id == lane.lane_id
    assert hand.states() == {"a": "STOPPED", "small": "STARTING", "large": "STARTING"}


def test_memory_is_looked_after_on_all_devices_of_a_gang_that_waits_again() -> None:
    """Its state could leave now, and so could others beside it."""
    hand = Hand(2, memory=100.0)
    lane = only(gang(hand, "a", 2, budget=1, memory=MemoryNeed(10.0, 10.0)), StartLane)
    hand.ready(lane.lane_id)
    hand.started("a")
    hand.iterate("a")
    assert hand.trial("a").residence.lane == lane.lane_id
    hand.state.memory.pop_grown()
    hand.state._core.lanes.check_memory(lane.lane_id)
    assert hand.state.memory.pop_grown() == [0, 1]
    hand.state._core.lanes.check_memory(None)
    assert hand.state.memory.pop_grown() == []


def test_a_gang_whose_lane_is_lost_starts_again_in_another() -> None:
    hand = Hand(2)
    lane = only(gang(hand, "a", 2), StartLane)
    hand.ready(lane.lane_id)
    commands = hand.do(LaneLost(hand.now, lane.lane_id, "died"))
    assert only(commands, StartLane).device_ids == (0, 1)
    assert hand.states()["a"] == "STARTING"


def test_a_gang_whose_devices_are_gone_fails_with_a_reason_unless_others_may_come() -> None:
    for most, state in ((0, "FAILED"), (4, "QUEUED")):
        hand = Hand(3)
        hand.state.set_most_devices(most)
        gang(hand, "a", 3)
        hand.lose_device(1)
        assert hand.states()["a"] == state
        if not most:
            failure = hand.trial("a").limits.failure
            assert failure.kind == "no_device" and "no 3 devices of one host can be had" in failure.message


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"devices": 5, "gang": True}, "devices"),
        ({"devices": 5, "max_width": 8}, "devices"),
        ({"requires": Requires(host="elsewhere")}, "requires"),
        ({"devices": 0.0}, "devices"),
    ],
)
def test_what_can_never_run_is_refused(spec: dict[str, Any], field: str) -> None:
    hand = Hand(4)
    with pytest.raises(InvalidFieldError) as caught:
        hand.submit("a", **spec)
    assert caught.value.field == field and not hand.state.trials


def test_a_trial_waits_for_what_autoscaling_may_bring() -> None:
    hand = Hand(2)
    hand.state.set_most_devices(4)
    hand.submit("a", requires=Requires(model="H100"))
    gang(hand, "b", 4)
    assert hand.states() == {"a": "QUEUED", "b": "QUEUED"}
    assert hand.state.demand.devices >= 4
    hand.do(DeviceAdded(hand.now, Device(7, model="NVIDIA H100 80GB HBM3")))
    assert held(hand, "a") == (7,)
    with pytest.raises(InvalidFieldError, match="no 5 devices"):
        gang(hand, "c", 5)


def test_an_elastic_trial_of_a_fixed_width_has_it_from_start_to_end() -> None:
    hand = Hand(4)
    hand.submit("a", devices=2, max_width=8)
    assert len(held(hand, "a")) == 2
    for lane_id in hand.trial("a").placement.lanes:
        if not hand.state.lanes[lane_id].ready:
            hand.ready(lane_id)
    hand.tick()
    assert len(held(hand, "a")) == 2, "idle devices do not widen it"
    lost = hand.trial("a").placement.lanes[1]
    hand.do(LaneLost(hand.now, lost, "died"))
    assert len(held(hand, "a")) == 2 and hand.states()["a"] == "STARTING", "it does not go on narrower"


def test_shares_bound_the_residents_of_a_device() -> None:
    hand = Hand(1, profile=Known(packing=8))
    hand.submit("a", "b", "c", "d", devices=1 / 3)
    assert sorted(hand.states().values()) == ["QUEUED", "STARTING", "STARTING", "STARTING"]


def test_trials_that_ask_for_nothing_leave_devices_to_those_that_need_them() -> None:
    hand = Hand(0, profile=Known(packing=1))
    hand.do(*(DeviceAdded(0.0, Device(index, tags=("fast",) if index < 2 else ())) for index in range(4)))
    fast = {"requires": Requires(tags="fast")}
    specs = [TrialSpec("any0", 1), TrialSpec("any1", 1), TrialSpec("fast0", 1, **fast), TrialSpec("fast1", 1, **fast)]
    hand.do(GroupSubmitted(0.0, "g", tuple(specs)))
    assert {*held(hand, "fast0"), *held(hand, "fast1")} == {0, 1}
    assert {*held(hand, "any0"), *held(hand, "any1")} == {2, 3}
