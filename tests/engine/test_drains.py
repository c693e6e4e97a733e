"""Draining devices and sessions: what runs is paused, saved to disk and goes on elsewhere, before a deadline."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, none, only

from fluid.engine.commands import (
    Command,
    NoteDeviceLost,
    NoteDrained,
    Pause,
    Persist,
    Report,
    RunIteration,
    Save,
    StartTrial,
    StopTrial,
)
from fluid.engine.events import Alarm, Checkpoint, DeviceDraining, IterationDone, SessionDraining, TrialSaved
from fluid.errors import InvalidFieldError
from fluid.policies.drains import DrainEnd


def drain(hand: Hand, device: int = 0, deadline: float = 100.0) -> list[Command]:
    return hand.do(DeviceDraining(hand.now, device, deadline))


def drain_all(hand: Hand, deadline: float = 100.0) -> list[Command]:
    return hand.do(SessionDraining(hand.now, deadline))


def drains_end(hand: Hand) -> bool:
    """Whether the engine wants to be woken at the end of a drain."""
    return any(DrainEnd(device) in hand.state._core.deadlines for device in (None, 0, 1))


def running(devices: int, *trial_ids: str, **spec: Any) -> Hand:
    """An engine with trials that have each done one iteration, the first on device 0."""
    hand = Hand(devices)
    hand.submit(*trial_ids, **{"budget": 9, **spec})
    for trial_id in trial_ids:
        hand.started(trial_id)
        hand.iterate(trial_id)
    return hand


def device_of(hand: Hand, trial_id: str) -> int:
    return int(hand.state.lanes[hand.lane(trial_id)].device_id)


def test_a_trial_on_a_drained_device_is_paused_saved_to_disk_and_goes_on_elsewhere() -> None:
    hand = running(2, "a", "b", max_width=1)
    device, lane = device_of(hand, "a"), hand.lane("a")
    pause = only(drain(hand, device), Pause)
    assert (pause.trial_id, pause.lane_ids) == ("a", (lane,))
    hand.iterate("a")  # the iteration under way
    assert only(hand.paused("a"), Save) == Save("a", (lane,), drop=True, durable=True)
    commands = hand.saved("a", lane, 2, dropped=True)
    assert only(commands, NoteDrained).unsaved == () and only(commands, NoteDeviceLost).device_id == device
    assert [one.index for one in hand.state.devices] == [1 - device]
    hand.iterate("b", 8)
    start = only(hand.log[-20:], StartTrial)
    assert (start.trial_id, start.checkpoint, start.iterations) == ("a", Checkpoint(2, "a/2"), 7)
    hand.started("a", 2)
    hand.iterate("a", 7)
    assert hand.reports("a") == list(range(1, 10)), "no iteration is repeated"


def test_a_drained_device_takes_no_further_trial() -> None:
    hand = running(2, "a", max_width=1)
    other = 1 - device_of(hand, "a")
    drain(hand, other)
    assert [one.index for one in hand.state.devices] == [1 - other], "nothing was there, so it is gone at once"
    hand = running(1, "a", max_width=1)
    drain(hand)
    assert none(hand.submit("b"), StartTrial)
    assert hand.states() == {"a": "RUNNING", "b": "QUEUED"}


def test_an_idle_state_on_a_drained_device_is_saved_too() -> None:
    hand = running(2, "a", budget=1, max_width=1)
    lane = hand.trial("a").residence.lane
    assert only(drain(hand, hand.trial("a").residence.device), Save) == Save("a", (lane,), drop=True, durable=True)
    assert only(hand.saved("a", lane, 1, dropped=True), NoteDrained).unsaved == ()
    hand.extend("a")
    assert hand.trial("a").state == "STARTING" and only(hand.log[-3:], StartTrial).checkpoint == Checkpoint(1, "a/1")


def test_at_the_deadline_the_device_goes_as_it_is() -> None:
    hand = running(2, "a", max_width=1)
    device = device_of(hand, "a")
    drain(hand, device, deadline=5.0)
    assert hand.state.alarm_at == 5.0
    hand.now = 5.0
    commands = hand.do(Alarm(5.0))
    assert only(commands, NoteDrained).unsaved == ("a",) and only(commands, NoteDeviceLost).device_id == device
    assert not drains_end(hand)
    assert only(commands, StartTrial).checkpoint is None, "it was never saved"


def test_a_trial_that_cannot_be_saved_runs_until_the_deadline() -> None:
    hand = running(2, "a", can_save=False, max_width=1)
    device = device_of(hand, "a")
    assert none(drain(hand, device, deadline=5.0), Pause)
    hand.iterate("a")
    assert hand.states() == {"a": "RUNNING"}
    assert only(hand.iterate("a", 7), NoteDrained).unsaved == (), "it has ended before the deadline"
    assert hand.end("a") == "DONE"


def test_a_second_drain_of_a_device_sets_another_deadline() -> None:
    hand = running(2, "a", max_width=1)
    device = device_of(hand, "a")
    drain(hand, device, deadline=50.0)
    assert none(drain(hand, device, deadline=5.0), Pause)
    assert hand.state.alarm_at == 5.0


def test_a_device_that_is_not_in_use_cannot_be_drained() -> None:
    hand = Hand(1)
    with pytest.raises(InvalidFieldError, match="device=7: is not in use"):
        drain(hand, 7)
    with pytest.raises(InvalidFieldError, match="deadline"):
        drain(hand, 0, float("nan"))


def test_a_device_that_is_lost_while_it_drains_ends_the_drain() -> None:
    hand = running(2, "a", max_width=1)
    device = device_of(hand, "a")
    drain(hand, device)
    assert only(hand.lose_device(device), NoteDrained).unsaved == ("a",)
    assert not drains_end(hand)


def test_a_trial_over_several_devices_is_saved_by_its_first_lane() -> None:
    hand = Hand(3)
    hand.submit("a", budget=9, max_width=3)
    hand.started("a")
    lanes = hand.trial("a").placement.lanes
    assert len(lanes) == 3
    last = hand.state.lanes[lanes[-1]].device_id
    assert only(drain(hand, last), Pause).lane_ids == lanes
    hand.iterate("a")
    commands = hand.paused("a")
    assert only(commands, StopTrial).lane_ids == lanes[1:], "it leaves the other lanes"
    assert hand.trial("a").state == "STARTING", "it goes on on the two devices that are left"
    assert only(commands, NoteDrained).unsaved == ()


def test_a_session_that_drains_saves_everything_and_starts_nothing() -> None:
    hand = Hand(2, max_packing=1)
    hand.submit("a", "b", "c", budget=9, max_width=1)
    begun = [trial_id for trial_id in "abc" if hand.states()[trial_id] == "STARTING"]
    for trial_id in begun:
        hand.started(trial_id)
        hand.iterate(trial_id)
    running = {trial_id: hand.lane(trial_id) for trial_id in begun}
    commands = drain_all(hand)
    assert {item.trial_id for item in commands if isinstance(item, Pause)} == set(running)
    for trial_id, lane in running.items():
        hand.iterate(trial_id)
        assert only(hand.paused(trial_id), Save) == Save(trial_id, (lane,), drop=True, durable=True)
    notes: list[Command] = []
    for trial_id, lane in running.items():
        notes = hand.saved(trial_id, lane, 2, dropped=True)
    note = only(notes, NoteDrained)
    assert (note.device_id, note.unsaved) == (None, ())
    assert set(hand.states().values()) == {"QUEUED"} and len(hand.state.devices) == 2
    assert none(hand.submit("d"), StartTrial) and none(hand.tick(), StartTrial)
    assert none(hand.add_device(2), StartTrial)
    assert not drains_end(hand)


def test_the_deadline_of_a_session_tells_what_was_not_saved_and_saves_on() -> None:
    hand = running(1, "a", max_width=1)
    drain_all(hand, deadline=5.0)
    hand.now = 5.0
    assert only(hand.do(Alarm(5.0)), NoteDrained).unsaved == ("a",)
    hand.iterate("a")
    assert only(hand.paused("a"), Save).durable
    assert none(hand.saved("a", 0, 2, dropped=True), NoteDrained), "it was told once"
    assert only(drain_all(hand), NoteDrained).unsaved == (), "but who asks again gets an answer"


def test_checkpoints_in_host_memory_are_copied_to_disk() -> None:
    hand = running(1, "a", budget=1, max_width=1)
    hand.state._residency.evict(hand.trial("a"))
    hand.saved("a", 0, 1, dropped=True, in_memory=True)
    original = Checkpoint(1, "a/1", in_memory=True)
    assert only(drain_all(hand), Persist) == Persist("a", original)
    commands = hand.do(TrialSaved(hand.now, "a", None, Checkpoint(1, "disk/a/1"), copied=True))
    assert only(commands, NoteDrained).unsaved == ()
    assert hand.trial("a").residence.durable == hand.trial("a").residence.checkpoint == Checkpoint(1, "disk/a/1")


def test_a_checkpoint_that_cannot_be_copied_is_told_and_not_tried_again() -> None:
    hand = running(1, "a", budget=1, max_width=1)
    hand.state._residency.evict(hand.trial("a"))
    hand.saved("a", 0, 1, dropped=True, in_memory=True)
    original = only(drain_all(hand), Persist).checkpoint
    commands = hand.do(TrialSaved(hand.now, "a", None, original, copied=True))
    assert only(commands, NoteDrained).unsaved == ("a",) and none(commands, Persist)


def in_memory_beside_a_trial(**spec: Any) -> tuple[Hand, int]:
    """Trial a is done, and in host memory alone; b runs. Returns the lane that a has left."""
    hand = Hand(2, max_packing=1)
    hand.submit("a", budget=1, max_width=1)
    hand.submit("b", budget=9, max_width=1, **spec)
    for trial_id in ("a", "b"):
        hand.started(trial_id)
        hand.iterate(trial_id)
    lane = hand.trial("a").residence.lane
    hand.state._residency.evict(hand.trial("a"))
    hand.saved("a", lane, 1, dropped=True, in_memory=True)
    return hand, lane


def test_a_copy_is_made_though_no_lane_is_left() -> None:
    hand, idle = in_memory_beside_a_trial()
    lanes = {idle, hand.lane("b")}
    for lane in lanes:
        hand.lose(lane)
    assert not any(lane.ready for lane in hand.state.lanes)
    commands = drain_all(hand)
    assert only(commands, Persist) == Persist("a", Checkpoint(1, "a/1", in_memory=True))
    assert none(commands, NoteDrained), "the answer is waited for"
    commands = hand.do(TrialSaved(hand.now, "a", None, Checkpoint(1, "disk/a/1"), copied=True))
    assert only(commands, NoteDrained).unsaved == ()
    assert hand.trial("a").residence.durable == Checkpoint(1, "disk/a/1")


def test_a_copy_is_made_beside_a_trial_that_may_hang() -> None:
    hand, _ = in_memory_beside_a_trial(can_save=False)
    assert only(drain_all(hand), Persist).trial_id == "a"
    hand.do(TrialSaved(hand.now, "a", None, Checkpoint(1, "disk/a/1"), copied=True))
    hand.now = 100.0
    assert only(hand.do(Alarm(100.0)), NoteDrained).unsaved == ("b",)


def test_the_state_of_a_trial_that_may_hang_is_copied_after_those_that_no_lane_will_save() -> None:
    hand = running(2, "b", "a", max_width=1)
    hand.saved("b", hand.lane("b"), 1, in_memory=True)
    hand.iterate("a", 8)
    lane = hand.trial("a").residence.lane
    hand.state._residency.evict(hand.trial("a"))
    hand.saved("a", lane, 9, dropped=True, in_memory=True)
    asked = [command.trial_id for command in drain_all(hand) if isinstance(command, Persist)]
    assert asked == ["a", "b"]


def test_a_copy_is_not_waited_for_where_the_trial_was_saved_to_disk_since() -> None:
    hand = running(1, "a", max_width=1)
    hand.saved("a", 0, 1, in_memory=True)
    assert only(drain_all(hand), Persist).checkpoint.iteration == 1
    hand.iterate("a")
    assert only(hand.paused("a"), Save).durable
    assert only(hand.saved("a", 0, 2, dropped=True), NoteDrained).unsaved == ()
    assert none(hand.do(TrialSaved(hand.now, "a", None, Checkpoint(1, "disk/a/1"), copied=True)), NoteDrained)
    assert hand.trial("a").residence.durable == Checkpoint(2, "a/2")


def test_a_checkpoint_that_comes_into_memory_during_a_drain_is_copied() -> None:
    hand = running(2, "a", "b", max_width=1)
    hand.iterate("a", 8)
    lane = hand.trial("a").residence.lane
    hand.state._residency.evict(hand.trial("a"))
    assert none(drain_all(hand), Persist)
    assert only(hand.saved("a", lane, 9, dropped=True, in_memory=True), Persist).trial_id == "a"


def test_a_session_that_drains_copies_what_is_on_machines_without_a_device_too() -> None:
    hand = running(1, "a", budget=1, max_width=1)
    hand.state._residency.evict(hand.trial("a"))
    hand.lose_device(0)
    hand.saved("a", 0, 1, dropped=True, in_memory=True)
    assert only(drain_all(hand), Persist).trial_id == "a"


def test_the_memory_of_a_machine_is_copied_only_with_its_last_device() -> None:
    hand = running(2, "a", budget=1, max_width=1)
    lane, device = hand.trial("a").residence.lane, hand.trial("a").residence.device
    hand.state._residency.evict(hand.trial("a"))
    hand.saved("a", lane, 1, dropped=True, in_memory=True)
    assert none(drain(hand, device), Persist)
    assert only(drain(hand, 1 - device), Persist).trial_id == "a"


def test_a_call_is_answered_before_the_trial_is_saved_out() -> None:
    hand = running(1, "a", max_width=1)
    drain_all(hand)
    hand.call("a")
    assert none(hand.paused("a"), Save)
    assert only(hand.called("a", 0), Save).durable
    assert hand.answers("a") == [(0, "")]


def test_a_trial_that_has_not_started_yet_waits_again() -> None:
    hand = Hand(1, ready=False)
    hand.submit("a")
    drain_all(hand)
    assert hand.states() == {"a": "QUEUED"} and none(hand.ready(0), StartTrial)


def test_a_trial_that_starts_is_paused_as_soon_as_it_runs() -> None:
    hand = Hand(1)
    hand.submit("a", max_width=1)
    assert none(drain_all(hand), Pause)
    assert only(hand.started("a"), Pause).trial_id == "a"


def test_a_trial_that_ends_while_it_is_paused_is_done() -> None:
    hand = running(1, "a", budget=2, max_width=1)
    drain_all(hand)
    done = hand.do(IterationDone(hand.now, "a", 0, iteration=2, seconds=1.0))
    assert only(done, Report).iteration == 2
    assert only(hand.paused("a"), Save).durable, "it may be extended"
    assert hand.end("a") == "DONE" and none(hand.log, RunIteration)
