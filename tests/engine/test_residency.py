"""Whose state stays on a device: as many as fit by their bytes, the most recently used ones."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from engine_helpers import Hand, Known, none, only
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fluid.engine.commands import Command, RunIteration, Save, StartLane, StartTrial
from fluid.engine.events import GroupTerms, LaneReady
from fluid.resources import MemoryNeed


class Learns(Known):
    """A profile that knows all beforehand, but learns memory."""

    def observe_memory(self, key: str, memory: MemoryNeed, *, model: str | None = None, rows: int = 1) -> bool:
        self._need = memory
        return True


def run(hand: Hand, trial_id: str, **spec: Any) -> list[Command]:
    """Has a trial run one iteration and end; what is evicted for it is saved. Returns all commands."""
    known = trial_id in hand.state.trials
    commands = hand.extend(trial_id, 1) if known else hand.submit(trial_id, budget=1, **spec)
    log = list(commands)
    while commands:
        commands = [answer for command in commands for answer in obey(hand, command)]
        log += commands
    assert hand.states()[trial_id] == "DONE"
    return log


def obey(hand: Hand, command: Command) -> list[Command]:
    """What a lane would do."""
    hand.now += 1.0
    if isinstance(command, Save):
        return hand.saved(
            command.trial_id, command.lane_ids[0], hand.trial(command.trial_id).progress.done, dropped=True
        )
    if isinstance(command, StartTrial):
        begun = command.checkpoint.iteration if command.checkpoint else 0
        return [*hand.started(command.trial_id, begun), *hand.iterate(command.trial_id)]
    if isinstance(command, RunIteration):
        return hand.iterate(command.trial_id)
    return []


def kept(hand: Hand) -> set[str]:
    """Trials whose state is on a device."""
    return {trial_id for trial_id, trial in hand.state.trials.items() if trial.residence.lane is not None}


def names(count: int) -> list[str]:
    return [f"t{index}" for index in range(count)]


# --- What decides


def test_as_many_states_stay_as_fit_whatever_the_number_that_runs() -> None:
    """90 usable: 16 states of 5, and room for the 10 that one more needs while it runs."""
    hand = Hand(memory=100.0, profile=Known(packing=1), resident_limit=1)
    for name in names(30):
        run(hand, name, memory=MemoryNeed(5.0, 5.0))
    assert kept(hand) == set(names(30)[-17:])


@pytest.mark.parametrize(("memory", "need"), [(None, MemoryNeed(5.0)), (100.0, None)])
def test_where_nothing_bounds_them_or_nothing_is_known_a_number_decides(memory: Any, need: Any) -> None:
    hand = Hand(memory=memory, profile=Known(packing=1), resident_limit=3)
    for name in names(9):
        run(hand, name, memory=need)
    assert kept(hand) == set(names(9)[-3:])


def test_a_state_that_stayed_goes_on_without_being_restored_and_one_that_left_from_its_checkpoint() -> None:
    hand = Hand(memory=100.0, profile=Known(packing=1), resident_limit=1)
    for name in names(4):
        run(hand, name, memory=MemoryNeed(25.0, 10.0))
    assert kept(hand) == {"t1", "t2", "t3"}
    assert none(run(hand, "t1"), StartTrial)
    back = run(hand, "t0")
    start = only(back, StartTrial)
    assert start.checkpoint is not None and start.checkpoint.iteration == 1
    assert only(back, Save).trial_id == "t2", "t1 was used since"


def test_a_trial_that_turns_out_to_need_more_has_states_leave_at_once() -> None:
    hand = Hand(memory=100.0, profile=Learns(packing=1, memory=MemoryNeed(30.0, 10.0)))
    for name in ("old", "new"):
        run(hand, name, memory=MemoryNeed(20.0))
    hand.submit("grows", budget=9)
    hand.started("grows")
    assert none(hand.iterate("grows", memory=MemoryNeed(35.0, 15.0)), Save)
    save = only(hand.iterate("grows", memory=MemoryNeed(36.0, 15.0)), Save)
    assert save.trial_id == "old" and save.drop
    assert none(hand.iterate("grows", memory=MemoryNeed(40.0, 20.0)), Save), "it is on its way"


def beside(needed: float) -> tuple[Hand, list[Command]]:
    """A trial of 40 runs, two states of 20 are kept beside it, and one more trial could be packed there."""
    hand = Hand(memory=100.0, profile=Known(packing=2), max_packing=2)
    for name in ("old", "new"):
        run(hand, name, memory=MemoryNeed(20.0))
    hand.submit("a", budget=9, memory=MemoryNeed(40.0))
    hand.started("a")
    hand.submit("b", budget=9, memory=MemoryNeed(needed))
    return hand, hand.tick()


def test_states_make_way_for_a_trial_that_is_to_be_packed() -> None:
    hand, commands = beside(30.0)
    assert only(commands, Save).trial_id == "old"
    hand.saved("old", 0, 1, dropped=True)
    assert hand.states()["b"] == "STARTING" and kept(hand) == {"new"}


def test_states_do_not_leave_for_a_trial_that_would_not_fit_even_then() -> None:
    hand, commands = beside(60.0)
    assert none(commands, Save) and kept(hand) == {"old", "new"}
    assert hand.states()["b"] == "QUEUED"


def test_a_state_that_can_not_be_fetched_back_is_not_given_up_to_pack_one_more() -> None:
    hand = Hand(memory=100.0, profile=Known(packing=2), max_packing=2)
    run(hand, "old", memory=MemoryNeed(40.0), can_save=False)
    hand.submit("a", budget=9, memory=MemoryNeed(40.0))
    hand.started("a")
    hand.submit("b", budget=9, memory=MemoryNeed(30.0))
    hand.tick()
    assert hand.states() == {"old": "DONE", "a": "RUNNING", "b": "QUEUED"}
    assert kept(hand) == {"old"}


# --- Against a list that is ordered by use

#: Trials of several owners would pause for each other.
ALL_OF_ONE = GroupTerms(owner="all")

#: States that differ little in size count as equal.
NEEDS = st.builds(MemoryNeed, st.sampled_from([2.0, 8.0, 32.0]), st.integers(0, 50).map(float))


@given(st.lists(NEEDS, min_size=1, max_size=8), st.lists(st.integers(0, 7), max_size=30))
def test_the_largest_state_leaves_first_then_the_least_recently_used(needs: list[MemoryNeed], order: list[int]) -> None:
    """One trial at a time, in any order: who is kept, and who is restored, is what a list ordered by use says.

    All are as likely to go on, and start as fast, so that a large state is worth least per byte.
    """
    hand = Hand(memory=100.0, profile=Known(packing=1), resident_limit=1)
    usable, expected = 90.0, list[int]()
    for index in (position % len(needs) for position in order):
        name, need = f"t{index}", needs[index]
        was_kept = index in expected
        commands = run(hand, name, memory=need)
        expected = [*(other for other in expected if other != index), index]
        while sum(needs[other].persistent_bytes for other in expected) + need.ephemeral_bytes > usable:
            expected.remove(max(expected[:-1], key=lambda other: needs[other].persistent_bytes))
        assert kept(hand) == {f"t{other}" for other in expected}
        assert none(commands, StartTrial) is was_kept
        assert name not in {command.trial_id for command in commands if isinstance(command, Save)}


class Residents(RuleBasedStateMachine):
    """Several run at once, pause, go on and end, in any order; the validator has the rule.

    After every event it checks that nothing which could leave is kept where it does not fit; here it is checked that
    nothing leaves for which there is room.
    """

    CONTEXT = 2.0

    @initialize(packing=st.integers(1, 4))
    def begin(self, packing: int) -> None:
        self.hand = Hand(memory=100.0, profile=Known(packing=packing), max_packing=packing, ready=False)
        self.hand.do(LaneReady(0.0, 0, self.CONTEXT))
        self.numbers = itertools.count()

    def settle(self, commands: list[Command]) -> None:
        """Lanes come up, saves are made and trials start; who runs is up to the other rules."""
        while commands:
            self.room_was_needed(commands)
            commands = [answer for command in commands for answer in self.answer(command)]

    def answer(self, command: Command) -> list[Command]:
        self.hand.now += 1.0
        if isinstance(command, StartLane):
            return self.hand.do(LaneReady(self.hand.now, command.lane_id, self.CONTEXT))
        if isinstance(command, Save):
            return obey(self.hand, command)
        if isinstance(command, StartTrial):
            return self.hand.started(command.trial_id, command.checkpoint.iteration if command.checkpoint else 0)
        return []

    def room_was_needed(self, commands: list[Command]) -> None:
        """Every evicted state took memory that a waiting or a running trial needed."""
        state = self.hand.state
        saved = [state.trials[command.trial_id] for command in commands if isinstance(command, Save)]
        # One that is about to start is fetched: in its lane another one runs by now.
        if all(trial.state.value == "STARTING" for trial in saved):
            return
        taken = state.memory.taken_bytes(0)
        waiting = [trial for trial in state.trials.values() if trial.state.value in ("QUEUED", "STARTING")]
        most = max((trial.spec.memory.peak_bytes for trial in waiting), default=0.0)
        assert taken + most + self.CONTEXT > 90.0, "there was room for all"

    @rule(need=NEEDS, budget=st.integers(1, 3))
    def submit(self, need: MemoryNeed, budget: int) -> None:
        trial = f"t{next(self.numbers)}"
        self.settle(self.hand.submit(trial, budget=budget, memory=need, terms=ALL_OF_ONE))

    def those_in(self, *states: str) -> list[str]:
        return [name for name, state in self.hand.states().items() if state in states]

    @precondition(lambda self: self.those_in("RUNNING"))
    @rule(data=st.data())
    def iterate(self, data: st.DataObject) -> None:
        self.settle(self.hand.iterate(data.draw(st.sampled_from(self.those_in("RUNNING")))))

    @precondition(lambda self: self.those_in("DONE"))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.settle(self.hand.extend(data.draw(st.sampled_from(self.those_in("DONE"))), 1))

    @precondition(lambda self: self.those_in("RUNNING"))
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.those_in("RUNNING")))
        lane_id = self.hand.lane(name)
        self.settle(self.hand.stop(name))
        self.settle(self.hand.released(name, lane_id))

    @rule()
    def tick(self) -> None:
        self.settle(self.hand.tick())

    def teardown(self) -> None:
        if hasattr(self, "hand"):
            while running := self.those_in("RUNNING"):
                self.settle(self.hand.iterate(running[0]))
            assert not self.those_in("QUEUED", "STARTING"), self.hand.states()


Residents.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestResidents: Any = Residents.TestCase
