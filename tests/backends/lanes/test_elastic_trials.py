"""Tests of fluid.backends.lanes.elastic, command by command: what comes out is data, no lane is needed."""

from __future__ import annotations

from typing import Any

import lane_messages as to
import pytest

from fluid._clock import VirtualClock
from fluid.backends.lanes.elastic import ElasticTrials, PoolAction, SetUpMember, ToLane
from fluid.elastic.messages import Broken, Halted, Join, Joined, Leave, Left, MemberIterated, Prepared
from fluid.engine.commands import Call, Pause, Resize, RunIteration, StartTrial, StopTrial
from fluid.engine.events import (
    Failure,
    IterationDone,
    PausePurpose,
    ResizeDone,
    TrialFailed,
    TrialPaused,
    TrialReleased,
)
from fluid.lane.protocol import FromMember, Membership, ToMember
from fluid.trainables.encoded_metrics import encode_metrics


class Table:
    """The trials, lanes 0 to 2, and what the trials have asked for so far."""

    def __init__(self) -> None:
        self.up = {0, 1, 2}
        self.clock = VirtualClock()
        self.trials = ElasticTrials(self.up.__contains__, lambda trial_id: trial_id == "a", self.clock, "torch")

    def start(self, *lanes: int, iterations: int = 5) -> list[PoolAction]:
        """Starts trial a in these lanes; all of them answer as they should."""
        actions = self.trials.execute(StartTrial("a", lanes, iterations=iterations))
        assert actions == [SetUpMember(lane, actions[0].command, Membership(1, "torch")) for lane in lanes]  # type: ignore[union-attr]
        for lane in lanes:
            self.say(lane, Prepared(0, "127.0.0.1", 0.1))
        return self.meet(1, *lanes)

    def meet(self, generation: int, *lanes: int, iteration: int = 0) -> list[PoolAction]:
        return [action for lane in lanes for action in self.say(lane, Joined(generation, iteration, None, 0.1))]

    def say(self, lane: int, message: Any) -> list[PoolAction]:
        return self.trials.hear(lane, FromMember(0.0, "a", 1, message), self.clock.now())


def kinds(actions: list[PoolAction]) -> list[tuple[int, type]]:
    """Lane and type of each message."""
    return [
        (action.lane_id, type(action.message.message if isinstance(action.message, ToMember) else action.message))
        for action in actions
        if isinstance(action, ToLane)
    ]


@pytest.fixture
def table() -> Table:
    return Table()


def test_only_wide_commands_of_elastic_trials_concern_it(table: Table) -> None:
    assert table.trials.concerns(StartTrial("a", (0, 1), iterations=1))
    assert not table.trials.concerns(StartTrial("a", (0,), iterations=1))
    assert not table.trials.concerns(StartTrial("b", (0, 1), iterations=1))
    table.start(0, 1)
    assert table.trials.concerns(RunIteration("a", (0,), 1)), "whatever is asked of a trial in several lanes"


def test_a_command_waits_for_the_one_under_way(table: Table) -> None:
    table.trials.execute(StartTrial("a", (0, 1), iterations=5))
    assert table.trials.execute(Pause("a", (0, 1), purpose=PausePurpose.PREEMPT)) == []
    assert table.trials.execute(Call("a", (0,), call_id=1, method="tell", payload=b"")) == []
    assert table.trials.execute(to.fork("a", "b")) == []
    for lane in (0, 1):
        table.say(lane, Prepared(0, "127.0.0.1", 0.1))
    started, paused, called, forks = table.meet(1, 0, 1)
    assert isinstance(paused, TrialPaused) and paused.iteration == 0, "before its first iteration"
    assert called == ToLane(0, to.call("a", 1, "tell", b"")) and forks == ToLane(0, to.fork("a", "b"))
    assert getattr(started, "trial_id", None) == "a"


def test_the_loss_of_a_lane_answers_a_pause(table: Table) -> None:
    table.start(0, 1, 2)
    table.up.discard(1)
    table.trials.lane_lost(1)
    assert table.trials.execute(Pause("a", (0, 1, 2), purpose=PausePurpose.PREEMPT)) == []
    for lane in (0, 2):
        table.say(lane, Broken(1, 0, "lane 1 is gone"))
    table.trials.execute(Resize("a", (0, 2), (0, 2), iterations=3))
    assert [type(action) for action in table.meet(2, 0, 2)] == [ResizeDone, ToLane, ToLane], "it goes on"


