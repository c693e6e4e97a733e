"""Devices that do not work: the engine finds them, and trials that fail because of them do not pay for that."""

from __future__ import annotations

from typing import Any

from engine_helpers import Hand, Known, none, only

from fluid.engine import tuning
from fluid.engine.commands import NoteDeviceLost, ReportEnd, StartLane, StartTrial
from fluid.engine.events import Alarm, LaneMeasured, TrialForgotten
from fluid.resources import MemoryNeed, Requires

GB = 1e9


def one_each(*names: str, devices: int, **options: Any) -> Hand:
    """A session with room for one trial on a device, where these have begun if there was room."""
    hand = Hand(devices=devices, profile=Known(packing=1, width=1), **options)
    hand.submit(*names, budget=10, retry_errors=False)
    for name in names:
        if hand.trial(name).placement.launched:
            hand.started(name)
    return hand


def device_of(hand: Hand, name: str) -> int:
    return int(hand.state.lanes[hand.lane(name)].device_id)


def breaks_device(hand: Hand, name: str) -> list[Any]:
    """A trial raises, and CUDA is of no use in its lane since; the lane ends, and another one gets ready."""
    lane = int(hand.trial(name).placement.lanes[0])
    commands = hand.failed(name, lane, "device")
    assert not any(isinstance(command, StartTrial) and lane in command.lane_ids for command in commands)
    if lane in hand.state.lanes:
        commands += hand.lose(lane)
    for command in list(commands):
        if isinstance(command, StartLane) and command.lane_id in hand.state.lanes:
            commands += hand.ready(command.lane_id)
    return commands


def on(hand: Hand, device: int) -> str:
    """The trial on a device."""
    return next(name for name in "abcd" if hand.state.occupancy.held.get(hand.trial(name).row) == (device,))


def test_a_trial_that_left_its_device_unusable_goes_elsewhere_and_this_does_not_count() -> None:
    hand = one_each("a", "b", "c", "d", devices=2)
    first, other = device_of(hand, "a"), device_of(hand, "b")
    breaks_device(hand, "a")
    third = on(hand, first)
    assert third in "cd" and hand.states()["a"] == "QUEUED" and hand.trial("a").limits.failures == 0
    hand.stop("d" if third == "c" else "c")
    hand.iterate("b", 10)
    assert on(hand, other) == "a"
    hand.started("a")
    hand.iterate("a")
    assert hand.trial("a").limits.avoids is None, "it may go back now"


def test_it_goes_back_once_another_trial_shows_that_the_device_works() -> None:
    hand = one_each("a", "b", "c", "d", devices=2)
    first = device_of(hand, "a")
    breaks_device(hand, "a")
    third = on(hand, first)
    hand.started(third)
    hand.iterate(third)
    hand.stop("d" if third == "c" else "c")
    hand.iterate(third, 9)
    assert on(hand, first) == "a"


def test_a_device_that_comes_back_begins_anew() -> None:
    hand = one_each("a", "b", "c", "d", devices=2)
    first = device_of(hand, "a")
    breaks_device(hand, "a")
    assert hand.trial("a").limits.avoids == first
    hand.lose_device(first)
    hand.add_device(first)
    assert hand.trial("a").limits.avoids is None


def test_strikes_of_trials_that_are_forgotten_count_on() -> None:
    hand = one_each(*"abcdef", devices=2, max_failures=0)
    bad = device_of(hand, "a")
    good = next(name for name in "bcdef" if hand.states()[name] == "RUNNING")
    for _ in range(3):
        victim = next(
            trial for trial in hand.state.trials.values() if hand.state.occupancy.residents.get(bad) == [trial.row]
        )
        if victim.state.value == "STARTING":
            hand.started(victim.trial_id)
        hand.iterate(good)
        breaks_device(hand, victim.trial_id)
        if victim.state.value == "QUEUED":
            hand.stop(victim.trial_id)
        hand.do(TrialForgotten(hand.now, victim.trial_id))
    assert only(hand.log, NoteDeviceLost).device_id == bad


