"""Several groups at once, priorities, and the ramp-up of packing and widths."""

from __future__ import annotations

from engine_helpers import Hand, Known, only

from fluid.engine.commands import StartLane, StartTrial
from fluid.engine.events import BudgetExtended, DeviceAdded, GroupSubmitted, IterationDone, Tick, TrialAdded, TrialSpec
from fluid.profile import Profile
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
    if hand.trial("a").move is not None:
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
    commands = hand.do(TrialAdded(0.0, "g", TrialSpec("b", 2)))
    assert only(commands, StartTrial).trial_id == "b"
    assert hand.state.groups["g"].trial_ids == ["a", "b"]


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
                for lane in trial.lanes:
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
            done = hand.trial(name).done + 1
            hand.do(IterationDone(hand.now, name, hand.lane(name), done, seconds))
    assert most == 3
    assert profile.packing_limit("default", 4) == 2


def test_widths_are_tried_by_doubling() -> None:
    hand = Hand(devices=8, profile=Profile())
    hand.submit("a", budget=100, max_width=8)
    assert hand.trial("a").width == 1.0, "nothing is known of it yet"
    hand.started("a")
    widths = []
    for _ in range(40):
        hand.tick()
        trial = hand.trial("a")
        if trial.move is not None:
            hand.paused("a")
            hand.resized("a")
        widths.append(trial.width)
        seconds = 1.0 / trial.width
        hand.do(IterationDone(hand.now, "a", hand.lane("a"), trial.done + 1, seconds))
    assert sorted(set(widths)) == [1.0, 2.0, 4.0, 8.0]


def test_a_width_that_does_not_help_is_left_again() -> None:
    hand = Hand(devices=4, profile=Profile())
    hand.submit("a", budget=100, max_width=4)
    hand.started("a")
    for _ in range(40):
        hand.tick()
        trial = hand.trial("a")
        if trial.move is not None:
            hand.paused("a")
            hand.resized("a")
        hand.do(IterationDone(hand.now, "a", hand.lane("a"), trial.done + 1, 1.2 if trial.width > 1 else 1.0))
    assert hand.trial("a").width == 1.0


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
    assert hand.trial("b").move is None, commands
