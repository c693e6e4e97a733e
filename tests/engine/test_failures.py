from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import (
    NoteDeviceLost,
    Report,
    ReportEnd,
    Resize,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopLane,
    StopTrial,
)
from fluid.engine.events import (
    BudgetExtended,
    Failure,
    GroupSubmitted,
    GroupTerms,
    IterationDone,
    LaneLost,
    StopRequested,
    TrialFailed,
    TrialSpec,
)
from fluid.errors import InvalidFieldError
from fluid.resources import MemoryNeed
from fluid.trialgroup import TrialState

GB = 1e9


def running(*names: str, devices: int = 1, **options: object) -> Hand:
    hand = Hand(devices=devices, **options)  # type: ignore[arg-type]
    hand.submit(*names, budget=10)
    for name in names:
        if len(hand.trial(name).placement.lanes) and not hand.trial(name).placement.launched:
            hand.ready(hand.trial(name).placement.lanes[0])
        hand.started(name)
    return hand


def test_a_trial_that_raises_is_tried_again_from_its_checkpoint_and_then_given_up() -> None:
    hand = running("a", max_failures=1)
    hand.iterate("a", 2)
    hand.saved("a", 0, 1)
    start = only(hand.failed("a", 0), StartTrial)
    assert start.checkpoint is not None and (start.checkpoint.iteration, start.iterations) == (1, 9)
    hand.started("a", 1)
    hand.iterate("a", 2)
    assert hand.reports("a") == [1, 2, 3], "iteration 2 was reported before"
    end = only(hand.failed("a", 0), ReportEnd)
    assert end.state == "FAILED" and end.failure is not None and end.failure.message == "error!"
    with pytest.raises(InvalidFieldError, match="FAILED"):
        hand.extend("a")


def raises(hand: Hand, lane: int, **facts: Any) -> list[Any]:
    return [
        command
        for command in hand.do(TrialFailed(hand.now, "a", lane, Failure("error", "no", **facts)))
        if isinstance(command, (StartTrial, ReportEnd))
    ]


def test_a_trial_that_fails_alike_twice_is_not_tried_a_third_time() -> None:
    hand = running("a")
    assert isinstance(raises(hand, hand.lane("a"), site="ValueError at x.py:3")[0], StartTrial)
    hand.started("a", 0)
    assert isinstance(raises(hand, hand.lane("a"), site="ValueError at x.py:3")[0], ReportEnd)


@pytest.mark.parametrize(("first", "second"), [("", ""), ("x.py:3", "x.py:4"), ("x.py:3", ""), ("", "x.py:3")])
def test_a_trial_that_fails_otherwise_is_tried_a_third_time(first: str, second: str) -> None:
    hand = running("a")
    for site in (first, second):
        assert isinstance(raises(hand, hand.lane("a"), site=site)[0], StartTrial)
        hand.started("a", 0)
    assert isinstance(raises(hand, hand.lane("a"), site="y.py:9")[0], ReportEnd)


def test_a_trainable_that_cannot_be_run_is_not_tried_again_unless_the_user_says_so() -> None:
    hand = running("a")
    assert isinstance(raises(hand, hand.lane("a"), is_form=True)[0], ReportEnd)
    hand = running("a", max_failures=2)
    for _ in range(2):
        assert isinstance(raises(hand, hand.lane("a"), is_form=True, site="x.py:3")[0], StartTrial)
        hand.started("a", 0)
    assert isinstance(raises(hand, hand.lane("a"), is_form=True, site="x.py:3")[0], ReportEnd)


def test_a_trial_that_says_that_it_is_infeasible_ends_so_at_once() -> None:
    hand = running("a", "b", devices=2, profile=Known(packing=1), max_failures=5)
    hand.iterate("a", 2)
    hand.saved("a", 0, 2)
    end = only(hand.failed("a", 0, "infeasible"), ReportEnd)
    assert (end.state, end.iteration, end.failure and end.failure.message) == ("INFEASIBLE", 2, "infeasible!")
    assert hand.trial("a").limits.failures == 0 and hand.trial("b").state.value == "RUNNING"
    with pytest.raises(InvalidFieldError, match="is INFEASIBLE and cannot be extended"):
        hand.extend("a")
    assert none(hand.do(StopRequested(hand.now, "a")), ReportEnd)


def test_a_lane_that_dies_takes_its_trial_down_only() -> None:
    hand = running("a", "b", devices=2, profile=Known(packing=1))
    lane = hand.lane("a")
    device = hand.state.lanes[lane].device_id
    assert only(hand.lose(lane), StartLane).device_id == device
    assert hand.trial("b").state.value == "RUNNING"
    assert hand.trial("a").limits.failures == 1