def test_it_does_not_wait_for_other_devices_if_no_other_trial_tries_that_one() -> None:
    hand = one_each("a", "b", devices=2)
    first = device_of(hand, "a")
    breaks_device(hand, "a")
    assert hand.states()["a"] == "STARTING" and hand.state.occupancy.held[hand.trial("a").row] == (first,)
    assert hand.trial("a").limits.failures == 0


def test_a_trial_that_does_it_again_is_to_blame_itself() -> None:
    hand = one_each("a", devices=2)
    breaks_device(hand, "a")
    hand.started("a")
    end = only(breaks_device(hand, "a"), ReportEnd)
    assert end.failure is not None and end.failure.kind == "error", "retry_errors=False holds"
    assert len(hand.state.occupancy) == 2


def test_on_the_only_device_it_counts_at_once() -> None:
    hand = one_each("a", devices=1)
    assert only(breaks_device(hand, "a"), ReportEnd).state == "FAILED"
    assert len(hand.state.occupancy) == 1


def test_a_trial_that_fits_nowhere_else_goes_back() -> None:
    hand = Hand(devices=1, memory=10 * GB, profile=Known(packing=1, width=1))
    hand.add_device(1, 100 * GB)
    hand.submit("a", memory=MemoryNeed(50 * GB, 0.0), budget=10)
    hand.ready(1)
    hand.started("a")
    breaks_device(hand, "a")
    assert hand.states()["a"] == "STARTING" and hand.state.occupancy.held[hand.trial("a").row] == (1,)


def test_a_device_that_every_trial_leaves_unusable_is_given_up_if_others_work() -> None:
    hand = one_each(*"abcdef", devices=2)
    bad = device_of(hand, "a")
    good = next(name for name in "bcdef" if name in hand.states() and hand.states()[name] == "RUNNING")
    log: list[Any] = []
    for _ in range(3):
        victim = next(
            trial for trial in hand.state.trials.values() if hand.state.occupancy.residents.get(bad) == [trial.row]
        )
        if victim.state.value == "STARTING":
            hand.started(victim.trial_id)
        hand.iterate(good)
        log += breaks_device(hand, victim.trial_id)
    lost = only(log, NoteDeviceLost)
    assert lost.device_id == bad and "3 trials in a row left it unusable, the last by device!" in lost.reason
    assert all(trial.limits.failures == 0 for trial in hand.state.trials.values())


def test_code_with_a_fault_costs_no_device() -> None:
    hand = one_each(*"abcdef", devices=2)
    for _ in range(40):
        for trial in list(hand.state.trials.values()):
            if trial.state.value == "STARTING" and trial.placement.launched:
                hand.started(trial.trial_id)
                breaks_device(hand, trial.trial_id)
            elif trial.state.value == "RUNNING":
                breaks_device(hand, trial.trial_id)
    assert set(hand.states().values()) == {"FAILED"}
    assert none(hand.log, NoteDeviceLost) and len(hand.state.occupancy) == 2


def test_a_device_that_completes_iterations_in_between_is_kept() -> None:
    hand = one_each(*"abcdef", devices=2)
    bad = device_of(hand, "a")
    good = next(name for name in "bcdef" if hand.states()[name] == "RUNNING")
    for _ in range(4):
        victim = next(
            trial for trial in hand.state.trials.values() if hand.state.occupancy.residents.get(bad) == [trial.row]
        )
        if victim.state.value == "STARTING":
            hand.started(victim.trial_id)
        hand.iterate(good)
        hand.iterate(victim.trial_id)
        breaks_device(hand, victim.trial_id)
    assert none(hand.log, NoteDeviceLost)


# -- lanes that cannot use their device --------------------------------------------------------------------


