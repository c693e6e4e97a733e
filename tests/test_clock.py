"""Tests of fluid._clock."""

from __future__ import annotations

import math
import threading

import pytest

from fluid._clock import Clock, MonotonicClock, VirtualClock, thread_seconds, thread_state
from fluid.errors import InvalidFieldError


def test_monotonic_clock_does_not_go_back() -> None:
    clock: Clock = MonotonicClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)


def test_virtual_clock_stands_still_until_advanced() -> None:
    clock = VirtualClock()
    assert clock.now() == clock.now() == 0.0
    clock.advance_to(2.5)
    assert clock.now() == 2.5
    clock.advance_to(2.5)
    assert clock.now() == 2.5


def test_virtual_clock_starts_where_it_is_told() -> None:
    assert VirtualClock(start=7).now() == 7.0


@pytest.mark.parametrize("t", [4.999, 0.0, -1.0, math.nan, math.inf])
def test_virtual_clock_refuses_to_go_back_and_keeps_its_time(t: float) -> None:
    clock = VirtualClock(start=5.0)
    with pytest.raises(InvalidFieldError) as caught:
        clock.advance_to(t)
    assert caught.value.field == "t"
    assert clock.now() == 5.0


def test_going_back_says_what_time_it_is() -> None:
    with pytest.raises(InvalidFieldError, match=r"t=3\.0: .*cannot go back.*5\.0"):
        VirtualClock(start=5.0).advance_to(3.0)


@pytest.mark.parametrize("start", [-0.1, math.nan, math.inf])
def test_virtual_clock_refuses_a_bad_start(start: float) -> None:
    with pytest.raises(InvalidFieldError, match="start"):
        VirtualClock(start=start)


def test_what_a_thread_does_is_told_until_it_has_ended() -> None:
    before, here = thread_seconds(), thread_state(threading.get_ident())
    assert here is not None
    assert not here.sleeps
    assert before <= here.seconds <= thread_seconds()
    asleep, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (asleep.set(), over.wait(20.0)))
    thread.start()
    asleep.wait(20.0)
    assert thread.ident is not None
    for _ in range(10_000):
        there = thread_state(thread.ident)
        assert there is not None
        if there.sleeps:
            break
    assert there.sleeps
    over.set()
    thread.join()
    assert thread_state(thread.ident) is None
