"""Trials that require devices which there are not: refused, failed when the devices go, or waiting until some come."""

from __future__ import annotations

import pytest
from engine_helpers import Hand, Known, only

from fluid.engine.commands import NoteWaiting, StartTrial, WaitReason
from fluid.engine.events import DeviceAdded, LaneReady
from fluid.errors import InvalidFieldError
from fluid.resources import Device, MemoryNeed, Requires

H100 = Requires(model="H100", wait=True)


def held(hand: Hand, trial_id: str) -> tuple[int, ...]:
    devices: tuple[int, ...] = hand.state.occupancy.held.get(hand.trial(trial_id).row, ())
    return devices


def add_h100(hand: Hand, index: int = 7) -> None:
    commands = hand.do(DeviceAdded(hand.now, Device(index, model="NVIDIA H100 80GB HBM3")))
    for command in commands:
        if (lane := getattr(command, "lane_id", None)) is not None:
            hand.do(LaneReady(hand.now, lane))


def test_a_group_that_no_device_serves_is_refused_with_what_there_is() -> None:
    hand = Hand(0)
    hand.do(*(DeviceAdded(0.0, Device(index, memory_bytes=2.0 * 2**30)) for index in range(2)))
    hand.submit("runs", budget=5)
    before = hand.states()
    with pytest.raises(InvalidFieldError) as caught:
        hand.submit("a", requires=Requires(memory_bytes=6 * 2**30, kind="cpu"), group="g")
    assert caught.value.field == "requires" and caught.value.value == Requires(memory_bytes=6 * 2**30, kind="cpu")
    assert "there are 2 x cpu of 2 GiB on 'localhost'" in str(caught.value)
    assert "Requires(memory_bytes=6442450944.0, kind='cpu')" in str(caught.value)
    assert "g" not in hand.state.groups and hand.states() == before, "nothing of it is left, and the others run on"


def test_a_trial_that_is_to_wait_starts_when_such_a_device_comes() -> None:
    hand = Hand(2)
    hand.submit("a", requires=H100, group="g")
    assert hand.states() == {"a": "QUEUED"} and hand.state.awaits_devices("a")
    note = only(hand.log, NoteWaiting)
    assert (note.reason, note.wanted) == (WaitReason.REQUIREMENTS, "a device with model 'H100'")
    assert hand.state.awaited("g") == ("a device with model 'H100'",)
    assert hand.state.demand.devices == 1, "autoscaling would ask for it"
    hand.submit("other")
    assert hand.states()["other"] == "STARTING", "it is in nobody's way"
    hand.do(DeviceAdded(hand.now, Device(3, model="NVIDIA A100-SXM4-80GB")))
    assert hand.states()["a"] == "QUEUED"
    add_h100(hand)
    assert held(hand, "a") == (7,) and not hand.state.awaits_devices("a")
    assert [item.trial_id for item in hand.log if isinstance(item, StartTrial)] == ["other", "a"]
    assert hand.state.awaited("g") == ()


def test_a_trial_that_is_to_wait_does_so_when_its_last_device_goes() -> None:
    hand = Hand(1)
    add_h100(hand)
    hand.submit("a", requires=H100)
    hand.submit("b", requires=Requires(model="H100"), devices=1)
    hand.started("a")
    hand.iterate("a")
    hand.lose_device(7)
    assert hand.states() == {"a": "QUEUED", "b": "FAILED"}
    assert hand.trial("b").limits.failure.kind == "no_device"
    hand.lose_device(0)
    assert hand.states()["a"] == "QUEUED", "no device is left at all, and it still waits"
    add_h100(hand, 8)
    assert held(hand, "a") == (8,)


def test_a_trial_may_wait_for_memory_and_for_more_devices_than_there_are() -> None:
    hand = Hand(2, memory=4.0 * 2**30)
    wait = Requires(wait=True)
    hand.submit("large", memory=MemoryNeed(6.0 * 2**30), requires=wait)
    hand.submit("gang", devices=4, gang=True, requires=wait)
    assert set(hand.states().values()) == {"QUEUED"}
    wanted = {note.wanted for note in hand.log if isinstance(note, NoteWaiting)}
    assert wanted == {"a device with 6 GiB usable", "4 devices of one host"}
    for index in (2, 3):
        hand.add_device(index, memory=8.0 * 2**30)
    assert held(hand, "large") and not held(hand, "gang")


def test_the_end_of_a_group_that_waits_for_devices_is_unknown() -> None:
    hand = Hand(2, profile=Known(packing=1))
    hand.submit("a", "b", budget=10, group="g")
    hand.started("a")
    hand.iterate("a")
    assert hand.state.seconds_left("g") is not None
    hand.submit("c", requires=H100, group="h")
    assert hand.state.seconds_left("h") is None and hand.state.seconds_left("g") is not None


def test_a_trial_whose_devices_are_taken_does_not_wait_for_others() -> None:
    hand = Hand(0, profile=Known(packing=1))
    add_h100(hand)
    hand.submit("a", requires=H100)
    hand.submit("b", requires=H100)
    assert not hand.state.awaits_devices("a") and not hand.state.awaits_devices("b")
    assert {note.reason for note in hand.log if isinstance(note, NoteWaiting)} == {WaitReason.DEVICES}
    assert all(hand.state.awaited(group_id) == () for group_id in hand.state.groups)


def test_groups_of_several_owners_have_places_in_the_starting_order() -> None:
    hand = Hand(1, profile=Known(packing=1))
    hand.submit("a", "b", group="g", budget=50)
    assert hand.state.places == {}, "there is one owner"
    hand.submit("c", group="h", budget=2)
    assert hand.state.places == {"g": 2, "h": 1}, "the one with the least work left starts first"
    hand.stop("c")
    assert hand.state.places == {}
