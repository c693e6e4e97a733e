"""Several groups at once, priorities, and the ramp-up of packing and widths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engine_helpers import Hand, Known, only

from fluid.engine.commands import Pause, RunIteration, StartLane, StartTrial
from fluid.engine.events import BudgetExtended, DeviceAdded, GroupSubmitted, IterationDone, Tick, TrialsAdded, TrialSpec
from fluid.measure.profile import Profile
from fluid.resources import Device


def test_a_new_group_gets_the_idle_devices() -> None:
    hand = Hand(devices=2, profile=Known(packing=1))
    hand.submit("a", budget=100)
    commands = hand.submit("b", budget=100)
    assert only(commands, StartTrial).trial_id == "b"


def test_queued_trials_of_any_group_come_before_a_widening() -> None:
    hand = Hand(devices=2, profile=Known(packing=1))
    hand.submit("a", budget=100, max_width=2)
    hand.started("a")
    hand.submit("b", budget=2)
    hand.tick()
    if hand.trial("a").placement.move is not None:
        hand.paused("a")
        hand.resized("a")
    hand.started("b")
    hand.submit("c", budget=2)
    hand.iterate("b", 2)
    assert hand.states()["c"] == "STARTING"


def test_a_higher_priority_starts_first() -> None:
    hand = Hand(profile=Known(packing=1))
    hand.submit("a")
    hand.submit("low", priority=1.0)
    hand.submit("high", priority=2.0)
    hand.started("a")
    hand.iterate("a", 3)
    assert (hand.states()["high"], hand.states()["low"]) == ("STARTING", "QUEUED")


def test_a_trial_can_join_a_group() -> None:
    hand = Hand(devices=2, profile=Known(packing=1))
    hand.submit("a", group="g")
    commands = hand.do(TrialsAdded(0.0, "g", (TrialSpec("b", 2),)))
    assert only(commands, StartTrial).trial_id == "b"
    assert hand.state.groups["g"].trial_ids.keys() == {"a", "b"}


def test_packing_is_tried_one_trial_at_a_time_for_as_long_as_it_pays() -> None:
    profile = Profile()
    hand = Hand(profile=profile)
    hand.submit(*"abcdef", budget=100)
    most = 0
    for _ in range(60):
        hand.tick()
        for name in "abcdef":
            trial = hand.trial(name)
            if trial.state.value == "STARTING":
                for lane in trial.placement.lanes:
                    if not hand.state.lanes[lane].ready:
                        hand.ready(lane)
                hand.started(name)
        running = [name for name in "abcdef" if hand.states()[name] == "RUNNING"]
        assert len(running) <= most + 1, "one more at a time"
        most = max(most, len(running))
        # A third trial gains next to nothing.
        seconds = {1: 1.0, 2: 1.1}.get(len(running), 1.65)
        for name in running:
            hand.now += seconds
            done = hand.trial(name).progress.done + 1
            hand.do(IterationDone(hand.now, name, hand.lane(name), iteration=done, seconds=seconds))
    assert most == 3
    assert profile.packing_limit("default", 4) == 2


def test_packing_is_not_tried_where_too_little_is_left_to_make_up_for_it() -> None:
    for seconds, tried in ((0.01, False), (1.0, True)):
        hand = Hand(profile=Profile())
        hand.submit(*"abc", budget=20)
        hand.started("a")
        for done in range(1, 8):
            hand.tick()
            hand.now += seconds
            hand.do(IterationDone(hand.now, "a", hand.lane("a"), iteration=done, seconds=seconds))
        hand.tick()
        assert ("STARTING" in hand.states().values()) == tried


def widths_of(hand: Hand, trial_id: str, seconds: Callable[[float], float]) -> list[float]:
    """The width of each of 40 iterations, which take so many seconds by their width; resizes are answered at once."""
    widths = []
    for _ in range(40):
        hand.tick()
        trial = hand.trial(trial_id)
        if trial.placement.move is not None:
            hand.paused(trial_id)
            hand.resized(trial_id)
        widths.append(trial.width)
        hand.do(
            IterationDone(
                hand.now,
                trial_id,
                hand.lane(trial_id),
                iteration=trial.progress.done + 1,
                seconds=seconds(trial.width),
            )
        )
    return widths


def test_widths_are_tried_by_doubling() -> None:
    hand = Hand(devices=8, profile=Profile())
    hand.submit("a", budget=100, max_width=8)
    assert hand.trial("a").width == 1.0, "nothing is known of it yet"
    hand.started("a")
    assert sorted(set(widths_of(hand, "a", lambda width: 1.0 / width))) == [1.0, 2.0, 4.0, 8.0]


def test_a_width_that_does_not_help_is_left_again() -> None:
    hand = Hand(devices=4, profile=Profile())
    hand.submit("a", budget=100, max_width=4)
    hand.started("a")
    widths = widths_of(hand, "a", lambda width: 1.2 if width > 1 else 1.0)
    assert 2.0 in widths and hand.trial("a").width == 1.0


def test_a_width_that_makes_it_far_slower_is_left_after_one_iteration_that_counts() -> None:
    """The first one after a resize is not learnt from: it holds what the resize itself costs."""
    hand = Hand(devices=2, profile=Profile())
    hand.submit("a", budget=100, max_width=2)
    hand.started("a")
    widths = widths_of(hand, "a", lambda width: 5.0 if width > 1 else 1.0)
    assert widths.count(2.0) == 2 and hand.trial("a").width == 1.0


@pytest.mark.parametrize(("budget", "tries"), [(6, False), (7, True)])
def test_an_unmeasured_width_is_not_tried_for_a_few_iterations(budget: int, tries: bool) -> None:
    hand = Hand(devices=2, profile=Profile())
    hand.submit("a", budget=10, max_width=1)
    hand.started("a")
    hand.iterate("a", 10)
    hand.submit("b", budget=budget, max_width=2)
    hand.started("b")
    hand.tick()
    assert (hand.trial("b").width, hand.trial("b").placement.move) == (1.0, None), "its own pace is unknown"
    hand.iterate("b", 2)  # the first one holds what a start costs
    hand.tick()
    assert (hand.trial("b").placement.move is not None) is tries


def test_a_trial_that_resumes_in_its_lane_tries_a_width_while_it_runs() -> None:
    hand = Hand(devices=2, profile=Profile())
    hand.submit("a", budget=10, max_width=2)
    hand.started("a")
    hand.iterate("a", 10)
    assert only(hand.extend("a", 10), RunIteration).lane_ids == (hand.lane("a"),)
    assert only(hand.tick(), Pause).trial_id == "a"


@pytest.mark.parametrize("known", [False, True])
def test_a_trial_of_a_few_iterations_starts_at_a_measured_width(known: bool) -> None:
    hand = Hand(devices=2, profile=Profile())
    hand.submit("a", budget=60, max_width=2)
    hand.started("a")
    if known:
        widths_of(hand, "a", lambda width: 1.0 / width)
    else:
        hand.iterate("a", 20)
    hand.stop("a")
    for lane_id in hand.trial("a").placement.lanes:
        hand.released("a", lane_id)
    hand.submit("b", budget=3, max_width=2)
    assert hand.trial("b").width == (2.0 if known else 1.0)


def test_which_of_a_keys_trials_is_widened_does_not_count() -> None:
    """The slow one of two is widened, and is still slower than the other one: it is faster than it was."""
    profile = Profile()
    hand = Hand(devices=2, profile=profile)
    hand.submit("quick", budget=10, profile_key="net")
    hand.submit("slow", budget=60, profile_key="net", max_width=2)
    hand.started("quick")
    hand.started("slow")
    for _ in range(10):
        hand.do(
            IterationDone(
                hand.now, "quick", hand.lane("quick"), iteration=hand.trial("quick").progress.done + 1, seconds=1.0
            )
        )
        hand.do(
            IterationDone(
                hand.now, "slow", hand.lane("slow"), iteration=hand.trial("slow").progress.done + 1, seconds=4.0
            )
        )
    widths_of(hand, "slow", lambda width: 2.2 if width > 1 else 4.0)
    assert hand.trial("slow").width == 2.0
    assert profile.beta("net") == pytest.approx(1.1, rel=0.01)


def test_fifo_packs_nothing() -> None:
    hand = Hand(planner="fifo")
    hand.submit("a", "b", "c")
    assert sorted(hand.states().values()) == ["QUEUED", "QUEUED", "STARTING"]
    hand.tick()
    assert sorted(hand.states().values()) == ["QUEUED", "QUEUED", "STARTING"]


def test_a_thousand_queued_trials_take_no_lane() -> None:
    hand = Hand(devices=0)
    hand.state.handle(*(DeviceAdded(0.0, Device(index)) for index in range(2)))
    commands = hand.state.handle(GroupSubmitted(0.0, "g", tuple(TrialSpec(f"t{i}", 3) for i in range(1000))))
    assert sum(isinstance(command, StartLane) for command in commands) <= 2 * 4
    assert len(hand.state.lanes) <= 2 * 4


def test_an_extension_of_the_instant_a_trial_ends_goes_on_before_anything_widens() -> None:
    hand = Hand(devices=2, profile=Known(packing=1))
    hand.submit("a", "b", budget=2, max_width=2)
    for name in "ab":
        hand.started(name)
    hand.iterate("a", 2)
    commands = hand.do(BudgetExtended(hand.now, "a", 2), Tick(hand.now))
    assert hand.states()["a"] == "RUNNING"
    assert hand.trial("b").placement.move is None, commands
