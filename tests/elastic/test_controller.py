"""The books of an elastic trial. Members are simulated by what they answer; nothing else is there to be real."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.elastic.members.controller import ElasticController, Phase
from fluid.elastic.messages import (
    Abort,
    AllHalted,
    Broken,
    Collapsed,
    Disconnect,
    Formed,
    Halt,
    Halted,
    Join,
    Joined,
    Leave,
    MemberFailed,
    MemberIterated,
    MemberRaised,
    MemberReady,
    Prepare,
    Prepared,
    Reported,
    RunMember,
    Send,
    StoreGet,
    StorePut,
    StoreValues,
)
from fluid.errors import FluidError, InvalidFieldError

PREPARE = Prepare(b"", b"")
HERE = "127.0.0.1"


class Trial:
    """A controller, its events, and what was sent to whom and is not answered yet."""

    def __init__(self) -> None:
        self.controller = ElasticController()
        self.events: list[Any] = []
        self.sent: list[tuple[int, Any]] = []

    def do(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.append((action.member, action.message))
            else:
                self.events.append(action)

    def receive(self, member: int, message: Any) -> None:
        self.do(self.controller.receive(member, message))

    def take_sent(self) -> list[tuple[int, Any]]:
        sent, self.sent = self.sent, []
        return sent

    def take_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def ready(self, *members: int, iteration: int = 0) -> None:
        for member in members:
            self.do(self.controller.prepare(member, PREPARE))
            self.receive(member, Prepared(iteration, "127.0.0.1", 0.1))
            assert self.take_events() == [MemberReady(member)]
        self.take_sent()

    def form(self, *members: int, iteration: int = 0) -> list[Join]:
        """Forms a generation and returns what its members were told."""
        self.do(self.controller.form(members))
        joins = []
        while any(isinstance(message, Join) for _, message in self.sent):
            for member, message in self.take_sent():
                if isinstance(message, Join):
                    joins.append(message)
                    self.receive(member, Joined(message.generation, iteration, None, 0.0))
                else:
                    self.sent.append((member, message))
        return joins

    def run(self, iterations: int = 5) -> None:
        self.do(self.controller.run(iterations))
        self.take_sent()
        self.take_events()


@pytest.fixture
def trial() -> Trial:
    return Trial()


def test_growing(trial: Trial) -> None:
    trial.ready(10)
    assert trial.form(10) == [Join(1, 0, 1, "", True)]
    assert trial.take_events() == [Formed(1, (10,), 0)]
    trial.do(trial.controller.run(3))
    assert trial.take_sent() == [(10, RunMember(1, 3))]
    trial.ready(11)
    trial.do(trial.controller.halt())
    assert trial.take_sent() == [(10, Halt())]
    trial.receive(10, MemberIterated(1, 1, {"loss": 1.0}, 0.5))
    trial.receive(10, Halted(1, 1, False))
    assert trial.take_events() == [Reported(1, {"loss": 1.0}, 1, 0.5), AllHalted(1, False)]
    trial.do(trial.controller.form([10, 11]))
    assert trial.take_sent() == [(10, Join(2, 0, 2, HERE, True, 1)), (11, Join(2, 1, 2, HERE, True, 1))]
    trial.receive(11, Joined(2, 1, None, 0.0))
    assert trial.take_events() == []
    trial.receive(10, Joined(2, 1, {"loss": 1.0}, 0.0))
    assert trial.take_events() == [Formed(2, (10, 11), 1)]


def test_shrinking_keeps_rank_0_and_needs_no_meeting(trial: Trial) -> None:
    trial.ready(1, 2, 3)
    trial.form(1, 2, 3)
    assert trial.form(1) == [Join(2, 0, 1, "", False)]
    assert trial.take_sent() == [(2, Leave()), (3, Leave())]
    assert trial.controller.ranks == (1,)


def test_survivors_come_first_whatever_the_order_asked_for(trial: Trial) -> None:
    trial.ready(1, 2, 3, 4)
    trial.form(1, 2)
    assert all(join.sync for join in trial.form(4, 2, 3, 1))
    assert trial.controller.ranks == (1, 2, 4, 3)


def test_when_rank_0_leaves_the_next_one_takes_its_place(trial: Trial) -> None:
    trial.ready(1, 2, 3)
    trial.form(1, 2, 3)
    assert trial.form(2, 3) == [Join(2, 0, 2, HERE, False), Join(2, 1, 2, HERE, False)]


def test_moving_to_others_hands_the_state_over_first(trial: Trial) -> None:
    trial.ready(1, 2, 3, 4)
    trial.form(1, 2)
    trial.take_events()
    joins = trial.form(3, 4, iteration=7)
    assert [(join.generation, join.rank, join.size, join.sync) for join in joins] == [
        (2, 0, 3, True),
        (2, 1, 3, True),
        (2, 2, 3, True),
        (3, 0, 2, False),
        (3, 1, 2, False),
    ]
    assert trial.take_sent() == [(1, Leave()), (2, Leave()), (3, Disconnect(2)), (4, Disconnect(2))]
    assert trial.take_events() == [Formed(3, (3, 4), 7)]


def test_members_on_several_machines_listen_at_their_own_addresses(trial: Trial) -> None:
    for member, address in ((1, "10.0.0.1"), (2, "10.0.0.2"), (3, "10.0.0.2")):
        trial.do(trial.controller.prepare(member, PREPARE))
        trial.receive(member, Prepared(0, address, 0.1))
    trial.take_sent()
    assert [join.address for join in trial.form(2, 1, 3)] == ["10.0.0.2", "10.0.0.1", "10.0.0.2"]
    assert [join.address for join in trial.form(2, 3)] == [HERE, HERE], "both are on one machine"
    assert [join.address for join in trial.form(2)] == [""]


def test_a_member_dies_and_the_others_go_on(trial: Trial) -> None:
    trial.ready(1, 2, 3)
    trial.form(1, 2, 3)
    trial.run()
    trial.receive(1, MemberIterated(1, 1, {}, 0.0))
    trial.receive(3, Broken(1, 1, "connection closed"))
    assert trial.take_sent() == [(1, Abort(1)), (2, Abort(1))]
    assert trial.take_events() == [Reported(1, {}, 3, 0.0)]
    trial.do(trial.controller.member_lost(2))
    trial.receive(1, Broken(1, 1, "connection closed"))
    assert trial.take_events() == [Collapsed(1, (1, 3), "connection closed")]
    assert [(join.rank, join.sync) for join in trial.form(1, 3, iteration=1)] == [(0, False), (1, False)]


def test_without_rank_0_the_farthest_one_hands_its_state_over(trial: Trial) -> None:
    trial.ready(1, 2, 3)
    trial.form(1, 2, 3)
    trial.run()
    trial.do(trial.controller.member_lost(1))
    assert trial.take_sent() == [(2, Abort(1)), (3, Abort(1))]
    trial.receive(2, Broken(1, 0, ""))
    trial.receive(3, Broken(1, 1, ""))
    assert trial.take_events() == [Collapsed(1, (3, 2), "member 1 is gone")]
    trial.do(trial.controller.form([2, 3]))
    assert [message for _, message in trial.take_sent()] == [Join(2, 0, 2, HERE, True), Join(2, 1, 2, HERE, True)]
    trial.receive(2, Joined(2, 1, None, 0.0))
    trial.receive(3, Joined(2, 1, {"loss": 3.0}, 0.0))
    # Rank 0 died before it could tell of the iteration that it had finished.
    assert trial.take_events() == [Reported(1, {"loss": 3.0}, 2, None)]
    assert trial.take_sent() == [(2, Join(3, 0, 2, HERE, False, 1)), (3, Join(3, 1, 2, HERE, False, 1))]
    trial.receive(3, Joined(3, 1, {"loss": 3.0}, 0.0))
    trial.receive(2, Joined(3, 1, None, 0.0))
    assert trial.take_events() == [Formed(3, (2, 3), 1)], "rank 0 is who was named first"


def test_rank_0_stays_even_if_another_one_is_ahead(trial: Trial) -> None:
    trial.ready(1, 2, 3)
    trial.form(1, 2, 3)
    trial.run()
    trial.do(trial.controller.member_lost(3))
    trial.receive(2, Broken(1, 1, ""))
    trial.receive(1, Broken(1, 0, ""))
    assert trial.take_events() == [Collapsed(1, (1, 2), "member 3 is gone")]
    assert all(join.sync for join in trial.form(1, 2))


def test_a_newcomer_that_dies_while_it_joins(trial: Trial) -> None:
    trial.ready(1, 2)
    trial.form(1)
    trial.take_events()
    trial.do(trial.controller.form([1, 2]))
    trial.do(trial.controller.member_lost(2))
    trial.take_sent()
    trial.receive(1, Joined(2, 0, None, 0.0))
    assert trial.take_sent() == []
    trial.receive(1, Broken(2, 0, ""))
    assert trial.take_events() == [Collapsed(2, (1,), "member 2 is gone")]
    assert trial.form(1) == [Join(3, 0, 1, "", False)]


def test_members_of_a_generation_exchange_values(trial: Trial) -> None:
    trial.ready(1, 2, 3)
    trial.do(trial.controller.form([1, 2]))
    trial.take_sent()
    trial.receive(1, StorePut(1, "a", b"1"))
    trial.receive(1, StoreGet(1, 7, ("a", "b")))
    assert trial.take_sent() == []
    trial.receive(3, StorePut(1, "b", b"a stranger"))
    trial.receive(3, StoreGet(1, 0, ("a",)))
    trial.receive(2, StorePut(0, "b", b"of another generation"))
    assert trial.take_sent() == []
    trial.receive(2, StorePut(1, "b", b"2"))
    trial.receive(2, StoreGet(1, 0, ("b",)))
    assert trial.take_sent() == [(1, StoreValues(1, 7, (b"1", b"2"))), (2, StoreValues(1, 0, (b"2",)))]


def test_a_newcomer_without_the_state_is_no_survivor(trial: Trial) -> None:
    trial.ready(1, 2)
    trial.form(1)
    trial.take_events()
    trial.do(trial.controller.form([1, 2]))
    trial.do(trial.controller.member_lost(1))
    trial.receive(2, Broken(2, 0, ""))
    assert trial.take_events() == [Collapsed(2, (), "member 1 is gone")]


def test_who_was_to_leave_survives_if_the_others_do_not(trial: Trial) -> None:
    trial.ready(1, 2)
    trial.form(1, 2)
    trial.take_events()
    trial.do(trial.controller.form([1]))
    trial.take_sent()
    trial.do(trial.controller.member_lost(1))
    assert trial.take_events() == [Collapsed(2, (2,), "member 1 is gone")]
    assert trial.form(2) == [Join(3, 0, 1, "", False)]


def test_deaths_while_and_after_it_breaks(trial: Trial) -> None:
    trial.ready(1, 2, 3)
    trial.form(1, 2, 3)
    trial.run()
    trial.do(trial.controller.member_lost(1))
    trial.do(trial.controller.member_lost(2))
    assert trial.take_events() == []
    trial.receive(3, Broken(1, 0, ""))
    assert trial.take_events() == [Collapsed(1, (3,), "member 1 is gone")]
    assert trial.controller.phase is Phase.BROKEN
    trial.do(trial.controller.member_lost(3))
    assert trial.take_events() == [Collapsed(1, (), "member 1 is gone")]
    trial.do(trial.controller.member_lost(3))
    assert trial.take_events() == []


def test_the_users_code_raises_in_a_member(trial: Trial) -> None:
    trial.ready(1, 2)
    trial.form(1, 2)
    trial.run()
    trial.receive(2, MemberRaised("ValueError: no", "Traceback"))
    trial.receive(1, Broken(1, 0, ""))
    assert trial.take_events() == [
        MemberFailed(2, "ValueError: no", "Traceback"),
        Collapsed(1, (1,), "member 2 is gone"),
    ]
    trial.ready(2)


def test_iterations_done_again_are_not_reported_again(trial: Trial) -> None:
    trial.ready(1)
    trial.form(1)
    trial.run()
    for iteration in (1, 2, 3):
        trial.receive(1, MemberIterated(1, iteration, {}, 0.0))
    trial.do(trial.controller.member_lost(1))
    trial.take_events()
    trial.ready(2, iteration=1)
    trial.form(2, iteration=1)
    trial.run()
    for iteration in (2, 3, 4):
        trial.receive(2, MemberIterated(2, iteration, {}, 0.0))
    assert [event.iteration for event in trial.take_events()] == [4]


def test_messages_of_a_generation_that_is_over_are_ignored(trial: Trial) -> None:
    trial.ready(1, 2)
    trial.form(1, 2)
    trial.form(1)
    trial.take_events()
    trial.receive(1, Broken(1, 0, ""))
    trial.receive(99, Broken(2, 0, ""))
    assert trial.take_events() == [] and trial.controller.phase is Phase.IDLE


def test_what_makes_no_sense_is_refused(trial: Trial) -> None:
    controller = trial.controller
    with pytest.raises(FluidError, match="generation 0 is idle"):
        controller.run(1)
    assert controller.halt() == []
    trial.do(controller.prepare(1, PREPARE))
    with pytest.raises(InvalidFieldError, match="member 1 is not ready"):
        controller.form([1])
    with pytest.raises(InvalidFieldError, match="is a member already"):
        controller.prepare(1, PREPARE)
    trial.receive(1, Prepared(0, "127.0.0.1", 0.1))
    for wrong in ([], [1, 1], [2]):
        with pytest.raises(InvalidFieldError, match="members"):
            controller.form(wrong)
    trial.form(1)
    with pytest.raises(InvalidFieldError, match="iterations"):
        controller.run(0)
    trial.run()
    with pytest.raises(FluidError, match="generation 1 is training"):
        controller.form([1])


class World:
    """Members as they behave, with deaths at any moment; whatever is on its way arrives in the sender's order."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.trial = Trial()
        #: What is on its way: to a member, and from one.
        self.boxes: dict[int, list[Any]] = {}
        self.answers: dict[int, list[Any]] = {}
        self.iterations: dict[int, int] = {}
        self.broke: dict[int, int] = {}
        #: Of each generation, who has reached which end of an iteration.
        self.reached: dict[int, dict[int, int]] = {}
        self.running: dict[int, tuple[int, int]] = {}

    def add(self, member: int) -> None:
        self.boxes[member], self.answers[member] = [], [Prepared(0, "127.0.0.1", 0.0)]
        self.iterations[member], self.broke[member] = 0, 0
        self.trial.do(self.trial.controller.prepare(member, PREPARE))

    def kill(self, member: int) -> None:
        for book in (self.boxes, self.iterations, self.broke):
            del book[member]
        self.running.pop(member, None)

    def deliver(self) -> None:
        """Lets one thing happen."""
        for member, message in self.trial.take_sent():
            if member in self.boxes and not isinstance(message, Prepare):
                self.boxes[member].append(message)
        moves = [("hear", m) for m in self.answers if self.answers[m] or m not in self.boxes]
        moves += [("act", m) for m in self.boxes if self.boxes[m]]
        if not moves:
            return
        kind, member = self.chance.choice(moves)
        if kind == "act":
            self.act(member, self.boxes[member].pop(0))
        elif self.answers[member]:
            self.trial.receive(member, self.answers[member].pop(0))
        else:
            del self.answers[member]
            self.trial.do(self.trial.controller.member_lost(member))

    @property
    def quiet(self) -> bool:
        waiting = (
            any(self.boxes.values()) or any(self.answers.values()) or bool(self.answers.keys() - self.boxes.keys())
        )
        return not waiting and not self.trial.sent

    def act(self, member: int, message: Any) -> None:
        say = self.answers[member].append
        if isinstance(message, Join):
            first = self.trial.controller.ranks[0]
            if message.sync and first in self.iterations:
                self.iterations[member] = self.iterations[first]
            say(Joined(message.generation, self.iterations[member], None, 0.0))
        elif isinstance(message, RunMember):
            if self.broke[member] < message.generation:
                self.iterations[member] += 1
                say(MemberIterated(message.generation, self.iterations[member], {}, 0.0))
                say(Halted(message.generation, self.iterations[member], False))
        elif isinstance(message, Abort) and self.broke[member] < message.generation:
            self.broke[member] = message.generation
            say(Broken(message.generation, self.iterations[member], ""))


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_whoever_dies_whenever_the_controller_ends_up_quiet_and_right(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance)
    controller = world.trial.controller
    for member in range(4):
        world.add(member)
    while not world.quiet:
        world.deliver()
    world.trial.do(controller.form([0, 1]))
    wanted = [[2, 3], [0, 1, 2, 3], [3]]
    for _ in range(60):
        if chance.random() < 0.05 and len(world.boxes) > 1:
            world.kill(chance.choice(sorted(world.boxes)))
        world.deliver()
        if world.quiet and controller.phase is Phase.IDLE:
            alive = [m for m in chance.choice(wanted) if m in world.boxes and m in controller._members]
            if chance.random() < 0.5 and alive:
                world.trial.do(controller.form(alive))
            else:
                world.trial.do(controller.run(1))
        elif world.quiet and controller.phase is Phase.BROKEN and controller.survivors:
            world.trial.do(controller.form(list(controller.survivors)))
    while not world.quiet:
        world.deliver()
    assert controller.phase in (Phase.IDLE, Phase.BROKEN)
    reported = [event.iteration for event in world.trial.events if isinstance(event, Reported)]
    assert reported == sorted(set(reported))
    assert set(controller.ranks) & set(controller._members) <= set(world.boxes)


