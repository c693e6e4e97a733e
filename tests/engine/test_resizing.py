from __future__ import annotations

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import (
    KillLane,
    NoteResize,
    Pause,
    Report,
    Resize,
    RunIteration,
    StartLane,
    StartTrial,
    StopTrial,
)
from fluid.engine.events import PausePurpose, TrialPaused
from fluid.engine.records import Stage
from fluid.measure.profile import Profile


def widening(devices: int = 2, **options: object) -> Hand:
    """A trial that runs on one device and has been told to pause for more: the others were busy when it came."""
    hand = Hand(devices=1, profile=Known(packing=1), **options)  # type: ignore[arg-type]
    hand.submit("a", budget=9, max_width=devices)
    hand.started("a")
    hand.iterate("a")
    for index in range(1, devices):
        lane = only(hand.add_device(index), StartLane).lane_id
        hand.ready(lane)
    hand.tick()
    return hand


def test_a_trial_widens_between_two_iterations() -> None:
    hand = widening()
    assert only(hand.log, Pause).lane_ids == (0,)
    assert only(hand.iterate("a"), Report).width == 1.0, "it still runs where it was"
    resize = only(hand.paused("a"), Resize)
    assert (resize.old_lane_ids, resize.lane_ids, resize.iterations) == ((0,), (0, 1), 7)
    assert only(hand.resized("a"), NoteResize) == NoteResize(
        "a",
        at=hand.now,
        width=2.0,
        device_ids=(0, 1),
        seconds=0.1,
        old_width=1.0,
        begun_at=1.0,
        gain=3.5,
        stall_s=0.0,
        left=7,
    )
    report = only(hand.iterate("a"), Report)
    assert (report.width, report.device_ids) == (2.0, (0, 1))
    hand.iterate("a", 6)
    assert hand.reports("a") == list(range(1, 10))
    assert only(hand.log, StopTrial).lane_ids == (1,), "only rank 0 keeps its state"


def test_it_is_not_interrupted_before_the_new_lanes_are_ready() -> None:
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=9, max_width=2)
    hand.started("a")
    lane = only(hand.add_device(1), StartLane).lane_id
    assert none(hand.tick(), Pause)
    hand.iterate("a")
    assert only(hand.ready(lane), Pause).lane_ids == (0,)


@pytest.mark.parametrize("warm", [True, False])
def test_a_queued_trial_comes_before_a_widening_that_has_not_happened_yet(warm: bool) -> None:
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=9, max_width=2)
    hand.started("a")
    lane = only(hand.add_device(1), StartLane).lane_id
    if warm:
        hand.ready(lane)
    hand.tick()
    assert hand.trial("a").placement.move.stage is (Stage.PAUSING if warm else Stage.WARMING)
    commands = hand.submit("b")
    assert hand.trial("b").placement.lanes == (lane,)
    if warm:
        only(commands, StartTrial)
        assert only(hand.paused("a"), RunIteration).iterations == 9
    else:
        only(hand.ready(lane), StartTrial)
    assert hand.trial("a").state.value == "RUNNING"
    hand.iterate("a", 9)
    assert hand.end("a") == "DONE"


def test_the_last_iteration_ends_a_trial_that_waits_for_new_lanes() -> None:
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=2, max_width=2)
    hand.started("a")
    lane = only(hand.add_device(1), StartLane).lane_id
    hand.tick()
    hand.iterate("a", 2)
    assert hand.end("a") == "DONE"
    assert not hand.state.lanes[lane].holders


def test_the_last_iteration_ends_a_paused_trial_once_it_has_answered() -> None:
    hand = widening()
    hand.iterate("a", 8)
    assert hand.end("a") is None, "its lane still owes the answer to Pause"
    hand.paused("a")
    assert hand.end("a") == "DONE"
    assert none(hand.log, Resize)


def test_an_extension_during_a_resize_is_run_afterwards() -> None:
    hand = widening()
    hand.paused("a")
    assert none(hand.extend("a", 3), RunIteration)
    assert only(hand.resized("a"), RunIteration).iterations == 3
    hand.iterate("a", 11)
    assert hand.end("a") == "DONE"


@pytest.mark.parametrize("stage", ["pausing", "moving"])
def test_stop_during_a_resize(stage: str) -> None:
    hand = widening()
    if stage == "moving":
        hand.paused("a")
    stop = only(hand.stop("a"), StopTrial)
    assert stop.lane_ids == ((0, 1) if stage == "moving" else (0,))
    for lane in stop.lane_ids:
        hand.released("a", lane)
    assert hand.end("a") == "STOPPED"
    assert hand.state.occupancy.free_count == 2


