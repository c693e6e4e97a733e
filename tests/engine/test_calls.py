"""Calls of trials' methods, reported starts, trials that are not tried again, and trials that are forgotten."""

from __future__ import annotations

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import (
    Call,
    Pause,
    ReportCall,
    ReportEnd,
    ReportStart,
    Resize,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopTrial,
)
from fluid.engine.events import CallRequested, Failure, PausePurpose, SavabilityChanged, TrialPaused
from fluid.errors import InvalidFieldError
from fluid.resources import MemoryNeed


def done(*trial_ids: str, budget: int = 1, **options: object) -> Hand:
    """Trials that are done, on one device."""
    hand = Hand(**options)  # type: ignore[arg-type]
    for trial_id in trial_ids:
        hand.submit(trial_id, budget=budget)
        hand.started(trial_id)
        hand.iterate(trial_id, budget)
    return hand


def test_a_running_trial_is_called_between_two_iterations() -> None:
    hand = Hand()
    hand.submit("a")
    hand.started("a")
    call = only(hand.call("a"), Call)
    assert (call.lane_ids, call.method, call.payload) == ((0,), "method", b"payload")
    hand.iterate("a")
    answer = only(hand.called("a", 0), ReportCall)
    assert (answer.group_id, answer.call_id, answer.result, answer.failure) == ("group of a", 0, b"result", None)
    hand.iterate("a", 2)
    assert hand.end("a") == "DONE"


def test_what_a_call_raises_leaves_the_trial_as_it_is() -> None:
    hand = Hand()
    hand.submit("a")
    hand.started("a")
    hand.call("a")
    failure = Failure("error", "no")
    assert only(hand.called("a", 0, failure=failure), ReportCall).failure is failure
    assert (hand.states()["a"], hand.trial("a").limits.failures) == ("RUNNING", 0)


def test_a_call_waits_until_the_trial_has_started() -> None:
    hand = Hand()
    hand.submit("a")
    assert none(hand.call("a", 0) + hand.call("a", 1), Call)
    calls = [command for command in hand.started("a") if isinstance(command, Call)]
    assert [call.call_id for call in calls] == [0, 1]


def test_a_resident_is_called_where_it_is_and_goes_on_afterwards() -> None:
    hand = done("a")
    only(hand.call("a"), Call)
    assert only(hand.extend("a", 2), RunIteration).iterations == 2, "a lane takes things in order"
    hand.called("a", 0)
    hand.iterate("a", 2)
    assert hand.answers("a") == [(0, "")] and hand.ends("a") == ["DONE", "DONE"]


def test_a_trial_that_was_saved_out_is_restored_for_a_call_and_its_end_is_reported_once() -> None:
    hand = done("a", resident_limit=0)
    hand.saved("a", 0, 1, dropped=True)
    start = only(hand.call("a"), StartTrial)
    assert start.iterations == 0 and start.checkpoint is not None and start.checkpoint.iteration == 1
    only(hand.started("a", 1), Call)
    assert none(hand.log[-1:], Save), "it stays for as long as it is to be called"
    assert only(hand.called("a", 0), Save).drop
    assert hand.ends("a") == ["DONE"] and hand.states()["a"] == "DONE"
    assert sum(isinstance(command, ReportStart) for command in hand.log) == 1


def test_a_call_that_comes_while_a_trial_is_saved_out_waits_for_its_return() -> None:
    hand = done("a", resident_limit=0)
    assert none(hand.call("a"), Call)
    only(hand.saved("a", 0, 1, dropped=True), StartTrial)
    only(hand.started("a", 1), Call)


def test_an_extension_after_a_call_runs_after_it() -> None:
    hand = done("a", resident_limit=0)
    hand.saved("a", 0, 1, dropped=True)
    assert only(hand.call("a"), StartTrial).iterations == 0
    hand.extend("a", 2)
    kinds = [type(command) for command in hand.started("a", 1)]
    assert kinds == [ReportStart, Call, RunIteration], "the submitter waits for it again"
    hand.called("a", 0)
    hand.iterate("a", 2)
    assert hand.ends("a") == ["DONE", "DONE"]


