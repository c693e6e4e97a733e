"""Copies of one fact that disagree are found by validate_state."""

from __future__ import annotations

import pytest
from engine_helpers import Hand

from fluid.engine.core import EngineError
from fluid.resources import MemoryNeed
from fluid.testing.validate import validate_state


def test_a_width_that_was_not_written_everywhere_is_found() -> None:
    hand = Hand(max_packing=1)
    hand.submit("a", "b")
    hand.started("a")
    running, waiting = hand.trial("a"), hand.trial("b")
    running.width = 0.5
    with pytest.raises(EngineError, match=r"row 1: .* \[0\.5, 3\.0, 1\.0\]; planners see \[1\.0, 3\.0, 1\.0\]"):
        validate_state(hand.state)
    hand.state.allocations.set_width(running, 0.5)
    validate_state(hand.state)
    waiting.width = 2.0
    with pytest.raises(EngineError, match="row 2: width 2, and it is queued for 1"):
        validate_state(hand.state)


def test_work_that_planners_do_not_know_of_is_found() -> None:
    hand = Hand()
    hand.submit("a", budget=10)
    hand.started("a")
    hand.state.allocations.work.set(hand.trial("a").row, 99.0)
    with pytest.raises(EngineError, match=r"row 1: .* \[1\.0, 99\.0, 1\.0\]; planners see \[1\.0, 10\.0, 1\.0\]"):
        validate_state(hand.state)
    hand.state.allocations.update_work(hand.trial("a"))
    validate_state(hand.state)


def test_a_trial_that_waits_for_nothing_is_found() -> None:
    """Bytes that nobody holds keep it off the only device, and nothing is to come that makes the engine look again."""
    hand = Hand(memory=100.0)
    hand.state.memory.reserve(0, 10.0)
    with pytest.raises(EngineError, match=r"10.0 bytes reserved, and residents hold 0") as caught:
        hand.submit("a", memory=MemoryNeed(90.0))
    assert "nothing is to come" not in str(caught.value), "a tick is"
    with pytest.raises(EngineError, match=r"'a' waits, devices \[0\] are idle, and nothing is to come"):
        hand.tick()
