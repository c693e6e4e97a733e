"""Resizes that would not pay: the engine leaves them, and the journal is told once."""

from __future__ import annotations

import json

from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import NoteKeptWidth, NoteResize, Pause
from fluid.results.journal import encode, replay


class CostlyResizes(Known):
    """A resize takes 8 s."""

    @property
    def epsilon(self) -> float:
        return 8.0


def widened(budgets: dict[str, int]) -> Hand:
    """Trials on a device each, and an idle one that came last."""
    hand = Hand(devices=len(budgets), profile=CostlyResizes(packing=1))
    hand.submit(*budgets, budget=2, max_width=8)
    for trial_id, budget in budgets.items():
        hand.started(trial_id)
        if budget > 2:
            hand.extend(trial_id, budget - 2)
    hand.add_device(len(budgets))
    return hand


def test_a_resize_that_a_departure_makes_unnecessary_is_rejected_and_told_once() -> None:
    hand = widened({"a": 60, "b": 2, "c": 2})
    commands = hand.tick()
    note = only(commands, NoteKeptWidth)
    assert none(commands, Pause)
    assert (note.trial_id, note.old_width, note.width, note.stall_s) == ("a", 1.0, 2.0, 8.0)
    assert 0.0 < note.gain < 30.0
    assert replay([json.dumps(encode(note))]).at == note.at, "reports read it, a resume passes over it"
    hand.iterate("b")
    assert none(hand.tick(), NoteKeptWidth), "nothing has changed"


def test_a_resize_that_pays_is_made_with_its_stall() -> None:
    hand = widened({"a": 60})
    assert none(hand.tick(), NoteKeptWidth)
    hand.ready(1)
    hand.iterate("a")
    hand.paused("a")
    note = only(hand.resized("a"), NoteResize)
    assert (note.stall_s, note.left) == (8.0, 59)
    assert note.gain == 59.0 / 2 - 8.0