def test_a_lane_killed_by_another_trial_costs_no_attempt_and_its_killer_runs_alone() -> None:
    hand = running("a", "b")
    assert hand.trial("a").width < 1.0
    lanes = {name: hand.lane(name) for name in "ab"}
    hand.do(
        LaneLost(1.0, lanes["a"], "a client's fault", culprit="a"),
        LaneLost(1.0, lanes["b"], "a client's fault", culprit="a"),
    )
    assert (hand.trial("a").limits.failures, hand.trial("b").limits.failures) == (1, 0)
    assert hand.trial("a").limits.packing_cap == 1
    waiting = hand.trial("a")
    assert waiting.width >= 1.0


def test_a_lost_device_costs_no_attempt() -> None:
    hand = running("a", "b", devices=2, profile=Known(packing=1), max_failures=0)
    device = hand.state.lanes[hand.lane("a")].device_id
    commands = hand.lose_device(device)
    only(commands, StopLane)
    assert only(commands, NoteDeviceLost) == NoteDeviceLost(device, hand.now)
    assert none(hand.lose_device(device), NoteDeviceLost), "it is gone already"
    assert hand.states()["a"] == "QUEUED"
    hand.iterate("b", 10)
    assert hand.states()["a"] == "STARTING"


def test_all_devices_go_and_one_comes_back() -> None:
    hand = running("a", "b", devices=2, profile=Known(packing=1))
    hand.lose_device(0)
    hand.lose_device(1)
    hand.submit("c")
    hand.stop("b")
    assert hand.states() == {"a": "QUEUED", "b": "STOPPED", "c": "QUEUED"}
    lane = only(hand.add_device(7), StartLane).lane_id
    only(hand.ready(lane), StartTrial)


def test_a_lane_that_does_not_start_is_tried_again_and_its_device_given_up_at_last() -> None:
    hand = Hand(devices=1, ready=False, max_failures=1)
    hand.submit("a")
    lane = only(hand.lose(hand.trial("a").placement.lanes[0]), StartLane).lane_id
    assert only(hand.lose(lane), NoteDeviceLost).device_id == 0
    assert len(hand.state.occupancy) == 0
    assert hand.states()["a"] == "FAILED"
    assert only(hand.submit("b", group="later"), ReportEnd).failure is not None, "it would wait for ever"
    only(hand.add_device(0), StartLane)
    hand.submit("c", group="last")
    assert hand.states() == {"a": "FAILED", "b": "FAILED", "c": "STARTING"}, "a device that comes back is tried again"


def test_the_lane_of_a_resident_that_another_place_waits_for_dies() -> None:
    hand = Hand(devices=2, profile=Known(packing=1, width=1))
    hand.submit("a", budget=1, terms=GroupTerms("ann"))
    hand.started("a")
    hand.iterate("a")
    home = hand.trial("a").residence.lane
    hand.submit("b", "c", budget=5, terms=GroupTerms("ann"))
    other = next(name for name in "bc" if hand.lane(name) != home)
    hand.started(other)
    hand.extend("a", 2)
    commands = hand.iterate(other, 5)
    save = only(commands, Save)
    assert save.lane_ids == (home,)
    commands = hand.lose(home)
    start = next(command for command in commands if isinstance(command, StartTrial) and command.trial_id == "a")
    assert start.checkpoint is None and start.iterations == 3


def test_a_trial_out_of_memory_beside_others_runs_with_fewer_and_loses_no_attempt() -> None:
    hand = running("a", "b", "c", max_failures=0)
    lane = hand.lane("c")
    hand.failed("c", lane, "out_of_memory")
    assert (hand.trial("c").limits.failures, hand.trial("c").limits.packing_cap) == (0, 2)
    assert hand.trial("c").width == 0.5


def test_a_trial_out_of_memory_alone_fails_and_says_what_there_was() -> None:
    hand = Hand(memory=10 * GB, profile=Known(packing=1, memory=MemoryNeed(7 * GB, 1 * GB)))
    hand.submit("a")
    hand.started("a")
    end = only(hand.failed("a", 0, "out_of_memory"), ReportEnd)
    assert end.failure is not None
    assert "9000000000 bytes usable" in end.failure.message and "8000000000" in end.failure.message


