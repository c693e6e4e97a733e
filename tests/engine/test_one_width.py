"""A trial that any planner gives one device is not planned, with the result of planning it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_helpers import Hand, Known

from fluid.engine.commands import Command
from fluid.engine.events import Event
from fluid.engine.placing.scheduling import Scheduling
from fluid.planners.portfolio import Portfolio
from fluid.policies.engine import EngineState
from fluid.testing.random_sessions import random_session
from fluid.trialgroup import TrialState


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many trials the planner was given at a time."""
    counts: list[int] = []
    for name in ("arrange", "join"):
        ask = getattr(Portfolio, name)

        def recorded(planner: Portfolio, instance: Any, *more: Any, _ask: Any = ask) -> Any:
            counts.append(len(instance))
            return _ask(planner, instance, *more)

        monkeypatch.setattr(Portfolio, name, recorded)
    yield counts


@pytest.mark.parametrize("seed", range(700, 712))
def test_sessions_are_the_same_as_with_planning(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    handle = EngineState.handle

    def recorded(state: EngineState, *events: Event) -> list[Command]:
        commands = handle(state, *events)
        log.extend(map(str, commands))
        return commands

    monkeypatch.setattr(EngineState, "handle", recorded)
    random_session(seed, steps=150)
    quick, log = log, []
    monkeypatch.setattr(Scheduling, "_has_one_width", lambda *_: False)
    random_session(seed, steps=150)
    assert quick
    assert log == quick


def test_one_trial_that_is_extended_is_not_planned(planned: list[int]) -> None:
    hand = Hand(devices=2, profile=Known())
    hand.submit("a", budget=1, max_width=1)
    planned.clear()
    for _ in range(3):
        for lane in list(hand.state.lanes):
            if not lane.ready:
                hand.ready(lane.lane_id)
        if hand.state.trials["a"].state is TrialState.STARTING:
            hand.started("a")
        hand.iterate("a")
        assert hand.state.trials["a"].state is TrialState.DONE
        hand.extend("a", 1)
    assert planned == []
    assert hand.reports("a") == [1, 2, 3]
