"""How likely a trial that waits at a rung is to go on, from its rank there (docs/theory.md, section 18). Pure.

Trials that are still to come are taken to be like those that came (exchangeable): a newcomer takes each rank among them
with the same probability. No model of scores is needed then, and the probabilities are exact.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from fluid.search_shape import Rung

#: Most trials of an asynchronous rung whose order of arrival is followed: the table has half the square of that.
MOST_FOLLOWED = 512


@lru_cache(maxsize=1024)
def odds_at(rung: Rung, reported: int) -> tuple[float, ...]:
    """Returns the probability to go on by rank, the best first, where so many trials of a rung have reported.

    Example:
        >>> from fluid.policies.checkpoints import odds_at
        >>> from fluid.search_shape import Rung
        >>> [round(each, 3) for each in odds_at(Rung(size=9, places=3), reported=3)]
        [0.762, 0.226, 0.012]
    """
    if reported < 1:
        return ()
    if rung.places < 1:
        return (0.0,) * reported
    size = None if rung.size is None else max(rung.size, reported)
    if not rung.promotes_at_once:
        return final_odds(reported, size, rung.places)
    eta = rung.places  # One in so many.
    if reported <= MOST_FOLLOWED and (size is None or size <= MOST_FOLLOWED):
        return arriving_odds(reported, min(MOST_FOLLOWED, size or MOST_FOLLOWED), eta)
    return final_odds(reported, size, eta if size is None else max(1, size // eta))


def final_odds(reported: int, size: int | None, places: int) -> tuple[float, ...]:
    """Returns the probability to be among the best ``places`` of ``size`` in the end, by rank among those reported.

    The trial of rank r, from 0, is among them if at least r + 1 of those reported are: their number is hypergeometric.

    Args:
        reported: how many have reported; at least 1.
        size: how many will have; ``None`` for no limit: then one in ``places`` goes on, and the number is binomial.
        places: how many go on.
    """
    return _final_odds(reported, size, places)


@lru_cache(maxsize=256)
def _final_odds(n: int, size: int | None, places: int) -> tuple[float, ...]:
    if size is None:
        share = min(1.0 / max(1, places), 1.0 - 1e-12)
        promoted = np.arange(n + 1)
        logs = _log_choose(n, promoted) + promoted * math.log(share) + (n - promoted) * math.log1p(-share)
    else:
        places = min(places, size)
        # So many of those reported may be among the best ones: no more than there are of either kind.
        promoted = np.arange(max(0, n - (size - places)), min(n, places) + 1)
        logs = _log_choose(places, promoted) + _log_choose(size - places, n - promoted) - _log_choose(size, n)
    odds = np.zeros(n + 1)
    odds[promoted] = np.exp(logs)
    tails = np.cumsum(odds[::-1])[::-1]  # of at least so many
    return tuple(np.minimum(1.0, tails[1:]).tolist())


def arriving_odds(arrived: int, size: int, eta: int) -> tuple[float, ...]:
    """Returns the probability to be among the best 1/eta of those that came, now or after a later arrival, by rank.

    ASHA promotes a trial as soon as it is. With t trials there, the next one ranks before the trial of rank r with
    probability (r + 1)/(t + 1); the table over t and r is worked out from the last arrival back.

    Args:
        arrived: how many have come; at least 1.
        size: how many will.
        eta: one in so many goes on.

    Example:
        >>> from fluid.policies.checkpoints import arriving_odds
        >>> [round(each, 3) for each in arriving_odds(2, 3, 3)]
        [0.667, 0.0]
    """
    return tuple(map(float, _arrival_table(size, eta)[min(arrived, size) - 1]))


@lru_cache(maxsize=8)
def _arrival_table(size: int, eta: int) -> tuple[np.ndarray, ...]:
    """The odds by rank, for 1, 2, ... arrivals."""
    later = (np.arange(size) < size // eta).astype(float)
    table = [later]
    for there in range(size - 1, 0, -1):
        ranks = np.arange(there)
        before = (ranks + 1.0) / (there + 1.0)
        odds = before * later[1:] + (1.0 - before) * later[:-1]
        odds[: there // eta] = 1.0
        table.append(odds)
        later = odds
    return tuple(reversed(table))


def _log_choose(n: int, k: Any) -> Any:
    """Logarithms of binomial coefficients."""
    table = _log_factorials(1 << n.bit_length())
    return table[n] - table[k] - table[n - k]


@lru_cache(maxsize=8)
def _log_factorials(size: int) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1.0, size + 1.0)))))
