"""When the last of several running trials ends, for re-planners that know that runtimes are uncertain.

A trial's work left is lognormal (:class:`fluid.planners.arrangement.Running`). A resize costs epsilon for certain, and
what it gains is uncertain: one of which the expected gain is lost in the spread of the last end is not made
(docs/theory.md, section 14).

Tried, and not done, as groups ended later: to resize only if that repays epsilon with odds of 0.7, not to resize a
trial before its first iteration, and to plan again when a first iteration is far from its prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fluid.measure.runtime_model import FloatArray, IntArray
from fluid.planners.arrangement import Running
from fluid.planners.instance import Completion, at_equal_odds, completion_of
from fluid.resources import TOLERANCE

#: A gain of the expected last end below this share of its standard deviation is noise. `benchmarks/odds.py` measures no
#: loss by it; from a tenth on, makespans grow.
_NOISE = 0.02


def as_certain(running: Running) -> Running:
    """The same trials with the work that each exceeds with the same odds, for planners that take it as certain."""
    if running.sigma is None:
        return running
    return replace(running, remaining=at_equal_odds(running.remaining, running.sigma), sigma=None)


class UncertainEnds:
    """The ends of running trials, some of which are uncertain.

    Args:
        running: the trials.
        finish: (m,) seconds until each ends, by the medians, if nothing is resized.
    """

    def __init__(self, running: Running, finish: FloatArray) -> None:
        self._running = running
        self._finish = finish
        self._sigma = np.zeros(len(running)) if running.sigma is None else running.sigma

    def best(self, choices: Sequence[IntArray], held: IntArray) -> IntArray:
        """The devices with which the last trial is expected to end first; ties go to the choice listed first.

        Args:
            choices: (m,) devices for each trial; first those that they have. Another choice has to be better than that
                by more than noise.
            held: (m,) devices that each trial has.
        """
        if len(choices) == 1:
            return choices[0]
        now = self._completion(choices[0], held)
        spread = 0.5 * (now.ends.quantile(0.84) - now.ends.quantile(0.16))
        best, earliest = choices[0], now.mean - _NOISE * spread
        for devices in choices[1:]:
            mean = self._completion(devices, held).mean
            if mean < earliest * (1.0 - TOLERANCE):
                best, earliest = devices, mean
        return best

    def odds_last(self, devices: IntArray, held: IntArray) -> FloatArray:
        """(m,) the odds that each trial ends last, if it gets so many devices in place of those that it has."""
        return self._completion(devices, held).odds_last

    def _completion(self, devices: IntArray, held: IntArray) -> Completion:
        running, width, stays = self._running, np.maximum(devices, 1), devices == held
        moved = running.remaining / running.speed * running.beta ** (width - 1.0) / width
        medians = np.where(stays, self._finish, moved + running.epsilon)
        # What is certain, the pause, makes the logarithm of the sum less uncertain.
        sigma = np.where(stays | (moved <= 0.0), self._sigma, self._sigma * moved / np.maximum(medians, 1e-300))
        return completion_of(medians, sigma)