def test_a_trial_that_is_set_back_is_called_once_it_has_repeated_its_iterations() -> None:
    hand = Hand()
    hand.submit("a", budget=5)
    hand.started("a")
    hand.iterate("a")
    hand.saved("a", 0, 1)
    hand.iterate("a", 2)
    only(hand.call("a"), Call)
    lane = only(hand.lose(0), StartLane).lane_id
    start = only(hand.ready(lane), StartTrial)
    assert start.iterations == 4
    assert none(hand.started("a", 1), Call)
    assert none(hand.iterate("a"), Call)
    assert only(hand.iterate("a"), Call).lane_ids == (lane,)
    assert hand.answers("a") == []
    hand.called("a", 0)
    assert hand.answers("a") == [], "that lane is gone"
    hand.called("a", lane)
    assert hand.answers("a") == [(0, "")]


def test_a_done_trial_that_lost_its_lane_repeats_unsaved_iterations_for_a_call() -> None:
    hand = done("a", budget=3)
    hand.call("a")
    lane = only(hand.lose(0), StartLane).lane_id
    assert only(hand.ready(lane), StartTrial).iterations == 3
    hand.started("a")
    hand.iterate("a", 3)
    hand.called("a", lane)
    assert hand.reports("a") == [1, 2, 3] and hand.ends("a") == ["DONE"] and hand.answers("a") == [(0, "")]


def test_a_trial_restored_for_a_call_and_extended_meanwhile_reports_its_end_again() -> None:
    hand = done("a", budget=3)
    hand.call("a")
    lane = only(hand.lose(0), StartLane).lane_id
    hand.ready(lane)
    hand.started("a")
    hand.iterate("a")
    commands = hand.extend("a", 1)
    only(commands, ReportStart)
    assert none(commands, RunIteration), "the call comes first"
    hand.iterate("a")
    assert [type(command) for command in hand.iterate("a")] == [Call, RunIteration]
    hand.iterate("a")
    hand.called("a", lane)
    assert hand.reports("a") == [1, 2, 3, 4] and hand.ends("a") == ["DONE", "DONE"]


def test_a_trial_that_is_preempted_while_it_repeats_iterations_runs_up_to_the_call_that_waits() -> None:
    hand = Hand()
    hand.submit("a", budget=4)
    hand.started("a")
    hand.iterate("a", 2)
    hand.call("a")
    hand.lose(0)
    hand.extend("a", 3)
    for command in hand.log:
        if isinstance(command, StartLane) and command.lane_id != 0:
            hand.ready(command.lane_id)
    hand.started("a")
    hand.iterate("a")
    hand.state._lifecycle.preempt(hand.trial("a"))
    lane = hand.lane("a")
    paused = TrialPaused(hand.now, "a", lane, iteration=1, purpose=PausePurpose.PREEMPT)
    assert only(hand.do(paused), RunIteration).iterations == 3, "up to the budget at the time of the call"
    commands = hand.iterate("a")
    assert only(commands, Call).lane_ids == (lane,)
    assert only(commands, RunIteration).iterations == 3, "added iterations come after the call"


def test_a_trial_that_finished_early_and_repeats_iterations_for_a_call_goes_on_after_a_pause() -> None:
    hand = Hand(profile=Known(packing=1))
    hand.submit("a", budget=20, max_width=2)
    hand.started("a")
    hand.iterate("a", 9)
    hand.iterate("a", finished=True)
    assert none(hand.lose(0), StartLane), "no trial wants one"
    hand.ready(only(hand.call("a"), StartLane).lane_id)
    hand.started("a")
    hand.iterate("a")
    lane = only(hand.add_device(1), StartLane).lane_id
    hand.tick()
    only(hand.ready(lane), Pause)
    hand.submit("b", budget=1)
    assert only(hand.paused("a"), RunIteration).iterations == 9, "b called the widening off"


def test_a_call_that_kills_its_lane_too_often_fails() -> None:
    hand = done("a", budget=1, max_failures=1)
    hand.saved("a", 0, 1)
    hand.call("a")
    lane = only(hand.lose(0, "a"), StartLane).lane_id
    hand.ready(lane)
    only(hand.started("a", 1), Call)
    assert hand.answers("a") == []
    hand.lose(lane, "a")
    assert hand.answers("a") == [(0, "lane_lost")]
    assert (hand.states()["a"], hand.ends("a")) == ("DONE", ["DONE"])


