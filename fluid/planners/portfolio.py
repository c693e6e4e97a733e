"""The portfolio planner, the default: several arrangements of one instance, the best by simulation.

See docs/theory.md, section 6.

The candidates include FIFO, StaticFluid and StaticFluid + DynamicFluid, so by the runtime model the choice is never
worse than any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fluid.dynamic_fluid import ReallocateByShare
from fluid.errors import require_integer
from fluid.planners.concentrate import Concentrate, concentrated_widths
from fluid.planners.fifo import Fifo
from fluid.planners.water_fill import WaterFill
from fluid.planning.arrangement import Arrangement, Replanner, start_order
from fluid.planning.instance import Instance
from fluid.planning.narrowest_widths import NarrowestWidths
from fluid.planning.planner import Planner
from fluid.planning.rollout import roll_out
from fluid.planning.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH, TOLERANCE, FloatArray
from fluid.static_fluid import StaticFluid

#: Multiples of T1 whose narrowest widths are tried: a little slack leaves room for what T1 does not see.
_TARGETS = (1.0, 1.1, 1.25)
#: Above this many trials, candidates are compared by their nominal makespan instead of by simulation.
DEFAULT_SIMULATE_UP_TO = 400


class Portfolio(Planner):
    """Tries several arrangements and keeps the one whose simulated makespan is smallest.

    Args:
        c: most trials to pack on one device.
        d: most devices for one trial.
        simulate_up_to: groups of more trials are compared by :func:`nominal_makespan`, which is a matter of
            milliseconds but no longer certain to be no worse than the paper's planners.
    """

    name = "portfolio"
    preempts = True

    def __init__(
        self,
        c: int = DEFAULT_MAX_PACKING,
        d: int = DEFAULT_MAX_WIDTH,
        *,
        simulate_up_to: int = DEFAULT_SIMULATE_UP_TO,
    ) -> None:
        super().__init__(c, d)
        self.simulate_up_to = require_integer("simulate_up_to", simulate_up_to, at_least=0)

    def arrange(self, instance: Instance) -> Arrangement:
        """Returns the best candidate; ties go to the one listed first."""
        if len(instance) > self.simulate_up_to:
            return min(candidates(instance), key=lambda candidate: nominal_makespan(instance, candidate))
        best: Arrangement | None = None
        shortest = math.inf
        for candidate in candidates(instance):
            makespan = roll_out(instance, candidate, give_up_after=shortest).now
            if best is None or makespan < shortest * (1.0 - TOLERANCE):
                best, shortest = candidate, makespan
        assert best is not None
        return best

    def replanner(self) -> Replanner:
        """Returns R."""
        return WaterFill()


def candidates(instance: Instance) -> Iterator[Arrangement]:
    """The arrangements worth comparing, each widths-and-re-planner pair once."""
    static = StaticFluid().arrange(instance)
    narrowest = NarrowestWidths(instance)
    target = narrowest.packable(narrowest.fixed_width_bound())
    concentrated = concentrated_widths(instance)
    proposals: list[tuple[str, FloatArray, Replanner]] = [
        ("static, re-planned by R", static.widths, WaterFill()),
        *((f"narrowest within {s:g} T1, R", narrowest.widths(s * target), WaterFill()) for s in _TARGETS),
        ("concentrated", concentrated, Concentrate()),
        ("concentrated, R", concentrated, WaterFill()),
    ]
    seen: set[tuple[bytes, str]] = set()
    for name, widths, replanner in proposals:
        key = (widths.tobytes(), type(replanner).__name__)
        if key not in seen:
            seen.add(key)
            order = start_order(widths, instance.heights, instance.priority)
            yield Arrangement(widths, order, replanner, replan_at_start=True, name=name)
    # Last, so that they win only where they are truly better, and R decides from then on in all other cases.
    yield replace(static, replanner=ReallocateByShare(), name="static, re-planned by share")
    yield static
    yield Fifo().arrange(instance)


def nominal_makespan(instance: Instance, arrangement: Arrangement) -> float:
    """A makespan in seconds read off the widths alone: no less than the tallest trial, nor than the mean load."""
    heights = instance.model.heights(instance.heights, arrangement.widths)
    load = float((heights * np.minimum(arrangement.widths, instance.n)).sum()) / instance.n
    return max(float(heights.max()), load)
