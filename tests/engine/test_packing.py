"""Packing that turns out to hurt: it is switched off, and trials packed before are preempted."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine import tuning
from fluid.engine.commands import KillLane, Pause, RunIteration
from fluid.engine.events import GroupSubmitted, LaneReady, PausePurpose, TrialPaused, TrialSpec
from fluid.measure.profile import Profile
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.testing.play import play


def run(alpha: float, max_packing: int) -> tuple[float, Profile]:
    """The makespan of 12 trials of 200 iterations on 2 devices, by the runtime model, and what was learnt."""
    backend = SimulatedBackend(lambda *_: Truth(1.0, alpha=alpha), [Device(0), Device(1)])
    profile, planner = Profile(), make_planner("portfolio", c=max_packing, d=1)
    specs = tuple(TrialSpec(f"t{index}", 200, profile_key="net") for index in range(12))
    play(EngineState(planner, profile, max_packing=max_packing), backend, GroupSubmitted(0.0, "group", specs))
    return backend.now(), profile


def test_packing_that_costs_ten_times_switches_itself_off() -> None:
    """Only the iterations that measured it are lost: a few on each device."""
    without, _ = run(10.0, 1)
    packed, profile = run(10.0, 4)
    assert profile.packing_limit("net", 4) == 1
    assert profile.alpha("net") == pytest.approx(10.0)
    assert without == 1200.0
    assert packed <= 1.05 * without


def test_packing_that_pays_stays() -> None:
    without, _ = run(1.1, 1)
    packed, profile = run(1.1, 4)
    assert profile.packing_limit("net", 4) == 4
    assert packed < 0.5 * without


@pytest.mark.parametrize(("busy", "states"), [(0.99, ["RUNNING", "QUEUED"]), (0.5, ["RUNNING", "STARTING"])])
def test_a_device_that_one_trial_keeps_busy_is_never_shared(busy: float, states: list[str]) -> None:
    hand = Hand(profile=Profile(), max_packing=4)
    hand.submit("a", "b", budget=50, profile_key="net")
    hand.started("a")
    hand.iterate("a", 10, busy=busy)
    hand.tick()
    assert list(hand.states().values()) == states


# --- What counts as packed


def measured(hand: Hand, trial_id: str, times: int, seconds: float) -> int:
    """Iterates a trial; returns the packing measured for its key, in a session of one key."""
    hand.iterate(trial_id, times, seconds=seconds)
    return hand.state.profile.measured_packing("net")


def packed(*trial_ids: str) -> Hand:
    """A session of one device where the first trial has been measured alone and the second one is about to start."""
    hand = Hand(profile=Profile(), max_packing=4)
    hand.submit(*trial_ids, budget=100, profile_key="net")
    hand.started(trial_ids[0])
    assert measured(hand, trial_ids[0], 10, 1.0) == 1
    hand.tick()
    assert hand.states()[trial_ids[1]] == "STARTING"
    return hand


def test_a_trial_that_has_not_iterated_yet_is_no_co_resident() -> None:
    """It makes a CUDA context, loads data or compiles: what the others take meanwhile says nothing about packing."""
    hand = packed("a", "b", "c", "d")
    assert measured(hand, "a", 10, 1.0) == 1, "the lane of b is not even ready"
    hand.ready(1)
    assert measured(hand, "a", 10, 1.0) == 1
    hand.started("b")
    assert measured(hand, "a", 10, 1.0) == 1, "b compiles in its first iteration"
    hand.tick()
    assert list(hand.states().values()) == ["RUNNING", "RUNNING", "QUEUED", "QUEUED"]
    assert measured(hand, "b", 1, 30.0) == 1
    assert measured(hand, "a", 1, 1.0) == 1, "b settled in the middle of this iteration"
    assert measured(hand, "a", 5, 1.5) == 2
    assert hand.state.profile.alpha("net") == pytest.approx(1.5)


def test_a_further_co_resident_waits_until_two_trials_were_observed() -> None:
    hand = packed("a", "b", "c")
    hand.ready(1)
    hand.started("b")
    hand.iterate("b", seconds=30.0)
    assert measured(hand, "a", 10, 1.1) == 2
    hand.tick()
    assert hand.states()["c"] == "QUEUED", "only one of them is known to be as fast as that"
    hand.iterate("b", seconds=1.1)
    hand.tick()
    assert hand.states()["c"] == "STARTING"


def test_a_co_resident_of_another_key_counts_too() -> None:
    """Each key has one trial on the device: neither would ever be observed on two."""
    profile = Profile()
    for key in "ab":
        for _ in range(5):
            profile.observe(key, 1.0)
    hand = Hand(profile=profile, max_packing=4)
    for trial_id in "ab":
        hand.submit(trial_id, budget=100, profile_key=trial_id)
    hand.started("a")
    hand.iterate("a", 2)
    hand.tick()
    hand.ready(1)
    hand.started("b")
    for _ in range(8):
        hand.iterate("b")
        hand.iterate("a")
    assert hand.state.estimates.of_key(hand.trial("a")).packing == 3


def test_a_co_resident_that_is_started_again_settles_anew() -> None:
    hand = packed("a", "b")
    hand.ready(1)
    hand.started("b")
    hand.iterate("b")
    hand.iterate("a", 2)
    before = hand.state.estimates.of_key(hand.trial("a")).observed[2, 1]
    hand.lose(1)
    hand.tick()
    assert hand.states()["b"] == "STARTING"
    hand.iterate("a", 5)
    hand.ready(2)
    hand.started("b")
    hand.iterate("a", 5)
    assert hand.state.estimates.of_key(hand.trial("a")).observed[2, 1] == before
    hand.iterate("b")
    hand.iterate("a", 2)
    assert hand.state.estimates.of_key(hand.trial("a")).observed[2, 1] == before + 2, (
        "b's first one was as long as usual"
    )


# --- Packing that cannot be measured


def churned(hand: Hand, rounds: int) -> None:
    """Has trials of one iteration come and go beside each other: a neighbour changes during each of them."""
    for _ in range(rounds):
        for lane in [lane.lane_id for lane in hand.state.lanes if not lane.ready]:
            hand.ready(lane)
        for name in [name for name, state in hand.states().items() if state == "STARTING"]:
            hand.started(name)
        for name in [name for name, state in hand.states().items() if state == "RUNNING"]:
            hand.iterate(name)
        hand.tick()


def residents(hand: Hand) -> int:
    return len(hand.state.occupancy.residents[0])


def churning() -> Hand:
    """A session of one device whose trials are too short to be observed side by side, and one of which was alone."""
    hand = Hand(profile=Profile(), max_packing=4)
    hand.submit("alone", budget=20, profile_key="net")
    hand.started("alone")
    hand.iterate("alone", 20)
    assert hand.state.profile.measured_packing("net") == 1
    hand.submit(*(f"t{row}" for row in range(200)), budget=1, profile_key="net")
    return hand


def test_packing_that_is_never_observed_is_given_up() -> None:
    hand = churning()
    seen = []
    for _ in range(60):
        churned(hand, 1)
        seen.append(residents(hand))
    estimate = hand.state.estimates.of_key(hand.trial("t199"))
    assert hand.state.profile.measured_packing("net") == 1, "the test packs what could be measured"
    assert max(seen) == 2 and set(seen[tuning.MOST_UNOBSERVED + 4 :]) == {1}
    assert estimate.packing == 1 and estimate.failed_tries == 1


def test_packing_that_was_given_up_is_tried_again_once_iterations_can_be_measured() -> None:
    hand = churning()
    churned(hand, 210)
    assert hand.state.estimates.of_key(hand.trial("t0")).packing == 1
    hand.submit("long", "other", budget=500, profile_key="net")
    hand.started("long")
    hand.iterate("long", tuning.OBSERVED_TO_RETRY - 10)
    hand.tick()
    assert hand.states()["other"] == "QUEUED"
    hand.iterate("long", 10 + 2 * tuning.OBSERVE_EVERY)  # of the last, the profile learns from one in eight
    hand.tick()
    assert hand.states()["other"] == "STARTING"
    hand.ready(hand.lane("other"))
    hand.started("other")
    hand.iterate("other")
    hand.iterate("long", 10, seconds=1.2)
    assert hand.state.profile.measured_packing("net") == 2


def test_slow_starts_do_not_give_packing_up() -> None:
    """While a co-resident compiles for minutes, no iteration is comparable, however many there are."""
    hand = packed("a", "b")
    hand.ready(1)
    hand.started("b")
    hand.iterate("a", 80)
    assert hand.state.estimates.of_key(hand.trial("a")).packing == 2
    hand.iterate("b", seconds=60.0)
    hand.iterate("a", 6, seconds=1.2)
    assert hand.state.profile.measured_packing("net") == 2


def test_each_device_may_try_several_times() -> None:
    """Sixteen devices get their second trial at once, before any of them was observed."""
    hand = Hand(devices=16, profile=Profile(), max_packing=2, max_width=1)
    names = [f"t{row}" for row in range(32)]
    hand.submit(*names, budget=100, profile_key="net")
    running = [name for name in names if hand.states()[name] == "STARTING"]
    for name in running:
        hand.started(name)
    for name in running:
        hand.iterate(name, 8)
    hand.tick()
    assert set(hand.states().values()) == {"RUNNING", "STARTING"}
    assert hand.state.estimates.of_key(hand.trial("t0")).packing == 2


# --- What it costs to try


def test_a_gpu_has_a_moment_to_tell_how_busy_a_trial_keeps_it() -> None:
    """Its lane tells once a second, however short the iterations are."""
    hand = Hand(profile=Profile(), max_packing=4)
    hand.submit("a", "b", budget=10_000, profile_key="net")
    hand.started("a")
    hand.iterate("a", 99, seconds=0.01)
    hand.tick()
    assert hand.states()["b"] == "QUEUED"
    hand.iterate("a", seconds=0.01, busy=0.99)  # of the iterations by now, the profile learns from one in eight
    hand.iterate("a", 1000, seconds=0.01)
    hand.tick()
    assert hand.states()["b"] == "QUEUED", "a keeps it busy"


def test_a_gpu_that_does_not_tell_is_tried() -> None:
    hand = Hand(profile=Profile(), max_packing=4)
    hand.submit("a", "b", budget=10_000, profile_key="net")
    hand.started("a")
    hand.iterate("a", 400, seconds=0.01)
    hand.tick()
    assert hand.states()["b"] == "STARTING"


def started_slowly(budget: int, warm_up: float) -> Hand:
    """Two trials on a device of which the first one, in a new lane, took that many seconds more to settle."""
    hand = Hand(profile=Profile(), max_packing=4, ready=False)
    hand.submit("a", "b", budget=budget, profile_key="net")
    hand.now += warm_up / 2
    hand.ready(0)
    hand.started("a")
    hand.now += warm_up / 2
    hand.iterate("a")  # 1 s, as the others
    return hand


@pytest.mark.parametrize(("budget", "state"), [(140, "QUEUED"), (170, "STARTING")])
def test_a_co_resident_is_tried_if_the_work_left_repays_its_start(budget: int, state: str) -> None:
    """A start takes 60 s: five times as long is 300 s of work, less than two trials of 170 iterations have left."""
    hand = started_slowly(budget, 60.0)
    hand.iterate("a", 8)
    hand.tick()
    assert hand.states() == {"a": "RUNNING", "b": state}


def test_a_start_in_a_lane_that_was_used_says_little_of_one_in_a_new_lane() -> None:
    hand = started_slowly(3, 60.0)
    warm_ups = hand.state.estimates.of_key(hand.trial("a")).warm_ups
    assert not warm_ups, "the first iteration alone does not tell what it took too long"
    hand.iterate("a", 2)
    assert list(warm_ups) == [60.0]
    hand.started("b")  # in the same lane
    hand.iterate("b", 3)
    assert list(warm_ups) == [60.0]


@pytest.mark.parametrize(("seconds", "warm_up"), [(10.0, 10.0), (30.0, 20.0), (math.inf, 20.0)])
def test_what_a_lane_waited_for_before_it_was_launched_is_no_cost_of_its_start(seconds: float, warm_up: float) -> None:
    """As for the MPS daemon of its GPU, once in a session; 30 s is a lane that was launched before the trial came."""
    hand = Hand(profile=Profile(), ready=False)
    hand.submit("a", budget=3, profile_key="net")
    hand.now += 20.0
    hand.do(LaneReady(hand.now, 0, seconds=seconds))
    hand.started("a")
    hand.iterate("a", 2)  # 1 s each
    assert list(hand.state.estimates.of_key(hand.trial("a")).warm_ups) == [warm_up]


# --- Step by step


class Sours(Known):
    """A profile that measures that packing hurts from a given moment on."""

    sour = False

    def packing_limit(self, key: str, c_max: int, model: str | None = None) -> int:
        return 1 if self.sour else c_max

    def alpha(self, key: str, model: str | None = None) -> float:
        return 10.0 if self.sour else 1.0


def too_many(**options: Any) -> Hand:
    """Three trials on a device, after it was measured that packing hurts."""
    profile = Sours()
    hand = Hand(profile=profile, ready=False, **options)
    hand.ready(0)
    hand.submit("a", "b", "c", budget=20)
    hand.ready(1)
    hand.ready(2)
    for trial_id in "abc":
        hand.started(trial_id)
    for trial_id in "cba":  # in this order the next iteration of "a" is the first of which all three had settled
        hand.iterate(trial_id)
    profile.sour = True
    hand.iterate("a")
    return hand


def test_trials_are_preempted_one_after_the_other_and_go_on_where_they_were() -> None:
    hand = too_many()
    for trial_id, lane in (("c", 2), ("b", 1)):
        assert only(hand.tick(), Pause) == Pause(trial_id, (lane,), purpose=PausePurpose.PREEMPT)
        assert none(hand.tick(), Pause), "the next is preempted when this one has paused"
        hand.iterate(trial_id)
        hand.paused(trial_id)
        assert hand.states()[trial_id] == "QUEUED"
    assert none(hand.tick(), Pause)
    commands = hand.iterate("a", 18)
    assert only(commands, RunIteration) == RunIteration("c", (2,), 18)
    hand.iterate("c", 18)
    hand.iterate("b", 18)
    assert hand.reports("b") == hand.reports("c") == list(range(1, 21))


def test_a_preempted_trial_that_is_done_when_it_has_paused_is_done() -> None:
    hand = too_many()
    hand.tick()
    hand.iterate("c", 19)
    assert hand.end("c") is None, "its answer is on the way"
    hand.paused("c")
    assert hand.end("c") == "DONE"


def test_a_preempted_trial_that_is_stopped_or_dies_meanwhile_does_not_wait() -> None:
    hand = too_many()
    hand.tick()
    hand.stop("c")
    hand.paused("c")
    hand.released("c", 2)
    assert hand.end("c") == "STOPPED"
    hand.tick()
    hand.lose(1)
    assert hand.trial("b").limits.failures == 1 and hand.trial("b").placement.preemption is None


def test_a_preempted_trial_that_is_extended_meanwhile_goes_on_later() -> None:
    hand = too_many()
    hand.tick()
    assert none(hand.extend("c", 5), RunIteration)
    hand.paused("c")
    hand.stop("b")
    hand.released("b", 1)
    assert only(hand.iterate("a", 18), RunIteration) == RunIteration("c", (2,), 24)


def test_a_pause_at_an_unexpected_iteration_ends_the_lane() -> None:
    hand = too_many()
    hand.tick()
    killed = only(hand.do(TrialPaused(hand.now, "c", 2, iteration=9, purpose=PausePurpose.PREEMPT)), KillLane)
    assert killed.lane_id == 2 and "'c' paused at iteration 9 after 1" in killed.reason
    hand.lose(2)
    assert hand.trial("c").placement.preemption is None and hand.states()["c"] in ("QUEUED", "STARTING")
