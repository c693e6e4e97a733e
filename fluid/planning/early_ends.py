"""How likely trials end before their budget is used up, and when: from those of a group that have ended, or run.

A submitter stops trials that do badly, a trial says that it has no more to do, or it fails. The estimator is that of
Kaplan and Meier (1958) over shares of the budget, in a few bins: of the trials that come to a bin, the share that ends
in it. With few trials the bins borrow from each other, and all from a weak prior that hardly any trial ends early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from fluid.planning.runtime_model import FloatArray

_BINS = 10
#: What is assumed before any trial has run: so many ends early, over so many whole budgets run.
_PRIOR_ENDS, _PRIOR_BUDGETS = 0.05, 1.0
#: Trials that a bin borrows at the mean rate of all bins.
_BORROWED = 4.0
_Shares: TypeAlias = Iterable[float] | Mapping[float, int]


class EarlyEnds:
    """The probability that a trial is still there at each share of its budget.

    Example:
        >>> from fluid.planning.early_ends import EarlyEnds
        >>> seen = EarlyEnds(ended=[0.5] * 50, others=[1.0] * 50)
        >>> round(seen.odds, 1), EarlyEnds([], []).odds < 0.05
        (0.5, True)

    Args:
        ended: shares of their budgets, in [0, 1), after which trials ended early; or the number of trials by share.
        others: shares that the others have run: 1 for those that have run all; or the number of trials by share.
    """

    def __init__(self, ended: _Shares, others: _Shares) -> None:
        (at, number), (rest, number_of_rest) = map(_columns, (ended, others))
        edges = np.arange(_BINS + 1) / _BINS
        ends = np.histogram(np.minimum(at, 1.0 - 1e-9), edges, weights=number)[0]
        exposed, times = np.concatenate([at, rest]), np.concatenate([number, number_of_rest])
        #: Trials that were there in each bin, counted by how much of it they have run, in bins.
        run = times @ np.clip(exposed[:, None] * _BINS - np.arange(_BINS), 0.0, 1.0) + 0.5 * ends
        rate = (ends.sum() + _PRIOR_ENDS) / (run.sum() + _PRIOR_BUDGETS * _BINS)
        hazards = (ends + _BORROWED * rate) / (run + _BORROWED)
        self._edges = edges
        self._survival = np.concatenate([[1.0], np.cumprod(1.0 - np.clip(hazards, 0.0, 1.0 - 1e-9))])

    @property
    def odds(self) -> float:
        """The probability that a trial ends early."""
        return 1.0 - float(self._survival[-1])

    def still_there(self, shares: FloatArray) -> FloatArray:
        """The probability that a trial has not ended early by each of these shares of its budget."""
        there: FloatArray = np.interp(shares, self._edges, self._survival)
        return there

    def parts(self, done: FloatArray, parts: int) -> FloatArray:
        """The odds of ending early in each of so many equal parts of what is left, and, last, of not doing so.

        Args:
            done: (k,) share of its budget that each trial has run.
            parts: how many.

        Returns:
            (parts + 1, k); each column adds up to 1.
        """
        steps = np.linspace(0.0, 1.0, parts + 1)[:, None]
        there = self.still_there(done + (1.0 - done) * steps)
        there /= there[:1]
        return np.concatenate([there[:-1] - there[1:], there[-1:]])


def _columns(shares: _Shares) -> tuple[FloatArray, FloatArray]:
    """The shares, each once, and how many trials have each."""
    counts = Counter(shares)
    at = np.fromiter(counts.keys(), np.float64, len(counts))
    return np.clip(at, 0.0, 1.0), np.fromiter(counts.values(), np.float64, len(counts))
