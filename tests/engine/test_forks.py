"""Trials that start from the state of another one."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, none, only

from fluid.engine.commands import Call, Command, Fork, ForkSaved, NoteQueued, ReportEnd, RunIteration, Save, StartLane, StartTrial
from fluid.engine.events import (
    BudgetExtended,
    CallRequested,
    Checkpoint,
    GroupRecovered,
    GroupSubmitted,
    LaneReady,
    PauseRequested,
    ResumeRequested,
    StartState,
    TrialCalled,
    TrialForked,
    TrialHistory,
    TrialsAdded,
    TrialSpec,
)
from fluid.errors import InvalidFieldError


class Forking(Hand):
    """Forks trials of one group."""

    def fork(self, child: str, parent: str = "a", at: int | None = None, **spec: Any) -> list[Command]:
        start = spec.pop("start", StartState(parent, at))
        made = TrialSpec(child, **{"budget": 6, "start": start, **spec})
        return self.do(TrialsAdded(self.now, "group of a", (made,)))

    def forked(
        self, child: str, at: int, parent: str = "a", *, lane_id: int | None = None, in_memory: bool = True, **more: Any
    ) -> list[Command]:
        found = None if more else Checkpoint(at, f"{child}/{at}", in_memory=in_memory)
        return self.do(TrialForked(self.now, child, parent=parent, lane_id=lane_id, checkpoint=found, **more))


def running(devices: int = 2, **spec: Any) -> Forking:
    """Trial ``a`` runs and has done two iterations."""
    hand = Forking(devices)
    hand.submit("a", **{"budget": 6, **spec})
    hand.started("a")
    hand.iterate("a", 2)
    return hand


def test_a_running_trials_lane_saves_its_state_and_the_fork_starts_from_there() -> None:
    hand = running()
    asked = only(hand.fork("b"), Fork)
    assert (asked.trial_id, asked.lane_ids, asked.child, asked.at) == ("a", (hand.lane("a"),), "b", None)
    assert hand.states()["b"] == "PAUSED" and hand.trial("b").awaits == "waits for the state of 'a'"
    hand.iterate("a")
    start = only(hand.forked("b", 3, lane_id=hand.lane("a")), StartTrial)
    assert start.checkpoint == Checkpoint(3, "b/3", in_memory=True) and start.iterations == 3
    assert hand.trial("b").awaits == "" and hand.states()["a"] == "RUNNING"
    hand.started("b", 3)
    hand.iterate("b", 3)
    assert hand.reports("b") == [4, 5, 6] and hand.end("b") == "DONE"


def test_a_waiting_fork_is_told_to_be_queued_not_paused() -> None:
    note = only(running().fork("b", at=5), NoteQueued)
    assert (note.trial_id, note.why) == ("b", "waits for the state of 'a' after 5 iterations")


def test_an_iteration_to_come_is_asked_for_at_once_and_again_in_another_lane() -> None:
    hand = running()
    assert only(hand.fork("b", at=5), Fork).at == 5
    assert none(hand.iterate("a"), Fork)
    commands = hand.lose(hand.lane("a"))
    assert none(commands, Fork)
    hand.start_all()
    assert [item.at for item in hand.log if isinstance(item, Fork)] == [5, 5]


def test_the_newest_state_of_a_trial_without_an_iteration_is_that_of_its_first_one() -> None:
    hand = Forking(2)
    hand.submit("a", budget=6)
    assert only(hand.fork("b"), Fork).at == 1
    assert none(hand.started("a"), Fork)


def test_the_newest_state_of_a_trial_that_repeats_lost_iterations_is_the_last_that_it_has_reported() -> None:
    hand = running(devices=1)
    hand.lose(hand.lane("a"))
    asked = [*hand.fork("b"), *hand.ready(hand.trial("a").placement.lanes[0]), *hand.started("a")]
    assert only(asked, Fork).at == 2


def test_a_lane_is_told_of_forks_together_with_what_starts_their_parent() -> None:
    hand = Forking(0)
    fork = TrialSpec("b", 6, start=StartState("a", 1))
    hand.do(GroupSubmitted(hand.now, "group of a", (TrialSpec("a", 6), fork)))
    hand.add_device(0)
    (lane,) = (item for item in hand.log if isinstance(item, StartLane))
    commands = hand.do(LaneReady(hand.now, lane.lane_id))
    assert only(commands, StartTrial).trial_id == "a" and only(commands, Fork).at == 1
    assert commands.index(only(commands, StartTrial)) < commands.index(only(commands, Fork))


def test_a_lane_to_which_a_parent_goes_is_told_of_its_forks_with_that() -> None:
    hand = running(devices=1)
    hand.do(PauseRequested(hand.now, "a"))
    hand.iterate("a")
    hand.paused("a")
    assert hand.states()["a"] == "PAUSED" and none(hand.fork("b", at=4), Fork)
    commands = hand.do(ResumeRequested(hand.now, "a"))
    assert only(commands, RunIteration) and only(commands, Fork).at == 4


def test_a_trial_that_is_done_gives_its_last_state_from_its_lane_or_its_checkpoint() -> None:
    hand = running(extends=True)
    hand.iterate("a", 4)
    lane = hand.trial("a").residence.lane
    asked = only(hand.fork("b", budget=9), Fork)
    assert (asked.lane_ids, asked.at) == ((lane,), 6)
    saved = Checkpoint(6, "a/6")
    hand.saved("a", lane, 6, dropped=True)
    asked_of_host = [item for item in hand.log if isinstance(item, ForkSaved)]
    assert [(item.trial_id, item.parent, item.checkpoint) for item in asked_of_host] == [("b", "a", saved)]
    hand.forked("b", 6)
    assert hand.states()["b"] == "STARTING"


def test_a_state_that_is_being_saved_is_awaited() -> None:
    hand = running(isolated=True)
    hand.iterate("a", 4)
    assert any(isinstance(item, Save) for item in hand.log)  # Nothing says that it goes on: its lane ends.
    commands = hand.fork("b", budget=9)
    assert none(commands, Fork) and none(commands, ForkSaved)
    lane = hand.trial("a").residence.lane
    assert only(hand.saved("a", lane, 6, dropped=True), ForkSaved).checkpoint.iteration == 6


def test_a_trial_that_is_done_and_has_lost_its_state_makes_it_again() -> None:
    hand = running(extends=True)
    hand.iterate("a", 4)
    hand.lose(hand.trial("a").residence.lane)
    hand.fork("b", budget=9)
    hand.start_all()
    assert hand.states()["a"] == "RUNNING"
    hand.iterate("a", 6)
    assert hand.reports("a") == [1, 2, 3, 4, 5, 6] and hand.ends("a") == ["DONE"]
    asked = [item for item in hand.log if isinstance(item, Fork)]
    assert asked and asked[-1].child == "b"


def test_a_checkpoint_of_another_run_is_copied_first() -> None:
    hand = running()
    start = StartState("old", 4, Checkpoint(4, "/runs/1/trials/old/kept/4"))
    asked = only(hand.fork("b", start=start), ForkSaved)
    assert (asked.trial_id, asked.parent, asked.checkpoint.path) == ("b", "old", "/runs/1/trials/old/kept/4")
    assert only(hand.forked("b", 4, "old", in_memory=False), StartTrial).iterations == 2
    assert hand.trial("b").residence.durable == Checkpoint(4, "b/4")


def test_a_lane_that_is_beyond_the_iteration_leaves_a_checkpoint_of_it() -> None:
    hand = running()
    hand.saved("a", hand.lane("a"), 2)
    hand.fork("b", at=2)
    asked = only(hand.forked("b", 0, lane_id=hand.lane("a"), problem="is beyond it", is_past=True), ForkSaved)
    assert asked.checkpoint.iteration == 2


@pytest.mark.parametrize("at", [None, 2, 5])
def test_a_parent_that_fails_before_fails_its_fork(at: int | None) -> None:
    hand = running(devices=1)
    hand.fork("b", at=at)
    for _ in range(3):
        hand.failed("a", hand.lane("a"))
        hand.start_all()
    assert hand.states() == {"a": "FAILED", "b": "FAILED"}
    assert "'a' is FAILED" in hand.trial("b").limits.failure.message


def test_a_state_that_cannot_be_saved_fails_the_fork() -> None:
    hand = running()
    hand.fork("b")
    end = only(hand.forked("b", 0, lane_id=hand.lane("a"), problem="a lock cannot be pickled", cannot=True), ReportEnd)
    assert end.state == "FAILED" and "a lock cannot be pickled" in end.failure.message


def test_a_budget_that_the_newest_state_has_used_up_fails_the_fork() -> None:
    hand = running()
    hand.fork("b", budget=3)
    hand.iterate("a")
    end = only(hand.forked("b", 3, lane_id=hand.lane("a")), ReportEnd)
    assert end.state == "FAILED" and "budget of 3 is used up" in end.failure.message


def test_a_fork_that_waits_can_be_stopped_and_paused_and_extended() -> None:
    hand = running()
    hand.fork("b", at=5)
    hand.fork("c", at=5)
    hand.stop("b")
    assert hand.end("b") == "STOPPED"
    hand.do(PauseRequested(hand.now, "c"))
    hand.extend("c")
    hand.iterate("a", 3)
    assert none(hand.forked("b", 5, lane_id=hand.lane("a")), StartTrial)
    hand.forked("c", 5, lane_id=hand.lane("a"))
    assert hand.states()["c"] == "PAUSED" and hand.trial("c").awaits == ""
    assert only(hand.do(ResumeRequested(hand.now, "c")), StartTrial).iterations == 3


def test_resuming_a_fork_by_hand_does_not_start_it_without_its_state() -> None:
    hand = running()
    hand.fork("b", at=5)
    hand.do(PauseRequested(hand.now, "b"))
    assert none(hand.do(ResumeRequested(hand.now, "b")), StartTrial)
    assert hand.trial("b").awaits


def test_a_fork_whose_state_is_lost_with_a_host_gets_it_again() -> None:
    hand = Forking(1)
    hand.submit("a", budget=6)
    hand.add_device(1, host="other")
    hand.start_all()
    hand.iterate("a", 2)
    hand.fork("b")
    found = Checkpoint(2, "b/2", host="other", in_memory=True)
    lane = hand.lane("a")
    hand.do(TrialForked(hand.now, "b", parent="a", lane_id=lane, checkpoint=found))
    hand.lose_device(1)
    assert hand.trial("b").residence.checkpoint is None
    assert [item.at for item in hand.log if isinstance(item, Fork)] == [None, 2]
    assert hand.trial("b").awaits == "waits for the state of 'a' after 2 iterations"


def test_a_session_that_goes_on_asks_for_what_was_not_there_and_for_nothing_else() -> None:
    hand = Forking(2)
    saved, start = Checkpoint(3, "b/3"), StartState("a", 3)
    past = (
        TrialHistory(TrialSpec("a", 6), budget=6, reported=6, checkpoint=Checkpoint(6, "a/6"), ended="DONE"),
        TrialHistory(TrialSpec("b", 6, start=start), budget=6, reported=3, checkpoint=saved),
        TrialHistory(TrialSpec("c", 9, start=StartState("a")), budget=9),
    )
    commands = hand.do(GroupRecovered(hand.now, "group of a", past))
    assert only(commands, StartTrial).checkpoint == saved
    assert only(commands, ForkSaved).trial_id == "c"


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        ({"start": StartState("nobody")}, "start_from", "no trial of this session"),
        ({"start": StartState("a", 1)}, "at", "is beyond it"),
        ({"start": StartState("a", 7)}, "at", "beyond the budget of trial 'a', 6"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(spec: dict[str, Any], field: str, reason: str) -> None:
    hand = running()
    with pytest.raises(InvalidFieldError, match=reason) as raised:
        hand.fork("b", **spec)
    assert raised.value.field == field and "b" not in hand.state.trials


def test_a_parent_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="start_from='a': cannot be saved"):
        running(can_save=False).fork("b")


def test_a_search_may_extend_a_fork_whose_budget_the_newest_state_has_used_up() -> None:
    hand = running()
    hand.fork("b", budget=3, extends=True)
    hand.iterate("a")
    end = only(hand.forked("b", 3, lane_id=hand.lane("a")), ReportEnd)
    assert end.state == "DONE" and hand.reports("b") == []
    start = only(hand.do(BudgetExtended(hand.now, "b", iterations=2)), StartTrial)
    assert start.checkpoint == Checkpoint(3, "b/3", in_memory=True) and start.iterations == 2
    hand.started("b", 3)
    hand.iterate("b", 2)
    assert hand.reports("b") == [4, 5] and hand.end("b") == "DONE"


def test_a_fork_from_a_state_beyond_its_budget_is_extended_and_called_as_others() -> None:
    hand = running()
    hand.fork("b", budget=1, extends=True)
    hand.do(CallRequested(hand.now, "b", call_id=1, method="m", payload=b""))
    hand.iterate("a")
    start = only(hand.forked("b", 3, lane_id=hand.lane("a")), StartTrial)
    assert start.checkpoint == Checkpoint(3, "b/3", in_memory=True) and start.iterations == 0
    lane = hand.lane("b")
    assert only(hand.started("b", 3), Call).call_id == 1
    hand.do(TrialCalled(hand.now, "b", lane, call_id=1))
    end = only(hand.do(BudgetExtended(hand.now, "b", iterations=1)), ReportEnd)
    assert end.state == "DONE"  # Two iterations, of which it has three.
    more = hand.do(BudgetExtended(hand.now, "b", iterations=2))
    assert only(more, RunIteration).iterations == 1


def test_a_checkpoint_that_its_trial_has_left_behind_is_looked_for_again() -> None:
    hand = running(isolated=True)
    hand.iterate("a", 4)
    hand.saved("a", hand.trial("a").residence.lane, 6, dropped=True)
    assert only(hand.fork("b", budget=9), ForkSaved).checkpoint.iteration == 6
    hand.extend("a")
    hand.start_all()
    gone = hand.forked("b", 0, problem="FileNotFoundError: the checkpoint of iteration 6 is gone")
    assert only(gone, Fork).lane_ids == (hand.lane("a"),)
    hand.iterate("a", 7)
    hand.forked("b", 7, lane_id=hand.lane("a"))
    assert hand.trial("b").awaits == "" and hand.trial("b").residence.restart_at == 7


def test_a_checkpoint_that_is_nowhere_else_fails_the_fork() -> None:
    hand = running(isolated=True)
    hand.iterate("a", 4)
    hand.saved("a", hand.trial("a").residence.lane, 6, dropped=True)
    hand.fork("b", budget=9)
    hand.forked("b", 0, problem="FileNotFoundError: the checkpoint of iteration 6 is gone")
    assert hand.end("b") == "FAILED"
