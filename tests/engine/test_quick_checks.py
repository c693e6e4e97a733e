"""A group of a key of which nothing is known gets one iteration at once, where another owner's trial pauses for it."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, none, only

from fluid.engine.commands import Command, NotePreempted, NoteTrial, Pause, RunIteration, StartTrial
from fluid.engine.events import GroupTerms, PausePurpose
from fluid.measure.profile import Profile
from fluid.policies.owners import quanta
from fluid.testing.random_sessions import random_session

ANN, BOB = GroupTerms(owner="ann"), GroupTerms(owner="bob")


def sweep(devices: int = 1, trials: str = "ab", *, terms: GroupTerms = ANN, **more: Any) -> Hand:
    """A sweep of ann's that fills the devices, and whose key was measured: an iteration takes 60 s."""
    options = {each: more.pop(each) for each in ("group_policy", "memory", "planner", "in_rounds") if each in more}
    hand = Hand(devices, profile=Profile(), max_packing=1, max_width=1, **options)
    hand.submit(*trials, terms=terms, **{"budget": 20, "profile_key": "sweep", **more})
    hand.start_all()
    for _ in range(2):
        for trial_id in trials[:devices]:
            iterate(hand, trial_id, 60.0 / devices)
    return hand


def iterate(hand: Hand, trial_id: str, passes: float = 60.0) -> list[Command]:
    """Ends a trial's iteration of 60 s so many seconds after what came before."""
    hand.now += passes - 60.0
    return hand.iterate(trial_id, seconds=60.0)


def check(hand: Hand, *trial_ids: str, terms: GroupTerms = BOB, **spec: Any) -> list[Command]:
    return hand.submit(*(trial_ids or ("c",)), terms=terms, **{"budget": 1, "profile_key": "check", **spec})


def test_a_trial_pauses_for_one_iteration_and_goes_on_in_place() -> None:
    hand = sweep()
    commands = check(hand)
    assert only(commands, Pause) == Pause("a", (hand.lane("a"),), purpose=PausePurpose.PREEMPT), "without a tick"
    assert only(commands, NotePreempted).successor == "c"
    texts = [each.text for each in commands if isinstance(each, NoteTrial)]
    assert "makes room for one iteration of 'c', of which nothing is known" in texts
    assert "gets device 0 for one iteration, as nothing is known of its like" in texts
    lane = hand.lane("a")
    iterate(hand, "a")
    assert only(hand.paused("a"), StartTrial) == StartTrial("c", (lane,), iterations=1), "before b, which waited longer"
    hand.started("c")
    assert only(iterate(hand, "c"), RunIteration) == RunIteration("a", (lane,), 17)
    assert hand.end("c") == "DONE"


def test_the_device_is_the_one_on_which_an_iteration_ends_first() -> None:
    hand = sweep(2, "ab")
    assert only(check(hand), Pause).trial_id == "a", "b has just begun one"


def test_a_short_newcomer_keeps_the_device_and_is_not_paused() -> None:
    hand = sweep()
    check(hand, budget=3)
    iterate(hand, "a")
    hand.paused("a")
    hand.started("c")
    commands = hand.iterate("c", seconds=20.0)
    assert only(commands, RunIteration) == RunIteration("c", (hand.lane("c"),), 2)
    assert none(commands, Pause)
    hand.iterate("c", 2, seconds=20.0)
    states = hand.states()
    assert states["c"] == "DONE" and "QUEUED" in (states["a"], states["b"]), "the next is the planner's choice"


def test_a_newcomer_with_much_work_gives_the_device_back_to_the_trial_that_paused() -> None:
    hand = sweep()
    check(hand, budget=100)
    iterate(hand, "a")
    hand.paused("a")
    hand.started("c")
    assert only(iterate(hand, "c"), Pause).trial_id == "c"
    assert only(hand.paused("c"), RunIteration).trial_id == "a"
    assert hand.states() == {"a": "RUNNING", "b": "QUEUED", "c": "QUEUED"}
    assert none(iterate(hand, "a"), Pause), "it is known now"


def test_a_newcomer_of_a_more_urgent_group_keeps_the_device_and_no_other_trial_pauses_for_its_like() -> None:
    hand = sweep(2, "ab")
    check(hand, "c", "d", terms=GroupTerms(owner="bob", priority=10.0), budget=100)
    iterate(hand, "a")
    hand.paused("a")
    hand.started("c")
    commands = iterate(hand, "c")
    assert only(commands, RunIteration).trial_id == "c"
    assert hand.states() == {"a": "QUEUED", "b": "RUNNING", "c": "RUNNING", "d": "QUEUED"}


