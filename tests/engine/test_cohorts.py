"""Tests of cohorts in the engine: which profile key a trial has, and what is expected of it before it runs."""

from __future__ import annotations

import random

import pytest
from cohort_sessions import Config, run_cohorts
from engine_helpers import Hand

from fluid.measure.cohorts.tree import CohortTree
from fluid.measure.profile import Profile
from fluid.resources import MemoryNeed


def configs_of(number: int, seed: int = 0) -> list[Config]:
    """Configs with a batch size, which decides, and a learning rate, which does not."""
    rng = random.Random(seed)
    return [
        (("lr", repr(rng.uniform(1e-4, 1e-1))), ("batch_size", str(rng.choice([32, 64, 256])))) for _ in range(number)
    ]


def by_batch(config: dict[str, str]) -> float:
    return 4.0 if config["batch_size"] == "256" else 0.5


def alike(config: dict[str, str]) -> float:
    return 1.0


def test_trials_get_the_profile_key_of_their_cohort() -> None:
    ran = run_cohorts(configs_of(60), by_batch)
    latest = {note.cohort for note in ran.placed[-30:]}
    assert latest == {"Net [batch_size <= 128]", "Net [batch_size > 128]"}
    assert ran.state.profile.seconds_per_iteration("Net [batch_size > 128]") == pytest.approx(4.0)
    assert ran.state.profile.seconds_per_iteration("Net [batch_size <= 128]") == pytest.approx(0.5)


def test_trials_are_predicted_before_their_first_iteration() -> None:
    configs = configs_of(60)
    ran = run_cohorts(configs, by_batch)
    late = list(ran.first_placed().values())[30:]
    assert len(late) == 30
    for note in late:
        assert note.predicted_s == pytest.approx(by_batch(dict(configs[int(note.trial_id[1:])])), rel=0.06), note


@pytest.mark.slow
def test_the_longest_predicted_trials_start_first() -> None:
    configs = configs_of(200, seed=3)
    known = run_cohorts(configs, by_batch, devices=8)
    apart = run_cohorts(configs, by_batch, devices=8, profile=Profile(cohorts=False))
    # No schedule is shorter than the mean load of a device.
    least = sum(4 * by_batch(dict(config)) for config in configs) / 8
    assert known.makespan < 1.03 * least
    assert known.makespan < apart.makespan


def test_trials_that_are_alike_stay_one_key() -> None:
    ran = run_cohorts(configs_of(60), alike)
    assert ran.state.profile.keys() == ["Net"]
    assert all(note.cohort is None for note in ran.placed)
    assert [cohort.conditions for cohort in ran.state.profile.cohorts["Net"].cohorts] == [""]


def test_without_cohorts_a_key_is_one_bucket() -> None:
    ran = run_cohorts(configs_of(60), by_batch, profile=Profile(cohorts=False))
    assert ran.state.profile.keys() == ["Net"] and not ran.state.profile.cohorts
    assert all(note.predicted_s is None and note.cohort is None for note in ran.placed)


def test_a_cohort_is_packed_at_once_as_far_as_its_key_was_measured_to_be() -> None:
    ran = run_cohorts(configs_of(80), by_batch, max_packing=2, alpha=1.2, budget=12)
    for key in ("Net [batch_size <= 128]", "Net [batch_size > 128]"):
        assert ran.state.profile.alpha(key) == pytest.approx(1.2, rel=0.05), key
        assert ran.state.profile.measured_packing(key) == 2, key


def test_a_cohort_tries_to_pack_though_unlike_trials_of_its_key_hurt_each_other() -> None:
    profile = Profile()
    for _ in range(8):
        profile.observe("Net", 1.0)
        profile.observe("Net", 9.0, co_residents=2)
    assert profile.packing_limit("Net", 2) == 1
    ran = run_cohorts(configs_of(80), by_batch, max_packing=2, alpha=1.1, budget=12, profile=profile)
    for key in ("Net [batch_size <= 128]", "Net [batch_size > 128]"):
        assert ran.state.profile.packing_limit(key, 2) == 2, key


def test_a_profile_that_was_saved_predicts_the_first_trial() -> None:
    first = run_cohorts(configs_of(60), by_batch)
    saved = Profile.from_json(first.state.profile.to_json())
    configs = configs_of(10, seed=5)
    second = run_cohorts(configs, by_batch, profile=saved)
    for note in second.first_placed().values():
        assert note.predicted_s == pytest.approx(by_batch(dict(configs[int(note.trial_id[1:])])), rel=0.06)
        assert note.cohort is not None


def test_groups_share_what_is_known_of_a_key() -> None:
    ran = run_cohorts(configs_of(60), by_batch, groups=3)
    assert {note.cohort for note in ran.placed[-6:]} <= {"Net [batch_size <= 128]", "Net [batch_size > 128]"}
    assert set(ran.ends.values()) == {"DONE"}


def test_all_trials_end_whatever_they_take() -> None:
    rng = random.Random(1)
    noisy = {str(size): size * rng.uniform(0.5, 2.0) for size in range(40)}
    configs: list[Config] = [(("size", str(rng.randrange(1, 40))),) for _ in range(120)]
    ran = run_cohorts(configs, lambda config: noisy[config["size"]], devices=4, max_packing=2)
    assert set(ran.ends.values()) == {"DONE"} and len(ran.ends) == 120


# --- memory


def sized(number: int) -> Config:
    return (("size", "large" if number % 2 else "small"),)


def learnt() -> Hand:
    """An engine with one device of 1,000 bytes, whose profile knows small and large trials."""
    profile, tree = Profile(), CohortTree()
    for number in range(16):
        need = MemoryNeed(100.0, 50.0) if number % 2 == 0 else MemoryNeed(600.0, 200.0)
        tree.learn(f"t{number}", sized(number), seconds=1.0, need=need)
    profile.cohorts["Net"] = tree
    return Hand(memory=1000.0, profile=profile)


def need_of(hand: Hand, name: str) -> float:
    need = hand.state.estimates.need(hand.trial(name))
    assert need is not None
    return need.peak_bytes


def test_memory_is_reserved_as_the_config_tells_it() -> None:
    hand = learnt()
    hand.submit("small", config=sized(0), profile_key="Net")
    hand.submit("large", config=sized(1), profile_key="Net")
    assert 150.0 <= need_of(hand, "small") <= 1.25 * 150.0 + 2.0, "each part in whole bytes"
    assert 800.0 <= need_of(hand, "large") <= 900.0  # what trials may fill at most
    assert hand.trial("small").spec.profile_key == "Net [size = small]"


def test_a_trial_that_needs_more_than_was_predicted_reserves_that_from_then_on() -> None:
    hand = learnt()
    hand.submit("odd", config=sized(0), profile_key="Net", budget=5)
    assert need_of(hand, "odd") < 200.0
    hand.started("odd")
    hand.iterate("odd", memory=MemoryNeed(400.0))
    assert need_of(hand, "odd") >= 400.0


def test_a_trial_that_says_what_it_needs_is_believed() -> None:
    hand = learnt()
    hand.submit("told", config=sized(1), profile_key="Net", memory=MemoryNeed(50.0))
    assert need_of(hand, "told") == 50.0