def test_a_device_that_no_lane_can_use_is_given_up_and_says_why() -> None:
    hand = Hand(devices=1, ready=False, max_failures=1)
    hand.submit("a")
    lane = only(hand.lose(hand.trial("a").placement.lanes[0], failed_position=0), StartLane).lane_id
    lost = only(hand.lose(lane, failed_position=0), NoteDeviceLost)
    assert lost.reason == "2 lanes in a row could not be started there, the last because it killed"
    assert hand.state.given_up == ((0, lost.reason),)
    hand.add_device(0)
    assert hand.state.given_up == ()


def test_a_device_that_takes_no_further_process_is_shared_by_fewer_trials() -> None:
    hand = Hand(devices=1, max_failures=0, profile=Known(packing=4))
    hand.submit("a", "b", "c", budget=10)
    hand.started("a")
    hand.ready(hand.trial("b").placement.lanes[0])
    hand.started("b")
    commands = hand.lose(hand.trial("c").placement.lanes[0], failed_position=0)
    assert none(commands, NoteDeviceLost) and none(commands, StartLane)
    assert hand.states() == {"a": "RUNNING", "b": "RUNNING", "c": "QUEUED"}
    assert hand.trial("c").limits.failures == 0
    hand.iterate("a", 10)
    assert hand.states()["c"] == "STARTING", "in the lane that is free now"
    assert hand.trial("c").placement.lanes == (hand.trial("a").residence.lane,)


def refused(**options: Any) -> Hand:
    """Trials "a" and "b" run on a device that took no process for "c", which waits."""
    hand = Hand(devices=1, profile=Known(packing=4), **options)
    need = MemoryNeed(1 * GB) if options else None
    hand.submit("a", "b", "c", budget=100, memory=need, iteration_timeout_s=None)
    hand.started("a")
    hand.ready(hand.trial("b").placement.lanes[0])
    hand.started("b")
    hand.lose(hand.trial("c").placement.lanes[0], failed_position=0)
    assert hand.states()["c"] == "QUEUED"
    return hand


def alarm(hand: Hand) -> list[Any]:
    """Lets the time of the next deadline come."""
    assert hand.state.alarm_at is not None
    hand.now = max(hand.now, hand.state.alarm_at)
    return hand.do(Alarm(hand.now))


def test_it_is_tried_again_after_a_while_and_each_time_less_soon() -> None:
    hand = refused()
    waits = []
    for _ in range(9):
        before = hand.now
        lane = only(alarm(hand), StartLane).lane_id
        waits.append(hand.now - before)
        assert hand.states()["c"] == "STARTING"
        hand.lose(lane, failed_position=0)
        assert hand.states() == {"a": "RUNNING", "b": "RUNNING", "c": "QUEUED"}
    assert waits == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]
    assert hand.trial("c").limits.failures == 0


def test_thousands_of_refusals_are_no_error() -> None:
    hand = refused()
    starts = hand.state._failures.starts
    for _ in range(2000):
        starts.refused(0)
    assert hand.state.alarm_at == hand.now + tuning.LONGEST_CAP_S


def test_a_lane_that_starts_there_ends_the_refusals() -> None:
    hand = refused()
    hand.lose(only(alarm(hand), StartLane).lane_id, failed_position=0)
    hand.ready(only(alarm(hand), StartLane).lane_id)
    hand.started("c")
    assert hand.states()["c"] == "RUNNING" and hand.state.alarm_at is None
    hand.submit("d", budget=9, iteration_timeout_s=None)
    hand.lose(hand.trial("d").placement.lanes[0], failed_position=0)
    assert hand.state.alarm_at == hand.now + tuning.CAP_S, "as at the first time"


def test_it_is_tried_again_sooner_once_a_process_there_has_ended() -> None:
    hand = refused()
    assert hand.state.alarm_at == tuning.CAP_S
    lane = hand.lane("b")
    hand.stop("b")
    hand.released("b", lane)
    assert hand.states()["c"] == "STARTING", "in place of the one that left, in its lane"
    assert hand.state.alarm_at == tuning.CAP_S, "there are as many processes as before"
    hand.submit("d", budget=9, iteration_timeout_s=None)
    assert hand.states()["d"] == "QUEUED"
    hand.lose(lane, blameless=True)
    hand.do()
    assert len(hand.state.lanes.on(0)) == 2, "another lane comes in its place"
    hand.lose_device(0)
    assert hand.state.alarm_at is None


