"""Group policies in the engine: which owner's trials start first, and on which devices."""

from __future__ import annotations

import pytest
from engine_helpers import Hand, Known

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command, Pause, Resize, StartLane
from fluid.engine.events import GroupSubmitted, GroupTerms, LaneReady, PausePurpose, TrialSpec
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device, MemoryNeed, Requires
from fluid.testing.play import Session
from fluid.testing.validate import validate_owners

ANN, BOB, EVE = GroupTerms("ann"), GroupTerms("bob"), GroupTerms("eve")
BIG = Requires(model="big")


def single(devices: int = 1, **options: object) -> Hand:
    """An engine whose devices hold one trial each."""
    return Hand(devices=devices, profile=Known(packing=1, width=1), **options)  # type: ignore[arg-type]


def unlike(*models: str, **options: object) -> Hand:
    """An engine with a device of each of these models, for one trial each."""
    hand = single(0, **options)
    for index, model in enumerate(models):
        for command in hand.add_device(index, model=model):
            if isinstance(command, StartLane):
                hand.do(LaneReady(hand.now, command.lane_id))
    return hand


def at_work(hand: Hand) -> list[str]:
    return sorted(name for name, state in hand.states().items() if state in ("STARTING", "RUNNING", "RESIZING"))


def device_of(hand: Hand, name: str) -> int:
    (device,) = hand.state.occupancy.held[hand.trial(name).row]
    return int(device)


def end(hand: Hand, name: str) -> None:
    """Runs a trial to its end."""
    if hand.states()[name] == "STARTING":
        hand.started(name)
    hand.iterate(name, hand.trial(name).progress.left)
    validate_owners(hand.state)


def order_of_starts(hand: Hand) -> list[str]:
    """The trials in the order in which one device runs them, from now on."""
    order = []
    while names := at_work(hand):
        (name,) = names
        order.append(name)
        end(hand, name)
    return order


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fifo", ["a", "b", "c", "d", "e"]), ("srsf", ["a", "d", "e", "b", "c"]), ("irs", ["a", "d", "e", "b", "c"])],
)
def test_the_owner_that_came_first_or_has_least_left_is_first(policy: str, expected: list[str]) -> None:
    hand = single(group_policy=policy)
    hand.submit("a", budget=3, terms=EVE)
    hand.submit("b", "c", budget=9, terms=ANN)
    hand.submit("d", "e", budget=2, terms=BOB)
    assert order_of_starts(hand) == expected


def test_a_group_without_an_owner_is_an_owner_and_groups_of_one_owner_are_one() -> None:
    hand = single(group_policy="srsf")
    hand.submit("running", budget=1)
    hand.submit("a", budget=4, terms=ANN)
    hand.submit("b", budget=3, terms=ANN)
    hand.submit("c", budget=5)
    # Ann has 7 seconds left, and what she submitted later is longer than nothing: c's owner has 5.
    assert order_of_starts(hand) == ["running", "c", "a", "b"]


def test_the_priority_of_groups_goes_before_ranks_and_that_of_trials_too() -> None:
    hand = single(group_policy="srsf")
    hand.submit("running", budget=1)
    hand.submit("short", budget=1, terms=ANN)
    hand.submit("long", budget=50, terms=GroupTerms("bob", priority=2.0))
    assert order_of_starts(hand) == ["running", "long", "short"]


def test_trials_that_a_search_has_yet_to_submit_count_as_work_left() -> None:
    hand = single(group_policy="srsf")
    hand.submit("running", budget=1)
    hand.submit("first of many", budget=2, terms=GroupTerms("ann", expected_trials=30))
    hand.submit("a", "b", budget=3, terms=BOB)
    assert order_of_starts(hand) == ["running", "a", "b", "first of many"]


