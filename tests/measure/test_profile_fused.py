"""What a profile learns of fused packs: their rates, how many rows pay, and how far that was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.measure.measurements import DRIFT_BASELINE, DRIFT_STREAK, MIN_OBSERVATIONS
from fluid.measure.profile import FORMAT, MIN_FUSED_OBSERVATIONS, Profile
from fluid.measure.runtime_model import FusedRates
from fluid.resources import MemoryNeed

KEY = "net"


def observe(profile: Profile, rows: int, *seconds: float, **where: Any) -> None:
    for each in seconds:
        profile.observe(KEY, each, rows=rows, **where)


def measured(table: dict[int, float], **options: Any) -> Profile:
    """A profile in which packs of so many rows took so long; 1 is a trial alone."""
    profile = Profile(**options)
    for rows, seconds in table.items():
        observe(profile, rows, *[seconds] * MIN_FUSED_OBSERVATIONS)
    return profile


def test_without_data_all_rows_are_worth_trying() -> None:
    profile = Profile()
    assert profile.fused_rates(KEY) is None
    assert profile.fused_measured(KEY) == 0
    assert [profile.fused_limit(KEY, most) for most in (1, 2, 3, 63, 64, 512)] == [1, 2, 2, 32, 64, 512]


def test_rates_need_a_trial_alone_and_a_pack() -> None:
    profile = measured({2: 1.1})
    assert profile.fused_rates(KEY) is None
    assert profile.fused_measured(KEY) == 0
    observe(profile, 1, *[1.0] * (MIN_FUSED_OBSERVATIONS - 1))
    assert profile.fused_rates(KEY) is None
    observe(profile, 1, 1.0)
    assert profile.fused_rates(KEY) == FusedRates((1, 2), (1.0, 1.1))
    assert profile.fused_measured(KEY) == 2


def test_rates_are_ratios_of_low_medians() -> None:
    profile = Profile()
    observe(profile, 1, 9.0, 2.0, 2.0)
    observe(profile, 4, 30.0, 3.0, 2.8, 3.2)
    assert profile.fused_rates(KEY) == FusedRates((1, 4), (1.0, 1.5))
    observe(profile, 4, 2.8, 2.8)
    assert profile.fused_rates(KEY) == FusedRates((1, 4), (1.0, 1.4)), "each observation counts"


def test_packs_beside_other_processes_say_nothing_about_packs_alone() -> None:
    profile = measured({1: 1.0})
    observe(profile, 2, *[5.0] * MIN_FUSED_OBSERVATIONS, co_residents=2)
    assert profile.fused_rates(KEY) is None
    observe(profile, 2, *[1.2] * MIN_FUSED_OBSERVATIONS)
    assert profile.fused_rates(KEY) == FusedRates((1, 2), (1.0, 1.2))


def test_packs_change_nothing_that_is_measured_of_processes() -> None:
    profile, without = measured({1: 1.0, 2: 1.1, 64: 9.0}), measured({1: 1.0})
    for each in (profile, without):
        observe(each, 1, *[1.0] * MIN_OBSERVATIONS)
        observe(each, 1, *[1.3] * MIN_OBSERVATIONS, co_residents=2)
    for each in (profile, without):
        assert each.alpha(KEY) == pytest.approx(1.3)
        assert each.measured_packing(KEY) == 2
        assert each.seconds_per_iteration(KEY) == 1.0
        assert each.marginal_benefits(KEY) == {2: pytest.approx(0.35)}


def test_a_pack_that_keeps_the_device_busy_says_nothing_of_a_trial_alone() -> None:
    profile = Profile()
    profile.observe(KEY, 1.0, rows=8, busy=1.0)
    assert profile.busy(KEY) is None


def test_seconds_of_a_key_that_only_ran_fused_are_those_of_its_smallest_pack() -> None:
    profile = measured({4: 1.5, 16: 3.0})
    assert profile.seconds_per_iteration(KEY) == 1.5
    observe(profile, 1, 1.0)
    assert profile.seconds_per_iteration(KEY) == 1.0


def test_rows_double_as_long_as_it_pays() -> None:
    profile = measured({1: 1.0, 2: 1.2, 4: 1.6, 8: 3.1})
    # Doubling 4 rows gains 1 - 3.1 / 3.2 = 3 %, below the threshold of 5 %.
    assert profile.fused_limit(KEY, 64) == 4
    assert profile.fused_limit(KEY, 3) == 2
    assert profile.fused_measured(KEY) == 8
    assert measured({1: 1.0, 2: 1.2, 4: 1.6, 8: 3.1}, threshold=0.02).fused_limit(KEY, 64) == 64


def test_a_gain_of_just_the_threshold_is_not_enough() -> None:
    assert measured({1: 1.0, 2: 1.9, 4: 4.0}).fused_limit(KEY, 2) == 1
    assert measured({1: 1.0, 2: 1.899, 4: 4.0}).fused_limit(KEY, 2) == 2


def test_what_was_not_measured_is_worth_trying() -> None:
    profile = measured({1: 1.0, 2: 1.2, 8: 9.9})
    assert profile.fused_measured(KEY) == 2, "the pack of 4 is missing"
    assert profile.fused_limit(KEY, 64) == 64, "whether 4 or 8 rows are too many is not known"


def test_the_first_doubling_need_not_pay_if_the_first_two_do() -> None:
    # Two rows take as long as 2.2 trials alone, four as long as 2.4.
    assert measured({1: 1.0, 2: 2.2}).fused_limit(KEY, 64) == 64, "four rows are tried"
    assert measured({1: 1.0, 2: 2.2}).fused_limit(KEY, 2) == 1, "two rows do not pay by themselves"
    assert measured({1: 1.0, 2: 2.2, 4: 2.4, 8: 3.0, 16: 6.0}).fused_limit(KEY, 64) == 8
    assert measured({1: 1.0, 2: 2.2, 4: 3.9}).fused_limit(KEY, 64) == 1
    assert measured({1: 1.0, 2: 2.5, 4: 2.4}).fused_limit(KEY, 4) == 4
    assert measured({1: 1.0, 2: 2.51}).fused_limit(KEY, 64) == 1, "too slow to try four rows"


@given(st.dictionaries(st.sampled_from([1, 2, 3, 4, 8, 16, 32]), st.floats(0.1, 10.0)), st.integers(1, 600))
def test_limits_are_powers_of_two_up_to_the_bound(table: dict[int, float], most: int) -> None:
    profile = measured(table)
    for rows in (profile.fused_limit(KEY, most), max(1, profile.fused_measured(KEY))):
        assert rows & (rows - 1) == 0
    assert 1 <= profile.fused_limit(KEY, most) <= most
    assert profile.fused_limit(KEY, most) <= profile.fused_limit(KEY, most + 1)


def test_rates_are_kept_by_device_model() -> None:
    profile = Profile()
    for model, seconds in (("NVIDIA H200", 1.1), ("NVIDIA A100", 1.9)):
        observe(profile, 1, *[1.0] * MIN_FUSED_OBSERVATIONS, model=model)
        observe(profile, 2, *[seconds] * MIN_FUSED_OBSERVATIONS, model=model)
    assert profile.fused_rates(KEY, "NVIDIA H200") == FusedRates((1, 2), (1.0, 1.1))
    assert profile.fused_rates(KEY, "NVIDIA A100") == FusedRates((1, 2), (1.0, 1.9))
    assert profile.fused_limit(KEY, 2, "NVIDIA A100") == 1
    assert profile.fused_measured(KEY, "another") == 0


def test_a_pack_that_drifts_is_measured_again() -> None:
    profile = measured({1: 1.0})
    observe(profile, 4, *[1.4] * DRIFT_BASELINE, *[2.8] * DRIFT_STREAK)
    assert profile.fused_rates(KEY) == FusedRates((1, 4), (1.0, 2.8))


def test_packs_follow_a_drift_alone() -> None:
    profile = measured({1: 1.0, 2: 1.2})
    observe(profile, 1, *[1.0] * DRIFT_BASELINE, *[3.0] * DRIFT_STREAK)
    rates = profile.fused_rates(KEY)
    assert rates is not None and rates.stretch(2) == pytest.approx(1.2)


def test_a_saved_profile_keeps_its_packs() -> None:
    profile = measured({1: 1.0, 2: 1.1, 4: 1.4})
    observe(profile, 4, 2.0, co_residents=2, memory=MemoryNeed(1.0, 2.0))
    copy = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert copy.to_json() == profile.to_json()
    assert copy.fused_rates(KEY) == profile.fused_rates(KEY) is not None
    for each in (profile, copy):
        observe(each, 4, *[2.0] * (MIN_FUSED_OBSERVATIONS - 1), co_residents=2)
    assert copy.to_json() == profile.to_json()


def test_profiles_of_the_formats_before_have_no_packs() -> None:
    profile = measured({1: 1.0})
    data: Any = json.loads(json.dumps(profile.to_json()))
    del data["keys"][KEY][0]["fused"]
    before = {**data, "format": FORMAT - 1}
    assert Profile.from_json(before).to_json() == profile.to_json()
    (content,) = data["keys"][KEY]
    del content["model"]
    oldest = Profile.from_json({**data, "format": 2, "keys": {KEY: content}})
    observe(oldest, 2, *[1.5] * MIN_FUSED_OBSERVATIONS, model="NVIDIA H200")
    assert oldest.fused_rates(KEY, "NVIDIA H200") == FusedRates((1, 2), (1.0, 1.5))


FUSED = f"keys['{KEY}'][0].fused"


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        ([], {}, FUSED),
        ([0], 3, f"{FUSED}[0]"),
        ([0, "rows"], 1, f"{FUSED}[0].rows"),
        ([0, "co_residents"], 0, f"{FUSED}[0].co_residents"),
        ([0, "seconds"], [0.0], f"{FUSED}[0].seconds"),
        ([1, "rows"], 2, f"{FUSED}[1]"),
    ],
)
def test_malformed_packs_are_refused(place: list[Any], value: object, field: str) -> None:
    data: Any = json.loads(json.dumps(measured({1: 1.0, 2: 1.1, 4: 1.4}).to_json()))
    spot, last = data["keys"][KEY][0], "fused"
    for step in place:
        spot, last = spot[last], step
    spot[last] = value
    with pytest.raises(InvalidFieldError) as caught:
        Profile.from_json(data)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"rows": 0}, "rows"),
        ({"rows": 2.5}, "rows"),
        ({"rows": 2, "width": 2}, "width"),
        ({"rows": 2, "co_residents": 0}, "co_residents"),
    ],
)
def test_packs_that_cannot_be_are_refused(options: Any, field: str) -> None:
    profile = Profile()
    with pytest.raises(InvalidFieldError) as caught:
        profile.observe(KEY, 1.0, **options)
    assert caught.value.field == field
    assert profile.keys() == [], "nothing was added"
    with pytest.raises(InvalidFieldError, match="most=0"):
        profile.fused_limit(KEY, 0)


def row_need(own: float, shared: float = 200.0, ephemeral: float = 1.0) -> MemoryNeed:
    return MemoryNeed(own + shared, ephemeral, shared)


def test_what_a_row_needs_is_measured_apart_from_what_a_trial_alone_does() -> None:
    profile = Profile()
    profile.observe_memory(KEY, MemoryNeed(290.0, 90.0))
    assert profile.row_memory(KEY) is None
    profile.observe_memory(KEY, row_need(45.0), rows=2)
    assert (profile.memory(KEY), profile.row_memory(KEY)) == (MemoryNeed(290.0, 90.0), row_need(45.0))
    profile.observe_memory(KEY, row_need(12.0), rows=8)
    assert profile.row_memory(KEY) == row_need(12.0), "of a larger pack: 88 of its bytes are there once, too"
    assert not profile.observe_memory(KEY, row_need(40.0), rows=2), "it took 80 in all, and the 8 rows took 104"
    assert profile.observe_memory(KEY, row_need(9.0, ephemeral=7.0), rows=8)
    assert profile.row_memory(KEY) == row_need(12.0, ephemeral=7.0)
    assert profile.observe_memory(KEY, row_need(60.0), rows=4)
    assert profile.row_memory(KEY) == row_need(60.0), "four rows that take more in all than the eight did"
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))).to_json() == profile.to_json()


def test_profiles_of_the_format_before_have_no_memory_of_rows() -> None:
    profile = Profile()
    profile.observe_memory(KEY, MemoryNeed(290.0, 90.0))
    data: Any = json.loads(json.dumps(profile.to_json()))
    (content,) = data["keys"][KEY]
    del content["row_memory"], content["memory"]["shared_bytes"]
    assert Profile.from_json({**data, "format": FORMAT - 1}).to_json() == profile.to_json()
    content["row_memory"] = {"persistent_bytes": 3.0, "ephemeral_bytes": 1.0, "shared_bytes": 1.0, "rows": 1}
    with pytest.raises(InvalidFieldError, match=r"row_memory\.rows.*at least 2"):
        Profile.from_json(data)
    content["row_memory"] = {"persistent_bytes": 1.0, "ephemeral_bytes": 1.0, "shared_bytes": 2.0, "rows": 2}
    with pytest.raises(InvalidFieldError, match="shared_bytes"):
        Profile.from_json(data)