def test_a_trial_that_ran_by_itself_is_taken_over_with_its_state(trial: Trial) -> None:
    trial.do(trial.controller.adopt(1, "become a member"))
    assert trial.take_sent() == [(1, "become a member")]
    assert not trial.controller.is_ready(1)
    trial.receive(1, Prepared(4, "127.0.0.1", 0.0))
    assert trial.take_events() == [MemberReady(1)]
    trial.ready(2)
    assert trial.controller.survivors == (1,)
    assert [join.rank for join in trial.form(2, 1, iteration=4)] == [0, 1]
    assert trial.controller.ranks == (1, 2), "who has the state is rank 0"
    assert trial.take_events() == [Formed(1, (1, 2), 4)], "its iterations were reported before"
    assert trial.controller.iteration == 4
    with pytest.raises(FluidError, match="generation 1"):
        trial.controller.adopt(3, "become a member")


def test_newcomers_who_are_not_wanted_any_more_leave(trial: Trial) -> None:
    trial.ready(1)
    trial.form(1)
    trial.take_events()
    trial.ready(2, 3)
    trial.do(trial.controller.prepare(4, PREPARE))
    trial.take_sent()
    assert trial.controller.newcomers == (2, 3, 4) and trial.controller.members == (1, 2, 3, 4)
    for member in (3, 4):
        trial.do(trial.controller.dismiss(member))
    assert trial.take_sent() == [(3, Leave()), (4, Leave())]
    assert trial.controller.newcomers == (2,) and not trial.controller.is_member(3)
    trial.receive(4, Prepared(0, "127.0.0.1", 0.1))
    assert trial.take_events() == [], "it was on its way"
    assert trial.controller.dismiss(3) == []
    with pytest.raises(InvalidFieldError, match="generation"):
        trial.controller.dismiss(1)
