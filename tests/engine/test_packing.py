"""Packing that turns out to hurt: it is switched off, and trials packed before are preempted."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import Hand, Known, none, only

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Notice, Pause, RunIteration
from fluid.engine.events import DeviceAdded, GroupSubmitted, PausePurpose, Tick, TrialPaused
from fluid.engine.state import EngineState
from fluid.engine.trial_spec import TrialSpec
from fluid.planners.by_name import make_planner
from fluid.planning.profile import Profile
from fluid.resources import Device


def run(alpha: float, max_packing: int) -> tuple[float, Profile]:
    """The makespan of 12 trials of 200 iterations on 2 devices, by the runtime model, and what was learnt."""
    backend, profile = SimulatedBackend(lambda *_: Truth(1.0, alpha=alpha)), Profile()
    planner = make_planner("portfolio", c=max_packing, d=1)
    state = EngineState(planner, profile, max_packing=max_packing)

    def handle(*events: Any) -> None:
        backend.execute([command for command in state.handle(*events) if not isinstance(command, Notice)])

    for index in range(2):
        backend.add_devices([Device(index)])
        handle(DeviceAdded(0.0, Device(index)))
    specs = tuple(TrialSpec(f"t{index}", 200, profile_key="net") for index in range(12))
    handle(GroupSubmitted(0.0, "group", specs))
    while any(not trial.state.ended for trial in state.trials.values()):
        assert backend.next_at() < float("inf"), "it waits for ever"
        handle(*backend.poll())
        while state.wants_tick:
            handle(Tick(backend.now()))
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


# --- Step by step


class Sours(Known):
    """A profile that measures that packing hurts from a given moment on."""

    sour = False

    def packing_limit(self, key: str, c_max: int) -> int:
        return 1 if self.sour else c_max

    def alpha(self, key: str) -> float:
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


def test_a_pause_at_an_unexpected_iteration_is_an_error() -> None:
    hand = too_many()
    hand.tick()
    with pytest.raises(Exception, match="paused at iteration 9 after 1"):
        hand.do(TrialPaused(hand.now, "c", 2, iteration=9, purpose=PausePurpose.PREEMPT))