def test_a_trial_is_tried_again_if_processes_that_are_no_lanes_have_filled_its_gpu() -> None:
    hand = Hand(memory=10 * GB, max_failures=1, profile=Known(packing=1, memory=MemoryNeed(7 * GB, 1 * GB)))
    hand.submit("a", budget=9)
    hand.started("a")
    hand.failed("a", 0, "out_of_memory", squeezed=True)
    assert hand.end("a") is None and hand.trial("a").limits.failures == 1
    hand.started("a")
    end = only(hand.failed("a", hand.lane("a"), "out_of_memory", squeezed=True), ReportEnd)
    assert end.state == "FAILED" and end.failure is not None and "failed 2 times" in end.failure.message


def test_a_trial_out_of_memory_alone_on_a_cpu_is_tried_again_as_others_use_that_memory_too() -> None:
    hand = Hand(max_failures=2, profile=Known(packing=1))
    hand.submit("a", budget=9, retry_errors=False)
    for attempt in range(3):
        assert hand.end("a") is None
        hand.started("a", attempt)
        hand.iterate("a")
        hand.saved("a", 0, attempt + 1)
        hand.failed("a", 0, "out_of_memory")
    end = only(hand.log, ReportEnd)
    assert end.state == "FAILED" and end.iteration == 3
    assert end.failure is not None and end.failure.kind == "out_of_memory"
    assert end.failure.message == "out_of_memory!: it ran alone on its device and failed 3 times"


def test_residents_leave_before_a_trial_that_ran_out_of_memory_is_tried_again() -> None:
    hand = Hand(profile=Known(packing=1))
    hand.submit("a", budget=1)
    hand.started("a")
    hand.iterate("a")
    hand.submit("b")
    hand.started("b")
    commands = hand.failed("b", 0, "out_of_memory")
    assert only(commands, Save).trial_id == "a"
    assert only(commands, StartTrial).trial_id == "b"


def test_trials_are_packed_only_as_far_as_memory_goes() -> None:
    hand = Hand(memory=10 * GB, profile=Known(memory=MemoryNeed(2 * GB, 2 * GB)))
    hand.submit("a", "b", "c")
    assert sorted(hand.states().values()) == ["QUEUED", "STARTING", "STARTING"]


def test_residents_leave_for_a_trial_that_needs_their_memory() -> None:
    hand = Hand(memory=10 * GB)
    hand.submit("a", budget=1, memory=MemoryNeed(5 * GB, 0.0))
    hand.started("a")
    hand.iterate("a")
    commands = hand.submit("b", memory=MemoryNeed(5 * GB, 2 * GB))
    assert only(commands, Save).trial_id == "a"
    assert hand.states()["b"] == "QUEUED"
    only(hand.saved("a", 0, 1, dropped=True), StartTrial)


def test_a_resident_counts_once_where_it_goes_on() -> None:
    hand = Hand(memory=10 * GB)
    hand.submit("a", budget=1, memory=MemoryNeed(6 * GB, 2 * GB))
    hand.started("a")
    hand.iterate("a")
    only(hand.extend("a"), RunIteration)


def test_a_trial_that_fits_on_no_device_is_refused() -> None:
    hand = Hand(memory=10 * GB)
    with pytest.raises(InvalidFieldError, match="fits on no device"):
        hand.submit("a", memory=MemoryNeed(9.5 * GB, 0.0))
    assert not hand.state.trials


def test_a_trial_that_fits_on_no_device_that_is_left_fails_and_says_so() -> None:
    hand = Hand(devices=1, memory=10 * GB)
    hand.add_device(1, 100 * GB)
    hand.submit("a", memory=MemoryNeed(50 * GB, 0.0))
    hand.lose_device(1)
    end = hand.log[-1]
    assert isinstance(end, ReportEnd) and end.failure is not None
    assert "50000000000 bytes" in end.failure.message and "9000000000 usable" in end.failure.message


def test_checkpoints_in_the_memory_of_a_host_that_is_gone_are_not_relied_on() -> None:
    hand = Hand(devices=0)
    lane = only(hand.add_device(0, host="one"), StartLane).lane_id
    hand.ready(lane)
    hand.submit("a", budget=9)
    hand.started("a")
    hand.iterate("a", 3)
    hand.saved("a", lane, 1)
    hand.saved("a", lane, 3, in_memory=True, host="one")
    hand.lose_device(0)
    start = only(hand.ready(only(hand.add_device(1, host="two"), StartLane).lane_id), StartTrial)
    assert start.checkpoint is not None and start.checkpoint.iteration == 1


