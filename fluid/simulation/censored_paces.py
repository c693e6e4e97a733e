"""The spread of trials' paces, of which some are known, and of others only that they are slower than they have run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

#: Spread of the logarithms of paces before any is known, and the number of trials for which it then counts.
SPREAD, _WEIGHT = 0.5, 1.0
#: Rounds in which those that are known by a bound are estimated.
_ROUNDS = 6
_NORMAL = NormalDist()


def mean_and_spread(
    observed: Sequence[float],
    at_least: Sequence[float] = (),
    *,
    spread: float = SPREAD,
    weight: int = 0,
    uncertain: float = 0.0,
) -> tuple[float, float]:
    """Mean and standard deviation of logarithms, of which some are known, and others by a lower bound.

    The first to end are the fast ones. Those with a bound count with their expectation above it, until that changes
    little (Schmee and Hahn, 1979).

    Example:
        >>> from fluid.simulation.censored_paces import mean_and_spread
        >>> [round(each, 3) for each in mean_and_spread([0.0, 0.0])]
        [0.0, 0.354]
        >>> mean_and_spread([0.0, 0.0], [1.0])[0] > 0.3
        True

    Args:
        observed: logarithms of the seconds that are known.
        at_least: logarithms of the seconds that others have run so far.
        spread: the standard deviation as it was known before.
        weight: observations from which it was known, whose mean is 0; 0 for a guess.
        uncertain: sum of the variances of those observed, where they are known roughly.
    """
    spread, known = max(spread, 1e-3), max(weight, _WEIGHT)

    def estimate(guesses: list[float], variances: float) -> tuple[float, float]:
        values = [*observed, *guesses]
        mean = sum(values) / max(1, len(values) + weight)
        squares = sum((value - mean) ** 2 for value in values) + variances
        return mean, math.sqrt((known * spread**2 + squares) / (known + max(0, len(values) - (not weight))))

    mean, sigma = estimate([], uncertain)
    for _ in range(_ROUNDS if at_least else 0):
        guesses, variances = [], uncertain
        for bound in at_least:
            z = (bound - mean) / sigma
            hazard = _hazard(z)
            guesses.append(mean + sigma * hazard)
            variances += sigma**2 * max(0.0, 1.0 + z * hazard - hazard**2)
        mean, sigma = estimate(guesses, variances)
    return mean, sigma


def _hazard(z: float) -> float:
    """Density of the standard normal distribution, over the probability of a greater value."""
    beyond = 0.5 * math.erfc(z / math.sqrt(2.0))
    return _NORMAL.pdf(z) / beyond if beyond > 1e-12 else z
