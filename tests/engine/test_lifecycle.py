from __future__ import annotations

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import (
    Call,
    KillLane,
    Report,
    ReportEnd,
    ReportSetBack,
    RunIteration,
    Save,
    StartLane,
    StartTrial,
    StopTrial,
)
from fluid.engine.events import FailRequested, Failure, IterationDone, StopRequested, TrialReleased, TrialStarted
from fluid.errors import InvalidFieldError


def test_a_trial_is_set_up_run_reported_and_done() -> None:
    hand = Hand()
    start = only(hand.submit("a"), StartTrial)
    assert (start.trial_id, start.iterations, start.checkpoint) == ("a", 3, None)
    hand.started("a")
    report = only(hand.iterate("a"), Report)
    assert (report.iteration, report.seconds, report.width, report.device_ids) == (1, 1.0, 1.0, (0,))
    commands = hand.iterate("a", 2)
    end = only(commands, ReportEnd)
    assert (end.state, end.iteration, end.failure) == ("DONE", 3, None)
    assert hand.reports("a") == [1, 2, 3]
    assert hand.state.groups["group of a"].open == 0


def test_pause_and_resume_of_a_resident_is_one_message() -> None:
    hand = Hand()
    hand.submit("a")
    hand.started("a")
    hand.iterate("a", 3)
    run = only(hand.extend("a", 2), RunIteration)
    assert run.iterations == 2
    assert none(hand.log[-1:], StartTrial)
    hand.iterate("a", 2)
    assert hand.reports("a") == [1, 2, 3, 4, 5]


def test_a_trial_waits_for_its_lane() -> None:
    hand = Hand(ready=False)
    assert none(hand.submit("a"), StartTrial)
    only(hand.ready(0), StartTrial)


def test_an_extension_while_it_starts_or_runs_is_added_to_what_its_lane_does() -> None:
    hand = Hand()
    hand.submit("a")
    assert none(hand.extend("a", 2), RunIteration)
    assert only(hand.started("a"), RunIteration).iterations == 2
    assert only(hand.extend("a", 1), RunIteration).iterations == 1
    hand.iterate("a", 6)
    assert hand.end("a") == "DONE"


def test_a_trial_that_says_it_has_finished_is_done_and_cannot_be_extended() -> None:
    hand = Hand()
    hand.submit("a", budget=10)
    hand.started("a")
    hand.iterate("a")
    hand.iterate("a", finished=True)
    assert (hand.end("a"), hand.reports("a")) == ("DONE", [1, 2])
    with pytest.raises(InvalidFieldError, match="has ended by itself"):
        hand.extend("a")


def test_a_trial_that_finds_nothing_left_to_do_reports_no_iteration() -> None:
    hand = Hand()
    hand.submit("a", budget=10)
    hand.started("a")
    hand.iterate("a")
    hand.do(IterationDone(hand.now, "a", hand.lane("a"), iteration=1, seconds=0.0, finished=True))
    assert (hand.end("a"), hand.reports("a")) == ("DONE", [1])


def test_a_running_trial_stops_when_its_lane_says_so() -> None:
    hand = Hand()
    hand.submit("a")
    hand.started("a")
    stop = only(hand.stop("a"), StopTrial)
    assert stop.lane_ids == (0,)
    assert only(hand.iterate("a"), Report).iteration == 1, "it was computed, and so it counts"
    assert hand.end("a") is None
    hand.released("a", 0)
    assert hand.end("a") == "STOPPED"
    with pytest.raises(InvalidFieldError, match="STOPPED"):
        hand.extend("a")


def test_a_trial_stopped_while_it_is_set_up_does_not_report_its_start() -> None:
    hand = Hand()
    hand.submit("a")
    hand.stop("a")
    hand.started("a")
    hand.released("a", 0)
    assert hand.end("a") == "STOPPED"


def test_a_queued_trial_or_one_whose_lane_is_not_ready_stops_at_once() -> None:
    hand = Hand(ready=False, max_packing=1, profile=Known(packing=1))
    hand.submit("a", "b")
    assert sorted(hand.states().values()) == ["QUEUED", "STARTING"]
    hand.do(StopRequested(0.0, "a"), StopRequested(0.0, "b"))
    assert hand.end("a") == hand.end("b") == "STOPPED"
    assert none(hand.log, StopTrial)


def test_a_done_trial_that_is_stopped_leaves_its_lane() -> None:
    hand = Hand()
    hand.submit("a", budget=1)
    hand.started("a")
    hand.iterate("a")
    commands = hand.stop("a")
    assert only(commands, StopTrial).lane_ids == (0,)
    assert hand.end("a") == "STOPPED"
    hand.released("a", 0)