def test_a_trial_that_loses_a_lane_before_it_has_started_frees_the_others_once_it_has_left_them() -> None:
    hand = Hand(devices=2, profile=Known(packing=1))
    hand.submit("a", budget=5, max_width=2)
    lanes = hand.trial("a").placement.lanes
    commands = hand.lose(lanes[1])
    assert only(commands, StopTrial).lane_ids == (lanes[0],)
    assert none(commands, StartTrial)
    hand.ready(hand.trial("a").placement.lanes[1])
    assert hand.trial("a").placement.launched is False
    only(hand.released("a", lanes[0]), StartTrial)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_wide_trial_that_loses_a_lane_goes_on_in_the_others(lost: int) -> None:
    hand = Hand(devices=3, profile=Known(packing=1, width=3))
    hand.submit("a", budget=9, max_width=3)
    hand.started("a")
    hand.iterate("a", 2)
    lanes = hand.trial("a").placement.lanes
    assert len(lanes) == 3
    left = tuple(lane for lane in lanes if lane != lanes[lost])
    resize = only(hand.lose(lanes[lost], culprit="a"), Resize)
    assert (resize.lane_ids, resize.iterations, resize.done) == (left, 7, 2)
    assert hand.states() == {"a": "RESIZING"} and hand.trial("a").limits.failures == 1
    hand.iterate("a")  # All lanes had finished it, and the lost one had not reported it.
    hand.resized("a")
    assert hand.states() == {"a": "RUNNING"} and hand.trial("a").width == 2.0
    hand.iterate("a", 6)
    assert hand.reports("a") == list(range(1, 10)) and hand.end("a") == "DONE"


def test_what_a_lost_leader_had_answered_and_reported_counts_when_it_is_heard_of() -> None:
    hand = Hand(devices=3, profile=Known(packing=1, width=3))
    hand.submit("a", budget=2, max_width=3)
    hand.started("a")
    hand.call("a", 7)
    hand.extend("a", 4)
    hand.iterate("a", 2)
    leader = hand.trial("a").placement.lanes[0]
    hand.lose(leader)
    hand.called("a", leader, 7)
    assert hand.answers("a") == [(7, "")]
    hand.do(IterationDone(hand.now, "a", leader, iteration=3, seconds=1.0))
    hand.resized("a")
    hand.iterate("a", 3)
    assert hand.reports("a") == [1, 2, 3, 4, 5, 6] and hand.end("a") == "DONE"


def test_what_is_lost_of_a_wide_trial_twice_in_a_row_is_not_counted_in_its_width() -> None:
    hand = Hand(devices=3, profile=Known(packing=1, width=3))
    hand.submit("a", budget=9, max_width=3)
    hand.started("a")
    first, second, last = hand.trial("a").placement.lanes
    for lane in (first, second):
        hand.lose(lane)
    hand.do(IterationDone(hand.now, "a", first, iteration=1, seconds=1.0))
    report = only(hand.log, Report)
    assert (report.width, len(report.device_ids)) == (1.0, 1)
    hand.resized("a")
    assert hand.trial("a").placement.lanes == (last,)


def test_checkpoints_of_iterations_that_a_trial_does_not_get_to_again_are_not_gone_on_from() -> None:
    hand = Hand()
    hand.submit("a", budget=9)
    hand.started("a")
    hand.iterate("a", 5)
    hand.saved("a", 0, 5)
    lane = only(hand.lose(0), StartLane).lane_id
    hand.ready(lane)
    hand.started("a", 0)  # from an older one, as that cannot be read
    hand.now += 1.0
    hand.do(IterationDone(hand.now, "a", lane, iteration=1, seconds=1.0, finished=True))
    assert hand.end("a") == "DONE"
    hand.lose(lane)
    hand.call("a")
    assert hand.trial("a").residence.checkpoint is None and hand.trial("a").progress.done == 0


def test_losing_lane_after_lane_a_wide_trial_fails_in_the_end() -> None:
    hand = Hand(devices=3, profile=Known(packing=1, width=3), max_failures=1)
    hand.submit("a", budget=9, max_width=3)
    hand.started("a")
    for _ in range(2):
        assert hand.end("a") is None
        hand.lose(hand.trial("a").placement.lanes[-1], culprit="a")
    assert hand.end("a") == "FAILED"


