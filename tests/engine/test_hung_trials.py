"""Trials that give no result: on an engine driven by hand, with made-up times."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import (
    Command,
    DumpStacks,
    KillLane,
    NoteHung,
    ReportEnd,
    Resize,
    StartLane,
    StartTrial,
    StopTrial,
)
from fluid.engine.events import Alarm, IterationDone, StopRequested, TrialStarted
from fluid.errors import InvalidFieldError


class Watched(Hand):
    """An engine driven by hand that gets its alarms in time."""

    def alarm(self) -> list[Command]:
        """Advances to the time that the engine names."""
        alarm_at = self.state.alarm_at
        assert alarm_at is not None
        self.now = max(self.now, alarm_at)
        return self.do(Alarm(self.now))

    def alarms_until(self, at: float) -> list[Command]:
        """Sends every alarm up to a time; returns the commands of all."""
        commands: list[Command] = []
        while self.state.alarm_at is not None and self.state.alarm_at <= at:
            commands += self.alarm()
        self.now = at
        return commands

    def stop_now(self, trial_id: str) -> list[Command]:
        return self.do(StopRequested(self.now, trial_id, now=True))


def running(*names: str, devices: int = 1, options: dict[str, Any] | None = None, **spec: Any) -> Watched:
    hand = Watched(devices=devices, **(options or {}))
    hand.submit(*names, **{"budget": 100, **spec})
    for name in names:
        for lane_id in hand.trial(name).placement.lanes:
            if not hand.state.lanes[lane_id].ready:
                hand.ready(lane_id)
        hand.started(name)
    return hand


# -- a limit in seconds ------------------------------------------------------------------------------------------------


def test_an_iteration_is_ended_exactly_at_its_limit_and_its_stacks_are_dumped_before() -> None:
    hand = running("a", iteration_timeout_s=20.0)
    hand.iterate("a", 2)
    assert hand.now == 2.0
    assert none(hand.alarms_until(19.9), DumpStacks)
    assert only(hand.alarm(), DumpStacks).lane_ids == (hand.lane("a"),) and hand.now == 20.0
    commands = hand.alarm()
    assert hand.now == 22.0
    kill = only(commands, KillLane)
    assert kill.lane_id == hand.lane("a") and kill.at == 22.0 and "'a' gave no result for 20 s" in kill.reason
    assert only(commands, NoteHung).killed
    assert none(hand.alarms_until(100.0), KillLane), "it is killed only once"


def test_iterations_that_end_in_time_are_left_alone_however_many_there_are() -> None:
    hand = running("a", iteration_timeout_s=5.0)
    for _ in range(50):
        hand.iterate("a")  # One second each.
        assert none(hand.alarms_until(hand.now), KillLane)
    assert hand.reports("a") == list(range(1, 51))


def test_the_first_timeout_costs_no_attempt_and_the_second_is_final_whatever_max_failures() -> None:
    for max_failures in (0, 5):
        hand = running("a", iteration_timeout_s=5.0, options={"max_failures": max_failures})
        hand.iterate("a", 3)
        hand.saved("a", hand.lane("a"), 2)
        lane = only(hand.alarms_until(hand.now + 5.0), KillLane).lane_id
        start = only(hand.lose(lane), StartLane)
        again = only(hand.ready(start.lane_id), StartTrial)
        assert again.checkpoint is not None and again.checkpoint.iteration == 2
        assert hand.trial("a").limits.failures == 0 and hand.trial("a").limits.packing_cap is None
        hand.started("a", 2)
        lane = only(hand.alarms_until(hand.now + 5.0), KillLane).lane_id
        end = only(hand.lose(lane), ReportEnd)
        assert end.state == "FAILED" and end.failure is not None and end.failure.kind == "timeout"


def test_a_set_up_has_ten_minutes_at_least() -> None:
    hand = Watched()
    hand.submit("a", iteration_timeout_s=5.0)
    assert none(hand.alarms_until(599.0), KillLane)
    assert "its set-up" in only(hand.alarms_until(600.0), KillLane).reason


def test_after_a_long_set_up_the_limit_is_that_of_an_iteration() -> None:
    hand = Watched()
    hand.submit("a", iteration_timeout_s=5.0)
    hand.alarms_until(300.0)
    hand.started("a")
    assert none(hand.alarms_until(304.9), KillLane)
    assert not none(hand.alarms_until(305.0), KillLane)


@pytest.mark.parametrize("start", [0.0, 1.0, 1.1, 3.3, 1e3 / 3.0, 1e6 / 7.0])
def test_an_alarm_is_never_asked_for_twice_at_one_time_whatever_is_rounded(start: float) -> None:
    hand = Watched()
    hand.now = start
    hand.submit("a", iteration_timeout_s=1.0)
    hand.started("a")
    assert not none(hand.alarm(), DumpStacks) and hand.state.alarm_at is not None and hand.state.alarm_at > hand.now
    assert not none(hand.alarm(), KillLane) and hand.now == start + 1.0


def test_saving_and_calls_take_no_time_from_the_next_iteration() -> None:
    hand = running("a", iteration_timeout_s=10.0)
    hand.call("a", 1)
    hand.alarms_until(9.5)
    hand.called("a", hand.lane("a"), 1)
    hand.alarms_until(19.0)
    hand.saved("a", hand.lane("a"), 0)
    assert none(hand.alarms_until(28.0), KillLane)
    assert not none(hand.alarms_until(29.0), KillLane)


def test_what_the_lane_had_reported_before_it_was_killed_counts() -> None:
    hand = running("a", iteration_timeout_s=5.0, budget=1)
    lane = only(hand.alarms_until(5.0), KillLane).lane_id
    hand.do(IterationDone(hand.now, "a", lane, iteration=1, seconds=5.0))
    assert hand.ends("a") == ["DONE"]
    hand.lose(lane)
    assert hand.ends("a") == ["DONE"] and hand.trial("a").limits.timeouts == 0


def test_a_trial_that_is_stopping_is_ended_at_its_limit_too() -> None:
    hand = running("a", iteration_timeout_s=5.0)
    hand.stop("a")
    lane = only(hand.alarms_until(5.0), KillLane).lane_id
    assert only(hand.lose(lane), ReportEnd).state == "STOPPED"


def test_the_neighbours_of_a_hung_trial_are_untouched() -> None:
    hand = running("a", "b", iteration_timeout_s=5.0, options={"profile": Known(packing=2)})
    assert len(hand.state.devices) == 1 and hand.lane("a") != hand.lane("b")
    for _ in range(4):
        hand.iterate("b")
        assert none(hand.alarms_until(hand.now), KillLane)
    lane = only(hand.alarms_until(5.0), KillLane).lane_id
    assert lane == hand.lane("a")
    hand.lose(lane)
    assert hand.states()["b"] == "RUNNING" and hand.trial("b").limits.failures == 0


def test_a_trial_that_waits_for_its_turn_is_not_silent_as_the_one_that_had_the_turns_is_done() -> None:
    hand = running("a", "b", budget=9, iteration_timeout_s=5.0, options={"turns": 2, "profile": Known(packing=1)})
    assert hand.lane("a") == hand.lane("b")
    for _ in range(9):
        assert none(hand.alarms_until(hand.now + 3.9), KillLane)
        hand.iterate("a", seconds=0.1)
    assert hand.states() == {"a": "DONE", "b": "RUNNING"}
    assert none(hand.alarms_until(hand.now + 4.9), KillLane), "its first turn has just begun"
    assert only(hand.alarms_until(hand.now + 1.0), KillLane).lane_id == hand.lane("b")


def test_all_lanes_of_a_wide_trial_are_killed_and_it_goes_on_from_its_checkpoint() -> None:
    hand = running("a", devices=2, iteration_timeout_s=5.0, max_width=2, options={"profile": Known(packing=1)})
    assert len(hand.trial("a").placement.lanes) == 2
    hand.iterate("a", 2)
    hand.saved("a", hand.lane("a"), 2)
    killed = [command.lane_id for command in hand.alarms_until(hand.now + 5.0) if isinstance(command, KillLane)]
    assert sorted(killed) == sorted(hand.trial("a").placement.lanes)
    commands = hand.lose(killed[0]) + hand.lose(killed[1])
    assert none(commands, Resize), "no lane of it is left to go on in"
    assert hand.trial("a").limits.timeouts == 1 and hand.states() == {"a": "STARTING"}


def test_a_trial_without_a_limit_asks_for_no_alarm() -> None:
    hand = running("a", iteration_timeout_s=None)
    assert hand.state.alarm_at is None


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), "soon", True])
def test_a_limit_that_cannot_be_is_refused(bad: Any) -> None:
    hand = Hand()
    with pytest.raises(InvalidFieldError, match="iteration_timeout_s"):
        hand.submit("a", iteration_timeout_s=bad)


# -- "auto" ------------------------------------------------------------------------------------------------------------


def test_auto_dumps_stacks_after_a_minute_and_kills_after_ten() -> None:
    hand = running("a")
    hand.iterate("a", 5)
    assert none(hand.alarms_until(64.0), DumpStacks)
    commands = hand.alarms_until(66.0)
    note = only(commands, NoteHung)
    assert only(commands, DumpStacks).trial_id == "a"
    assert (note.at, note.seconds, note.limit, note.killed) == (65.0, 60.0, 600.0, False)
    assert none(hand.alarms_until(604.0), KillLane)
    assert not none(hand.alarms_until(605.0), KillLane)


def test_auto_follows_the_iterations_of_the_key() -> None:
    hand = running("a")
    for _ in range(5):
        hand.now += 100.0
        done = hand.trial("a").progress.done + 1
        hand.do(IterationDone(hand.now, "a", hand.lane("a"), iteration=done, seconds=100.0))
    begun = hand.now
    assert none(hand.alarms_until(begun + 999.0), DumpStacks)
    assert not none(hand.alarms_until(begun + 1000.0), DumpStacks)
    assert none(hand.alarms_until(begun + 2999.0), KillLane)
    assert not none(hand.alarms_until(begun + 3000.0), KillLane)


def jobs(*names: str, seconds: float = 1.0) -> Watched:
    """An engine in which trials of one iteration each have run, all but the last of them to their end."""
    hand = Watched(devices=1, profile=Known(packing=1))
    for name in names:
        hand.submit(name, group=name, budget=1, profile_key="job")
        lane_id = hand.lane(name)
        if not hand.state.lanes[lane_id].ready:
            hand.ready(lane_id)
        hand.started(name)
        if name != names[-1]:
            hand.now += seconds
            hand.do(IterationDone(hand.now, name, lane_id, iteration=1, seconds=seconds))
    return hand


def test_auto_never_ends_a_whole_job_however_long_it_takes_beside_others() -> None:
    hand = jobs(*"abcdef")
    begun, commands = hand.now, hand.alarms_until(hand.now + 1e5)
    assert none(commands, KillLane)
    note = only(commands, NoteHung)
    assert (note.trial_id, note.at, note.seconds, note.limit, note.killed) == ("f", begun + 600.0, 600.0, None, False)
    assert only(commands, DumpStacks).trial_id == "f"
    hand.do(IterationDone(hand.now, "f", hand.lane("f"), iteration=1, seconds=1e5))
    assert hand.ends("f") == ["DONE"]


def test_a_whole_job_counts_as_silent_only_once_its_stacks_are_dumped() -> None:
    hand = jobs(*"abcdef")
    hand.alarms_until(hand.now + 500.0)
    assert hand.state.silent(hand.now) == []
    hand.alarms_until(hand.now + 200.0)
    assert hand.state.silent(hand.now) == [("f", 700.0)]


def test_a_limit_in_seconds_ends_a_whole_job() -> None:
    hand = jobs(*"abcde")
    hand.submit("f", group="f", budget=1, profile_key="job", iteration_timeout_s=20.0)
    hand.do(IterationDone(hand.now, "e", hand.lane("e"), iteration=1, seconds=1.0))
    hand.started("f")
    assert only(hand.alarms_until(hand.now + 20.0), KillLane).lane_id == hand.lane("f")


def test_auto_limits_a_first_iteration_once_a_trial_of_the_key_has_gone_on_after_its_own() -> None:
    hand = jobs(*"abcdef")
    hand.submit("g", group="g", budget=2, profile_key="job")
    hand.do(IterationDone(hand.now, "f", hand.lane("f"), iteration=1, seconds=1.0))
    hand.started("g")
    hand.iterate("g", 2)
    hand.submit("h", group="h", budget=1, profile_key="job")
    hand.started("h")
    assert only(hand.alarms_until(hand.now + 600.0), KillLane).lane_id == hand.lane("h")


def test_auto_ends_nothing_before_five_iterations_of_the_key_were_measured() -> None:
    hand = running("a", profile_key="new")
    hand.iterate("a", 4)
    assert none(hand.alarms_until(1e5), KillLane)


def test_auto_takes_what_another_trial_of_the_key_has_shown() -> None:
    hand = running("a", "b", devices=2, profile_key="key", options={"profile": Known(packing=1)})
    hand.iterate("b", 5)
    kills = [command for command in hand.alarms_until(700.0) if isinstance(command, KillLane)]
    assert [kill.lane_id for kill in kills] == [hand.lane("a"), hand.lane("b")]


def test_auto_does_not_end_a_long_validation_that_the_key_has_shown_before() -> None:
    hand = running("a", budget=1000)
    hand.iterate("a", 5)
    hand.now += 1500.0  # The driver was not asked in between: no alarm is sent.
    hand.do(IterationDone(hand.now, "a", hand.lane("a"), iteration=6, seconds=1500.0))
    hand.iterate("a", 300)
    begun = hand.now
    assert none(hand.alarms_until(begun + 4000.0), KillLane)
    assert not none(hand.alarms_until(begun + 4500.0), KillLane)


def test_auto_ends_a_set_up_that_hangs_once_five_were_measured() -> None:
    hand = running(*"abcde", devices=5, budget=1, options={"profile": Known(packing=1)})
    for name in "abcde":
        hand.iterate(name)
    hand.submit("f", group="later")
    begun = hand.now
    assert hand.states()["f"] == "STARTING"
    assert none(hand.alarms_until(begun + 599.0), KillLane)
    assert not none(hand.alarms_until(begun + 600.0), KillLane)


# -- a driver that was suspended ---------------------------------------------------------------------------------------


def test_the_time_in_which_the_driver_was_suspended_does_not_count() -> None:
    hand = running("a", iteration_timeout_s=5.0)
    hand.now = 1000.0
    assert none(hand.do(Alarm(hand.now)), KillLane)
    assert none(hand.alarms_until(1004.0), KillLane)
    assert not none(hand.alarms_until(1005.0), KillLane)


# -- lanes that a trial does not leave ---------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [5.0, "auto", None])
def test_a_lane_that_a_trial_does_not_leave_is_killed_in_the_end(limit: Any) -> None:
    hand = running("a", devices=2, iteration_timeout_s=limit, max_width=2, options={"profile": Known(packing=1)})
    first, second = hand.trial("a").placement.lanes
    hand.failed("a", first)
    assert hand.state.lanes[second].draining == {"a"}
    commands = hand.alarms_until(hand.now + 600.0)
    assert [command.lane_id for command in commands if isinstance(command, KillLane)].count(second) == 1
    hand.lose(second)
    assert hand.trial("a").limits.timeouts <= 1


# -- stop(now=True) ----------------------------------------------------------------------------------------------------


def test_stopping_now_kills_the_lanes_of_a_trial_that_runs() -> None:
    hand = running("a", iteration_timeout_s=None)
    lane = hand.lane("a")
    assert only(hand.stop_now("a"), KillLane).lane_id == lane
    assert hand.states() == {"a": "STOPPING"}
    assert only(hand.lose(lane), ReportEnd).state == "STOPPED"
    assert none(hand.stop_now("a"), KillLane)


def test_stopping_now_helps_where_stopping_did_not() -> None:
    hand = running("a")
    lane = hand.lane("a")
    assert only(hand.stop("a"), StopTrial).lane_ids == (lane,)
    commands = hand.stop_now("a")
    assert only(commands, KillLane).lane_id == lane and none(commands, StopTrial)
    assert none(hand.stop_now("a"), KillLane), "once is enough"
    assert only(hand.lose(lane), ReportEnd).state == "STOPPED"


def test_stopping_a_waiting_trial_now_is_an_ordinary_stop() -> None:
    hand = running("a", options={"profile": Known(packing=1)})
    hand.submit("b", group="later")
    commands = hand.stop_now("b")
    assert none(commands, KillLane) and only(commands, ReportEnd).state == "STOPPED"


def test_stopping_now_costs_the_other_residents_of_the_lane_nothing_but_their_way_back() -> None:
    hand = running("a", budget=1, options={"profile": Known(packing=1)})
    hand.iterate("a")  # It is done, and its state stays in the lane.
    hand.saved("a", 0, 1)
    hand.submit("b", group="later", budget=5)
    hand.started("b")
    lane = hand.lane("b")
    assert hand.trial("a").residence.lane == lane
    hand.stop_now("b")
    hand.lose(lane)
    assert hand.trial("a").limits.failures == 0 and hand.trial("a").residence.lane is None
    hand.extend("a", 1)
    hand.ready(max(other.lane_id for other in hand.state.lanes))
    hand.do(TrialStarted(hand.now, "a", hand.lane("a"), iteration=1, seconds=0.1))
    hand.iterate("a")
    assert hand.end("a") == "DONE" and hand.reports("a") == [1, 2]


def test_stopping_a_wide_trial_now_kills_all_its_lanes_and_the_first_loss_ends_it() -> None:
    hand = running("a", devices=2, max_width=2, options={"profile": Known(packing=1)})
    lanes = hand.trial("a").placement.lanes
    killed = [command.lane_id for command in hand.stop_now("a") if isinstance(command, KillLane)]
    assert sorted(killed) == sorted(lanes)
    assert only(hand.lose(lanes[0]), ReportEnd).state == "STOPPED"
    hand.lose(lanes[1])
    assert hand.ends("a") == ["STOPPED"]


def test_no_trial_is_started_in_a_lane_that_is_being_killed() -> None:
    hand = running("a", options={"profile": Known(packing=1)})
    hand.submit("b", group="later")
    lane = hand.lane("a")
    hand.stop_now("a")
    commands = hand.released("a", lane)  # It had left before the kill reached it.
    assert hand.ends("a") == ["STOPPED"] and none(commands, StartTrial)
    start = only(hand.lose(lane), StartLane)
    assert only(hand.ready(start.lane_id), StartTrial).trial_id == "b"
