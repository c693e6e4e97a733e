"""Tiers: whether a trial of several devices should have them of one speed (docs/theory.md, section 15).

A trial on several devices runs at the pace of the slowest of them. So it may end sooner on fewer that are faster, or on
faster ones that are not idle yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fluid.planning.runtime_model import TOLERANCE


def tier_pays(share: float, slowdown: float, response: float) -> bool:
    """Whether a job should use the devices of one tier only (Venn): V + g c < 1 + c.

    Args:
        share: V, the delay until it has devices of that tier, relative to that until it has any.
        slowdown: g, the time that it takes on these, relative to that on any; below 1 if they are faster.
        response: c, the time that it takes on any devices, relative to the delay until it has them.
    """
    return share + slowdown * response < 1.0 + response


def waits_for_tier(seconds_now: float, delay: float, seconds_there: float) -> bool:
    """The same test for a trial that could start now, where c is infinite: all sides multiplied by the delay.

    Args:
        seconds_now: how long it would take on the devices that are idle.
        delay: seconds until the devices of the tier are idle.
        seconds_there: how long it would take on those.
    """
    return delay + seconds_there < seconds_now * (1.0 - TOLERANCE)


def fastest_part(speeds: Sequence[float], stretch: Callable[[int], float]) -> list[int]:
    """Those of a trial's devices on which it ends first: all that are as fast as one of them; of equal ones, fewest.

    Args:
        speeds: of each device for the trial.
        stretch: h(w)/h(1) at a width w, at speed 1.

    Returns:
        Their positions, ascending.
    """
    best, slowest = float("inf"), 0.0
    for speed in sorted(set(speeds), reverse=True):
        seconds = stretch(sum(each >= speed for each in speeds)) / speed
        if seconds < best * (1.0 - TOLERANCE):
            best, slowest = seconds, speed
    return [position for position, speed in enumerate(speeds) if speed >= slowest]