def test_a_trial_back_in_one_lane_is_handed_back_with_what_waits(table: Table) -> None:
    table.start(0, 1, iterations=0)
    table.trials.execute(Resize("a", (0,), (0, 1), iterations=4))
    table.trials.execute(RunIteration("a", (0,), 2))
    actions = table.meet(2, 0)
    assert kinds(actions) == [(1, Leave)] and isinstance(actions[1], ResizeDone)
    assert actions[2:] == [RunIteration("a", (0,), 4), RunIteration("a", (0,), 2)]
    assert not table.trials.concerns(RunIteration("a", (0,), 4))


def test_every_lane_that_a_stopped_trial_leaves_is_told_of_once(table: Table) -> None:
    table.start(0, 1)
    table.trials.execute(StopTrial("a", (1,)))
    assert table.say(0, MemberIterated(1, 1, encode_metrics({"loss": 1.0}), 0.5)) == [
        IterationDone(0.0, "a", 0, iteration=1, seconds=0.5, metrics=encode_metrics({"loss": 1.0})),
    ]
    table.say(0, Halted(1, 1, False))
    assert kinds(table.say(1, Halted(1, 1, False))) == [(0, Join)]
    assert (1, Leave) in kinds(table.meet(2, 0, iteration=1))
    assert table.say(1, Left()) == [TrialReleased(0.0, "a", 1)]
    assert table.say(1, Left()) == []


def test_a_trial_that_fails_is_given_up_in_lanes_the_engine_does_not_know_of(table: Table) -> None:
    table.trials.count(StartTrial("a", (0,), iterations=5))
    actions = table.trials.execute(Pause("a", (0,), purpose=PausePurpose.RESIZE, next_lane_ids=(0, 1)))
    assert [action.lane_id for action in actions if isinstance(action, SetUpMember)] == [1]
    actions = table.trials.follow(TrialFailed(1.0, "a", 0, Failure("error", "ValueError: on purpose")))
    assert kinds(actions) == [(1, Leave)]
    assert not table.trials.concerns(StopTrial("a", (0,)))


@pytest.mark.parametrize("pending", [None, "pause", "resize"])
def test_a_trial_that_has_lost_all_its_lanes_starts_anew(table: Table, pending: str | None) -> None:
    table.start(0, 1)
    if pending == "pause":
        table.trials.execute(Pause("a", (0, 1), purpose=PausePurpose.RESIZE, next_lane_ids=(0, 1, 2)))
    elif pending == "resize":
        table.trials.execute(Resize("a", (2,), (0, 1), iterations=5))
    for lane in (0, 1):
        table.up.discard(lane)
    actions = [action for lane in (0, 1) for action in table.trials.lane_lost(lane)]
    assert ((2, Leave) in kinds(actions)) == (pending == "pause"), "the engine does not know of that lane"
    assert not table.trials.concerns(StartTrial("a", (2,), iterations=5)), "like any trial in one lane"


def test_commands_for_lanes_that_are_gone_do_not_hold_a_start_elsewhere_up(table: Table) -> None:
    table.up |= {3, 4}
    table.start(0, 1, 2)
    for lane in (0, 1, 2):
        table.up.discard(lane)
        table.trials.lane_lost(lane)
    # The engine gave these before it heard of the last loss.
    assert table.trials.execute(Resize("a", (1, 2), (1, 2), iterations=5, done=0)) == []
    assert table.trials.execute(Pause("a", (2,), purpose=PausePurpose.RESIZE, next_lane_ids=(2, 3))) == []
    start = StartTrial("a", (3, 4), iterations=5)
    assert table.trials.execute(start) == [SetUpMember(lane, start, Membership(2, "torch")) for lane in (3, 4)]


def test_a_trial_that_is_started_in_a_lane_that_is_gone_can_be_stopped_in_the_others(table: Table) -> None:
    table.up.discard(1)
    actions = table.trials.execute(StartTrial("a", (0, 1), iterations=5))
    assert all(isinstance(action, SetUpMember) for action in actions)
    assert not table.trials.concerns(StopTrial("a", (0,))), "lane 0 answers by itself"