def test_one_trial_of_each_owner_and_key_has_a_quantum() -> None:
    hand = sweep(3, "abe")
    assert only(check(hand, "c", "d"), Pause)
    assert none(check(hand, "f"), Pause), "of the same owner and key"
    assert only(check(hand, "g", profile_key="other"), Pause)
    assert only(check(hand, "h", terms=GroupTerms()), Pause), "a group without an owner is its own"


@pytest.mark.parametrize("terms", [ANN, GroupTerms(owner="bob", priority=0.5)])
def test_none_pauses_for_its_own_owners_trials_or_for_less_urgent_ones(terms: GroupTerms) -> None:
    assert none(check(sweep(), terms=terms), Pause)


def test_none_pauses_where_the_key_is_known_and_the_trial_waits_its_turn() -> None:
    assert none(check(sweep(), profile_key="sweep"), Pause)


def test_by_order_of_arrival_a_quantum_takes_a_higher_priority() -> None:
    assert none(check(sweep(group_policy="fifo")), Pause)
    assert only(check(sweep(group_policy="fifo"), terms=GroupTerms(owner="bob", priority=2.0)), Pause)


@pytest.mark.parametrize(("can_save", "memory", "pauses"), [(False, None, 1), (False, 100.0, 0), (True, 100.0, 1)])
def test_a_trial_that_cannot_be_saved_pauses_only_where_memory_is_not_counted(
    can_save: bool, memory: float | None, pauses: int
) -> None:
    hand = sweep(can_save=can_save, memory=memory)
    assert sum(isinstance(command, Pause) for command in check(hand)) == pauses


def test_a_device_whose_trial_ends_is_kept_for_the_newcomer_and_none_pauses() -> None:
    hand = sweep(1, "ab", budget=3)
    assert none(check(hand), Pause), "a runs its last iteration"
    assert only(iterate(hand, "a"), StartTrial).trial_id == "c"


def test_no_other_trial_gets_the_device_meanwhile() -> None:
    hand = sweep(2, "abde")
    check(hand)
    hand.stop("a")
    assert only(hand.released("a", hand.lane("a")), StartTrial).trial_id == "c", "not d, which waited longer"


def test_a_newcomer_that_starts_elsewhere_keeps_no_device() -> None:
    hand = sweep(2, "ab")
    check(hand)
    hand.stop("b")
    commands = hand.released("b", hand.lane("b"))
    assert only(commands, StartTrial).lane_ids != hand.trial("a").placement.lanes
    iterate(hand, "a")
    assert only(hand.paused("a"), RunIteration).trial_id == "a"


def test_quanta_take_a_tenth_of_an_hour_and_the_next_begins_when_that_is_past() -> None:
    hand = sweep(1, "a", budget=200)
    first = 0.0
    for number in range(6):
        check(hand, f"c{number}", profile_key=f"check {number}")
        iterate(hand, "a")
        hand.paused("a")
        first = first or hand.now
        hand.started(f"c{number}")
        iterate(hand, f"c{number}")
    assert none(check(hand, "late", profile_key="late"), Pause)
    assert hand.state.quick_checks.wait_until == pytest.approx(first + quanta.WINDOW_S)
    while hand.now < first + quanta.WINDOW_S - 60.0:
        assert none(iterate(hand, "a"), Pause)
    assert only(iterate(hand, "a"), Pause).trial_id == "a"


def test_all_trials_that_take_turns_on_a_full_device_pause() -> None:
    hand = Hand(1, profile=Profile(), max_packing=1, turns=2)
    hand.submit("a", "b", terms=ANN, budget=20, profile_key="sweep")
    hand.start_all()
    hand.iterate("a")
    hand.iterate("b")
    told = check(hand)
    assert [each.trial_id for each in told if isinstance(each, Pause)] == ["a", "b"]
    assert only(hand.paused("b"), StartTrial).trial_id == "c", "its turn comes after a's"
    hand.iterate("a")
    hand.paused("a")
    hand.started("c")
    assert {each.trial_id for each in hand.iterate("c") if isinstance(each, RunIteration)} == {"a", "b"}


def test_in_rounds_each_trial_has_an_iteration_in_turn_anyway() -> None:
    hand = Hand(1, profile=Profile(), max_packing=1, max_width=1, in_rounds=True)
    assert "QuickChecks" not in [type(policy).__name__ for policy in hand.state.policies]


#: A device was kept for a trial that had started elsewhere; another trial of a key was found an event too late.
@pytest.mark.parametrize("seed", [42, 52, 99, 107])
def test_random_sessions_in_which_trials_come_of_which_nothing_is_known(seed: int) -> None:
    session = random_session(seed, 200, new_keys=True)
    told = [command for _, commands in session.told for command in commands]
    assert any(isinstance(each, NoteTrial) and "for one iteration, as nothing" in each.text for each in told)
