"""Which of several trials ends last, and when, if how long each still takes is known only with some uncertainty.

The seconds that trial i has left are lognormal, with a median and a standard deviation sigma of their logarithm, and
independent of the others'. With F_i their distribution function and f_i their density, the last one ends within l
seconds with probability ``G(l) = prod_i F_i(l)`` (Orloj, eq. 4.6, has it for k alike ones, ``F^k``), and

    P(i ends last) = integral of f_i(l) prod_{j != i} F_j(l) dl
    E[last end]    = integral of 1 - G(l) dl.

All of it is computed at once, on one grid of quantiles of G. Numpy only, as scipy is no dependency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from fluid.errors import InvalidFieldError
from fluid.planning.end_distribution import EndDistribution
from fluid.planning.runtime_model import FloatArray, IntArray

#: The distribution function of the normal distribution is 1 above, to 1e-10.
_CERTAIN_BY = 6.5
#: The last one of the trials does not end before a trial's quantile at this many sigmas below its median, to 1e-9.
_NOT_BEFORE = 6.0
#: Odds below which what ends by then is taken as never ending last.
_NEVER = 1e-9
#: How far above the median of their logarithm trials are compared, in standard deviations: :func:`at_equal_odds`.
_ABOVE_MEDIAN = 1.0
#: Odds at which the grid has its points: dense in both tails, whose share of the mean is large if sigma is.
_GRID_ODDS = np.array([0.5 * math.erfc(-z / math.sqrt(2.0)) for z in np.linspace(-4.0, 4.0, 81)])
#: Points of the first grid, and of the later ones beyond those odds: lognormal tails are long.
_FIRST_POINTS, _TAIL_POINTS = 24, 12
#: The odds at which coarse grids have theirs.
_COARSE_ODDS = _GRID_ODDS[::4]
#: Coarse grids are refined until no step has more than this share of the odds, this often at most.
_LARGEST_STEP = 0.25
_REFINEMENTS = 4
#: The table of the normal distribution, in sigmas: linear between entries 1/256 apart, to 2e-6 of the logarithm.
_TABLE_FROM, _TABLE_TO, _TABLE_PER_SIGMA = -37.0, 8.0, 256
#: Entries that are looked up at once.
_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class Completion:
    """When the last of k trials ends, and which one that is.

    Attributes:
        odds_last: (k,) probability that the trial ends last; they add up to 1, and trials that are certain to end last
            together share it.
        mean: expected seconds until the last one ends, to 0.5 % for sigmas up to 1.5.
        ends: the distribution of these seconds.
    """

    odds_last: FloatArray
    mean: float
    ends: EndDistribution


def at_equal_odds(medians: FloatArray, sigmas: FloatArray | None) -> FloatArray:
    """Seconds that each trial exceeds with the same odds: one standard deviation above the median.

    By these, planners sort trials where they have no better rule: of trials with one median, the least certain one is
    likely to end last (docs/theory.md, section 14).

    Args:
        medians: (k,) seconds.
        sigmas: (k,) standard deviation of the logarithm of the true seconds over these; ``None`` if they are certain.
    """
    return medians if sigmas is None else medians * np.exp(_ABOVE_MEDIAN * sigmas)


def completion_of(medians: ArrayLike, sigmas: ArrayLike) -> Completion:
    """Computes when the last of several trials ends, and which one that is.

    Example:
        >>> from fluid.planning.completion import completion_of
        >>> both = completion_of([100.0, 90.0], [0.0, 0.5])
        >>> [round(float(odds), 2) for odds in both.odds_last], round(both.mean, 1)
        ([0.58, 0.42], 121.0)

    Args:
        medians: (k,) seconds that each trial has left, at least 0, as likely more as less.
        sigmas: (k,) or one number: standard deviation of the logarithm of the true seconds over these; 0 if they are
            certain.

    Raises:
        InvalidFieldError: there is no trial, or a value is not a finite number of at least 0.
    """
    seconds = np.atleast_1d(np.asarray(medians, dtype=np.float64))
    if seconds.ndim != 1 or not len(seconds):
        raise InvalidFieldError("medians", medians, "must be those of at least one trial")
    spread = np.broadcast_to(np.asarray(sigmas, dtype=np.float64), seconds.shape)
    for name, values in (("medians", seconds), ("sigmas", spread)):
        if not (np.isfinite(values) & (values >= 0.0)).all():
            raise InvalidFieldError(name, values.tolist(), "must be finite numbers of at least 0")
    uncertain = np.flatnonzero((spread > 0.0) & (seconds > 0.0))
    known = np.ones(len(seconds), dtype=bool)
    known[uncertain] = False
    floor = float(seconds[known].max(initial=0.0))
    if len(uncertain):
        mu, sigma = np.log(seconds[uncertain]), spread[uncertain]
        least = math.log(floor) if floor > 0.0 else -math.inf
        least = max(least, float((mu - _NOT_BEFORE * sigma).max()))
        late = mu + _CERTAIN_BY * sigma > least  # the others cannot end last
        uncertain, mu, sigma = uncertain[late], mu[late], sigma[late]
    if not len(uncertain):
        last = known & (seconds == floor)
        return Completion(last / last.sum(), floor, EndDistribution.certain(floor))
    grid, kept, logs = _grid(mu, sigma, least)
    uncertain = uncertain[kept]
    total = logs.sum(axis=1)
    odds = np.exp(total)
    odds_last = np.zeros(len(seconds))
    # The last end lies in a step of the grid with the odds that G gains there. It is trial i's with the share that
    # log F_i has in the gain of log G: f_i/F_i over sum_j f_j/F_j, which is exact where these are in proportion.
    gained = np.diff(odds)
    share = gained / np.maximum(np.diff(total), 1e-300)
    # share @ np.diff(logs, axis=0), without another large array.
    odds_last[uncertain] = -np.diff(share, prepend=0.0, append=0.0) @ logs
    odds_last[uncertain] += (1.0 - odds[-1]) / len(uncertain)
    times = np.exp(grid)
    if floor > 0.0 and math.log(floor) >= least:
        last = known & (seconds == floor)
        odds_last[last] = odds[0] / last.sum()
        times[0] = floor
    odds_last /= odds_last.sum()
    odds[-1] = 1.0
    mean = float(times[0] + ((1.0 - 0.5 * (odds[1:] + odds[:-1])) * np.diff(times)).sum())
    return Completion(odds_last, mean, EndDistribution(times, odds))


def _grid(mu: FloatArray, sigma: FloatArray, least: float) -> tuple[FloatArray, IntArray, FloatArray]:
    """Logarithms of seconds between which G has about equal odds, but for its tails.

    Args:
        mu: (k,) mean of the logarithm of each trial's seconds.
        sigma: (k,) its standard deviation.
        least: none ends last before; if G is above 0 there, certain trials end at that time.

    Returns:
        (m,) the grid, the positions of the trials that can end last, and (m, positions) logarithm of their F_i.
    """
    most = float((mu + _CERTAIN_BY * sigma).max())
    coarse = np.linspace(least, most, _FIRST_POINTS)
    for left in reversed(range(_REFINEMENTS + 1)):
        odds = np.exp(_log_cdf(coarse, mu, sigma).sum(axis=1))
        if not left or float(np.diff(odds).max()) <= _LARGEST_STEP * (1.0 - odds[0]):
            break
        coarse = np.concatenate([[least], _quantiles(coarse, odds, _COARSE_ODDS), [most]])
    inner = _quantiles(coarse, odds, _GRID_ODDS)
    if odds[0] <= _NEVER:
        least = float(coarse[np.searchsorted(odds, _NEVER, side="right") - 1])
    grid = np.concatenate([[least], inner, np.linspace(inner[-1], most, _TAIL_POINTS + 1)[1:]])
    kept = np.flatnonzero(mu + _CERTAIN_BY * sigma > least)
    return grid, kept, _log_cdf(grid, mu[kept], sigma[kept])


def _quantiles(grid: FloatArray, odds: FloatArray, wanted: FloatArray) -> FloatArray:
    """Where G, given on a grid, has gained these shares of what it gains there."""
    found: FloatArray = np.interp(odds[0] + (1.0 - odds[0]) * wanted, odds, grid)
    return found


def _log_cdf(grid: FloatArray, mu: FloatArray, sigma: FloatArray) -> FloatArray:
    """(m, k) logarithm of each trial's F_i on a grid of logarithms of seconds, from a table."""
    values, gains = _log_cdf_table()
    scale = _TABLE_PER_SIGMA / sigma
    found = np.empty((len(grid), len(mu)))
    rows = max(1, _BLOCK // len(mu))
    for first in range(0, len(grid), rows):
        # In place, and in blocks: large temporary arrays cost more, in page faults, than the arithmetic.
        at = found[first : first + rows]
        np.subtract(grid[first : first + rows, None], mu, out=at)
        at *= scale
        at -= _TABLE_FROM * _TABLE_PER_SIGMA
        np.clip(at, 0.0, (_TABLE_TO - _TABLE_FROM) * _TABLE_PER_SIGMA, out=at)
        entry = at.astype(np.int32)
        at -= entry
        at *= gains[entry]
        at += values[entry]
    return found


@cache
def _log_cdf_table() -> tuple[FloatArray, FloatArray]:
    """The table's values, and by how much the next one is larger."""
    z = np.arange(_TABLE_FROM * _TABLE_PER_SIGMA, _TABLE_TO * _TABLE_PER_SIGMA + 1.0) / _TABLE_PER_SIGMA
    values = np.array([math.log(0.5 * math.erfc(-each / math.sqrt(2.0))) for each in z.tolist()])
    return values, np.diff(values, append=values[-1])
