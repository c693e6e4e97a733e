"""How fast device models are for a key, and when that follows from the devices themselves."""

from __future__ import annotations

import pytest

from fluid.devices.occupancy import Occupancy
from fluid.engine.estimates.estimates import ModelSpeeds
from fluid.measure.profile import Profile
from fluid.resources import Device


def measured(seconds: float) -> tuple[ModelSpeeds, Occupancy]:
    """Speeds of the key ``"k"``, of which an iteration takes 0.1 s on a T4 and so many seconds on an A100."""
    profile, occupancy = Profile(), Occupancy()
    for index, (model, each) in enumerate({"T4": 0.1, "A100": seconds}.items()):
        occupancy.add_device(Device(index, model=model))
        for _ in range(8):
            profile.observe("k", each, model=model)
    speeds = ModelSpeeds(profile, occupancy)
    speeds.pop_changed()
    speeds.update("k")
    return speeds, occupancy


def test_a_key_is_as_fast_on_each_model_as_was_measured() -> None:
    speeds, _ = measured(0.05)
    assert speeds.of("k") == {"T4": 1.0, "A100": 2.0}
    assert speeds.update("k") is None


@pytest.mark.parametrize("seconds", [0.05, 0.0977])
def test_every_speed_changes_once_the_devices_own_hold(seconds: float) -> None:
    speeds, occupancy = measured(seconds)
    before = (speeds.of("k") or {})["A100"]
    occupancy.add_device(Device(2, model="T4", speed=2.0))
    assert speeds.pop_changed() and speeds.of("k") is None
    assert (speeds.update("k") or {})["A100"] == pytest.approx(1.0 / before), "however little it is"
    assert speeds.update("k") is None


def test_the_model_that_is_left_has_speed_1() -> None:
    speeds, occupancy = measured(0.0977)
    before = (speeds.of("k") or {})["A100"]
    occupancy.remove_device(0)
    assert speeds.pop_changed() and speeds.of("k") is None
    assert (speeds.update("k") or {})["A100"] == pytest.approx(1.0 / before)
