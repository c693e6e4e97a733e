"""Urgent groups: running trials of less urgent groups pause in place for them, and come back."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import Command, NotePreempted, NoteQueued, Pause, RunIteration, Save, StartTrial
from fluid.engine.events import (
    BudgetExtended,
    GroupSubmitted,
    GroupTerms,
    PausePurpose,
    StateMeasured,
    TrialsAdded,
    TrialSpec,
)
from fluid.resources import MemoryNeed, Requires

#: Nothing is packed or widened; iterations take a second.
ALONE: dict[str, Any] = {"profile": Known(packing=1, width=1), "max_packing": 1}


def submit(hand: Hand, *trial_ids: str, priority: float = 10.0, preempt: bool = True, **spec: Any) -> list[Command]:
    """Submits a group that preempts, named after its first trial."""
    trials = tuple(TrialSpec(trial_id, **{"budget": 3, **spec}) for trial_id in trial_ids)
    terms = GroupTerms(priority=priority, preempt=preempt)
    return hand.do(GroupSubmitted(hand.now, f"group of {trial_ids[0]}", trials, terms))


def sweep(devices: int, trials: str, **spec: Any) -> Hand:
    """A sweep that runs on devices; those of its trials that were placed have started."""
    hand = Hand(devices=devices, **ALONE)
    hand.submit(*trials, **{"budget": 20, **spec})
    hand.start_all()
    return hand


def paused_in(commands: list[Command]) -> list[str]:
    return sorted(command.trial_id for command in commands if isinstance(command, Pause))


def test_a_running_trial_pauses_in_place_for_an_urgent_one_and_comes_back() -> None:
    hand = sweep(1, "ab")
    hand.iterate("a", 2)
    lane = hand.lane("a")
    commands = submit(hand, "u")
    assert only(commands, Pause) == Pause("a", (lane,), purpose=PausePurpose.PREEMPT), "at once, without a tick"
    note = only(commands, NotePreempted)
    assert (note.successor, note.urgent_group) == ("u", "group of u")
    commands = hand.iterate("a")
    assert none(commands, RunIteration), "it ends the iteration in flight, and is told of no more"
    commands = hand.paused("a")
    assert only(commands, StartTrial) == StartTrial("u", (lane,), iterations=3), "in the lane that is warm"
    assert none(commands, Save), "the state stays"
    assert "urgent group 'group of u'" in only(commands, NoteQueued).why
    hand.started("u")
    commands = hand.iterate("u", 3)
    assert only(commands, RunIteration) == RunIteration("a", (lane,), 17), "before b, which waited longer"
    hand.iterate("a", 17)
    hand.start_all()
    hand.iterate("b", 20)
    assert set(hand.states().values()) == {"DONE"}
    assert hand.reports("a") == hand.reports("b") == list(range(1, 21)) and hand.reports("u") == [1, 2, 3]


def test_as_many_trials_pause_as_are_urgent_and_each_of_them_once() -> None:
    hand = sweep(4, "abcdefgh")
    commands = submit(hand, "u", "v", "w")
    assert len(paused_in(commands)) == 3
    assert none(hand.tick(), Pause)
    for trial_id in paused_in(commands):
        hand.iterate(trial_id)
        assert only(hand.paused(trial_id), StartTrial).trial_id in "uvw"
    assert [hand.states()[name] for name in "uvw"] == ["STARTING"] * 3
    assert none(hand.tick(), Pause)


@pytest.mark.parametrize(("priority", "preempt"), [(1.0, True), (10.0, False), (0.5, True)])
def test_only_a_more_urgent_group_that_preempts_makes_others_pause(priority: float, preempt: bool) -> None:
    hand = sweep(1, "ab")
    assert none(submit(hand, "u", priority=priority, preempt=preempt), Pause)
    hand.iterate("a", 20)
    if priority != 1.0:
        first = "u" if priority > 1.0 else "b"
        assert hand.states()[first] == "STARTING", "it is first in line if its priority is higher"


def test_an_urgent_group_makes_one_that_is_less_urgent_pause_but_none_of_its_own_priority() -> None:
    hand = sweep(2, "ab")
    for name in paused_in(submit(hand, "u", "v")):
        hand.paused(name)
    hand.start_all()
    assert none(submit(hand, "x"), Pause)
    assert paused_in(submit(hand, "y", priority=11.0)) in (["u"], ["v"])


def test_trials_of_the_lowest_priority_pause_first() -> None:
    hand = Hand(devices=3, **ALONE)
    for name, priority in (("a", 3.0), ("b", 2.0), ("c", 5.0)):
        submit(hand, name, priority=priority, preempt=False)
    hand.start_all()
    assert paused_in(submit(hand, "u")) == ["b"]
    assert paused_in(submit(hand, "v", priority=4.0)) == ["a"]


def test_the_trial_pauses_whose_iteration_ends_first() -> None:
    hand = sweep(2, "ab")
    hand.iterate("a")
    hand.now += 0.5
    hand.iterate("b", seconds=0.0)
    hand.now += 0.25
    assert paused_in(submit(hand, "u")) == ["a"]


def test_trials_that_are_added_and_extended_preempt_too() -> None:
    hand = sweep(2, "abc")
    first = only(submit(hand, "u", budget=1), Pause).trial_id
    hand.paused(first)
    hand.started("u")
    hand.iterate("u")
    assert hand.end("u") == "DONE"
    hand.start_all()
    second = only(hand.do(BudgetExtended(hand.now, "u", 2)), Pause).trial_id
    third = only(hand.do(TrialsAdded(hand.now, "group of u", (TrialSpec("v", 1),))), Pause).trial_id
    assert {second, third} == {"a", "b"}


def test_a_trial_that_cannot_be_saved_pauses_and_goes_on_in_its_lane_alone() -> None:
    hand = sweep(2, "abc", can_save=False)
    name = only(submit(hand, "u"), Pause).trial_id
    lane, other = hand.lane(name), "b" if name == "a" else "a"
    hand.iterate(name)
    hand.paused(name)
    hand.started("u")
    hand.iterate(other, 20)
    assert hand.states()["c"] == "STARTING", "its own device is not free yet"
    assert only(hand.iterate("u", 3), RunIteration) == RunIteration(name, (lane,), 19)


def test_a_trial_that_has_not_begun_goes_back_to_the_queue() -> None:
    hand = Hand(devices=1, ready=False, **ALONE)
    hand.submit("a")
    commands = submit(hand, "u")
    assert none(commands, Pause) and hand.states() == {"a": "QUEUED", "u": "STARTING"}
    assert only(hand.ready(0), StartTrial).trial_id == "u"


def test_a_trial_that_is_being_set_up_pauses_once_it_runs() -> None:
    hand = Hand(devices=1, **ALONE)
    hand.submit("a")
    assert none(submit(hand, "u"), Pause)
    assert only(hand.started("a"), Pause).trial_id == "a"


def test_an_urgent_trial_that_finds_a_free_device_first_lets_the_other_go_on() -> None:
    hand = sweep(2, "ab")
    name = only(submit(hand, "u"), Pause).trial_id
    other = "b" if name == "a" else "a"
    hand.stop(other)
    lane = hand.lane(other)
    assert only(hand.released(other, lane), StartTrial).trial_id == "u"
    assert only(hand.paused(name), RunIteration).trial_id == name
    assert hand.state.placing.reserved_devices == frozenset()


def test_an_urgent_trial_that_is_stopped_lets_the_other_go_on() -> None:
    hand = sweep(1, "ab")
    submit(hand, "u")
    hand.stop("u")
    assert only(hand.paused("a"), RunIteration).trial_id == "a"


def test_one_of_many_packed_trials_pauses_if_the_urgent_one_may_be_packed() -> None:
    hand = Hand(devices=1, profile=Known(packing=4))
    hand.submit(*"abcd", budget=20)
    hand.start_all()
    commands = submit(hand, "u")
    (name,) = paused_in(commands)
    assert only(hand.paused(name), StartTrial).trial_id == "u"
    assert len(hand.state.occupancy.residents[0]) == 4


def test_all_packed_trials_pause_for_an_urgent_one_that_wants_a_device_for_itself() -> None:
    hand = Hand(devices=1, profile=Known(packing=4))
    hand.submit(*"abcd", budget=20)
    hand.start_all()
    assert paused_in(submit(hand, "u", devices=1)) == list("abcd")
    for name in "abc":
        assert none(hand.paused(name), RunIteration), "the device is claimed"
    assert only(hand.paused("d"), StartTrial).trial_id == "u"


def test_a_gang_gets_several_devices_at_once() -> None:
    hand = sweep(3, "abcd")
    first, second = paused_in(submit(hand, "u", devices=2, gang=True))
    assert none(hand.paused(first), StartTrial), "its device is claimed"
    hand.paused(second)
    assert hand.states()["u"] == "STARTING"
    assert len(hand.trial("u").placement.lanes) == 1 and len(hand.state.occupancy.held[hand.trial("u").row]) == 2


def test_a_wide_trial_makes_room_for_several() -> None:
    hand = Hand(devices=2, profile=Known(packing=1), max_packing=1)
    hand.submit("a", budget=100, max_width=2)
    hand.started("a")
    hand.tick()
    if hand.trial("a").placement.move is not None:
        hand.paused("a")
        hand.resized("a")
    assert hand.trial("a").width == 2.0
    assert paused_in(submit(hand, "u", "v")) == ["a"]
    hand.paused("a")
    assert [hand.states()[name] for name in "auv"] == ["QUEUED", "STARTING", "STARTING"]


def test_only_devices_that_the_urgent_trial_may_use_are_cleared() -> None:
    hand = Hand(devices=0, **ALONE)
    for index, model in enumerate(("A100", "T4")):
        hand.add_device(index, model=model)
    for lane in list(hand.state.lanes):
        hand.ready(lane.lane_id)
    hand.submit("a", "b", budget=20)
    for lane in list(hand.state.lanes):
        hand.ready(lane.lane_id)
    hand.start_all()
    (name,) = paused_in(submit(hand, "u", requires=Requires(model="T4")))
    assert hand.state.occupancy.held[hand.trial(name).row] == (1,)


@pytest.mark.parametrize(("kept", "saves"), [(30.0, False), (60.0, True)])
def test_states_stay_where_memory_allows_and_are_saved_where_not(kept: float, saves: bool) -> None:
    hand = Hand(devices=1, memory=100.0, **ALONE)
    hand.submit("a", budget=20, memory=MemoryNeed(kept, 20.0))
    hand.start_all()
    lane = hand.lane("a")
    assert only(submit(hand, "u", memory=MemoryNeed(30.0, 20.0)), Pause).trial_id == "a"
    commands = hand.paused("a")
    assert none(commands, Save) is not saves
    if saves:
        assert only(hand.saved("a", lane, 0, dropped=True), StartTrial).trial_id == "u"
    assert hand.states()["u"] == "STARTING"


def test_no_trial_pauses_for_one_that_does_not_fit_beside_a_state_that_cannot_be_saved() -> None:
    hand = Hand(devices=1, memory=100.0, **ALONE)
    hand.submit("a", budget=20, memory=MemoryNeed(60.0, 20.0), can_save=False)
    hand.start_all()
    assert none(submit(hand, "u", memory=MemoryNeed(30.0, 20.0)), Pause)


def test_trials_with_little_gain_per_byte_pause_first() -> None:
    hand = Hand(devices=1, memory=100.0, profile=Known(packing=4))
    needs = {"a": MemoryNeed(5.0, 15.0), "b": MemoryNeed(10.0, 40.0), "c": MemoryNeed(5.0, 15.0)}
    hand.do(GroupSubmitted(0.0, "sweep", tuple(TrialSpec(name, 20, memory=need) for name, need in needs.items())))
    hand.start_all()
    assert set(hand.states().values()) == {"RUNNING"}
    assert paused_in(submit(hand, "u", memory=MemoryNeed(5.0, 20.0))) == ["b"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_device_that_was_cleared_in_vain_is_not_cleared_again_though_nothing_less_urgent_runs_elsewhere(
    devices: int,
) -> None:
    hand = Hand(devices=devices, memory=100.0, watermark=1.0, **ALONE)
    hand.submit("a", budget=3, can_save=False, memory=MemoryNeed(0.0, 10.0))
    hand.start_all()
    if devices == 2:
        submit(hand, "busy", budget=9, memory=MemoryNeed(0.0, 10.0))
        hand.start_all()
    lane = hand.lane("a")
    hand.do(StateMeasured(hand.now, "a", lane, 40.0))
    assert paused_in(submit(hand, "u", memory=MemoryNeed(0.0, 90.0))) == ["a"], "it is said to need 10 bytes"
    hand.iterate("a")
    commands = hand.paused("a")
    assert only(commands, RunIteration).trial_id == "a", "what it keeps of its state leaves the urgent one no room"
    assert none(commands, Pause)
    hand.iterate("a", 2)
    hand.released("a", lane)
    assert hand.states()["u"] == "STARTING", "its memory is free now"