def test_a_trial_that_moves_is_called_when_it_has_arrived() -> None:
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=9, max_width=2)
    hand.started("a")
    hand.iterate("a")
    lane = only(hand.add_device(1), StartLane).lane_id
    hand.tick()
    assert only(hand.call("a", 0), Call).lane_ids == (0,), "it runs on while the new lane starts"
    only(hand.ready(lane), Pause)
    assert none(hand.call("a", 1), Call)
    hand.called("a", 0, 0)
    only(hand.paused("a"), Resize)
    assert only(hand.resized("a"), Call).lane_ids == (0,), "rank 0 alone is asked"
    hand.called("a", 0, 1)
    hand.iterate("a", 8)
    assert hand.end("a") == "DONE"


def test_a_call_during_a_resize_that_is_called_off_comes_before_added_iterations() -> None:
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=4, max_width=2)
    hand.started("a")
    lane = only(hand.add_device(1), StartLane).lane_id
    hand.tick()
    only(hand.ready(lane), Pause)
    hand.call("a")
    hand.extend("a", 3)
    hand.lose(lane)
    commands = hand.paused("a")
    assert [type(command) for command in commands] == [Call, RunIteration]
    assert only(commands, RunIteration).iterations == 7


@pytest.mark.parametrize("state", ["QUEUED", "RUNNING", "DONE"])
def test_calls_of_a_trial_that_is_stopped_are_answered(state: str) -> None:
    hand = done("a") if state == "DONE" else Hand(devices=int(state == "RUNNING"))
    if state != "DONE":
        hand.submit("a")
    if state == "RUNNING":
        hand.started("a")
    hand.call("a", 0)
    hand.call("a", 1)
    hand.stop("a")
    if state == "RUNNING":
        hand.called("a", 0, 0)
        hand.released("a", 0)
    assert hand.answers("a") == [(0, "" if state == "RUNNING" else "stopped"), (1, "stopped")]
    assert hand.states()["a"] == "STOPPED"
    with pytest.raises(InvalidFieldError, match="cannot be called"):
        hand.call("a", 2)


def test_calls_of_a_trial_that_fails_are_answered_with_why() -> None:
    hand = Hand(max_failures=0)
    hand.submit("a")
    hand.started("a")
    hand.call("a")
    failure = only(hand.failed("a", 0), ReportCall).failure
    assert failure is not None
    assert (failure.kind, failure.message, failure.exception) == ("error", "the trial failed: error!", None)


def test_a_trial_that_is_to_be_called_keeps_its_place() -> None:
    hand = done("a", resident_limit=1)
    hand.call("a")
    hand.submit("b", budget=1)
    hand.started("b")
    assert only(hand.iterate("b"), Save).trial_id == "b"
    hand.called("a", 0)


def test_unknown_trials_are_not_called_and_one_whose_state_was_dropped_runs_again_before() -> None:
    hand = Hand(resident_limit=0)
    with pytest.raises(InvalidFieldError, match="unknown"):
        hand.call("a")
    hand.submit("a", budget=1, can_save=False)
    hand.started("a")
    hand.iterate("a")
    hand.released("a", 0)
    assert only(hand.call("a"), StartTrial).iterations == 1
    assert none(hand.started("a"), Call)
    assert only(hand.iterate("a"), Call).call_id == 0
    assert hand.reports("a") == [1]


# -- starts ---------------------------------------------------------------------------------------------------------


def test_every_start_is_reported() -> None:
    hand = Hand(devices=2, profile=Known(packing=1, width=1))
    hand.submit("a", budget=1)
    start = only(hand.started("a"), ReportStart)
    assert (start.trial_id, start.group_id, start.width, start.device_ids) == ("a", "group of a", 1.0, (0,))
    hand.iterate("a")
    assert only(hand.extend("a", 2), ReportStart).at == hand.now, "resumed where it was"
    hand.failed("a", 0)
    only(hand.started("a"), ReportStart)
    hand.stop("a")
    hand.submit("b")
    hand.stop("b")
    assert none(hand.started("b"), ReportStart), "it will not run"


# -- errors that are final ------------------------------------------------------------------------------------------


def test_a_trial_whose_errors_are_final_is_not_tried_again() -> None:
    hand = Hand(max_failures=5)
    hand.submit("a", retry_errors=False)
    hand.started("a")
    end = only(hand.failed("a", 0), ReportEnd)
    assert end.state == "FAILED" and end.failure is not None and end.failure.kind == "error"