def test_it_is_tried_again_sooner_once_memory_was_freed_there() -> None:
    hand = refused(memory=20 * GB)
    hand.do(LaneMeasured(hand.now, 0, 3 * GB), LaneMeasured(hand.now, 1, 3 * GB))
    assert hand.state.alarm_at == tuning.CAP_S, "more is taken than before"
    lane = hand.lane("b")
    hand.stop("b")
    hand.released("b", lane)
    assert hand.state.alarm_at == tuning.CAP_S, "another trial took its place"
    hand.do(LaneMeasured(hand.now, 0, 0.2 * GB), LaneMeasured(hand.now, 1, 0.2 * GB))
    assert hand.state.alarm_at == tuning.CAP_S, "no less than when it refused"
    hand.started("c")
    hand.stop("c")
    hand.released("c", lane)
    assert hand.state.alarm_at == tuning.CAP_S * tuning.EASED_CAP
    hand.submit("d", "e", budget=9, memory=MemoryNeed(1 * GB), iteration_timeout_s=None)
    assert hand.states()["e"] == "QUEUED"
    alarm(hand)
    assert hand.states()["e"] == "STARTING"


def test_it_is_tried_at_once_where_that_time_is_over() -> None:
    hand = refused(memory=20 * GB)
    hand.now = 30.0
    lane = hand.lane("b")
    hand.stop("b")
    hand.stop("c")
    hand.released("b", lane)
    assert hand.state.alarm_at == 30.0, "not in the past: then the driver would seem to have been suspended"


def test_an_idle_device_has_no_cap() -> None:
    hand = refused()
    for name in "abc":
        hand.stop(name)
    for name in "ab":
        hand.released(name, hand.lane(name))
    assert hand.state.alarm_at is None and hand.state.occupancy.caps == {}


def test_a_gangs_lane_says_which_device_it_cannot_use() -> None:
    hand = Hand(devices=2, max_failures=0, profile=Known(packing=1))
    hand.submit("a", devices=2, gang=True)
    lost = only(hand.lose(hand.trial("a").placement.lanes[0], failed_position=1), NoteDeviceLost)
    assert lost.device_id == 1


def test_it_goes_back_if_no_other_device_is_eligible() -> None:
    hand = Hand(devices=0, profile=Known(packing=1, width=1))
    for index, model in enumerate(["T4", "A100"]):
        hand.ready(only(hand.add_device(index, model=model), StartLane).lane_id)
    hand.submit("b", "c", budget=10, requires=Requires(model="A100"))
    hand.submit("a", budget=10, requires=Requires(model="T4"), retry_errors=False)
    hand.started("a")
    assert only(breaks_device(hand, "a"), ReportEnd).state == "FAILED", "it counts, as on an only device"


def test_it_goes_back_if_no_other_waiting_trial_can_use_the_device() -> None:
    hand = one_each("a", "b", devices=2)
    hand.ready(only(hand.add_device(2, model="T4"), StartLane).lane_id)
    hand.submit("c", "d", budget=10, requires=Requires(model="T4"))
    first = device_of(hand, "a")
    breaks_device(hand, "a")
    assert hand.state.occupancy.held[hand.trial("a").row] == (first,)


def test_a_device_that_all_waiting_trials_avoid_is_not_left_idle() -> None:
    hand = Hand(devices=2, profile=Known(packing=1, width=1))
    hand.submit("a", "b", "c", budget=10, retry_errors=False)
    first = device_of(hand, "a")
    hand.started("a")
    hand.started("b")
    breaks_device(hand, "a")
    assert on(hand, first) == "c"
    hand.started("c")
    breaks_device(hand, "c")
    assert hand.state.occupancy.residents[first], "b may run for hours"