def test_a_lane_that_dies_before_the_trial_came_calls_the_resize_off() -> None:
    hand = widening()
    hand.lose(1)
    assert hand.trial("a").state.value == "RESIZING", "Pause is in flight"
    run = only(hand.paused("a"), RunIteration)
    assert (run.lane_ids, run.iterations) == ((0,), 8)
    hand.iterate("a", 8)
    assert hand.end("a") == "DONE"
    assert hand.trial("a").limits.failures == 0


def test_a_device_that_goes_before_the_trial_came_calls_the_resize_off() -> None:
    hand = widening()
    hand.lose_device(1)
    only(hand.paused("a"), RunIteration)
    assert hand.trial("a").width == 1.0


def test_a_lane_that_dies_while_the_trial_moves_takes_it_down() -> None:
    hand = widening()
    hand.saved("a", 0, 1)
    hand.paused("a")
    commands = hand.lose(1)
    assert only(commands, StopTrial).lane_ids == (0,)
    assert hand.trial("a").state.value in ("QUEUED", "STARTING")
    assert none(commands, StartTrial), "its old lane may still run it"
    assert hand.trial("a").limits.failures == 1
    start = only(hand.released("a", 0) + hand.ready(hand.trial("a").placement.lanes[-1]), StartTrial)
    assert start.checkpoint is not None and start.checkpoint.iteration == 1


def test_the_only_lane_of_a_trial_that_is_to_move_dies() -> None:
    hand = widening()
    lane = only(hand.lose(0), StartLane).lane_id
    assert hand.trial("a").placement.move is None
    assert hand.trial("a").progress.done == 0
    only(hand.ready(lane), StartTrial)


def test_a_resize_that_fails_is_a_failure() -> None:
    hand = widening()
    hand.paused("a")
    commands = hand.failed("a", 1)
    assert only(commands, StopTrial).lane_ids == (0,)
    assert hand.trial("a").limits.failures == 1


def test_a_wide_trial_shrinks_when_others_arrive() -> None:
    hand = Hand(devices=4, profile=Known(packing=1))
    hand.submit("a", budget=100, max_width=4)
    assert hand.trial("a").width == 4.0
    hand.started("a")
    hand.iterate("a")
    hand.submit("b", "c", "d", budget=100)
    assert hand.states()["b"] == "QUEUED"
    only(hand.tick(), Pause)
    resize = only(hand.paused("a"), Resize)
    assert len(resize.lane_ids) == 1 and resize.lane_ids[0] in resize.old_lane_ids
    assert hand.states()["b"] == "QUEUED", "the devices are not free yet"
    hand.resized("a")
    assert set(hand.states().values()) == {"RUNNING", "STARTING"}


def test_a_trial_alone_lets_others_in_without_being_interrupted() -> None:
    hand = Hand(devices=1)
    hand.submit("a", budget=100)
    hand.started("a")
    hand.iterate("a")
    hand.submit("b", budget=100)
    assert hand.states()["b"] == "QUEUED"
    commands = hand.tick()
    assert none(commands, Pause)
    assert hand.states()["b"] == "STARTING"


def test_what_cannot_be_saved_is_not_resized() -> None:
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=9, max_width=2, can_save=False)
    hand.started("a")
    hand.ready(only(hand.add_device(1), StartLane).lane_id)
    assert none(hand.tick(), Pause)


def test_a_pause_out_of_order_ends_the_lane() -> None:
    hand = widening()
    killed = only(hand.do(TrialPaused(hand.now, "a", 0, iteration=7, purpose=PausePurpose.RESIZE)), KillLane)
    assert killed.lane_id == 0 and "'a' paused at iteration 7" in killed.reason
    hand.lose(0)
    assert hand.states()["a"] in ("QUEUED", "STARTING")


def test_the_cost_of_a_resize_is_measured() -> None:
    profile = Profile()
    hand = Hand(devices=1, profile=profile, max_packing=1)
    hand.submit("a", budget=30, max_width=2)
    hand.started("a")
    hand.ready(only(hand.add_device(1), StartLane).lane_id)
    hand.iterate("a", 8)
    hand.tick()
    hand.paused("a")
    hand.resized("a")
    assert profile.epsilon == 0.1
