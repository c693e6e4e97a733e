"""A long queue is planned again by kinds of trials, with the result of planning it trial by trial."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_helpers import Hand, Known

from fluid.engine import tuning
from fluid.engine.commands import Command, NoteMeasured, NoteWaiting
from fluid.engine.events import GroupSubmitted, TrialSpec
from fluid.measure.runtime_model import FloatArray, IntArray
from fluid.planners.instance import Instance
from fluid.planners.portfolio import Portfolio
from fluid.testing.random_sessions import random_session
from fluid.trialgroup import TrialState


class Flips(Known):
    """A profile by which c alternates between 3 and 4, and that a second key is slower by."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0

    def observe(self, key: str, seconds: float, **more: Any) -> None:
        self._seen += 1

    def packing_limit(self, key: str, c_max: int, model: str | None = None) -> int:
        return 3 + self._seen // 2 % 2

    def seconds_per_iteration(self, key: str, model: str | None = None) -> float | None:
        return 1.0 if key == "" else 2.5


@pytest.fixture
def by_kinds(monkeypatch: pytest.MonkeyPatch) -> list[FloatArray]:
    """The answers of the planner that gave widths by kinds."""
    answers: list[FloatArray] = []
    join_alike = Portfolio.join_alike

    def recorded(planner: Portfolio, kinds: Instance, counts: IntArray, idle: int) -> FloatArray | None:
        widths = join_alike(planner, kinds, counts, idle)
        if widths is not None:
            answers.append(widths)
        return widths

    monkeypatch.setattr(Portfolio, "join_alike", recorded)
    return answers


def submit(hand: Hand, budgets: list[int], keys: int, **more: Any) -> None:
    first = len(hand.state.trials)
    specs = [
        TrialSpec(f"t{row}", budget, profile_key="x" * (row % keys), max_width=1, **more)
        for row, budget in enumerate(budgets, first)
    ]
    hand.do(GroupSubmitted(hand.now, f"from {first}", tuple(specs)))


def start(hand: Hand) -> list[str]:
    """Makes lanes ready, and sets trials up; returns the ids of those that run."""
    for lane in list(hand.state.lanes):
        if not lane.ready:
            hand.ready(lane.lane_id)
    for trial in list(hand.state.trials.values()):
        if trial.state is TrialState.STARTING:
            hand.started(trial.trial_id)
    return [trial.trial_id for trial in hand.state.trials.values() if trial.state is TrialState.RUNNING]


def play(seed: int, keys: int = 2) -> list[Command]:
    """A session of a long queue: c flips, trials are added, extended and stopped while they wait."""
    rng = random.Random(seed)
    hand = Hand(devices=2, profile=Flips())
    submit(hand, [rng.randint(1, 6) for _ in range(60)], keys)
    for step in range(150):
        hand.iterate(rng.choice(start(hand)))
        waiting = [trial.trial_id for trial in hand.state.trials.values() if trial.state is TrialState.QUEUED]
        if step % 50 == 30:
            hand.extend(rng.choice(waiting), 3)
        if step % 50 == 40:
            hand.stop(rng.choice(waiting))
        if step == 70:
            submit(hand, [2, 7, 2, 2], keys, priority=2.0)
    return hand.log


@pytest.mark.parametrize("seed", range(2))
def test_planning_by_kinds_decides_as_planning_trial_by_trial(
    seed: int, by_kinds: list[FloatArray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LONG_QUEUE", 10**6)
    trial_by_trial = play(seed)
    assert not by_kinds
    monkeypatch.setattr(tuning, "LONG_QUEUE", 1)
    assert play(seed) == trial_by_trial
    assert len(by_kinds) > 5


def test_of_lines_that_get_another_width_the_journal_names_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LONG_QUEUE", 1)
    rng = random.Random(0)
    hand = Hand(devices=2, profile=Flips())
    submit(hand, [5] * 60, keys=1)
    line = next(note.line for note in hand.log if isinstance(note, NoteWaiting))
    while sum(isinstance(command, NoteMeasured) for command in hand.log) < 4:
        hand.iterate(rng.choice(start(hand)))
    notes = [note for note in hand.log if isinstance(note, NoteWaiting)]
    assert [len(note.trial_ids) > 0 for note in notes].count(True) == 1, "when they were submitted"
    assert {note.line for note in notes} == {line}
    assert [note.width for note in notes] == [1 / 3, 1 / 4, 1 / 3, 1 / 4, 1 / 3]


@pytest.mark.parametrize("seed", range(500, 505))
def test_random_sessions_of_queues_that_count_as_long(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LONG_QUEUE", 1)
    random_session(seed, steps=250)
