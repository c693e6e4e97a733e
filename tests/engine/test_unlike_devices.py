"""Devices of unlike models: the engine measures how fast they are for each profile key, and plans with that."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from engine_helpers import Hand, none

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import NoteMeasured, NoteWaiting, Save, StartLane, WaitReason
from fluid.engine.events import GroupSubmitted, GroupTerms, LaneMeasured, LaneReady, TrialSpec
from fluid.measure.measurements import MIN_OBSERVATIONS
from fluid.measure.profile import Profile
from fluid.planners.arrangement import Arrangement
from fluid.planners.instance import Instance
from fluid.planners.portfolio import Portfolio, make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device, MemoryNeed, Requires
from fluid.testing.play import play

SLOW, FAST = "NVIDIA A100", "NVIDIA H200"

ANN = GroupTerms("ann")


def add(hand: Hand, index: int, model: str | None, **more: Any) -> None:
    for command in hand.add_device(index, model=model, **more):
        if isinstance(command, StartLane):
            hand.do(LaneReady(hand.now, command.lane_id))


def unlike(*models: str | None, profile: Profile | None = None, **options: Any) -> Hand:
    hand = Hand(devices=0, profile=profile or Profile(), **options)
    for index, model in enumerate(models):
        add(hand, index, model)
    return hand


def speeds(hand: Hand) -> dict[int, float]:
    """The speed that planners see, by trial."""
    running = hand.state.allocations.snapshot()
    return dict(zip(running.rows.tolist(), running.speed.tolist(), strict=True))


def run(hand: Hand, seconds: dict[str, float], times: int = MIN_OBSERVATIONS + 1) -> None:
    """Has trials iterate in turn; the first iteration of each begins before it runs alone, and is not counted."""
    for trial_id in seconds:
        hand.started(trial_id)
    for _ in range(times):
        for trial_id, each in seconds.items():
            hand.iterate(trial_id, seconds=each)


def test_planners_see_the_speeds_that_were_measured() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("a", "b", "c", budget=100)
    run(hand, {"a": 2.0, "b": 0.5})
    estimates, trial = hand.state.estimates, hand.trial
    assert speeds(hand) == {trial("a").row: 1.0, trial("b").row: 4.0}
    assert estimates.pace(trial("c")) == 2.0, "on a device of speed 1"
    assert estimates.pace(trial("b")) == pytest.approx(2.0), (
        "seconds on a device of speed 1, also of the fast one's trial"
    )
    left = trial("a").progress.left
    assert estimates.seconds_left(trial("a")) == pytest.approx(2.0 * left)
    assert estimates.seconds_left(trial("b")) == pytest.approx(0.5 * left)


def test_the_speeds_are_those_of_each_profile_key() -> None:
    hand = unlike(SLOW, FAST, SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("a", "b", budget=100, profile_key="bound by the GPU")
    hand.submit("c", "d", budget=100, profile_key="bound by its input")
    run(hand, {"a": 2.0, "b": 0.5, "c": 1.0, "d": 0.8})
    seen = {name: speeds(hand)[hand.trial(name).row] for name in "abcd"}
    assert seen == pytest.approx({"a": 1.0, "b": 4.0, "c": 1.0, "d": 1.25})


def test_a_key_that_was_not_measured_has_the_usual_speed() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("a", "b", budget=MIN_OBSERVATIONS + 1, profile_key="old")
    run(hand, {"a": 2.0, "b": 0.5})
    hand.submit("c", "d", budget=9, profile_key="new")
    assert sorted(speeds(hand).values()) == [1.0, 4.0]


def test_speeds_that_the_user_gave_hold() -> None:
    hand = unlike(SLOW)
    add(hand, 1, FAST, speed=3.0)
    hand.submit("a", "b", budget=100, profile_key="net")
    row = {device: hand.state.occupancy.residents[device][0] for device in (0, 1)}
    slow, fast = (hand.state.trials.by_row[row[device]].trial_id for device in (0, 1))
    run(hand, {slow: 2.0, fast: 0.5})
    assert speeds(hand) == {row[0]: 1.0, row[1]: 3.0}
    assert hand.state.profile.seconds_per_iteration("net", FAST) == 1.5, "seconds on a device of speed 1"


def test_noise_is_no_speed() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("a", "b", budget=100)
    run(hand, {"a": 1.0, "b": 0.96})
    assert set(speeds(hand).values()) == {1.0}


def test_paces_are_relative_to_a_model_that_is_left() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("a", "b", "c", budget=100)
    run(hand, {"a": 2.0, "b": 0.5})
    hand.stop("a")
    hand.released("a", hand.lane("a"))
    hand.lose_device(0)
    assert set(speeds(hand).values()) == {1.0}
    for name in "bc":
        assert hand.state.estimates.pace(hand.trial(name)) == pytest.approx(0.5)
    add(hand, 2, SLOW)
    waits = [name for name in "abc" if hand.trial(name).state.value == "STARTING"]
    assert sorted(speeds(hand).values()) == [0.25, 1.0], waits


def test_each_model_has_its_own_packing_limit() -> None:
    profile = Profile()
    for model, seconds in ((SLOW, (1.0, 2.0)), (FAST, (1.0, 1.1, 1.2, 1.3))):
        for p, each in enumerate(seconds, start=1):
            for _ in range(MIN_OBSERVATIONS):
                profile.observe("net", each, model=model, co_residents=p)
    hand = unlike(SLOW, FAST, profile=profile, max_packing=4, max_width=1)
    hand.submit(*"abcdefgh", budget=100, profile_key="net")
    assert hand.state.estimates.on_model("net", SLOW).packing == 1
    assert hand.state.estimates.on_model("net", FAST).packing == 4


def test_memory_is_that_of_the_model_where_a_trial_runs() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("a", "b", "c", budget=100)
    run(hand, {"a": 1.0, "b": 1.0}, 1)
    hand.iterate("a", memory=MemoryNeed(3.0))
    hand.iterate("b", memory=MemoryNeed(5.0))
    need = hand.state.estimates.need
    assert [need(hand.trial(name)) for name in "abc"] == [MemoryNeed(3.0), MemoryNeed(5.0), MemoryNeed(5.0)]


def test_beta_is_measured_on_one_model() -> None:
    """Seconds of a wide iteration on slower devices are converted to those of the model that was measured first."""
    hand = unlike(FAST, SLOW, SLOW, max_packing=1, max_width=2)
    hand.submit("a", "b", budget=100, max_width=1, profile_key="net")
    run(hand, {"a": 1.0, "b": 4.0})
    estimates = hand.state.estimates
    hand.submit("c", budget=100, max_width=2, profile_key="net")
    hand.started("c")
    assert estimates.scaling_seconds(hand.trial("c"), 4.0) == 1.0
    assert {estimate.scaling_model for estimate in estimates.all_of("net")} == {FAST}


def test_a_trial_gets_the_device_that_is_fastest_for_its_key() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("a", "b", budget=MIN_OBSERVATIONS + 1, profile_key="net")
    run(hand, {"a": 2.0, "b": 0.5})
    hand.submit("c", budget=9, profile_key="net")
    assert hand.state.occupancy.held[hand.trial("c").row] == (1,), "though device 0 is idle, too"


def test_a_wide_trial_gets_devices_of_one_model() -> None:
    hand = unlike(SLOW, FAST, SLOW, FAST, max_packing=1, max_width=2)
    hand.submit("a", "b", budget=MIN_OBSERVATIONS + 1, max_width=1, profile_key="net")
    run(hand, {"a": 2.0, "b": 0.5})
    hand.submit("c", budget=50, devices=2, max_width=2, profile_key="net")
    assert sorted(hand.state.occupancy.held[hand.trial("c").row]) == [1, 3]


def test_a_device_is_packed_as_far_as_its_model_allows() -> None:
    profile = Profile()
    for model, seconds in ((SLOW, (1.0, 2.0)), (FAST, (1.0, 1.1, 1.2, 1.3))):
        for p, each in enumerate(seconds, start=1):
            for _ in range(MIN_OBSERVATIONS):
                profile.observe("net", each, model=model, co_residents=p)
    hand = unlike(SLOW, FAST, profile=profile, max_packing=4, max_width=1)
    hand.submit(*"abcdefgh", budget=100, profile_key="net")
    assert {device: len(rows) for device, rows in hand.state.occupancy.residents.items()} == {0: 1, 1: 4}


def test_a_need_that_turns_out_smaller_makes_room_for_those_that_wait() -> None:
    profile = Profile()
    profile.observe_memory("net", MemoryNeed(30.0), model=FAST)
    for key, co_residents in itertools.product(("net", "other"), (1, 2)):
        for _ in range(MIN_OBSERVATIONS):
            profile.observe(key, 1.0, model=SLOW, co_residents=co_residents)
    hand = Hand(devices=0, profile=profile)
    add(hand, 0, SLOW, memory=100.0)
    add(hand, 1, FAST, memory=40.0)
    hand.do(LaneMeasured(0.0, 0, 20.0))
    hand.submit("on the other device", budget=99, requires=Requires(model=FAST), memory=MemoryNeed(30.0), terms=ANN)
    hand.submit("a", budget=9, profile_key="net", terms=ANN)
    hand.started("a")
    hand.submit("b", budget=9, profile_key="other", memory=MemoryNeed(45.0), terms=ANN)
    hand.tick()
    assert hand.states()["b"] == "QUEUED", "30 for a, as on the other model, 20 for a lane and 45"
    hand.iterate("a", memory=MemoryNeed(20.0))
    assert hand.states()["b"] == "STARTING"
    assert [hand.state.occupancy.held[hand.trial(name).row] for name in "ab"] == [(0,), (0,)]


def test_a_trial_fits_where_its_model_needs_less_memory() -> None:
    profile = Profile()
    profile.observe_memory("net", MemoryNeed(30.0), model=SLOW)
    profile.observe_memory("net", MemoryNeed(60.0), model=FAST)
    hand = unlike(profile=profile, max_packing=1, max_width=1)
    add(hand, 0, SLOW, memory=40.0)
    add(hand, 1, FAST, memory=80.0)
    hand.submit("a", "b", budget=9, profile_key="net")
    assert {device: len(rows) for device, rows in hand.state.occupancy.residents.items()} == {0: 1, 1: 1}


def packed_profile(**seconds: dict[str, tuple[float, ...]]) -> Profile:
    """What iterations take beside 0, 1, 2 ... others, by key and model."""
    profile = Profile()
    for key, by_model in seconds.items():
        for model, each in by_model.items():
            for p, taken in enumerate(each, start=1):
                for _ in range(MIN_OBSERVATIONS):
                    profile.observe(key, taken, model=model, co_residents=p)
    return profile


def waiting_for_another_model() -> Hand:
    """Trial b packs on the fast device, which is taken, and not on the slow one, where light trials share it."""
    packs, alone = (1.0, 1.1, 1.2, 1.3), (1.0, 2.0)
    profile = packed_profile(light={SLOW: packs, FAST: packs}, net={SLOW: alone, FAST: packs})
    hand = unlike(profile=profile, max_packing=4, max_width=1)
    add(hand, 0, SLOW, memory=100.0)
    add(hand, 1, FAST, memory=100.0)
    on_slow = {"profile_key": "light", "requires": Requires(model=SLOW)}
    hand.submit("kept", budget=1, memory=MemoryNeed(50.0), **on_slow)
    hand.started("kept")
    hand.iterate("kept")
    hand.submit("x", budget=100, profile_key="net", devices=1, requires=Requires(model=FAST), memory=MemoryNeed(1.0))
    hand.submit("a", "a2", budget=100, memory=MemoryNeed(5.0), **on_slow)
    hand.log.clear()
    hand.submit("b", budget=100, profile_key="net", memory=MemoryNeed(60.0))
    return hand


def test_a_trial_waits_for_a_device_where_the_open_one_is_full_for_it() -> None:
    hand = waiting_for_another_model()
    assert len(hand.state.occupancy.residents[0]) == 2, "the light ones share the slow device"
    assert hand.state.occupancy.is_open(0, 0.25), "which others could join"
    (note,) = (item for item in hand.log if isinstance(item, NoteWaiting))
    assert (note.trial_ids, note.reason, note.memory) == (("b",), WaitReason.DEVICES, ())


def test_no_state_is_evicted_for_a_trial_that_would_not_be_packed_there() -> None:
    hand = waiting_for_another_model()
    assert none(hand.log, Save)
    assert hand.trial("kept").residence.lane is not None


def test_what_was_measured_is_told_with_the_model() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1)
    hand.submit("a", "b", budget=100, profile_key="net")
    run(hand, {"a": 2.0, "b": 0.5}, 2)
    notes = [item for item in hand.log if isinstance(item, NoteMeasured)]
    assert {(note.model, note.seconds) for note in notes} >= {(SLOW, 2.0), (FAST, 0.5)}


# --- keys that start wide


def test_a_wide_trial_on_devices_of_one_model_teaches_the_pace_there() -> None:
    hand = unlike(SLOW, FAST, FAST, max_packing=1, max_width=2)
    hand.submit("a", budget=100, profile_key="net", max_width=1, requires=Requires(model=SLOW))
    run(hand, {"a": 4.0})
    hand.submit("c", budget=100, profile_key="net", devices=2, max_width=2, requires=Requires(model=FAST))
    hand.started("c")
    hand.iterate("c", 2, seconds=0.5)
    profile, estimates = hand.state.profile, hand.state.estimates
    assert profile.seconds_per_iteration("net", FAST) == 1.0, "on one device, without overheads"
    assert profile.needs_measuring("net", FAST), "speeds are those of trials alone"
    assert estimates.on_model("net", FAST).pace == 1.0
    assert profile.beta("net", SLOW) == 1.0, "which is measured on the model that the key ran on first"


def test_a_key_that_starts_wide_on_unlike_devices_has_a_pace() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=2)
    hand.submit("a", budget=100, profile_key="net", devices=2, max_width=2)
    hand.started("a")
    hand.iterate("a", 2, seconds=40.0)
    hand.submit("b", budget=100, profile_key="net")
    estimates, profile = hand.state.estimates, hand.state.profile
    assert hand.state.occupancy.held[hand.trial("a").row] == (0, 1)
    assert estimates.pace(hand.trial("b")) == pytest.approx(80.0), "and not that of other keys"
    assert estimates.is_measured(hand.trial("b"))
    assert profile.seconds_per_iteration("net") is None, "which of the two was slower is not known"
    hand.state.allocations.update_speeds()
    assert estimates.pace(hand.trial("b")) == pytest.approx(80.0)
    notes = [item.seconds for item in hand.log if isinstance(item, NoteMeasured)]
    assert notes == [pytest.approx(80.0)]


def test_a_pace_that_was_measured_alone_comes_before_that_of_a_wide_trial() -> None:
    hand = unlike(SLOW, FAST, max_packing=1, max_width=2)
    hand.submit("a", budget=3, profile_key="net", devices=2, max_width=2)
    hand.started("a")
    left = hand.trial("a").placement.lanes[1]
    hand.iterate("a", 3, seconds=40.0)
    hand.released("a", left)
    hand.submit("b", budget=100, profile_key="net", max_width=1, requires=Requires(model=FAST))
    run(hand, {"b": 10.0})
    hand.submit("c", budget=100, profile_key="net", max_width=1, requires=Requires(model=FAST))
    assert hand.state.estimates.pace(hand.trial("c")) == pytest.approx(10.0)


class Recording(Portfolio):
    """The default planner; it keeps the instances that it was given."""

    def __init__(self) -> None:
        super().__init__(c=1, d=1)
        self.instances: list[Instance] = []

    def arrange(self, instance: Instance) -> Arrangement:
        self.instances.append(instance)
        return super().arrange(instance)


def test_an_arriving_group_is_planned_at_the_speeds_of_its_keys() -> None:
    planner = Recording()
    hand = unlike(SLOW, FAST, max_packing=1, max_width=1, planner=planner)
    hand.submit("a", "b", budget=MIN_OBSERVATIONS + 1, profile_key="net")
    assert [device.speed for device in planner.instances[-1].cluster.devices] == [1.0, 1.0], "nothing was measured yet"
    run(hand, {"a": 2.0, "b": 0.5})
    hand.submit("c", "d", "e", budget=10, profile_key="net")
    assert [device.speed for device in planner.instances[-1].cluster.devices] == [1.0, 4.0]
    assert planner.instances[-1].heights.tolist() == [20.0] * 3
    assert [device.speed for device in hand.state.devices] == [1.0, 1.0], "as they are described"


def simulate(*devices: Device) -> tuple[float, Profile]:
    """The makespan of 24 trials on a backend where the fast model is four times as fast, and what was learnt."""
    backend = SimulatedBackend(lambda *_: Truth(1.0, alpha=1.2, speeds={FAST: 4.0}), devices)
    profile, specs = Profile(), tuple(TrialSpec(f"t{row}", 60, profile_key="net") for row in range(24))
    engine = EngineState(make_planner("portfolio", c=2, d=1), profile, max_packing=2)
    play(engine, backend, GroupSubmitted(0.0, "group", specs))
    return backend.now(), profile


def test_what_is_measured_is_what_the_simulated_devices_do() -> None:
    measured, profile = simulate(Device(0, model=SLOW), Device(1, model=FAST), Device(2, model=SLOW))
    assert profile.speeds("net", [SLOW, FAST])[FAST] == pytest.approx(4.0)
    for model in (SLOW, FAST):
        assert profile.alpha("net", model) == pytest.approx(1.2)
    # Two slow devices and a fast one do the work of six slow ones, and packing is worth 2 / 1.2.
    assert measured < 1.5 * 24 * 60 / 6 / (2 / 1.2)
