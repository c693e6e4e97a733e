"""Measurements are kept by device model: overheads and memory do not mix, and speeds follow from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.measure.measurements import MIN_OBSERVATIONS
from fluid.measure.profile import Profile
from fluid.resources import MemoryNeed

FAST, SLOW = "NVIDIA H200", "NVIDIA A100"


def observe(profile: Profile, key: str, model: str | None, *seconds: float) -> None:
    """Adds as many observations as a bucket needs with 1, 2, ... co-residents."""
    for p, each in enumerate(seconds, start=1):
        for _ in range(MIN_OBSERVATIONS):
            profile.observe(key, each, model=model, co_residents=p)


def test_overheads_do_not_mix_the_seconds_of_two_models() -> None:
    profile = Profile()
    observe(profile, "net", SLOW, 2.0, 3.8)
    observe(profile, "net", FAST, 1.0, 1.1)
    assert profile.models("net") == [SLOW, FAST]
    assert profile.alpha("net", SLOW) == pytest.approx(1.9)
    assert profile.alpha("net", FAST) == pytest.approx(1.1)
    assert profile.packing_limit("net", 4, SLOW) == 1 < profile.packing_limit("net", 4, FAST)
    assert profile.seconds_per_iteration("net", FAST) == 1.0
    assert profile.seconds_per_iteration("net") == 2.0, "the model that was measured first stands for an unknown one"


def test_memory_is_kept_by_model() -> None:
    profile = Profile()
    profile.observe_memory("net", MemoryNeed(3.0), model=SLOW)
    profile.observe_memory("net", MemoryNeed(5.0), model=FAST)
    assert profile.memory("net", SLOW) == MemoryNeed(3.0)
    assert profile.memory("net", FAST) == MemoryNeed(5.0)
    assert profile.memory("net", "another") is None


def test_the_speed_is_the_ratio_of_median_seconds_alone() -> None:
    profile = Profile()
    for seconds in (9.0, 2.0, 2.0, 2.1, 1.9):
        profile.observe("net", seconds, model=SLOW)
    for _ in range(MIN_OBSERVATIONS - 1):
        profile.observe("net", 0.5, model=FAST)
    assert profile.speeds("net", [SLOW, FAST]) == {SLOW: 1.0, FAST: 1.0}, "too few observations on one of them"
    profile.observe("net", 0.5, model=FAST)
    assert profile.speeds("net", [SLOW, FAST]) == {SLOW: 1.0, FAST: 4.0}
    assert profile.speeds("net", [FAST, SLOW]) == {FAST: 1.0, SLOW: 0.25}


def test_a_model_that_a_key_was_not_measured_on_has_the_other_keys_usual_speed() -> None:
    profile = Profile()
    for key, fast in (("small", 1.0), ("middle", 0.5), ("large", 0.25)):
        observe(profile, key, SLOW, 1.0)
        observe(profile, key, FAST, fast)
    observe(profile, "new", FAST, 3.0)
    observe(profile, "new", "third", 6.0)
    assert profile.speeds("new", [SLOW, FAST, "third", "fourth"]) == {SLOW: 1.0, FAST: 2.0, "third": 1.0, "fourth": 1.0}


def test_packed_iterations_say_nothing_about_speed() -> None:
    profile = Profile()
    observe(profile, "net", SLOW, 1.0, 1.5)
    for _ in range(MIN_OBSERVATIONS):
        profile.observe("net", 0.1, model=FAST, co_residents=2)
    assert profile.speeds("net", [SLOW, FAST]) == {SLOW: 1.0, FAST: 1.0}


def test_a_saved_profile_keeps_its_models() -> None:
    profile = Profile()
    observe(profile, "net", SLOW, 2.0, 3.8)
    observe(profile, "net", None, 1.0)
    profile.observe_memory("net", MemoryNeed(3.0), model=FAST)
    again = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert again.to_json() == profile.to_json()
    assert again.models("net") == [SLOW, None, FAST]
    assert again.speeds("net", [SLOW, None]) == {SLOW: 1.0, None: 2.0}


def _without_models(profile: Profile) -> Any:
    """The profile as the format before this one wrote it."""
    data: Any = json.loads(json.dumps(profile.to_json()))
    data["format"] = 2
    for key, (content,) in data["keys"].items():
        del content["model"]
        data["keys"][key] = content
    return data


def test_the_first_model_takes_over_what_an_older_profile_measured() -> None:
    older = Profile()
    observe(older, "net", None, 2.0, 2.2)
    profile = Profile.from_json(_without_models(older))
    for model in (None, FAST, SLOW):
        assert profile.alpha("net", model) == pytest.approx(1.1), "it may be of any of them"
    assert Profile.from_json(profile.to_json()).alpha("net", FAST) == pytest.approx(1.1), "also when saved again"
    profile.observe("net", 2.0, model=FAST)
    assert profile.models("net") == [FAST]
    assert profile.measured_packing("net", FAST) == 2
    assert profile.measured_packing("net", SLOW) == 0, "the other models are measured anew"


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({}, "keys['net']"),
        ([3], "keys['net'][0]"),
        ([{"model": 3}], "keys['net'][0].model"),
        ([{"model": None, "memory": None, "busy": [], "buckets": []}] * 2, "keys['net'][1].model"),
    ],
)
def test_malformed_models_are_refused(content: object, field: str) -> None:
    data: Any = Profile().to_json()
    data["keys"] = {"net": content}
    with pytest.raises(InvalidFieldError) as caught:
        Profile.from_json(data)
    assert caught.value.field == field


@pytest.mark.parametrize("model", ["", 3])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    profile = Profile()
    with pytest.raises(InvalidFieldError, match="model="):
        profile.observe("net", 1.0, model=model)
    assert profile.keys() == [], "nothing was added"
