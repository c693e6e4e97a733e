"""Trials with a process of their own: which lane they get, when it stays, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine import tuning
from fluid.engine.commands import (
    KillLane,
    NotePlaced,
    ReportSetBack,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopLane,
    StopTrial,
)
from fluid.engine.events import (
    Alarm,
    CleanUpLasts,
    LaneReady,
    LaneSpent,
    PauseRequested,
    ResumeRequested,
    SavabilityChanged,
)
from fluid.resources import MemoryNeed


def session(devices: int = 1, **options: Any) -> Hand:
    return Hand(devices=devices, **{"profile": Known(packing=1, width=1), **options})


def run(hand: Hand, name: str, **spec: Any) -> int:
    """Runs a trial to the end of its budget of one iteration; returns its lane."""
    hand.submit(name, **{"budget": 1, "isolated": True, **spec})
    return go(hand, name)


def go(hand: Hand, name: str) -> int:
    if not hand.trial(name).placement.launched:
        hand.ready(hand.trial(name).placement.lanes[0])
    lane = hand.lane(name)
    hand.started(name, hand.trial(name).progress.done)
    hand.iterate(name)
    return lane


def test_a_trial_runs_where_none_ran_and_its_lane_ends_once_it_was_cleaned_up() -> None:
    hand = session()
    lane = run(hand, "a", extends=False)
    assert only(hand.log, StopTrial).lane_ids == (lane,) and none(hand.log, Save)
    commands = hand.submit("b", isolated=True)
    new = only(commands, StartLane).lane_id
    assert none(hand.ready(new), StartTrial), "a trial that has ended is still being cleaned up"
    commands = hand.released("a", lane)
    assert only(commands, StopLane).lane_id == lane
    assert only(commands, StartTrial).lane_ids == (new,)


def test_a_trial_that_is_not_cleaned_up_in_time_loses_its_lane_where_another_one_waits() -> None:
    hand = session()
    lane = run(hand, "a", extends=False)
    hand.now += 100.0
    assert none(hand.tick(), KillLane), "nothing waits for it"
    new = only(hand.submit("b", isolated=True), StartLane).lane_id
    hand.ready(new)
    hand.now += tuning.CLEAN_UP_S
    killed = only(hand.do(Alarm(hand.now)), KillLane)
    assert killed.lane_id == lane and "'a' has ended, and did not leave" in killed.reason
    assert only(hand.lose(lane), StartTrial).lane_ids == (new,)
    assert hand.states() == {"a": "DONE", "b": "STARTING"}


def test_a_trial_with_a_state_that_can_be_saved_is_saved_first_and_goes_on_in_another_lane() -> None:
    hand = session()
    lane = run(hand, "a")
    assert only(hand.log, Save) == Save("a", (lane,), drop=True)
    hand.submit("b", isolated=True)
    assert hand.states()["b"] == "STARTING"
    new = hand.trial("b").placement.lanes[0]
    hand.ready(new)
    assert not hand.trial("b").placement.launched, "what is saved has not left yet"
    commands = hand.saved("a", lane, 1, dropped=True, in_memory=True)
    assert only(commands, StopLane).lane_id == lane and only(commands, StartTrial).trial_id == "b"
    hand.stop("b")
    hand.released("b", new)
    commands = hand.extend("a", 2)
    assert none(commands, ReportSetBack)
    restored = only(hand.ready(only(commands, StartLane).lane_id), StartTrial)
    assert restored.checkpoint is not None and restored.iterations == 2


@pytest.mark.parametrize("why", [{"follow_up_iterations": 3}, {"extends": True}])
def test_a_trial_of_which_something_says_that_it_goes_on_stays_in_its_lane(why: dict[str, Any]) -> None:
    hand = session()
    lane = run(hand, "a", **why)
    assert none(hand.log, Save) and none(hand.log, StopTrial)
    other = run(hand, "b", extends=False)
    assert other != lane
    hand.released("b", other)
    assert only(hand.extend("a"), RunIteration).lane_ids == (lane,)


def test_a_paused_trial_stays_in_its_lane_in_which_no_other_one_runs() -> None:
    hand = session()
    hand.submit("a", budget=9, isolated=True, can_save=False)
    hand.started("a")
    hand.do(PauseRequested(hand.now, "a"))
    hand.paused("a")
    lane = run(hand, "b", extends=False)
    assert lane != 0
    hand.released("b", lane)
    assert only(hand.do(ResumeRequested(hand.now, "a")), RunIteration).lane_ids == (0,)


def test_a_trial_that_is_tried_again_is_set_up_in_another_lane() -> None:
    hand = session()
    hand.submit("a", budget=9, isolated=True)
    hand.started("a")
    commands = hand.failed("a", 0)
    assert only(commands, StopLane).lane_id == 0
    new = only(commands, StartLane).lane_id
    assert only(hand.ready(new), StartTrial).lane_ids == (new,)


def test_a_call_keeps_a_trial_that_is_done_until_it_was_answered() -> None:
    hand = session()
    hand.submit("a", budget=1, isolated=True)
    hand.started("a")
    hand.call("a")
    assert none(hand.iterate("a"), Save)
    assert only(hand.called("a", 0), Save) == Save("a", (0,), drop=True)


def test_trials_that_may_share_a_lane_do_so_and_not_with_one_that_may_not() -> None:
    hand = session()
    assert run(hand, "a", isolated=False) == run(hand, "b", isolated=False) == 0
    assert run(hand, "c", extends=True) == 1
    assert run(hand, "d", isolated=False) == 0


def test_a_lane_that_a_trial_has_changed_for_good_gets_no_further_one() -> None:
    hand = session()
    lane = run(hand, "a", isolated=False, budget=1)
    assert none(hand.do(LaneSpent(hand.now, lane, "a thread of the trial goes on")), StopLane), "it keeps a state"
    assert run(hand, "b", isolated=False) != lane
    hand.extend("a")
    assert hand.lane("a") == lane, "the trial goes on with what it has there"
    hand.stop("a")
    assert only(hand.released("a", lane), StopLane).lane_id == lane


def test_a_trial_that_was_about_to_start_is_set_up_in_another_lane_than_a_spent_one() -> None:
    hand = session()
    run(hand, "a", isolated=False)
    hand.stop("a")
    hand.submit("b", isolated=False)
    assert hand.trial("b").placement.lanes == (0,)
    commands = hand.do(LaneSpent(hand.now, 0, "a thread of the trial goes on"))
    (new,) = hand.trial("b").placement.lanes
    assert new != 0 and only(commands, StartLane).lane_id == new
    commands = [*hand.released("a", 0), *hand.released("b", 0), *hand.ready(new)]
    assert only(commands, StopLane).lane_id == 0 and only(commands, StartTrial).lane_ids == (new,)


def test_a_lane_in_which_trials_raise_one_after_another_is_used_no_more() -> None:
    hand, ended = session(max_failures=0), []
    for name in "abcd":
        hand.submit(name, budget=9, isolated=False)
        hand.started(name)
        if name == "b":
            hand.iterate(name)  # The process is well.
        ended.append([command.lane_id for command in hand.failed(name, 0) if isinstance(command, StopLane)])
    assert ended == [[], [], [], [0]] and tuning.MOST_RAISED == 3


def test_a_device_keeps_so_many_idle_lanes_and_gives_up_what_cannot_be_saved_last() -> None:
    hand = session()
    hand.state.lanes.most_idle, hand.state.lanes.most_processes = 2, 4
    for name, can_save in (("a", False), ("b", True), ("c", True)):
        run(hand, name, extends=True, can_save=can_save)
    saves = [command.trial_id for command in hand.log if isinstance(command, Save)]
    assert saves == ["b"], "the one that has rested for longest of those that can be saved"
    hand.saved("b", hand.trial("b").residence.lane, 1, dropped=True)
    for name in "def":
        run(hand, name, extends=True, can_save=False)
    assert [command.trial_id for command in hand.log if isinstance(command, Save)] == ["b", "c"]
    assert none(hand.log, StopTrial)
    hand.saved("c", hand.trial("c").residence.lane, 1, dropped=True)
    run(hand, "g", extends=True, can_save=False)
    assert only(hand.log, StopTrial).trial_id == "a", "the machine has no more processes"


def test_a_wide_trial_that_goes_on_in_several_lanes_is_set_up_in_all_of_them() -> None:
    hand = Hand(devices=2, profile=Known(packing=1, width=2))
    hand.submit("a", budget=9, isolated=True, max_width=2, devices=2)
    hand.started("a")
    hand.do(PauseRequested(hand.now, "a"))
    lanes = set(hand.trial("a").placement.lanes)
    first = hand.lane("a")
    hand.paused("a")
    for lane in lanes - {first}:
        assert only(hand.released("a", lane), StopLane).lane_id == lane
    hand.do(ResumeRequested(hand.now, "a"))
    assert lanes.isdisjoint(hand.trial("a").placement.lanes)


def test_the_lane_of_a_gang_ends_with_its_trial() -> None:
    hand = Hand(devices=2, profile=Known(packing=1))
    commands = hand.submit("a", budget=1, isolated=True, devices=2, gang=True, extends=False)
    lane = next(each.lane_id for each in commands if isinstance(each, StartLane) and each.others)
    hand.ready(lane)
    hand.started("a")
    hand.iterate("a")
    assert only(hand.released("a", lane), StopLane).lane_id == lane


def test_a_stopped_trial_whose_clean_up_lasts_loses_its_lane_where_another_one_waits() -> None:
    hand = session()
    hand.submit("a", budget=9, isolated=True)
    hand.started("a")
    lane = hand.lane("a")
    hand.stop("a")
    begun = hand.now
    hand.now += 1.0
    hand.do(CleanUpLasts(hand.now, "a", lane, begun))
    hand.now = begun + tuning.CLEAN_UP_S
    assert none(hand.do(Alarm(hand.now)), KillLane), "nothing waits for it"
    hand.submit("b", isolated=True)
    hand.now = begun + 2.0 * tuning.CLEAN_UP_S
    assert only(hand.do(Alarm(hand.now)), KillLane).lane_id == lane
    hand.lose(lane)
    assert hand.states() == {"a": "STOPPED", "b": "STARTING"}


def test_a_clean_up_that_has_just_begun_is_not_ended_with_an_older_one() -> None:
    hand = session(devices=2)
    lanes = {}
    for name in "ab":
        hand.submit(name, budget=1, isolated=True, extends=False)
        if not hand.trial(name).placement.launched:
            hand.ready(hand.trial(name).placement.lanes[0])
        lanes[name] = hand.lane(name)
        hand.started(name)
    hand.iterate("a")
    hand.submit("c", budget=1, isolated=True)
    hand.now += tuning.CLEAN_UP_S - 0.1
    hand.iterate("b")
    hand.now += 0.1
    killed = [command.lane_id for command in hand.do(Alarm(hand.now)) if isinstance(command, KillLane)]
    assert killed == [lanes["a"]]


def test_the_time_of_a_trial_that_has_raised_begins_anew_as_it_cleans_up() -> None:
    hand = session()
    hand.submit("a", budget=9, isolated=True, iteration_timeout_s=5.0)
    hand.started("a")
    hand.now += 4.0
    hand.do(CleanUpLasts(hand.now, "a", hand.lane("a"), hand.now - 1.0))
    hand.now += 4.0
    assert none(hand.do(Alarm(hand.now)), KillLane)


def test_a_trial_that_is_done_and_turns_out_not_to_be_savable_leaves_all_the_same() -> None:
    hand = session()
    lane = run(hand, "a")
    assert only(hand.log, Save).drop
    told = SavabilityChanged(hand.now, "a", lane, can_save=False, reason="it cannot be pickled", refuses=True)
    assert only(hand.do(told), StopTrial).lane_ids == (lane,)
    assert only(hand.released("a", lane), StopLane).lane_id == lane


def test_the_last_checkpoint_is_kept_before_a_trial_leaves_where_no_process_may_stay() -> None:
    hand = session()
    hand.state.lanes.most_idle = 0
    lane = run(hand, "a", keep_last=True)
    assert only(hand.log, Save) == Save("a", (lane,), drop=False, durable=True, keep=True)


def test_a_call_of_a_trial_that_is_gone_and_cannot_be_saved_says_that_it_begins_again() -> None:
    hand = session()
    lane = run(hand, "a", can_save=False)
    hand.released("a", lane)
    hand.call("a")
    told = only(hand.log, ReportSetBack)
    assert told.lost == 1 and "it was called" in told.reason and "cannot be saved" in told.reason


def test_a_lane_that_cleans_up_is_not_ended_for_its_memory_and_who_waits_for_it_starts_then() -> None:
    hand = Hand(devices=1, memory=100.0, profile=Known(packing=1, width=1), ready=False)
    hand.do(LaneReady(hand.now, 0, own_bytes=2.0))
    hand.submit("a", budget=2, isolated=True, can_save=False, memory=MemoryNeed(20.0, 60.0), follow_up_iterations=5)
    hand.started("a")
    hand.iterate("a", 2)
    lane = only(hand.submit("b", budget=1, isolated=True, extends=False), StartLane).lane_id
    hand.do(LaneReady(hand.now, lane, own_bytes=12.0))
    hand.started("b")
    hand.extend("a", 1)
    commands = hand.iterate("b")
    assert only(commands, NotePlaced).trial_id == "a" and none(commands, StopLane), "b is being cleaned up"
    commands = hand.released("b", lane)
    assert only(commands, StopLane).lane_id == lane
    assert only(commands, RunIteration).trial_id == "a"
