"""The portfolio planner, the default: the best of several arrangements by rollout (docs/theory.md, section 6).

The candidates include FIFO, StaticFluid and StaticFluid + DynamicFluid, so by the runtime model the portfolio is never
worse than any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fluid.dynamic_fluid import DynamicFluid, ReallocateByShare
from fluid.errors import require_integer, require_one_of
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH, FloatArray, IntArray
from fluid.planners.arrangement import Arrangement, KeepWidths, Replanner, start_order
from fluid.planners.bounds import NarrowestWidths
from fluid.planners.instance import Instance
from fluid.planners.planner import Planner
from fluid.planners.rollout import roll_out
from fluid.planners.shares import packed_widths
from fluid.planners.water_fill import Concentrate, WaterFill, concentrated_widths
from fluid.resources import TOLERANCE
from fluid.static_fluid import StaticFluid

# -- fifo ----------------------------------------------------------------------------------------
#
# First come, first served: one trial per device, in order of submission, as tuning without Fluid.


class Fifo(Planner):
    """Every trial gets width 1 and keeps it; the order is that of submission.

    Example:
        >>> from fluid import Cluster, Fifo, Trial, TrialGroup
        >>> trials = [Trial(print, budget=budget, trial_id=name) for name, budget in zip("abc", (30, 10, 4))]
        >>> plan = Fifo().plan(TrialGroup(trials), Cluster.of(2))
        >>> plan.makespan, plan.queue
        (30.0, ['c'])
    """

    name = "fifo"

    def arrange(self, instance: Instance) -> Arrangement:
        """Returns width 1 for all, in the order given."""
        k = len(instance)
        return Arrangement(np.ones(k), np.arange(k), KeepWidths(), replan_at_start=False, name=self.name)

    def join(self, instance: Instance, others: FloatArray, idle: int) -> Arrangement:
        """Returns width 1 for all: a trial waits for an idle device."""
        return self.arrange(instance)


# -- portfolio -----------------------------------------------------------------------------------


#: Multiples of T1 whose narrowest widths are tried: slack, as T1 ignores the order in which trials can start.
_TARGETS = (1.0, 1.1, 1.25)
#: Above this many trials, candidates are compared by nominal makespan: rollouts would delay the start of the group.
DEFAULT_SIMULATE_UP_TO = 400


class Portfolio(Planner):
    """Keeps, of several arrangements, the one with the smallest predicted makespan.

    Example:
        >>> from fluid import Cluster, Portfolio, Trial, TrialGroup
        >>> trials = [Trial(print, budget=budget, trial_id=name) for name, budget in zip("abcd", (30, 10, 4, 4))]
        >>> plan = Portfolio(c=2, d=4).plan(TrialGroup(trials), Cluster.of(4))
        >>> plan.makespan, plan.lower_bound
        (10.0, 9.5)
        >>> plan.widths
        {'a': 3.0, 'b': 0.5, 'c': 0.5, 'd': 0.5}

    Args:
        c: most trials to pack on one device.
        d: most devices for one trial.
        simulate_up_to: most trials of a group whose candidates are rolled out. Larger groups are compared by
            :func:`nominal_makespan`, which takes milliseconds but does not guarantee a plan no worse than the paper's.
            In fused packs of more than four rows, a trial counts as one for each four rows of its pack.
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
        """Returns the best candidate, the first of equal ones."""
        if _rollout_size(instance) > self.simulate_up_to:
            return min(candidates(instance), key=lambda candidate: nominal_makespan(instance, candidate))
        best: Arrangement | None = None
        shortest = math.inf
        for candidate in candidates(instance):
            makespan = roll_out(instance, candidate, give_up_after=shortest).now
            if best is None or makespan < shortest * (1.0 - TOLERANCE):
                best, shortest = candidate, makespan
        assert best is not None
        return best

    def join_alike(self, kinds: Instance, counts: IntArray, idle: int) -> FloatArray | None:
        """Returns :func:`fluid.planners.shares.packed_widths`."""
        return packed_widths(kinds, counts, idle)

    def replanner(self) -> Replanner:
        """Returns R."""
        return WaterFill()


def candidates(instance: Instance) -> Iterator[Arrangement]:
    """The arrangements to compare, each pair of widths and re-planner once."""
    static = StaticFluid().arrange(instance)
    if instance.sigma is not None:
        static = replace(static, order=start_order(static.widths, instance.late_heights, instance.priority))
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
            order = start_order(widths, instance.late_heights, instance.priority)
            yield Arrangement(widths, order, replanner, replan_at_start=True, name=name)
    # Last: ties go to an earlier candidate, whose re-planner is R.
    yield replace(static, replanner=ReallocateByShare(), name="static, re-planned by share")
    yield static
    yield Fifo().arrange(instance)


def nominal_makespan(instance: Instance, arrangement: Arrangement) -> float:
    """An estimate of the makespan from the widths alone, seconds: the tallest trial or the mean load per device."""
    model, widths = instance.model, arrangement.widths
    if model.fused is not None:
        # A pack may have dozens of rows, but has no more than there are trials for each device.
        fewest = 1.0 / math.ceil(len(instance) / instance.n)
        widths = np.where(model.fused.fuses & (widths < 1.0), np.maximum(widths, fewest), widths)
    heights = model.heights(instance.heights, widths)
    load = float((heights * np.minimum(widths, instance.n)).sum()) / instance.n
    return max(float(heights.max()), load)


def _rollout_size(instance: Instance) -> float:
    """The trials, weighted by how long it takes to roll out one: a departure changes the rates of all co-residents."""
    k = len(instance)
    if instance.model.fused is None:
        return k
    residents = min(float(instance.model.c.max()), k / instance.n)
    return k * max(1.0, residents / DEFAULT_MAX_PACKING)


# -- by name -------------------------------------------------------------------------------------
#
# The planners by name. A new planner is added here.


#: From the simplest to the best; ``portfolio`` is the default.
PLANNERS: dict[str, type[Planner]] = {planner.name: planner for planner in (Fifo, StaticFluid, DynamicFluid, Portfolio)}


def make_planner(name: str, *, c: int = DEFAULT_MAX_PACKING, d: int = DEFAULT_MAX_WIDTH) -> Planner:
    """Makes the planner of that name.

    Args:
        name: ``"fifo"``, ``"static"``, ``"dynamic"`` or ``"portfolio"``.
        c: most trials to pack on one device.
        d: most devices for one trial.

    Raises:
        InvalidFieldError: the planner is unknown.
    """
    return PLANNERS[require_one_of("planner", name, PLANNERS)](c=c, d=d)
