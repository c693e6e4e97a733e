"""What a lane measures of how busy a trial keeps its CPU device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing import get_context

import pytest

from fluid.lane.device.busy import BusyMeter


def compute(seconds: float) -> None:
    """Computes for so long, also if others do at the same time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def share(work: Callable[[], None], threads: int = 1) -> float | None:
    meter = BusyMeter(threads)
    meter.begin()
    begun = time.monotonic()
    work()
    return meter.end(time.monotonic() - begun)


def test_computing_is_busy_and_waiting_is_not() -> None:
    assert (share(lambda: compute(0.3)) or 0.0) > 0.9
    # Where the machine has too much to do, this process waits for its turn when it wakes up, which counts as busy.
    assert any((share(lambda: time.sleep(0.3)) or 0.0) < 0.1 for _ in range(5))
    part = share(lambda: (compute(0.1), time.sleep(0.4))[0])
    assert 0.1 < (part or 0.0) < 0.8


def test_one_thread_does_not_fill_a_device_for_four() -> None:
    found = share(lambda: compute(0.3), threads=4)
    assert found is not None and found < 0.5


def _neighbour() -> None:
    compute(60.0)


def test_waiting_for_ones_turn_is_busy() -> None:
    """Else a machine with too much to do would look as if there were room for more."""
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    others = [get_context("fork").Process(target=_neighbour, daemon=True) for _ in range(3)]
    try:
        for other in others:
            other.start()
        begun = time.monotonic()
        found = share(lambda: compute(0.3))
        taken = time.monotonic() - begun
    finally:
        os.sched_setaffinity(0, before)
        for other in others:
            other.kill()
            other.join()
    if taken < 0.6:
        pytest.skip("the neighbours did not get in the way")
    assert found is not None and found > 0.85