METRIC = Failure("metric", "it reported none")


def test_a_trial_that_its_submitter_finds_to_have_failed_is_failed_wherever_it_is() -> None:
    hand = Hand(max_packing=1, profile=Known(packing=1))
    hand.submit("done", budget=1)
    hand.started("done")
    hand.iterate("done")
    hand.submit("runs", "waits")
    hand.started("runs")
    for name in ("done", "waits"):
        end = only(hand.do(FailRequested(0.0, name, METRIC)), ReportEnd)
        assert (end.trial_id, end.state, end.failure) == (name, "FAILED", METRIC)
    assert none(hand.do(FailRequested(0.0, "runs", METRIC)), ReportEnd), "it ends its iteration first"
    hand.do(FailRequested(0.0, "runs", Failure("metric", "later")), StopRequested(0.0, "runs"))
    hand.released("runs", hand.lane("runs"))
    assert hand.end("runs") == "FAILED"
    assert hand.trial("runs").limits.failure == METRIC
    assert {group.open for group in hand.state.groups.values()} == {0}
    with pytest.raises(InvalidFieldError, match="FAILED"):
        hand.extend("done")
    for name in ("done", "runs", "waits"):
        assert none(hand.do(FailRequested(0.0, name, METRIC)), ReportEnd)
    with pytest.raises(InvalidFieldError, match="unknown"):
        hand.do(FailRequested(0.0, "nobody", METRIC))


def test_a_trial_that_has_failed_so_stays_so_where_its_lane_dies() -> None:
    hand = Hand()
    hand.submit("a")
    hand.started("a")
    hand.do(FailRequested(0.0, "a", METRIC))
    hand.lose(hand.lane("a"))
    assert hand.end("a") == "FAILED" and hand.trial("a").limits.failure == METRIC


def test_events_of_a_lane_that_the_trial_has_left_change_nothing() -> None:
    hand = Hand(devices=2)
    hand.submit("a")
    hand.started("a")
    lane = hand.lane("a")
    hand.failed("a", lane)
    for stale in (
        IterationDone(1.0, "a", lane + 17, iteration=7, seconds=1.0),
        TrialStarted(1.0, "a", lane + 17, iteration=5, seconds=1.0),
        TrialReleased(1.0, "a", lane + 17),
        IterationDone(1.0, "unknown", lane, iteration=7, seconds=1.0),
    ):
        before = hand.states()
        assert hand.do(stale) == []
        assert hand.states() == before


def test_a_lane_that_reports_an_iteration_out_of_order_is_killed() -> None:
    hand = Hand()
    hand.submit("a")
    hand.started("a")
    kill = only(hand.do(IterationDone(1.0, "a", 0, iteration=2, seconds=1.0)), KillLane)
    assert kill.lane_id == 0 and "'a' reports iteration 2 after 0" in kill.reason
    assert hand.trial("a").progress.reported == 0


def done_where_another_runs() -> tuple[Hand, int, str]:
    """A trial "a" that is done and kept in a lane where another one runs now, and a second one on the other device.

    Returns:
        The hand, that lane, and who runs on the other device.
    """
    hand = Hand(devices=2, profile=Known(packing=1, width=1))
    hand.submit("a", budget=1)
    hand.started("a")
    hand.iterate("a")
    home = hand.trial("a").residence.lane
    assert home is not None
    hand.submit("b", "c", budget=5)
    other = next(name for name in "bc" if hand.lane(name) != home)
    hand.started(other)
    return hand, home, other


def test_a_trial_whose_state_is_elsewhere_is_fetched_first() -> None:
    hand, home, other = done_where_another_runs()
    hand.extend("a")
    save = only(hand.stop(other) + hand.released(other, hand.lane(other)), Save)
    assert save.drop and save.lane_ids == (home,)
    start = only(hand.saved("a", home, 1, dropped=True), StartTrial)
    assert start.checkpoint is not None and start.checkpoint.iteration == 1
    hand.started("a", 1)
    hand.iterate("a", 2)
    assert hand.reports("a") == [1, 2, 3]


def test_a_trial_that_was_saved_as_it_is_goes_on_elsewhere_at_once() -> None:
    hand, home, other = done_where_another_runs()
    hand.saved("a", home, 1)
    hand.call("a")
    hand.extend("a")
    free = hand.lane(other)
    commands = hand.iterate(other, 5)
    assert none(commands, Save) and only(commands, StopTrial) == StopTrial("a", (home,))
    start = only(commands, StartTrial)
    assert start.lane_ids == (free,) and start.checkpoint is not None
    hand.released("a", home)
    # Its old lane may have been busy: what it was asked to call is called where the trial is.
    assert only(hand.started("a", 1), Call).lane_ids == start.lane_ids
    hand.called("a", home)
    assert hand.answers("a") == []
    hand.called("a", start.lane_ids[0])
    hand.iterate("a", 2)
    assert hand.reports("a") == [1, 2, 3] and hand.answers("a") == [(0, "")]


