"""Horizons: how far one party of a sweep lets a trial run before it may decide about it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Horizon:
    """What one party that decides over a trial says about its next decision.

    Attributes:
        at: the iteration whose result it decides about; ``None`` if it never does.
        stops: whether it is sure to stop the trial at ``at``.
        save: whether Tune asks for a checkpoint at ``at``.
        likely_save: whether Tune may ask for one at ``at``.
        last: last iteration to which it promotes this trial or trials that wait for it; 0 if that is unknown.
    """

    at: int | None
    _: KW_ONLY
    stops: bool = False
    save: bool = False
    likely_save: bool = False
    last: float = 0


def first_at_least(bound: float, iteration: int) -> int | None:
    """Returns the first iteration after ``iteration`` that is at least ``bound``; ``None`` if there is none."""
    if math.isinf(bound) and bound > 0:
        return None
    # A NaN bound, which parties compare in either direction, gives the next iteration.
    return math.ceil(bound) if bound > iteration + 1 else iteration + 1


def earliest(horizons: Iterable[Horizon]) -> int | None:
    """Returns the earliest iteration at which one of the parties decides; ``None`` if none does."""
    return min((horizon.at for horizon in horizons if horizon.at is not None), default=None)
