"""What owners gain where a device in use goes from one to another."""

from __future__ import annotations

import pytest

from fluid.policies.owners.transfers import OwnerEnd, pause_gain, waiting_gain


def test_a_device_now_is_worth_the_wait_shared_by_the_devices_of_the_owner() -> None:
    assert waiting_gain(OwnerEnd(100.0, 0), 12.0) == 12.0
    assert waiting_gain(OwnerEnd(100.0, 3), 12.0) == 3.0


@pytest.mark.parametrize(
    ("waiting", "running", "is_elsewhere", "gain"),
    [
        # The others of 5 devices take over 40 seconds: 10 each; the stall of 5 seconds is shared by all 5.
        (OwnerEnd(60.0, 0), OwnerEnd(500.0, 5), True, 30.0 - 10.0 - 1.0),
        # In its own share they go to the waiting owner first: the trial waits until its 60 seconds are done.
        (OwnerEnd(60.0, 0), OwnerEnd(500.0, 5), False, 30.0 - 60.0 - 1.0),
        # Without another device the trial waits until the 20 seconds of the waiting owner are done.
        (OwnerEnd(20.0, 0), OwnerEnd(40.0, 1), True, 30.0 - 20.0 - 5.0),
        # That is so, too, where it is shorter than what the other device would have to take over.
        (OwnerEnd(20.0, 1), OwnerEnd(500.0, 2), True, 15.0 - 10.0 - 2.5),
    ],
)
def test_a_pause_gains_what_one_owner_ends_earlier_less_what_the_other_ends_later(
    waiting: OwnerEnd, running: OwnerEnd, is_elsewhere: bool, gain: float
) -> None:
    found = pause_gain(waiting, running, wait=30.0, seconds=40.0, stall=5.0, is_elsewhere=is_elsewhere)
    assert found == pytest.approx(gain)