def test_a_wide_trial_that_ends_though_it_lost_a_lane_ends_once_it_stands_still() -> None:
    hand = Hand(devices=2, profile=Known(packing=1))
    hand.submit("a", budget=3, max_width=2)
    hand.started("a")
    hand.iterate("a", 2)
    hand.lose(hand.trial("a").placement.lanes[0])
    hand.iterate("a")
    assert hand.end("a") is None
    hand.resized("a")
    assert hand.end("a") == "DONE" and hand.reports("a") == [1, 2, 3]


def test_a_lane_lost_while_a_wide_trial_is_paused_to_be_widened_leaves_it_the_others() -> None:
    hand = Hand(devices=2, profile=Known(packing=1))
    hand.submit("a", budget=9, max_width=3)
    hand.started("a")
    hand.iterate("a")
    hand.add_device(2)
    hand.ready(2)
    hand.tick()
    a = hand.trial("a")
    lanes = a.placement.move.old_lanes
    resize = only(hand.lose(lanes[1]), Resize)
    assert resize.lane_ids == lanes[:1] and a.width == 1.0


def test_a_lane_lost_while_a_wide_trial_is_narrowed_to_share_a_device_leaves_room_for_the_others_there() -> None:
    hand = Hand(devices=2, profile=Known(packing=4))
    hand.submit("wide", budget=30, max_width=2)
    hand.started("wide")
    hand.iterate("wide")
    first, second = hand.trial("wide").placement.lanes
    hand.state._resizing.begin(hand.trial("wide"), 0.25)  # as a planner may, which here prefers a whole device
    hand.submit(*"abcdefgh", budget=30)
    assert hand.trial("wide").state is TrialState.RESIZING
    shared = hand.state.lanes[first].device_id
    assert len(hand.state.occupancy.residents[shared]) > 1, "others were placed beside it"
    resize = only(hand.lose(second), Resize)
    assert resize.lane_ids == (first,) and hand.trial("wide").width == 0.25


def test_a_wide_trial_that_is_stopped_ends_when_it_has_left_all_its_lanes() -> None:
    hand = Hand(devices=2, profile=Known(packing=1))
    hand.submit("a", budget=5, max_width=2)
    hand.started("a")
    hand.stop("a")
    hand.released("a", 0)
    assert hand.end("a") is None
    hand.failed("a", 1)
    assert hand.end("a") == "STOPPED"


def test_requests_that_cannot_be_change_nothing_not_even_those_before_them() -> None:
    hand = Hand()
    good = GroupSubmitted(0.0, "g", (TrialSpec("a", 1),))
    for bad in (
        GroupSubmitted(0.0, "g", (TrialSpec("b", 1),)),
        GroupSubmitted(0.0, "h", (TrialSpec("b", 0),)),
        GroupSubmitted(0.0, "h", (TrialSpec("b", 1, max_width=0),)),
        BudgetExtended(0.0, "a", 0),
        StopRequested(0.0, "unknown"),
    ):
        with pytest.raises(InvalidFieldError):
            hand.do(good, bad)
        assert not hand.state.trials and not hand.state.groups
    with pytest.raises(InvalidFieldError, match="unknown"):
        hand.do(good, BudgetExtended(0.0, "a", 1))
    assert not hand.state.trials and not hand.state.groups, "requests that build on each other need calls of their own"
    with pytest.raises(InvalidFieldError, match="taken"):
        hand.add_device(0)
    hand.do(good)
    hand.do(BudgetExtended(0.0, "a", 1))
    assert hand.trial("a").progress.budget == 2
    hand.stop("a")
    with pytest.raises(InvalidFieldError, match="is STOPPING and cannot be extended"):
        hand.extend("a")


def test_a_trial_that_is_extended_in_the_call_that_stops_it_stops() -> None:
    hand = Hand()
    hand.submit("a", budget=1)
    hand.started("a")
    hand.do(StopRequested(0.0, "a"), BudgetExtended(0.0, "a", 1))
    hand.released("a", 0)
    assert hand.end("a") == "STOPPED" and hand.trial("a").progress.budget == 1


def test_where_no_lane_starts_on_any_device_what_waits_fails_with_the_reason() -> None:
    hand = Hand(devices=1, ready=False, max_failures=1)
    hand.submit("a", "b", budget=3)
    for _ in range(2):
        for lane in [lane for lane in hand.state.lanes if not lane.ready]:
            hand.lose(lane.lane_id)
    assert hand.states() == {"a": "FAILED", "b": "FAILED"}
    assert hand.end("a") == hand.end("b") == "FAILED"
    failure = hand.trial("a").limits.failure
    assert failure is not None and "no lane could be started on any device" in failure.message
