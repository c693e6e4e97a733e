from __future__ import annotations

from fluid.sizing.held_time import HeldTime


def test_devices_count_from_their_arrival_to_their_loss() -> None:
    meter = HeldTime()
    assert not meter.has_heard and meter.device_seconds(5.0) == 0.0
    meter.came(0, at=1.0)
    meter.came(0, at=3.0)
    meter.came(7, at=4.0)
    assert meter.held == {0, 7} and meter.device_seconds(5.0) == 4.0 + 1.0
    meter.left(7, at=6.0)
    meter.left(9, at=6.0)
    assert meter.device_seconds(10.0) == 9.0 + 2.0
    meter.came(7, at=10.0)
    meter.all_left(at=12.0)
    assert meter.held == frozenset() and meter.device_seconds(100.0) == 11.0 + 4.0


def test_time_never_counts_backwards() -> None:
    meter = HeldTime()
    meter.came(0, at=10.0)
    assert meter.device_seconds(9.0) == 0.0
    meter.left(0, at=9.0)
    assert meter.device_seconds(20.0) == 0.0
