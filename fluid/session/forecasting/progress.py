"""Predicts how many iterations a search will have run at its end, from the lengths of its trials so far.

Trials that a search stops early end first, so the mean of the ended ones would be too small. The Kaplan-Meier
estimator (Kaplan and Meier, 1958) counts running trials too, as far as they have come: of n(t) trials that have run t
iterations, e(t) ended there, so that a trial runs more than t with probability S(t) = S(t-1) * (1 - e(t) / n(t)).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

#: Trials that must have ended before the prediction counts as supported.
_LEAST_ENDED = 2
#: Largest share of the remaining iterations that may lie beyond the longest ended trial, unless so large a share of the
#: trials has ended.
_MOST_UNSEEN, _ENOUGH_ENDED = 0.5, 0.25


@dataclass(frozen=True, slots=True)
class LiveLength:
    """How far a trial that has not ended is: iterations done, granted, and at most in all."""

    done: int
    granted: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchForecast:
    """The iterations that a search still has to run.

    Attributes:
        left: iterations of all trials, also of those that are to come.
        longest: iterations of the trial that has most left.
        is_supported: whether enough trials have ended to predict a time from these numbers.
    """

    left: float
    longest: float
    is_supported: bool


def forecast(ended: Mapping[int, int], live: Mapping[LiveLength, int], coming: int) -> SearchForecast:
    """Predicts the rest of a search.

    Where no trial has been yet and a scheduler decides, a trial is taken to survive t iterations with a probability
    that falls as 1/t, as in successive halving: each rung gets about the same work.

    Args:
        ended: number of trials that have ended, by their iterations.
        live: number of trials that have not, by how far they are.
        coming: number of trials that the search will still submit.
    """
    cap = max([*ended, *(length.most for length in live)], default=0)
    lengths = _Lengths(ended, live, cap)
    reached = max([*ended, *(length.done for length in live)], default=0)
    first = LiveLength(0, min((length.granted for length in live if length.granted), default=cap), cap)
    seen = max(ended, default=0)
    left = longest = unseen = 0.0
    for length, number in [*live.items(), (first, coming)]:
        most = max(length.most, length.granted)
        survived = length.done if length.granted > length.done and length is not first else length.done - 1
        known = min(most, max(1, reached, length.granted))
        beyond = lengths.survival(known - 1, survived) * known * math.log(most / known) if most else 0.0
        rest = lengths.between(length.done, known, survived) + beyond
        left += number * rest
        longest = max(longest, rest if number else 0.0)
        unseen += number * (beyond + lengths.between(max(length.done, min(seen, known)), known, survived))
    over = sum(ended.values())
    most_seen = unseen <= _MOST_UNSEEN * left or over >= _ENOUGH_ENDED * (over + sum(live.values()) + coming)
    supported = over >= _LEAST_ENDED and most_seen
    return SearchForecast(left=left, longest=longest, is_supported=supported or not left)


class _Lengths:
    """The distribution of the lengths of trials, as a step function S with its integral.

    Args:
        ended, live: as for :func:`forecast`.
        cap: iterations that no trial exceeds.
    """

    def __init__(self, ended: Mapping[int, int], live: Mapping[LiveLength, int], cap: int) -> None:
        censored = Counter[int]()
        for trial, number in live.items():
            censored[trial.done] += number
        at_risk, survival = sum(ended.values()) + sum(censored.values()), 1.0
        #: Where S changes, S from there on, and the sum of S before.
        self._at = [0]
        self._survival = [1.0]
        self._before = [0.0]
        self._cap = cap
        for length in sorted(ended.keys() | censored.keys()):
            if ended.get(length):
                survival *= 1.0 - ended[length] / at_risk
                self._before.append(self._before[-1] + self._survival[-1] * (length - self._at[-1]))
                self._at.append(length)
                self._survival.append(survival)
            at_risk -= ended.get(length, 0) + censored[length]

    def between(self, start: int, end: int, survived: int) -> float:
        """Iterations from ``start`` to ``end`` that a trial will run which runs more than ``survived``."""
        survival = self._at_least(survived)
        if survival <= 0.0 or end <= start:
            return 0.0
        return (self._sum_to(min(end, self._cap)) - self._sum_to(start)) / survival

    def survival(self, length: int, survived: int) -> float:
        """The probability that a trial runs more than ``length`` iterations which runs more than ``survived``."""
        before = self._at_least(survived)
        return min(1.0, self._at_least(length) / before) if before > 0.0 else 0.0

    def _at_least(self, survived: int) -> float:
        return 1.0 if survived < 0 else self._survival[self._position(survived)]

    def _sum_to(self, length: int) -> float:
        """The sum of S over iterations below ``length``."""
        position = self._position(length)
        return self._before[position] + self._survival[position] * (length - self._at[position])

    def _position(self, length: int) -> int:
        return bisect_right(self._at, length) - 1
