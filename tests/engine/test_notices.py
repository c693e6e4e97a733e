"""What the journal is told of decisions: where trials run, what they wait for, what resizes were to gain."""

from __future__ import annotations

import json

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import (
    FreeMemory,
    NoteMeasured,
    NotePlaced,
    NotePreempted,
    NoteQueued,
    NoteResize,
    NoteTrial,
    NoteWaiting,
    Save,
    StartTrial,
    WaitReason,
)
from fluid.engine.core import EngineError
from fluid.engine.events import GroupSubmitted, TrialSpec
from fluid.measure.profile import Profile
from fluid.resources import Device, MemoryNeed
from fluid.results.journal import Recovered, encode, replay
from fluid.testing.validate import validate_state

ALONE = {"profile": Known(packing=1, width=1), "max_packing": 1}


# --- Where trials run


def test_a_start_names_devices_lanes_and_the_state_it_goes_on_from() -> None:
    hand = Hand(profile=Known(packing=1))
    placed = only(hand.submit("a"), NotePlaced)
    assert placed == NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,))
    hand.started("a")
    hand.iterate("a", 3)
    again = only(hand.extend("a"), NotePlaced)
    assert (again.iteration, again.resident) == (3, True), "its lane keeps the state"


def test_a_packed_start_gives_the_measured_overhead() -> None:
    hand = Hand(profile=Known(packing=2))
    hand.submit("a", "b")
    assert [item.alpha for item in hand.log if isinstance(item, NotePlaced)] == [1.0, 1.0]


# --- What trials wait for


def test_trials_that_are_alike_are_noted_together_and_once() -> None:
    hand = Hand(**ALONE)
    waiting = only(hand.submit("a", "b", "c"), NoteWaiting)
    assert (waiting.trial_ids, waiting.width, waiting.reason) == (("b", "c"), 1.0, WaitReason.DEVICES)
    hand.started("a")
    assert none(hand.iterate("a", 3), NoteWaiting), "c waits for what it waited for"
    joined = only(hand.submit("d"), NoteWaiting)
    assert (joined.line, joined.trial_ids) == (waiting.line, ("d",))


def test_memory_is_named_with_what_was_free() -> None:
    hand = Hand(devices=1, memory=10.0, profile=Known(packing=4))
    hand.submit("a", memory=MemoryNeed(6.0))
    waiting = only(hand.submit("b", memory=MemoryNeed(4.0)), NoteWaiting)
    assert (waiting.reason, waiting.need_bytes) == (WaitReason.DEVICES, 4.0), "a was given the device alone"
    hand.started("a")
    hand.iterate("a")
    changed = [item for item in hand.tick() if isinstance(item, NoteWaiting)]
    assert [(item.trial_ids, item.reason) for item in changed][-1] in [((), WaitReason.MEMORY), (("b",), "MEMORY")]
    assert changed[-1].memory == (FreeMemory(0, 3.0, 9.0),)


def test_a_trial_that_cannot_be_saved_waits_for_its_lane() -> None:
    hand = Hand(**ALONE)
    hand.submit("a", "b", can_save=False)
    hand.started("a")
    hand.iterate("a", 3)
    waiting = only(hand.extend("a"), NoteWaiting)
    assert (waiting.trial_ids, waiting.reason) == (("a",), WaitReason.LANE)


# --- Resizes, preemptions, failures, measurements


def test_a_resize_tells_what_it_was_to_gain() -> None:
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=11, max_width=2)
    hand.started("a")
    hand.iterate("a")
    hand.add_device(1)
    hand.ready(1)
    hand.tick()
    hand.iterate("a")
    hand.paused("a")
    note = only(hand.resized("a"), NoteResize)
    # Ten iterations were left, one of them in flight: nine at half of a second less, as epsilon was never measured.
    assert (note.old_width, note.width, note.begun_at, note.gain) == (1.0, 2.0, 1.0, 4.5)


def test_a_resize_that_is_called_off_is_told_with_the_reason() -> None:
    hand = Hand(devices=1, profile=Known(packing=1))
    hand.submit("a", budget=11, max_width=2)
    hand.started("a")
    hand.iterate("a")
    hand.add_device(1)
    hand.tick()
    note = only(hand.submit("b"), NoteTrial)
    assert note.text == "stays at width 1 instead of going to 2: a queued trial needs the devices"