def test_a_trial_whose_errors_are_final_is_tried_again_after_lost_lanes_and_out_of_memory() -> None:
    hand = Hand()
    hand.submit("a", "b", retry_errors=False)
    hand.ready(1)
    hand.started("a")
    hand.started("b")
    hand.failed("b", 1, "out_of_memory")
    assert hand.end("b") is None and hand.trial("b").limits.packing_cap == 1
    hand.lose(0)
    assert hand.end("a") is None and hand.trial("a").limits.failures == 1


@pytest.mark.parametrize("again", [True, False])
def test_an_error_while_it_is_saved_is_an_error(again: bool) -> None:
    hand = Hand(resident_limit=0)
    hand.submit("a", budget=1, retry_errors=again)
    hand.started("a")
    only(hand.iterate("a"), Save)
    hand.extend("a")
    hand.failed("a", 0)
    assert hand.end("a") == ("DONE" if again else "FAILED")


# -- forgetting -----------------------------------------------------------------------------------------------------


def test_a_trial_that_has_ended_can_be_forgotten() -> None:
    hand = done("a", "b")
    hand.call("a")
    commands = hand.forget("a")
    assert only(commands, StopTrial).trial_id == "a", "its state is dropped"
    assert none(commands, ReportEnd) and hand.answers("a") == [(0, "stopped")]
    hand.called("a", 0)
    hand.released("a", 0)
    assert list(hand.state.trials) == ["b"]
    assert all(trial.trial_id == "b" for trial in hand.state.trials.by_row.values())
    for ask in (hand.forget, hand.call, hand.stop, hand.extend):
        with pytest.raises(InvalidFieldError, match="unknown"):
            ask("a")
    with pytest.raises(InvalidFieldError, match="taken"):
        hand.submit("a", group="again")
    hand.extend("b")
    hand.iterate("b", 2)
    assert hand.ends("b") == ["DONE", "DONE"]


def test_a_trial_that_has_not_ended_cannot_be_forgotten() -> None:
    hand = Hand()
    hand.submit("a")
    for _ in ("STARTING", "RUNNING"):
        with pytest.raises(InvalidFieldError, match="has not ended"):
            hand.forget("a")
        hand.started("a")
    hand.stop("a")
    with pytest.raises(InvalidFieldError, match="has not ended"):
        hand.forget("a")
    hand.released("a", 0)
    hand.forget("a")
    assert not hand.state.trials and hand.state.groups["group of a"].open == 0


@pytest.mark.parametrize("fails", [True, False])
def test_memory_of_a_trial_forgotten_while_it_was_saved_is_free_again(fails: bool) -> None:
    hand = Hand(resident_limit=0, memory=100.0, profile=Known(memory=MemoryNeed(20.0, 10.0)))
    hand.submit("a", budget=1)
    hand.started("a")
    only(hand.iterate("a"), Save)
    hand.forget("a")
    assert hand.state.memory.reserved == {0: 20.0}
    if fails:
        hand.failed("a", 0)
    else:
        hand.saved("a", 0, 1, dropped=True)
    assert not hand.state.memory.reserved.get(0)


def test_trials_that_are_only_called_are_queued_though_none_has_work_left() -> None:
    hand = Hand(devices=2)
    hand.submit("a", budget=1, follow_up_iterations=5)
    hand.submit("b", budget=1)
    for trial_id in "ab":
        hand.started(trial_id)
        lane = hand.lane(trial_id)
        hand.iterate(trial_id)
        hand.saved(trial_id, lane, 1)
        hand.lose(lane)
    assert hand.states() == {"a": "DONE", "b": "DONE"}
    hand.do(*(CallRequested(hand.now, name, call_id=0, method="method", payload=b"") for name in "ab"))
    assert hand.states() == {"a": "STARTING", "b": "STARTING"}


def test_a_done_trial_whose_state_turns_out_not_to_be_savable_is_called_where_it_is_and_is_done() -> None:
    hand = Hand(resident_limit=0)
    hand.submit("a", budget=1)
    hand.started("a")
    lane = hand.lane("a")
    assert only(hand.iterate("a"), Save).drop
    hand.call("a")
    assert hand.states() == {"a": "STARTING"}, "it waits until it was saved"
    hand.do(SavabilityChanged(hand.now, "a", lane, can_save=False, refuses=True))
    assert hand.states() == {"a": "DONE"} and hand.trial("a").residence.lane == lane
    hand.called("a", lane)
    assert hand.answers("a") == [(0, "")] and hand.ends("a") == ["DONE"]
