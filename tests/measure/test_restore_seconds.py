"""Seconds of restores by source, as the profile keeps them."""

from __future__ import annotations

import json

import pytest

from fluid.errors import InvalidFieldError
from fluid.measure.profile import NEWEST, Profile, RestoreSeconds


def test_the_median_of_the_newest_counts_by_source() -> None:
    restores = RestoreSeconds()
    for seconds in [9.0] * NEWEST + [0.1] * NEWEST:
        restores.observe("net", "memory", seconds)
    restores.observe("net", "disk", 2.0)
    assert restores.of("net") == {"memory": 0.1, "disk": 2.0}
    assert restores.of("other") == {}


def test_a_profile_keeps_them_and_one_from_before_has_none() -> None:
    profile = Profile()
    profile.observe("net", 1.0)
    profile.restores.observe("net", "disk", 2.0)
    saved = json.loads(json.dumps(profile.to_json()))
    assert Profile.from_json(saved).restores.of("net") == {"disk": 2.0}
    del saved["restores"]
    assert Profile.from_json(saved).restores.of("net") == {}


@pytest.mark.parametrize("bad", [[], {"net": 1}, {"net": {"disk": 2.0}}, {"net": {"disk": [-1.0]}}])
def test_what_is_no_profile_is_refused(bad: object) -> None:
    with pytest.raises(InvalidFieldError):
        Profile.from_json({**Profile().to_json(), "restores": bad})
