"""Preemption: a running trial pauses for one that waits, and goes on where there is room."""

from __future__ import annotations

from engine_helpers import Hand, Known, none, only

from fluid.engine.commands import Pause, RunIteration, StartTrial
from fluid.engine.events import BudgetExtended, GroupSubmitted, PausePurpose, TrialSpec
from fluid.measure.profile import Profile
from fluid.resources import MemoryNeed

#: Nothing is packed or widened; iterations take a second.
ALONE = {"profile": Known(packing=1, width=1), "max_packing": 1}


def left_over(budget: int = 4, **spec: object) -> Hand:
    """Three equal trials on two devices, of which "c" waits; the others have done their first iteration."""
    hand = Hand(devices=2, **ALONE)
    hand.submit("a", "b", "c", budget=budget, **spec)
    for trial_id in "ab":
        hand.started(trial_id)
    hand.tick()
    hand.now += 1.0
    for trial_id in "ab":
        hand.now -= 1.0
        hand.iterate(trial_id)
    return hand


def test_a_trial_is_preempted_for_a_late_one_and_goes_on_from_its_checkpoint() -> None:
    hand = left_over()
    pause = only(hand.tick(), Pause)
    leaving, staying = pause.trial_id, "b" if pause.trial_id == "a" else "a"
    lane = hand.lane(leaving)
    assert pause == Pause(leaving, (lane,), purpose=PausePurpose.PREEMPT), "it goes on later, and no Resize follows"
    assert none(hand.tick(), Pause), "one at a time"
    hand.iterate(leaving)
    assert only(hand.paused(leaving), StartTrial) == StartTrial("c", (lane,), iterations=4)
    assert hand.states() == {leaving: "QUEUED", staying: "RUNNING", "c": "STARTING"}
    hand.saved(leaving, lane, 2)
    hand.started("c")
    hand.iterate(staying, 2)
    other = hand.trial(staying).placement.lanes[0]
    goes_on = only(hand.iterate(staying), StartTrial)
    assert (goes_on.trial_id, goes_on.lane_ids, goes_on.checkpoint.iteration) == (leaving, (other,), 2)
    hand.started(leaving, 2)
    hand.iterate(leaving, 2)
    hand.iterate("c", 4)
    assert set(hand.states().values()) == {"DONE"}
    assert hand.reports(leaving) == hand.reports("c") == [1, 2, 3, 4]


def test_trials_are_preempted_as_soon_as_their_iterations_are_measured() -> None:
    hand = Hand(devices=2, profile=Profile(), max_packing=1)
    hand.submit("a", "b", "c", budget=4)
    for trial_id in "ab":
        hand.started(trial_id)
    hand.tick()
    assert not hand.state.wants_tick
    hand.iterate("a", 2)  # the first one says nothing: others came meanwhile
    assert hand.state.wants_tick
    assert only(hand.tick(), Pause).trial_id in "ab"


def test_a_preempted_trial_goes_on_in_its_lane_if_its_successor_was_stopped() -> None:
    hand = left_over()
    leaving = only(hand.tick(), Pause).trial_id
    hand.stop("c")
    hand.iterate(leaving)
    lane = hand.lane(leaving)
    assert only(hand.paused(leaving), RunIteration) == RunIteration(leaving, (lane,), 2)
    assert hand.trial(leaving).placement.preemption is None


def test_a_preempted_trial_that_ends_before_it_has_paused_is_done() -> None:
    hand = left_over()
    pause = only(hand.tick(), Pause)
    hand.iterate(pause.trial_id, 3)  # an iteration was booked late, and it had begun the last one before it heard
    started = only(hand.paused(pause.trial_id), StartTrial)
    assert started.trial_id == "c" and hand.end(pause.trial_id) == "DONE"


def test_a_trial_that_cannot_be_saved_is_not_preempted() -> None:
    assert none(left_over(can_save=False).tick(), Pause)


def test_a_trial_is_not_preempted_for_one_of_lower_priority() -> None:
    hand = Hand(devices=2, **ALONE)
    specs = [TrialSpec(trial_id, 4, priority=priority) for trial_id, priority in (("a", 2.0), ("b", 2.0), ("c", 1.0))]
    hand.do(GroupSubmitted(0.0, "g", tuple(specs)))
    for trial_id in "ab":
        hand.started(trial_id)
        hand.iterate(trial_id, 2)
        assert none(hand.tick(), Pause)


def test_the_papers_planners_do_not_preempt() -> None:
    for planner in ("dynamic", "static", "fifo"):
        hand = Hand(devices=2, planner=planner, **ALONE)
        hand.submit("a", "b", "c", budget=4)
        for trial_id in "ab":
            hand.started(trial_id)
            hand.iterate(trial_id, 2)
            assert none(hand.tick(), Pause)


def test_no_trial_is_preempted_for_one_that_does_not_fit_beside_its_state() -> None:
    for kept, makes_way in ((10.0, True), (60.0, False)):
        hand = Hand(devices=2, memory=100.0, **ALONE)
        hand.submit("a", "b", "c", budget=4, memory=MemoryNeed(kept, 20.0))
        for trial_id in "ab":
            hand.started(trial_id)
        hand.now += 1.0
        for trial_id in "ab":
            hand.now -= 1.0
            hand.iterate(trial_id)
        assert bool([command for command in hand.tick() if isinstance(command, Pause)]) is makes_way


def test_trials_with_follow_up_iterations_start_first_and_long_ones_with_them() -> None:
    hand = Hand(devices=1, **ALONE)
    specs = {"first": (1, 0), "short": (3, 0), "leads": (1, 5), "long": (9, 0), "extended": (1, 0)}
    trials = [
        TrialSpec(trial_id, budget, follow_up_iterations=follow_up_iterations)
        for trial_id, (budget, follow_up_iterations) in specs.items()
    ]
    hand.do(GroupSubmitted(0.0, "g", tuple(trials)))
    order = []
    while running := [trial_id for trial_id, state in hand.states().items() if state == "STARTING"]:
        order += running
        hand.started(running[0])
        if running == ["long"]:
            hand.do(BudgetExtended(hand.now, "extended", 1, follow_up_iterations=4))
        hand.iterate(running[0], hand.trial(running[0]).progress.budget)
    assert order == ["long", "leads", "extended", "short", "first"]
