"""The last checkpoint of a trial outlives the run, where its submitter wants that."""

from __future__ import annotations

import pytest
from engine_helpers import Hand, none, only

from fluid.engine.commands import NoteTrial, Persist, Save, StopTrial
from fluid.engine.events import Checkpoint, TrialNotKept, TrialSaved
from fluid.keeping import Kept


def running(max_failures: int = 2, **spec: object) -> tuple[Hand, int]:
    hand = Hand(devices=1, max_failures=max_failures)
    hand.submit("a", budget=2, keep_last=True, **spec)
    hand.started("a")
    return hand, hand.lane("a")


def kept(hand: Hand, lane: int, iteration: int) -> None:
    checkpoint = Checkpoint(iteration, f"kept/a/{iteration}")
    hand.do(TrialSaved(hand.now, "a", lane, checkpoint, kept=Kept(9)))


def test_a_trial_that_is_done_is_saved_for_good() -> None:
    hand, lane = running()
    assert none(hand.iterate("a"), Save)
    assert only(hand.iterate("a"), Save) == Save("a", (lane,), durable=True, keep=True)
    kept(hand, lane, 2)
    assert hand.trial("a").residence.checkpoint_is_current, "it can be extended elsewhere from there"
    assert not only(hand.stop("a"), StopTrial).keep, "it was saved"


def test_an_extended_trial_is_saved_again() -> None:
    hand, lane = running()
    hand.iterate("a", 2)
    kept(hand, lane, 2)
    hand.extend("a", 1)
    assert only(hand.iterate("a"), Save).keep


def test_a_trial_that_is_stopped_is_saved_before_it_leaves() -> None:
    hand, lane = running()
    hand.iterate("a")
    hand.saved("a", lane, 1, in_memory=True)
    assert only(hand.stop("a"), StopTrial) == StopTrial("a", (lane,), keep=True)
    kept(hand, lane, 1)
    assert none(hand.released("a", lane), Persist)
    assert hand.states() == {"a": "STOPPED"}


def test_of_a_trial_that_failed_the_newest_checkpoint_is_copied() -> None:
    hand, lane = running(retry_errors=False)
    hand.iterate("a")
    hand.saved("a", lane, 1, in_memory=True)
    copy = only(hand.failed("a", lane), Persist)
    assert copy == Persist("a", Checkpoint(1, "a/1", in_memory=True), keep=True)
    hand.do(TrialSaved(hand.now, "a", None, Checkpoint(1, "kept/a/1"), copied=True, kept=Kept(9)))
    assert hand.trial("a").residence.durable.path == "kept/a/1"


def test_the_newest_checkpoint_is_copied_though_no_lane_is_left() -> None:
    hand, lane = running(max_failures=0)
    hand.iterate("a")
    hand.saved("a", lane, 1, in_memory=True)
    copy = only(hand.lose(lane, culprit="a"), Persist)
    assert copy == Persist("a", Checkpoint(1, "a/1", in_memory=True), keep=True)
    assert hand.states() == {"a": "FAILED"} and not any(each.ready for each in hand.state.lanes)


@pytest.mark.parametrize("isolated", [False, True])
def test_the_newest_checkpoint_is_copied_if_the_lane_is_lost_that_was_to_save_the_last_state(isolated: bool) -> None:
    hand, lane = running(isolated=isolated)
    hand.iterate("a")
    hand.saved("a", lane, 1, in_memory=True)
    commands = hand.iterate("a")
    assert only(commands, Save).keep and none(commands, StopTrial)
    assert only(hand.lose(lane), Persist) == Persist("a", Checkpoint(1, "a/1", in_memory=True), keep=True)
    assert hand.states() == {"a": "DONE"}


def test_nothing_is_copied_if_the_lane_is_lost_that_has_saved_the_last_state() -> None:
    hand, lane = running()
    hand.iterate("a", 2)
    kept(hand, lane, 2)
    assert none(hand.lose(lane), Persist)


def test_a_trial_without_a_checkpoint_leaves_none() -> None:
    hand, lane = running(retry_errors=False)
    assert none(hand.failed("a", lane), Persist)


def test_a_trial_that_cannot_be_saved_is_not() -> None:
    hand, _ = running(can_save=False)
    assert none(hand.iterate("a", 2), Save)
    assert not only(hand.stop("a"), StopTrial).keep


def test_nothing_is_saved_where_it_is_not_wanted() -> None:
    hand = Hand(devices=1)
    hand.submit("a", budget=1)
    hand.started("a")
    lane = hand.lane("a")
    hand.saved("a", lane, 0)
    assert none(hand.iterate("a"), Save)
    assert not only(hand.stop("a"), StopTrial).keep


def test_what_is_not_kept_is_told_and_tried_again() -> None:
    hand, _ = running()
    hand.iterate("a", 2)
    told = only(hand.do(TrialNotKept(hand.now, "a", iteration=2, reason="the disk is full")), NoteTrial)
    assert told.text == "the checkpoint of iteration 2 is not kept: the disk is full"
    assert only(hand.stop("a"), StopTrial).keep
