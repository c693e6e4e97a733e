"""A forecast: when a group of trials ends, with odds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """When a group ends, with odds.

    Example:
        >>> from fluid import Forecast
        >>> Forecast(seconds={0.5: 60.0, 0.9: 90.0}, age_s=2.0).seconds[0.9]
        90.0

    Attributes:
        seconds: by probability, the seconds from now by which the group has ended with that probability.
        age_s: seconds since this was worked out; what has happened since is not in it.
    """

    seconds: Mapping[float, float]
    age_s: float = 0.0
