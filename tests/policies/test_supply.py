"""How many devices there were on average: of what is there now, and of what comes and goes."""

from __future__ import annotations

import pytest

from fluid.devices.occupancy import Occupancy
from fluid.policies.owners.kinds import DeviceKinds
from fluid.policies.owners.supply import SUPPLY_S, Supply
from fluid.resources import Device, Requires

BIG, SMALL = Device(0, model="big"), Device(0, model="small")
NEEDS_BIG = (Requires(model="big"), None)
ANY = (None, None)


def supply(*devices: Device) -> Supply:
    """These devices, by place, since 5 seconds before the first group."""
    made = Supply()
    for index, device in enumerate(devices):
        made.set(index * 1e-3, index, device)
    made.begin(5.0)
    return made


def test_devices_that_stay_have_no_average() -> None:
    made = supply(BIG, SMALL)
    assert made.averages(5.0) is None and made.averages(1e6) is None
    made.set(20.0, 0, BIG)
    assert made.averages(1e6) is None, "it was open before"


def test_a_device_counts_for_the_time_that_it_is_open() -> None:
    made = supply(BIG, SMALL)
    made.set(105.0, 0, None)
    assert made.averages(105.0) == {BIG: 1.0, SMALL: 1.0}
    assert made.averages(205.0) == {BIG: 0.5, SMALL: 1.0}
    made.set(205.0, 7, BIG)
    made.set(205.0, 8, BIG)
    assert made.averages(405.0) == {BIG: (100.0 + 2 * 200.0) / 400.0, SMALL: 1.0}
    made.begin(300.0)
    assert made.averages(405.0) == {BIG: 1.25, SMALL: 1.0}, "only the first group begins"


def test_a_model_that_replaces_another_of_the_same_index_is_told_from_it() -> None:
    made = supply(BIG)
    made.set(15.0, 0, SMALL)
    assert made.averages(25.0) == {BIG: 0.5, SMALL: 0.5}


def test_what_was_longer_ago_than_a_day_is_forgotten() -> None:
    made = supply(BIG, SMALL)
    made.set(105.0, 0, None)
    assert made.averages(55.0 + SUPPLY_S) == {BIG: 50.0 / SUPPLY_S, SMALL: 1.0}
    made.set(106.0 + SUPPLY_S, 1, None)
    assert made.averages(106.0 + 1.25 * SUPPLY_S) == {SMALL: 0.75}
    assert made.averages(106.0 + 2.0 * SUPPLY_S) is None


def kinds(occupancy: Occupancy) -> DeviceKinds:
    """Three small devices and a big one, since the first group, at 0."""
    made = DeviceKinds(occupancy)
    made.supply.begin(0.0)
    for index in range(4):
        occupancy.add_device(Device(index, model="big" if index == 3 else "small", speed=2.0))
        made.forget_devices(index)
    return made


def test_a_kind_that_flickers_counts_by_its_average_while_it_is_there() -> None:
    occupancy = Occupancy()
    made = kinds(occupancy)
    occupancy.now = 100.0
    made.find({NEEDS_BIG, ANY})
    assert made.speeds == [6.0, 2.0]
    occupancy.close_device(3)
    made.forget_devices(3)
    occupancy.now = 300.0
    made.find({NEEDS_BIG, ANY})
    assert made.speeds == [6.0] and made.eligible(NEEDS_BIG) == 0, "no device is for those who need a big one"
    occupancy.reopen_device(3)
    made.forget_devices(3)
    occupancy.now = 400.0
    made.find({NEEDS_BIG, ANY})
    assert made.speeds == [6.0, pytest.approx(2.0 * 200.0 / 400.0)]
    assert made.devices_of(made.eligible(NEEDS_BIG)) == {3}


def test_a_requirement_that_comes_later_knows_what_there_was() -> None:
    occupancy = Occupancy()
    made = kinds(occupancy)
    occupancy.now = 100.0
    occupancy.remove_device(0)
    made.forget_devices(0)
    occupancy.now = 200.0
    made.find({ANY})
    assert made.speeds == [7.0], "2.5 small ones and the big one"
    made.find({NEEDS_BIG, ANY})
    assert made.speeds == [5.0, 2.0]
