"""Trials whose newest checkpoint cannot be used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import Call, Command, KillLane, ReportSetBack, Resize, RunIteration, Save, StartTrial
from fluid.engine.events import Checkpoint, GroupSubmitted, TrialSaved, TrialSetBack, TrialSpec, TrialStarted
from fluid.results.journal import encode, replay


def set_back(hand: Hand, trial_id: str, iteration: int, *, in_memory: bool = False, **more: Any) -> list[Command]:
    """The trial's lane could restore no later state than that of an iteration; 0 is the beginning."""
    checkpoint = Checkpoint(iteration, f"older/{iteration}", in_memory=in_memory) if iteration else None
    lane = hand.trial(trial_id).placement.lanes[0]
    return hand.do(TrialSetBack(hand.now, trial_id, lane, checkpoint=checkpoint, reason="damaged", **more))


def dead(iteration: int = 4, budget: int = 10, **options: Any) -> Hand:
    """A trial whose lane has died after an iteration that was saved, and that was told to start from there."""
    hand = Hand(profile=Known(packing=1), max_failures=9, **options)
    hand.submit("a", budget=budget)
    hand.started("a")
    hand.iterate("a", iteration)
    hand.saved("a", 0, iteration, in_memory=True)
    hand.lose(0)
    assert only(hand.ready(1), StartTrial).iterations == budget - iteration
    return hand


@pytest.mark.parametrize("iteration", [0, 2, 4])
def test_a_trial_repeats_what_it_lost_and_reports_each_iteration_once(iteration: int) -> None:
    hand = dead()
    told = only(set_back(hand, "a", iteration), ReportSetBack)
    assert (told.lost, told.checkpoint and told.checkpoint.iteration, told.reason) == (4, iteration or None, "damaged")
    more = hand.started("a", iteration)
    lost = 4 - iteration
    assert [command.iterations for command in more if isinstance(command, RunIteration)] == [lost] * bool(lost)
    hand.iterate("a", 10 - iteration)
    assert hand.end("a") == "DONE" and hand.reports("a") == list(range(1, 11))
    assert hand.trial("a").limits.failures == 1, "the death of the lane"


def test_the_next_start_is_from_the_checkpoint_that_could_be_used() -> None:
    hand = dead()
    set_back(hand, "a", 2)
    hand.started("a", 2)
    hand.lose(1)
    start = only(hand.ready(2), StartTrial)
    assert start.checkpoint == Checkpoint(2, "older/2") and start.iterations == 8
    set_back(hand, "a", 0)
    hand.started("a", 0)
    hand.lose(2)
    assert only(hand.ready(3), StartTrial).checkpoint is None


def test_a_trial_that_is_resized_may_be_set_back_on_the_way() -> None:
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=30, max_width=2)
    hand.started("a")
    hand.iterate("a", 4)
    hand.add_device(1)
    hand.ready(1)
    hand.tick()
    hand.iterate("a")
    assert only(hand.paused("a"), Resize).iterations == 25
    set_back(hand, "a", 3)
    top_up = only(hand.resized("a"), RunIteration)
    assert top_up.iterations == 2 and hand.trial("a").progress.done == 3
    hand.iterate("a", 27)
    assert hand.end("a") == "DONE" and hand.reports("a") == list(range(1, 31))


def test_a_call_waits_until_the_trial_has_caught_up() -> None:
    hand = dead()
    hand.call("a")
    set_back(hand, "a", 2)
    assert none(hand.started("a", 2), Call)
    assert none(hand.iterate("a"), Call)
    assert only(hand.iterate("a"), Call).call_id == 0


def test_a_trial_that_was_done_repeats_what_it_lost_before_it_is_called() -> None:
    hand = Hand(profile=Known(packing=1))
    hand.submit("a", budget=4)
    hand.started("a")
    hand.iterate("a", 4)
    hand.saved("a", 0, 4, in_memory=True)
    hand.lose(0)
    hand.call("a")
    assert only(hand.ready(1), StartTrial).iterations == 0
    set_back(hand, "a", 2)
    assert only(hand.started("a", 2), RunIteration).iterations == 2
    hand.iterate("a")
    assert only(hand.iterate("a"), Call).call_id == 0
    assert hand.ends("a") == ["DONE"] and hand.reports("a") == [1, 2, 3, 4]


def test_a_trial_that_cannot_load_its_checkpoints_is_told_once_and_moved_no_more() -> None:
    hand = dead(devices=1)
    assert only(set_back(hand, "a", 0, cannot_load=True), ReportSetBack).cannot_load
    hand.started("a", 0)
    assert not hand.trial("a").spec.can_save
    hand.iterate("a", 5)
    hand.saved("a", 1, 5)
    hand.lose(1)
    assert only(hand.ready(2), StartTrial).checkpoint is not None, "it is tried again, as it costs nothing any more"
    assert none(set_back(hand, "a", 0, cannot_load=True), ReportSetBack)
    hand.started("a", 0)
    hand.iterate("a", 10)
    assert hand.end("a") == "DONE" and hand.reports("a") == list(range(1, 11))


def test_what_an_old_lane_says_is_passed_over_and_what_cannot_be_ends_the_lane() -> None:
    hand = dead()
    assert not hand.do(TrialSetBack(hand.now, "a", 0, checkpoint=None, reason="old"))
    assert not hand.do(TrialSetBack(hand.now, "unknown", 1, checkpoint=None, reason="old"))
    killed = only(set_back(hand, "a", 5), KillLane)
    assert killed.lane_id == hand.lane("a") and "beyond its checkpoint's 4" in killed.reason
    started = TrialStarted(hand.now, "a", hand.lane("a"), iteration=5, seconds=0.0)
    assert not hand.do(started) and hand.states()["a"] == "STARTING", "it is passed over, and the lane ends only once"
    hand.lose(hand.lane("a"))
    assert hand.trial("a").progress.done == 4 and hand.states()["a"] == "STARTING"


@pytest.mark.parametrize("kept", [True, False])
def test_a_disk_without_space_is_not_the_trials_failure(kept: bool) -> None:
    hand = Hand(resident_limit=0, max_failures=0)
    hand.submit("a", budget=1, retry_errors=False)
    hand.started("a")
    hand.iterate("a")
    if kept:
        hand.extend("a")
    save = [command for command in hand.log if isinstance(command, Save)]
    assert len(save) == 1
    hand.failed("a", 0, "not_saved")
    if not kept:
        hand.extend("a")
    hand.started("a", 0)
    hand.iterate("a", 3)
    assert hand.end("a") == "DONE" and hand.reports("a") == [1, 2, 3]
    assert hand.trial("a").limits.failures == 0


@pytest.mark.parametrize("iteration", [0, 3, 5])
def test_the_journal_knows_what_could_not_be_used(iteration: int) -> None:
    checkpoint = Checkpoint(iteration, "older", in_memory=True) if iteration else None
    items = [
        GroupSubmitted(0.0, "g", (TrialSpec("a", 9),)),
        TrialSaved(1.0, "a", 0, Checkpoint(4, "on disk")),
        TrialSaved(2.0, "a", 0, Checkpoint(6, "newest", in_memory=True)),
        ReportSetBack("a", "g", at=3.0, lost=6, checkpoint=checkpoint, reason="damaged", cannot_load=False),
    ]
    recovered = replay([json.dumps(encode(item)) for item in items])
    assert recovered.groups["g"]["a"].checkpoint == checkpoint
    assert recovered.durable == ({"a": Checkpoint(4, "on disk")} if iteration == 5 else {})