def test_ranks_follow_the_work_that_is_left() -> None:
    hand = single(2, group_policy="srsf")
    hand.submit("a1", "a2", "a3", budget=6, terms=ANN)
    hand.submit("b1", "b2", budget=7, terms=BOB)
    for name in at_work(hand):
        hand.started(name)
    assert at_work(hand) == ["a1", "a2"]
    end(hand, "a1")
    assert at_work(hand) == ["a2", "a3"], "ann has 12 seconds left, bob 14"


def test_scarce_devices_are_for_those_that_have_no_others() -> None:
    """Both models are idle; a general trial of an owner with less work leaves the big device to the other's."""
    hand = unlike("big", "small", group_policy="irs")
    hand.submit("x", budget=1, requires=BIG, terms=BOB)
    hand.submit("y", budget=1, terms=EVE, requires=Requires(model="small"))
    hand.submit("general", "general 2", budget=2, terms=ANN)
    hand.submit("needs big", budget=90, requires=BIG, terms=BOB)
    end(hand, "x")
    assert at_work(hand) == ["needs big", "y"], "under SRSF, a general trial would have taken the big device"
    assert device_of(hand, "needs big") == 0
    end(hand, "y")
    assert at_work(hand) == ["general", "needs big"] and device_of(hand, "general") == 1


def test_under_srsf_the_least_demand_comes_first_even_on_scarce_devices() -> None:
    hand = unlike("big", "small", group_policy="srsf")
    hand.submit("x", budget=1, requires=BIG, terms=BOB)
    hand.submit("y", budget=1, terms=EVE, requires=Requires(model="small"))
    hand.submit("general", "general 2", budget=2, terms=ANN)
    hand.submit("needs big", budget=90, requires=BIG, terms=BOB)
    end(hand, "x")
    assert at_work(hand) == ["general", "y"]


def test_memory_that_is_known_beforehand_is_a_requirement() -> None:
    hand = single(0, group_policy="irs")
    for index, memory in enumerate((8.0, 2.0)):
        for command in hand.add_device(index, memory):
            if isinstance(command, StartLane):
                hand.do(LaneReady(hand.now, command.lane_id))
    hand.submit("x", budget=1, memory=MemoryNeed(0.0, 6.0), terms=BOB)
    hand.submit("y", budget=1, memory=MemoryNeed(0.0, 1.0), terms=ANN)
    hand.submit("large", budget=90, memory=MemoryNeed(0.0, 6.0), terms=BOB)
    hand.submit("little", budget=2, memory=MemoryNeed(0.0, 1.0), terms=ANN)
    assert (device_of(hand, "x"), device_of(hand, "y")) == (0, 1)
    end(hand, "x")
    assert at_work(hand) == ["large", "y"] and device_of(hand, "large") == 0


def test_no_device_is_idle_while_a_trial_waits_that_may_use_it() -> None:
    """The scarce device is another owner's share; that has no trial waiting any more, so a general one gets it."""
    hand = unlike("big", "small", group_policy="irs")
    hand.submit("needs big", budget=3, requires=BIG, terms=BOB)
    hand.submit(*"abc", budget=3, terms=ANN)
    assert at_work(hand) == ["a", "needs big"]
    end(hand, "needs big")
    assert at_work(hand) == ["a", "b"]


def commands_of(owners: tuple[str, ...], policy: str) -> list[Command]:
    """A session of groups of these owners, one after the other, with widths, packing and resizes."""
    backend = SimulatedBackend(
        lambda trial_id, width: Truth(1.0 + 0.1 * (len(trial_id) + ord(trial_id[-1]) % 5), alpha=1.1, beta=1.2),
        [Device(index) for index in range(5)],
    )
    session = Session(EngineState(make_planner("portfolio"), group_policy=policy), backend)
    for number, owner in enumerate(owners):
        specs = tuple(TrialSpec(f"{number}{letter}", 4 + number, max_width=4) for letter in "abcdefghijklm")
        session.tell(GroupSubmitted(backend.now(), f"g{number}", specs, GroupTerms(owner)))
        session.run()
    return session.commands