def test_a_preemption_names_its_successor_and_the_trial_waits_again() -> None:
    hand = Hand(devices=2, **ALONE)
    hand.submit("a", "b", "c", budget=4)
    for trial_id in "ab":
        hand.started(trial_id)
    hand.tick()
    for trial_id in "ab":
        hand.iterate(trial_id)
    note = only(hand.tick(), NotePreempted)
    assert (note.successor, note.co_residents) == ("c", 1)
    hand.iterate(note.trial_id)
    queued = only(hand.paused(note.trial_id), NoteQueued)
    assert (queued.trial_id, queued.iteration, queued.kind) == (note.trial_id, 2, None)


def test_a_failure_tells_its_kind_and_the_iteration_it_goes_back_to() -> None:
    hand = Hand(**ALONE)
    hand.submit("a")
    hand.started("a")
    hand.iterate("a")
    hand.saved("a", 0, 1)
    hand.iterate("a")
    queued = only(hand.failed("a", 0), NoteQueued)
    assert (queued.iteration, queued.kind, queued.failures) == (1, "error", 1)
    assert queued.why == "failure 1 of 2: error!"


def test_measurements_that_change_packing_are_told() -> None:
    hand = Hand(profile=Profile(), max_packing=1)
    hand.submit("a", budget=20)
    hand.started("a")
    hand.iterate("a", 2)  # the first one says nothing: it was disturbed by its own start
    (note,) = [item for item in hand.log if isinstance(item, NoteMeasured)]
    assert (note.profile_key, note.seconds, note.packing) == ("default", 1.0, 1)


# --- The journal


def test_a_journal_with_notes_is_replayed_as_one_without() -> None:
    hand = Hand(**ALONE)
    hand.submit("a", "b")
    entries = [json.dumps(entry) for item in hand.log if (entry := encode(item)) is not None]
    assert [json.loads(entry)["what"] for entry in entries] == ["NotePlaced", "NoteWaiting"]
    assert json.loads(entries[1])["reason"] == "DEVICES"
    assert replay(entries) == Recovered(at=0.0)
    submitted = json.dumps(encode(GroupSubmitted(0.0, "g", (TrialSpec("a", 5),))))
    assert replay([submitted, *entries]).groups == replay([submitted]).groups


# --- No device is idle while a trial could start there


def test_an_idle_device_that_a_queued_trial_fits_is_found() -> None:
    hand = Hand(**ALONE)
    hand.submit("a", "b")
    hand.state.occupancy.add_device(Device(1))
    with pytest.raises(EngineError, match=r"devices \[1\] are idle, and 'b' of width 1 waits"):
        validate_state(hand.state)


def test_trials_of_other_keys_pass_one_whose_measured_memory_does_not_fit() -> None:
    """All are queued while no need is known; then one key turns out to need more than what is free."""
    hand = Hand(devices=2, memory=100.0, profile=_MeasuredMemory(), max_packing=1, resident_limit=0)
    hand.submit("big", profile_key="big", budget=9)
    hand.submit("pin", memory=MemoryNeed(50.0), can_save=False, budget=9)
    hand.submit("big-2", profile_key="big")
    hand.submit("small", profile_key="small")
    hand.started("big")
    hand.started("pin")
    hand.iterate("big", memory=MemoryNeed(60.0))
    commands = hand.iterate("pin", 9)
    assert [command.trial_id for command in commands if isinstance(command, StartTrial)] == ["small"]


class _MeasuredMemory(Known):
    """Everything but memory is known, and that is measured by key."""

    def __init__(self) -> None:
        super().__init__(packing=1, width=1)
        self._needs: dict[str, MemoryNeed] = {}

    def observe_memory(self, key: str, memory: MemoryNeed, *, model: str | None = None, rows: int = 1) -> bool:
        self._needs[key] = memory
        return True

    def memory(self, key: str, model: str | None = None) -> MemoryNeed | None:
        return self._needs.get(key)


def test_memory_that_a_failed_save_frees_lets_a_queued_trial_start() -> None:
    hand = Hand(memory=100.0, profile=Known(packing=1, width=1), max_packing=1)
    hand.submit("a", memory=MemoryNeed(60.0))
    hand.started("a")
    hand.iterate("a", 3)
    save = only(hand.submit("b", memory=MemoryNeed(60.0)), Save)
    hand.stop("a")
    assert hand.states()["b"] == "QUEUED"
    started = only(hand.failed("a", save.lane_ids[0]), StartTrial)
    assert started.trial_id == "b", "the lane dropped the state that it could not save"