@pytest.mark.parametrize("since", ["a call", "an older checkpoint"])
def test_a_trial_does_not_go_on_elsewhere_from_an_outdated_checkpoint(since: str) -> None:
    hand, home, other = done_where_another_runs()
    hand.saved("a", home, 0 if since == "an older checkpoint" else 1)
    if since == "a call":
        hand.call("a")
        hand.called("a", home)
    hand.extend("a")
    only(hand.iterate(other, 5), Save)


def test_the_least_recently_used_resident_is_saved_when_there_are_too_many() -> None:
    hand = Hand(resident_limit=1)
    for name in "ab":
        hand.submit(name, budget=1)
        hand.started(name)
        hand.iterate(name)
    save = only(hand.log, Save)
    assert (save.trial_id, save.drop) == ("a", True)


def test_a_trial_extended_while_it_is_evicted_waits_and_goes_on_from_what_was_saved() -> None:
    hand = Hand(resident_limit=0)
    hand.submit("a", budget=1)
    hand.started("a")
    only(hand.iterate("a"), Save)
    commands = hand.extend("a")
    assert none(commands, StartTrial) and none(commands, RunIteration)
    start = only(hand.saved("a", 0, 1, dropped=True), StartTrial)
    assert start.checkpoint is not None and start.iterations == 2


def test_what_cannot_be_saved_stays_resident_however_many_there_are() -> None:
    hand = Hand(resident_limit=1)
    for name in "abc":
        hand.submit(name, budget=1, can_save=False)
        hand.started(name)
        hand.iterate(name)
    assert none(hand.log, Save) and none(hand.log, StopTrial)
    for name in "abc":
        only(hand.extend(name, 1), RunIteration)
        hand.iterate(name)


def test_a_trial_whose_unsaved_state_was_dropped_runs_from_the_beginning_when_it_is_extended() -> None:
    hand = Hand(resident_limit=0)
    hand.submit("a", budget=1, can_save=False)
    hand.started("a")
    assert only(hand.iterate("a"), StopTrial).trial_id == "a"
    hand.released("a", 0)
    commands = hand.extend("a", 2)
    assert only(commands, StartTrial).iterations == 3
    told = only(commands, ReportSetBack)
    assert (told.lost, told.checkpoint) == (1, None) and "follow_up_iterations" in told.reason
    hand.started("a")
    hand.iterate("a", 3)
    assert hand.reports("a") == [1, 2, 3]


def test_what_cannot_be_saved_waits_for_its_own_lane() -> None:
    hand = Hand(devices=2, profile=Known(packing=1, width=1))
    hand.submit("a", budget=1, can_save=False)
    hand.started("a")
    hand.iterate("a")
    home = hand.trial("a").residence.lane
    hand.submit("b", "c", budget=1)
    assert {hand.lane("b"), hand.lane("c")} >= {home}
    hand.extend("a")
    assert hand.trial("a").state.value == "QUEUED"
    owner = next(name for name in "bc" if hand.lane(name) == home)
    other = "c" if owner == "b" else "b"
    hand.started(other)
    assert none(hand.iterate(other), RunIteration), "the other device will not do"
    hand.started(owner)
    assert only(hand.iterate(owner), RunIteration).lane_ids == (home,)


def test_a_checkpoint_that_fails_sets_the_trial_back_and_its_iterations_are_not_reported_twice() -> None:
    hand = Hand(resident_limit=0)
    hand.submit("a", budget=2)
    hand.started("a")
    hand.iterate("a", 2)
    hand.extend("a", 1)
    start = only(hand.failed("a", 0), StartTrial)
    assert (start.iterations, start.checkpoint) == (3, None)
    hand.started("a")
    hand.iterate("a", 3)
    assert hand.reports("a") == [1, 2, 3]
    assert hand.end("a") == "DONE"


def test_a_checkpoint_beyond_what_was_reported_does_not_count() -> None:
    hand = Hand()
    hand.submit("a")
    hand.started("a")
    hand.iterate("a")
    hand.saved("a", 0, 1)
    hand.saved("a", 0, 2)  # its iteration 2 never came
    start = only(hand.failed("a", 0), StartTrial)
    assert start.checkpoint is not None and start.checkpoint.iteration == 1


def test_lanes_are_warmed_when_a_device_is_added() -> None:
    hand = Hand(devices=0)
    assert only(hand.add_device(5), StartLane).device_id == 5
