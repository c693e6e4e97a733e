"""When several groups have ended that share devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fluid.planners.instance import EndDistribution

#: Points of the distribution.
_POINTS = 201


def in_turn(ends: Sequence[EndDistribution | None]) -> EndDistribution | None:
    """When groups have ended that share devices: their work adds up, and they are slow together or fast together.

    Args:
        ends: of each group, if it had all devices; ``None`` for one that is unknown.

    Returns:
        The distribution; ``None`` if one is unknown.
    """
    known = [end for end in ends if end is not None]
    if len(known) < len(ends):
        return None
    if len(known) == 1:
        return known[0]
    odds = np.linspace(0.0, 1.0, _POINTS)
    seconds = sum((np.interp(odds, end.odds, end.seconds) for end in known), np.zeros_like(odds))
    return EndDistribution(seconds, odds)
