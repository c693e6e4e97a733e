"""Devices that retire: they take no further trial, go once they are empty, and no iteration is repeated or waits."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, none, only

from fluid.engine.commands import NoteDeviceLost, NoteDrained, Pause, Save, StartTrial
from fluid.engine.events import DeviceAdded, DeviceLost, DeviceRetained, DeviceRetiring
from fluid.errors import InvalidFieldError
from fluid.resources import Device, MemoryNeed
from fluid.results.journal import VERSION, encode


def running(devices: int, *trial_ids: str, **spec: Any) -> Hand:
    """An engine with trials that have each done one iteration."""
    hand = Hand(devices)
    hand.submit(*trial_ids, **{"budget": 3, "max_width": 1, **spec})
    for trial_id in trial_ids:
        hand.started(trial_id)
        hand.iterate(trial_id)
    return hand


def device_of(hand: Hand, trial_id: str) -> int:
    return int(hand.state.lanes[hand.lane(trial_id)].device_id)


def test_an_idle_device_that_retires_goes_at_once() -> None:
    hand = running(2, "a")
    idle = 1 - device_of(hand, "a")
    commands = hand.do(DeviceRetiring(hand.now, idle))
    assert only(commands, NoteDeviceLost) == NoteDeviceLost(idle, hand.now, "")
    assert only(commands, NoteDrained).unsaved == ()
    assert [device.index for device in hand.state.devices] == [1 - idle]


def test_a_trial_runs_to_its_end_on_a_device_that_retires_and_no_other_starts_there() -> None:
    hand = running(2, "a", "b", budget=3)
    device, lane = device_of(hand, "a"), hand.lane("a")
    commands = hand.do(DeviceRetiring(hand.now, device))
    assert none(commands, Pause) and none(commands, NoteDeviceLost)
    assert hand.state.retirements.devices == {device} and len(hand.state.occupancy) == 1
    assert none(hand.submit("c", max_width=1), StartTrial), "the other device is taken"
    hand.iterate("a")
    commands = hand.iterate("a")
    assert hand.reports("a") == [1, 2, 3] and none(commands, StartTrial)
    commands = hand.saved("a", lane, 3, dropped=True)  # It may be extended.
    assert only(commands, NoteDeviceLost).device_id == device
    assert [one.index for one in hand.state.devices] == [1 - device] and not hand.state.retirements.devices


def test_the_state_of_a_trial_at_its_rung_is_saved_before_its_device_goes() -> None:
    hand = running(2, "a", "b", budget=2, follow_up_iterations=6)
    device, lane = device_of(hand, "a"), hand.lane("a")
    hand.do(DeviceRetiring(hand.now, device))
    commands = hand.iterate("a")
    assert only(commands, Save) == Save("a", (lane,), drop=True, durable=True)
    assert none(commands, NoteDeviceLost), "it waits for that"
    commands = hand.saved("a", lane, 2, dropped=True)
    assert only(commands, NoteDeviceLost).device_id == device and only(commands, NoteDrained).unsaved == ()


def test_a_device_that_is_retained_takes_trials_again() -> None:
    hand = running(2, "a", "b")
    device = device_of(hand, "a")
    hand.do(DeviceRetiring(hand.now, device))
    hand.submit("c", max_width=1)
    hand.do(DeviceRetained(hand.now, device))
    assert not hand.state.retirements.devices and len(hand.state.occupancy) == 2
    hand.iterate("a")
    assert only(hand.iterate("a"), StartTrial).trial_id == "c"
    with pytest.raises(InvalidFieldError, match="does not retire"):
        hand.do(DeviceRetained(hand.now, device))


def test_the_last_device_that_takes_trials_cannot_retire() -> None:
    hand = running(2, "a", "b")
    hand.do(DeviceRetiring(hand.now, 0))
    assert not hand.state.retirements.may_retire(1)
    for device, problem in ((1, "is needed"), (7, "is not in use")):
        with pytest.raises(InvalidFieldError, match=problem):
            hand.do(DeviceRetiring(hand.now, device))


def test_devices_that_retire_are_retained_when_the_last_other_one_is_lost() -> None:
    hand = running(2, "a", "b")
    device = device_of(hand, "a")
    hand.do(DeviceRetiring(hand.now, device))
    hand.do(DeviceLost(hand.now, 1 - device))
    assert not hand.state.retirements.devices and len(hand.state.occupancy) == 1


def test_a_device_that_alone_has_the_memory_for_a_trial_does_not_retire() -> None:
    hand = Hand(0)
    for index, memory in enumerate((100.0, 20.0, 100.0)):
        hand.do(DeviceAdded(hand.now, Device(index, memory_bytes=memory)))
    hand.submit("a", memory=MemoryNeed(0.0, 60.0), max_width=1)
    may = hand.state.retirements.may_retire
    assert [may(index) for index in range(3)] == [True, True, True]
    hand.do(DeviceLost(hand.now, 2))
    assert [may(index) for index in range(2)] == [False, True]


def test_as_many_devices_stay_as_a_trial_of_a_fixed_width_takes() -> None:
    hand = Hand(3)
    hand.submit("a", devices=2, gang=True, max_width=1)
    hand.do(DeviceRetiring(hand.now, 2))
    assert not hand.state.retirements.may_retire(0) and not hand.state.retirements.may_retire(1)


def test_the_state_of_a_trial_that_cannot_be_saved_keeps_its_device() -> None:
    hand = running(2, "a", "b", budget=2, follow_up_iterations=6, can_save=False)
    device = device_of(hand, "a")
    hand.do(DeviceRetiring(hand.now, device))
    commands = hand.iterate("a")
    assert none(commands, NoteDeviceLost) and not hand.state.retirements.devices, "it is retained"
    assert len(hand.state.occupancy) == 2


def test_the_journal_tells_of_devices_that_retire() -> None:
    for kind in (DeviceRetiring, DeviceRetained):
        assert encode(kind(2.0, 3)) == {"v": VERSION, "what": kind.__name__, "at": 2.0, "device_id": 3}
