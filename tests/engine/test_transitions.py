"""The table of a trial's states: it is enforced, complete, and drawn."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from engine_helpers import Hand

from fluid.engine import core
from fluid.engine.core import EngineError
from fluid.engine.records import LEGAL, TRANSITIONS, state_diagram
from fluid.trialgroup import TrialState

SCRIPT = Path(__file__).parents[2] / "scripts" / "random_sessions.py"


def test_each_transition_stands_once_and_every_state_can_be_left_and_entered() -> None:
    assert len(LEGAL) == len(TRANSITIONS)
    assert all(
        before is not after and transition.reason for transition in TRANSITIONS for before, after, _ in [transition]
    )
    assert {before for before, _ in LEGAL} == {state for state in TrialState if not state.is_over}
    assert {after for _, after in LEGAL} == set(TrialState)


def test_an_illegal_transition_is_an_error_that_tells_the_story() -> None:
    hand = Hand()
    hand.submit("a")
    trial = hand.trial("a")
    with pytest.raises(EngineError, match=r"(?s)'a'.*from STARTING to RESIZING: on purpose.*QUEUED: submitted"):
        hand.state._core.set_state(trial, TrialState.RESIZING, "on purpose")
    assert trial.state is TrialState.STARTING


def test_the_diagram_has_a_line_for_each_transition() -> None:
    lines = [line.strip() for line in state_diagram().splitlines()]
    assert lines[:2] == ["stateDiagram-v2", "[*] --> QUEUED: submitted"]
    assert "RUNNING --> PAUSED: preempted, or paused" in lines and "FAILED --> [*]" in lines
    assert len(lines) == 2 + len(TRANSITIONS) + sum(state.ended for state in TrialState)


def test_the_command_for_random_sessions_tells_the_seed_and_the_story_of_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(["2", "--seed", "40", "--steps", "60"]) == 0
    assert "2 of 2 sessions, 0 failed" in capsys.readouterr().out
    monkeypatch.setattr(core, "LEGAL", LEGAL - {(TrialState.QUEUED, TrialState.STARTING)})
    assert main(["2", "--seed", "40", "--steps", "60"]) == 1
    printed = capsys.readouterr().out
    assert "session of seed 41 failed" in printed and "cannot go from QUEUED to STARTING" in printed
    assert "2 of 2 sessions, 2 failed" in printed
