"""Trials whose lane finds that they cannot be saved, or that they can by now."""

from __future__ import annotations

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import (
    Command,
    Pause,
    Report,
    ReportCall,
    ReportUnsavable,
    Resize,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopTrial,
)
from fluid.engine.events import DeviceDraining, SavabilityChanged, TrialSetBack


def tell(hand: Hand, trial_id: str, lane_id: int, can_save: bool = False, refuses: bool = False) -> list[Command]:
    reason = "" if can_save else "cannot pickle 'lock'"
    return hand.do(SavabilityChanged(hand.now, trial_id, lane_id, can_save=can_save, reason=reason, refuses=refuses))


def refuse(hand: Hand, trial_id: str, lane_id: int) -> list[Command]:
    return tell(hand, trial_id, lane_id, refuses=True)


def to_be_fetched() -> Hand:
    """``a`` was done and is extended while another trial has its lane, so that it is to go on in lane 1."""
    hand = Hand(profile=Known(packing=1))
    hand.submit("a", budget=2)
    hand.started("a")
    hand.iterate("a", 2)
    hand.submit("b", budget=3)
    hand.started("b")
    hand.extend("a", 2)
    hand.ready(only(hand.add_device(1), StartLane).lane_id)
    assert only(hand.log, Save).lane_ids == (0,) and hand.states()["a"] == "STARTING"
    return hand


def test_a_trial_that_cannot_be_fetched_waits_for_its_lane() -> None:
    hand = to_be_fetched()
    commands = refuse(hand, "a", 0)
    assert only(commands, ReportUnsavable).reason == "cannot pickle 'lock'"
    assert hand.states()["a"] == "QUEUED" and hand.trial("a").pinned
    assert hand.state.occupancy.free_count == 1, "it does not hold the other device"
    run = only(hand.iterate("b", 3), RunIteration)
    assert (run.trial_id, run.lane_ids, run.iterations) == ("a", (0,), 2)
    hand.iterate("a", 2)
    assert hand.end("a") == "DONE" and hand.reports("a") == [1, 2, 3, 4]
    assert none(tell(hand, "a", 0), ReportUnsavable), "once is enough"


def test_calls_are_made_where_the_state_stayed() -> None:
    hand = to_be_fetched()
    hand.call("a")
    refuse(hand, "a", 0)
    hand.called("a", 0)
    assert only(hand.log, ReportCall).result == b"result"


def test_an_evicted_trial_that_cannot_be_saved_stays_until_there_is_no_room() -> None:
    hand = Hand(resident_limit=0)
    hand.submit("a", budget=1)
    hand.started("a")
    only(hand.iterate("a"), Save)
    assert none(refuse(hand, "a", 0), StopTrial)
    assert hand.trial("a").residence.lane == 0 and not hand.trial("a").residence.saving
    run = only(hand.extend("a", 1), RunIteration)
    assert (run.trial_id, run.lane_ids) == ("a", (0,))


def moving() -> Hand:
    """A trial that was told to go from lane 0 to others."""
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=9, max_width=2)
    hand.started("a")
    hand.iterate("a")
    hand.ready(only(hand.add_device(1), StartLane).lane_id)
    only(hand.tick(), Pause)
    only(hand.paused("a"), Resize)
    return hand


def test_a_trial_that_cannot_move_goes_on_where_it_was() -> None:
    hand = moving()
    run = only(refuse(hand, "a", 0), RunIteration)
    assert (run.lane_ids, run.iterations) == ((0,), 8)
    assert hand.states()["a"] == "RUNNING" and hand.state.occupancy.free_count == 1
    hand.iterate("a", 8)
    assert hand.end("a") == "DONE" and hand.reports("a") == list(range(1, 10))


def test_a_trial_that_is_stopped_and_cannot_move_is_stopped_where_it_was() -> None:
    hand = moving()
    hand.stop("a")
    assert only(refuse(hand, "a", 0), StopTrial).lane_ids == (0,)
    hand.released("a", 0)
    assert hand.end("a") == "STOPPED" and hand.state.occupancy.free_count == 2


def test_a_state_that_is_not_the_newest_is_gone_on_from_without_reporting_twice() -> None:
    hand = to_be_fetched()
    start = only(hand.saved("a", 0, 1, dropped=True), StartTrial)
    assert start.checkpoint is not None and (start.checkpoint.iteration, start.iterations) == (1, 3)
    hand.started("a", 1)
    assert none(hand.iterate("a"), Report)
    hand.iterate("a", 2)
    assert hand.end("a") == "DONE" and hand.reports("a") == [1, 2, 3, 4]


def test_a_trial_that_can_be_saved_by_now_leaves_a_device_that_drains() -> None:
    hand = Hand(profile=Known(packing=1))
    hand.submit("a", budget=9, can_save=False)
    hand.started("a")
    hand.iterate("a")
    assert none(hand.do(DeviceDraining(hand.now, 0, hand.now + 100.0)), Pause)
    only(tell(hand, "a", 0, can_save=True), Pause)
    assert only(hand.paused("a"), Save).durable
    hand.saved("a", 0, 1, dropped=True)
    assert hand.states()["a"] == "QUEUED" and not hand.state.devices


def test_what_is_said_while_the_trial_is_being_saved_or_by_an_old_lane_is_passed_over() -> None:
    hand = to_be_fetched()
    assert not tell(hand, "a", 0) and hand.trial("a").spec.can_save, "the answer to Save tells"
    assert not tell(hand, "a", 7) and not refuse(hand, "a", 7) and not tell(hand, "unknown", 0)
    assert hand.trial("a").spec.can_save


@pytest.mark.parametrize("can_save", [True, False])
def test_a_trial_that_cannot_load_its_checkpoints_is_not_moved_again(can_save: bool) -> None:
    hand = Hand(profile=Known(packing=1))
    hand.submit("a", budget=9, can_save=can_save)
    hand.started("a")
    hand.iterate("a", 3)
    hand.saved("a", 0, 3)
    hand.lose(0)
    hand.ready(1)
    hand.do(TrialSetBack(hand.now, "a", 1, checkpoint=None, reason="raised", cannot_load=True))
    hand.started("a", 0)
    tell(hand, "a", 1, can_save=True)
    assert not hand.trial("a").spec.can_save
