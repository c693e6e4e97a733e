"""Running trials go to a faster device that becomes idle, where that gains more than it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from engine_helpers import Hand, none, only
from hypothesis import given, settings
from hypothesis import strategies as st
from test_unlike_devices import ANN, FAST, SLOW, add, run, unlike

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import NoteResize, Pause, Resize
from fluid.engine.events import GroupSubmitted, TrialSpec
from fluid.measure.measurements import MIN_OBSERVATIONS
from fluid.measure.profile import Profile
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.policies.faster_devices import FasterDevices
from fluid.resources import Device, MemoryNeed, Requires
from fluid.testing.play import play

MIDDLE = "NVIDIA H100"


@dataclass
class Ran:
    """A simulated session."""

    makespan: float
    profile: Profile
    moves: list[NoteResize] = field(default_factory=list)


def simulate(
    devices: list[Device],
    budgets: Mapping[str, list[int]],
    truths: Mapping[str, Truth],
    *,
    epsilon: float = 0.0,
    profile: Profile | None = None,
    max_width: int = 1,
) -> Ran:
    """Runs one group of trials, given by their budgets and profile keys."""
    backend = SimulatedBackend(lambda trial_id, _: truths[trial_id[0]], devices, epsilon=epsilon)
    profile = profile or Profile()
    engine = EngineState(make_planner("portfolio", c=1, d=max_width), profile, max_packing=1)
    trials = [
        TrialSpec(f"{key}{row}", budget, profile_key=key, max_width=max_width)
        for key, each in budgets.items()
        for row, budget in enumerate(each)
    ]
    told = play(engine, backend, GroupSubmitted(0.0, "group", tuple(trials)))
    moves = [notice for notice in told if isinstance(notice, NoteResize) and notice.width == 1.0]
    return Ran(backend.now(), profile, moves)


def without_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FasterDevices, "choose", lambda _: [])


def devices_of(*models: str | None) -> list[Device]:
    return [Device(index, model=model) for index, model in enumerate(models)]


# --- by hand


def moving(profile_key: str = "net", **spec: object) -> Hand:
    """Trial a runs on the slow device, and b on the fast one has just ended."""
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("a", budget=1000, profile_key=profile_key, **spec)
    hand.submit("b", budget=MIN_OBSERVATIONS + 1, profile_key="net")
    run(hand, {"a": 2.0, "b": 0.5})
    return hand


def test_a_trial_goes_to_the_faster_device_that_is_idle() -> None:
    hand = moving()
    assert hand.states()["b"] == "DONE"
    (lane,) = hand.trial("a").placement.lanes
    assert only(hand.tick(), Pause).trial_id == "a"
    hand.iterate("a", seconds=2.0)
    assert only(hand.paused("a"), Resize).old_lane_ids == (lane,)
    note = only(hand.resized("a"), NoteResize)
    assert (note.width, note.old_width, note.device_ids) == (1.0, 1.0, (1,))
    left = 1000 - MIN_OBSERVATIONS - 1
    # Each iteration in the lane's first was counted on to take 5% longer than measured, and the start took 0.1 s.
    gain = (left - 1) * (2.0 - 0.5 * 1.05)
    assert note.gain == pytest.approx(gain, rel=0.01)
    assert note.gain is not None
    assert note.gain < gain
    assert hand.state.estimates.seconds_left(hand.trial("a")) == pytest.approx(0.5 * (left - 1))
    assert none(hand.tick(), Pause), "the device that it left is slower"


def test_the_cost_of_a_move_is_what_was_measured() -> None:
    hand = moving()
    trial, estimates = hand.trial("a"), hand.state.estimates
    before = estimates.seconds_gained_on(trial, 1)
    key = estimates.on_model("net", SLOW)
    key.saves.extend([40.0] * 5)
    key.starts.extend([20.0] * 5)
    key.warm_ups.extend([100.0] * 5)
    assert before - estimates.seconds_gained_on(trial, 1) == pytest.approx(160.0 - 0.2, rel=0.05)
    hand.state.profile.observe_resize(70.0)
    assert before - estimates.seconds_gained_on(trial, 1) == pytest.approx(170.0 - 0.2, rel=0.05)


def test_a_move_that_costs_more_than_it_gains_is_not_made() -> None:
    hand = moving()
    hand.state.profile.observe_resize(2000.0)
    assert none(hand.tick(), Pause)


@pytest.mark.parametrize("why", ["its key was not measured there", "it cannot be saved", "it asks for the other model"])
def test_a_trial_stays_where_it_is_if(why: str) -> None:
    if why.startswith("its key"):
        hand = moving(profile_key="other")
    elif why.startswith("it cannot"):
        hand = moving(can_save=False)
    else:
        hand = moving(requires=Requires(model=SLOW))
    assert none(hand.tick(), Pause)


@pytest.mark.parametrize("planner", ["fifo", "static", "dynamic", "portfolio"])
def test_trials_move_under_planners_that_plan_again(planner: str) -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1, planner=planner)
    hand.submit("a", budget=1000, profile_key="net")
    hand.submit("b", budget=MIN_OBSERVATIONS + 1, profile_key="net")
    run(hand, {"a": 2.0, "b": 0.5})
    assert none(hand.tick(), Pause) is (planner in ("fifo", "static"))


def test_a_trial_moves_only_where_it_fits() -> None:
    for room, moves in ((100.0, True), (40.0, False)):
        hand = unlike(max_packing=1, max_width=1)
        add(hand, 0, SLOW, memory=100.0)
        hand.submit("a", budget=1000, profile_key="net", memory=MemoryNeed(60.0))
        add(hand, 1, FAST, memory=room)
        hand.submit("b", budget=MIN_OBSERVATIONS + 1, profile_key="net", memory=MemoryNeed(10.0))
        run(hand, {"a": 2.0, "b": 0.5})
        assert none(hand.tick(), Pause) is not moves


def test_a_trial_that_moves_takes_the_memory_that_was_measured_there() -> None:
    profile = Profile()
    for model, need in ((SLOW, 60.0), (FAST, 30.0)):
        profile.observe_memory("net", MemoryNeed(need), model=model)
    hand = unlike(profile=profile, max_packing=1, max_width=1)
    add(hand, 0, SLOW, memory=100.0)
    hand.submit("a", budget=1000, profile_key="net")
    add(hand, 1, FAST, memory=100.0)
    hand.submit("b", budget=MIN_OBSERVATIONS + 1, profile_key="net")
    run(hand, {"a": 2.0, "b": 0.5})
    hand.stop("b")  # whose state would take the room
    hand.released("b", 1)
    assert only(hand.tick(), Pause).trial_id == "a"
    assert hand.state.memory.need_of(hand.trial("a").row) == MemoryNeed(30.0)


@pytest.mark.parametrize(("need", "room", "moves"), [(60.0, 40.0, False), (60.0, 80.0, True), (None, 80.0, False)])
def test_a_trial_moves_only_where_there_is_room_for_what_it_needs_now(
    need: float | None, room: float, moves: bool
) -> None:
    """The trial that was measured on the fast device is small, and says nothing about that one."""
    hand = unlike(max_packing=1, max_width=1)
    add(hand, 0, SLOW, memory=100.0)
    hand.submit("a", budget=1000, profile_key="net")
    add(hand, 1, FAST, memory=room)
    hand.submit("b", budget=MIN_OBSERVATIONS + 1, profile_key="net")
    hand.started("a")
    hand.started("b")
    for _ in range(MIN_OBSERVATIONS + 1):
        hand.iterate("a", seconds=2.0, memory=None if need is None else MemoryNeed(need))
        hand.iterate("b", seconds=0.5, memory=None if need is None else MemoryNeed(10.0))
    hand.stop("b")  # whose state would take room
    hand.released("b", 1)
    assert none(hand.tick(), Pause) is not moves


def test_a_waiting_trial_comes_first() -> None:
    hand = moving()
    hand.submit("c", budget=50, profile_key="net")
    assert none(hand.tick(), Pause)
    assert hand.state.occupancy.held[hand.trial("c").row] == (1,)


def test_a_trial_that_arrives_before_the_move_gets_the_device() -> None:
    hand = moving()
    hand.tick()
    hand.submit("c", budget=50, profile_key="net")
    hand.paused("a")
    assert hand.state.occupancy.held[hand.trial("a").row] == (0,)
    assert hand.state.occupancy.held[hand.trial("c").row] == (1,)


def test_the_trial_that_ends_last_moves() -> None:
    hand = unlike(SLOW, SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("short", budget=200, profile_key="net")
    hand.submit("long", budget=400, profile_key="net")
    hand.submit("b", budget=MIN_OBSERVATIONS + 1, profile_key="net")
    run(hand, {"short": 2.0, "long": 2.0, "b": 0.5})
    assert only(hand.tick(), Pause).trial_id == "long"


def test_trials_move_by_the_speeds_that_the_user_gave() -> None:
    hand = unlike()
    add(hand, 0, None)
    hand.submit("a", budget=100)
    hand.started("a")
    hand.iterate("a", 3)
    add(hand, 1, None, speed=3.0)
    assert only(hand.tick(), Pause).trial_id == "a"


# --- wide and packed trials


def test_a_trial_is_not_widened_onto_devices_that_slow_it_down() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=2)
    hand.submit("a", "b", budget=MIN_OBSERVATIONS + 1, max_width=1, profile_key="net", terms=ANN)
    hand.submit("c", budget=400, max_width=2, profile_key="net", terms=ANN)
    run(hand, {"b": 0.5, "a": 2.0})
    hand.started("c")
    hand.iterate("c", 3, seconds=0.5)
    assert hand.state.occupancy.held[hand.trial("c").row] == (1,)
    wider = hand.state.planner.replanner().replan(hand.state.allocations.snapshot())
    assert [change.width for change in wider] == [2.0], "which the re-planner wants: to it, devices are alike"
    assert none(hand.tick(), Pause)


def test_a_trial_moves_if_the_devices_for_a_wider_one_turn_out_to_be_too_slow() -> None:
    hand = unlike(SLOW, FAST, MIDDLE, max_packing=1, max_width=3)
    for model, seconds in ((SLOW, 40.0), (FAST, 0.5), (MIDDLE, 1.0)):
        for _ in range(MIN_OBSERVATIONS):
            hand.state.profile.observe("net", seconds, model=model)
    for width in (2, 3, 4):
        for _ in range(MIN_OBSERVATIONS):
            hand.state.profile.observe("net", 40.0 / width, model=SLOW, width=width)
    hand.submit("b", budget=1, profile_key="net", max_width=1)
    hand.submit("c", budget=1, profile_key="net", max_width=1, requires=Requires(model=SLOW))
    hand.submit("a", budget=400, profile_key="net", max_width=3)
    for name, seconds in (("a", 1.0), ("b", 0.5), ("c", 40.0)):
        hand.started(name)
        hand.iterate(name, seconds=seconds)
    assert hand.state.occupancy.held[hand.trial("a").row] == (2,)
    wider = hand.state.planner.replanner().replan(hand.state.allocations.snapshot())
    assert [change.width for change in wider] == [3.0], "one of these devices is too slow"
    assert only(hand.tick(), Pause).trial_id == "a"
    assert hand.state.occupancy.held[hand.trial("a").row] == (1,)


def test_a_packed_trial_does_not_leave_for_a_device_that_slows_it_down() -> None:
    profile = Profile()
    for model, seconds in ((SLOW, (1.0, 2.0)), (FAST, (0.25, 0.3))):
        for p, each in enumerate(seconds, start=1):
            for _ in range(MIN_OBSERVATIONS):
                profile.observe("net", each, model=model, co_residents=p)
    hand = unlike(SLOW, FAST, profile=profile, max_packing=2, max_width=1)
    hand.submit("a", "b", "c", budget=100, profile_key="net")
    (alone,) = (name for name in "abc" if hand.state.occupancy.held[hand.trial(name).row] == (0,))
    for name in "abc":
        for lane in hand.trial(name).placement.lanes:
            if not hand.trial(name).placement.launched:
                hand.ready(lane)
        hand.started(name)
    hand.stop(alone)
    hand.released(alone, hand.lane(alone))
    leaving = hand.state.planner.replanner().replan(hand.state.allocations.snapshot())
    assert [change.width for change in leaving] == [1.0], "which the re-planner wants: to it, devices are alike"
    assert none(hand.tick(), Pause)


# --- simulated sessions


def test_the_makespan_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, truths = devices_of(SLOW, FAST, SLOW), {"n": Truth(1.0, speeds={FAST: 4.0})}
    budgets = {"n": [100, 100, 100]}
    moved = simulate(devices, budgets, truths, epsilon=2.0)
    assert [note.device_ids for note in moved.moves] == [(1,), (1,)]
    without_moves(monkeypatch)
    stayed = simulate(devices, budgets, truths, epsilon=2.0)
    assert stayed.makespan == pytest.approx(100.0)
    assert moved.makespan < 0.75 * stayed.makespan


@pytest.mark.parametrize("models", [(None, None, None), (SLOW, SLOW, SLOW), (SLOW, FAST, MIDDLE)])
def test_no_trial_moves_between_devices_that_are_alike(models: tuple[str | None, ...]) -> None:
    ran = simulate(devices_of(*models), {"n": [20, 50, 400]}, {"n": Truth(1.0)})
    assert ran.moves == []


speeds = st.fixed_dictionaries({model: st.floats(0.2, 5.0) for model in (SLOW, FAST)})


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([SLOW, FAST, MIDDLE]), min_size=2, max_size=5),
    st.lists(st.integers(1, 60), min_size=1, max_size=7),
    st.lists(st.integers(1, 60), max_size=4),
    speeds,
    speeds,
    st.sampled_from([0.0, 0.5, 20.0]),
)
def test_moves_never_make_a_makespan_longer(
    models: list[str],
    first: list[int],
    second: list[int],
    speeds_of_first: dict[str, float],
    speeds_of_second: dict[str, float],
    epsilon: float,
) -> None:
    devices, budgets = devices_of(*models), {"n": first, "m": second}
    truths = {"n": Truth(1.0, speeds=speeds_of_first), "m": Truth(0.5, speeds=speeds_of_second)}

    def known() -> Profile:
        profile = Profile()
        profile.observe_resize(epsilon)
        return profile

    moved = simulate(devices, budgets, truths, epsilon=epsilon, profile=known())
    with pytest.MonkeyPatch.context() as patch:
        without_moves(patch)
        stayed = simulate(devices, budgets, truths, epsilon=epsilon, profile=known())
    assert stayed.moves == []
    assert moved.makespan <= stayed.makespan * (1 + 1e-9)
    for note in moved.moves:
        assert note.gain is not None
        assert note.gain > 0.0
    by_trial = [note.trial_id for note in moved.moves]
    assert all(by_trial.count(trial_id) < len(set(models)) * len(models) for trial_id in by_trial), "none goes round"
