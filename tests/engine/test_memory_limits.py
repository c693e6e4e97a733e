"""Limits of what each trial may take on a device that several share: the one that grows runs out, not its neighbour."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, none, only
from test_memory import GB, Learns

from fluid.engine.commands import LimitMemory, StartLane, StartTrial
from fluid.engine.events import LaneMeasured
from fluid.resources import MemoryNeed


def limits(commands: list[Any]) -> dict[str, Any]:
    """The limits told, in GB, by trial; the newest of each."""
    told = [
        command
        for command in commands
        if isinstance(command, LimitMemory) or (isinstance(command, StartTrial) and command.limit_bytes is not None)
    ]
    return {each.trial_id: None if each.limit_bytes is None else pytest.approx(each.limit_bytes / GB) for each in told}


def submit(hand: Hand, *trial_ids: str, need: float | None) -> dict[str, Any]:
    """Submits trials, has their lanes started and the trials set up; returns the limits told meanwhile."""
    before = len(hand.log)
    memory = None if need is None else MemoryNeed(need * GB)
    for command in hand.submit(*trial_ids, memory=memory):
        if isinstance(command, StartLane):
            hand.ready(command.lane_id)
    for trial_id in trial_ids:
        hand.started(trial_id)
    return limits(hand.log[before:])


def test_trials_that_share_a_device_divide_what_is_left() -> None:
    hand = Hand(memory=10 * GB)
    assert submit(hand, "a", need=3.0) == {}, "it is alone"
    hand = Hand(memory=10 * GB)
    assert submit(hand, "a", "b", "c", need=2.0) == {"a": 3.0, "b": 3.0, "c": 3.0}
    lane = hand.lane("c")
    hand.stop("c")
    assert limits(hand.released("c", lane)) == {"a": 4.5, "b": 4.5}


def test_a_trial_is_limited_from_its_set_up_on() -> None:
    hand = Hand(memory=10 * GB)
    commands = hand.submit("a", "b", memory=MemoryNeed(3 * GB))
    assert only(commands, StartTrial) == StartTrial("a", (0,), iterations=3, limit_bytes=4.5 * GB)
    lane = only(commands, StartLane).lane_id
    started = only(hand.ready(lane), StartTrial)
    assert started == StartTrial("b", (lane,), iterations=3, limit_bytes=4.5 * GB)
    hand.started("a")
    hand.started("b")
    assert none(hand.log, LimitMemory)
    again = only(hand.failed("b", lane), StartTrial)
    assert (again.lane_ids, again.limit_bytes) == ((lane,), 4.5 * GB), "the lane has forgotten its limit"


def test_a_trial_may_exceed_its_need_a_little_on_a_full_device() -> None:
    assert submit(Hand(memory=10 * GB), "a", "b", need=4.5) == {"a": 5.625, "b": 5.625}


def test_the_last_trial_has_no_limit() -> None:
    hand = Hand(memory=10 * GB)
    submit(hand, "a", "b", need=3.0)
    lane = hand.lane("a")
    assert limits(hand.stop("a")) == {}, "it has not left yet"
    assert limits(hand.released("a", lane)) == {"b": None}
    assert limits(hand.iterate("b")) == {}


def test_a_limit_follows_what_a_trial_was_seen_to_need() -> None:
    hand = Hand(memory=10 * GB, profile=Learns(packing=2, memory=MemoryNeed(2 * GB)))
    assert submit(hand, "a", "b", need=None) == {"a": 4.5, "b": 4.5}
    assert limits(hand.iterate("a", memory=MemoryNeed(2.02 * GB))) == {}, "hardly more"
    assert limits(hand.iterate("a", memory=MemoryNeed(4.4 * GB))) == {"a": 5.5, "b": 5.5}


def test_a_context_that_grows_tightens_the_limits() -> None:
    hand = Hand(memory=10 * GB)
    submit(hand, "a", "b", need=2.0)
    assert limits(hand.do(LaneMeasured(0.0, 0, 1 * GB), LaneMeasured(0.0, 1, 3 * GB))) == {"a": 4.0, "b": 4.0}


def test_a_trial_that_runs_again_in_another_lane_is_told_again() -> None:
    hand = Hand(memory=10 * GB)
    submit(hand, "a", "b", need=3.0)
    (replaced,) = [command for command in hand.lose(hand.lane("a")) if isinstance(command, StartLane)]
    assert limits(hand.ready(replaced.lane_id)) == {"a": 4.5}


def test_devices_of_unknown_memory_have_no_limits() -> None:
    assert submit(Hand(memory=None), "a", "b", need=3.0) == {}