def test_with_one_owner_at_a_time_the_policy_makes_no_difference() -> None:
    one = commands_of(("ann", "ann", "ann"), "fifo")
    assert commands_of(("ann", "ann", "ann"), "irs") == one
    assert commands_of(("ann", "bob", "eve"), "irs") == one, "no owner is open beside another"


def test_with_one_owner_nothing_is_ranked() -> None:
    hand = single(group_policy="irs")
    hand.submit("a", "b", terms=ANN)
    hand.submit("c", budget=1, terms=ANN)
    assert not hand.state.shares.ranks and not hand.state.shares.demands
    hand.submit("d", budget=1, terms=BOB)
    assert list(hand.state.shares.ranks) and hand.state.shares.demands


def test_a_trial_that_may_run_elsewhere_leaves_a_scarce_device_for_one_that_cannot() -> None:
    hand = unlike("big", "small", group_policy="irs")
    hand.submit("first", budget=5, terms=EVE, requires=Requires(model="small"))
    hand.submit("general", budget=100, terms=ANN)
    for name in ("first", "general"):
        hand.started(name)
    assert device_of(hand, "general") == 0
    end(hand, "first")
    hand.submit("needs big", budget=50, requires=BIG, terms=BOB)
    hand.tick()
    assert hand.states()["general"] == "RESIZING", "the small device is idle"
    assert any(isinstance(each, Pause) and each.purpose is PausePurpose.RESIZE for each in hand.log)
    hand.paused("general")
    assert any(isinstance(each, Resize) for each in hand.log)
    hand.resized("general")
    hand.released("general", 0)
    assert at_work(hand) == ["general", "needs big"]
    assert (device_of(hand, "general"), device_of(hand, "needs big")) == (1, 0)


def test_no_trial_is_paused_for_an_owner_with_more_work_left_even_on_a_scarce_device() -> None:
    hand = unlike("big", "small", "small", group_policy="irs")
    hand.submit("general", budget=20, terms=ANN)
    hand.started("general")
    assert device_of(hand, "general") == 0
    hand.submit("general 2", "general 3", budget=20, terms=ANN)
    hand.submit("needs big", budget=100, requires=BIG, terms=BOB)
    for name in ("general 2", "general 3"):
        hand.started(name)
    hand.tick()
    # Ann would end 20 seconds later, on one device, for 20 seconds that Bob's 100 would end earlier.
    assert not any(isinstance(each, Pause) for each in hand.log)
    end(hand, "general 3")
    hand.tick()
    assert hand.states()["general"] == "RESIZING", "to an idle device it goes"


def test_a_trial_of_an_owner_with_much_work_is_paused_for_one_with_little() -> None:
    hand = single(2, group_policy="irs")
    hand.submit(*"abcdef", budget=100, terms=ANN)
    for name in "ab":
        hand.started(name)
    hand.submit("short", budget=4, terms=BOB)
    commands = hand.tick()
    paused = [each.trial_id for each in commands if isinstance(each, Pause)]
    assert len(paused) == 1
    hand.iterate(paused[0])
    hand.paused(paused[0])
    assert hand.states()["short"] == "STARTING"
    end(hand, "short")
    assert paused[0] in at_work(hand), "the paused one goes on before those that have not begun"
    assert hand.trial(paused[0]).progress.done == 1


@pytest.mark.parametrize("policy", ["fifo", "srsf"])
def test_other_policies_take_no_device_in_use(policy: str) -> None:
    hand = single(2, group_policy=policy)
    hand.submit(*"abcdef", budget=100, terms=ANN)
    for name in "ab":
        hand.started(name)
    hand.submit("short", budget=4, terms=BOB)
    hand.tick()
    paused = [each for each in hand.log if isinstance(each, Pause)]
    assert not paused or policy == "srsf", "McNaughton's preemption is for owners that come first"
