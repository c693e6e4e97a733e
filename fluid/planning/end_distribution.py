"""The distribution of the time at which something ends: a deadline is met with some odds, not for certain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fluid.errors import InvalidFieldError, require_number
from fluid.planning.runtime_model import FloatArray


@dataclass(frozen=True, eq=False)
class EndDistribution:
    """When something ends, from now: a cumulative distribution function on a grid, linear between its points.

    Example:
        >>> from fluid.planning.end_distribution import EndDistribution
        >>> ends = EndDistribution.of_draws([8.0, 10.0, 12.0])
        >>> ends.quantile(0.5), ends.odds_by(12.0), ends.odds_by(7.0)
        (10.0, 1.0, 0.0)

    Attributes:
        seconds: (m,) ascending, from now.
        odds: (m,) probability that it has ended by then, ascending, 1 at the end.
    """

    seconds: FloatArray
    odds: FloatArray

    @classmethod
    def certain(cls, seconds: float) -> EndDistribution:
        """It ends in so many seconds."""
        return cls(np.array([seconds]), np.array([1.0]))

    @classmethod
    def of_draws(cls, draws: ArrayLike) -> EndDistribution:
        """The distribution of which these are draws, at least one: the smallest and the largest are its ends."""
        seconds = np.sort(np.asarray(draws, dtype=np.float64))
        if not len(seconds):
            raise InvalidFieldError("draws", draws, "must be at least one")
        return cls(seconds, np.linspace(0.0, 1.0, len(seconds)) if len(seconds) > 1 else np.array([1.0]))

    @property
    def mean(self) -> float:
        """Expected seconds from now."""
        middles = (self.seconds[1:] + self.seconds[:-1]) / 2.0
        return float(self.odds[0] * self.seconds[0] + np.diff(self.odds) @ middles)

    def quantile(self, q: float) -> float:
        """Seconds by which it has ended with probability ``q``, in (0, 1)."""
        return float(np.interp(require_odds("q", q), self.odds, self.seconds))

    def quantiles(self, q: Sequence[float]) -> dict[float, float]:
        """Seconds by which it has ended with each of these probabilities."""
        return {each: self.quantile(each) for each in q}

    def odds_by(self, seconds: float) -> float:
        """The probability that it has ended by then."""
        return float(np.interp(seconds, self.seconds, self.odds, left=0.0, right=1.0))

    def later(self, seconds: float) -> EndDistribution:
        """The distribution of an end that many seconds later; earlier, but not before now, if that is negative."""
        return EndDistribution(np.maximum(0.0, self.seconds + seconds), self.odds)

    def stretched(self, factor: float) -> EndDistribution:
        """The distribution of an end for which everything takes so many times as long."""
        return EndDistribution(self.seconds * factor, self.odds)

    def towards(self, other: EndDistribution, part: float) -> EndDistribution:
        """The distribution whose quantiles lie a part of the way, 0 to 1, from these to those of another one."""
        odds = np.union1d(self.odds, other.odds)
        mine, theirs = (np.interp(odds, each.odds, each.seconds) for each in (self, other))
        return EndDistribution(mine + (theirs - mine) * part, odds)


def require_odds(name: str, value: object) -> float:
    """Returns a probability in (0, 1).

    Raises:
        InvalidFieldError: it is none.
    """
    odds = require_number(name, value, at_least=0.0)
    if not 0.0 < odds < 1.0:
        raise InvalidFieldError(name, value, "must be in (0, 1)")
    return odds
