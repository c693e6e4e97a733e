"""The account of exploratory quanta: a tenth of the devices' time within an hour."""

from __future__ import annotations

import math

from fluid.policies.owners.quanta import QuantumAccount


def test_the_seconds_of_the_last_hour_count_those_under_way_included() -> None:
    account = QuantumAccount()
    account.begin(1, 0.0)
    assert account.seconds(100.0) == 100.0
    account.end(1, 200.0)
    account.begin(2, 300.0)
    assert account.seconds(350.0) == 250.0
    account.end(2, 400.0)
    assert account.seconds(3600.0) == 300.0
    assert account.seconds(3700.0) == 200.0, "half of the first is more than an hour ago"
    assert account.seconds(3950.0) == 50.0 and account.seconds(4000.0) == 0.0


def test_another_may_begin_while_a_tenth_is_not_taken_and_then_when_as_much_is_an_hour_ago() -> None:
    account = QuantumAccount()
    assert account.free_at(0.0, devices=1) == 0.0
    account.begin(1, 0.0)
    assert account.free_at(359.0, devices=1) == 359.0, "how long it takes is not known"
    assert account.free_at(360.0, devices=1) == math.inf, "nothing leaves the window before it has ended"
    assert account.free_at(360.0, devices=2) == 360.0
    account.end(1, 500.0)
    assert account.free_at(500.0, devices=1) == 3740.0, "140 seconds were too many"
    assert account.free_at(3740.0, devices=1) == 3740.0


def test_what_took_more_than_the_window_is_paid_back_in_full() -> None:
    account = QuantumAccount()
    account.begin(1, 0.0)
    account.end(1, 5000.0)
    at = account.free_at(5000.0, devices=1)
    assert at == 5000.0 + 3600.0 - 360.0
    assert account.seconds(at) == 360.0
