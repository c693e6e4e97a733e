"""The planner's interface, and the plan that it makes of a TrialGroup."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property

import numpy as np

from fluid.errors import require_integer
from fluid.measure.profile import Profile
from fluid.measure.runtime_model import DEFAULT_MAX_PACKING, DEFAULT_MAX_WIDTH, FloatArray, IntArray
from fluid.planners.arrangement import Arrangement, KeepWidths, Replanner, start_order
from fluid.planners.bounds import malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.planners.rollout import Rollout, roll_out, start
from fluid.planners.shares import arrival_widths
from fluid.resources import Cluster, Placement
from fluid.trialgroup import TrialGroup


class Planner(ABC):
    """Turns an instance into an arrangement: widths, a starting order and a re-planner.

    Args:
        c: most trials to pack on one device; lowered where a trial's packing overhead says so.
        d: most devices for one trial; lowered where its scaling overhead says so.

    Raises:
        InvalidFieldError: ``c`` or ``d`` is below 1.
    """

    #: The name for ``FluidExecutor(planner=...)`` and ``fluid plan --planner``.
    name: str
    #: Whether trials with follow-up iterations start first, and trials that would end late preempt running ones
    #: (:mod:`fluid.policies.preemption`).
    preempts: bool = False

    def __init__(self, c: int = DEFAULT_MAX_PACKING, d: int = DEFAULT_MAX_WIDTH) -> None:
        self.c = require_integer("c", c, at_least=1)
        self.d = require_integer("d", d, at_least=1)

    @abstractmethod
    def arrange(self, instance: Instance) -> Arrangement:
        """Plans the instance as if all its devices were idle, with the instance's own ``c`` and ``d``."""

    def replanner(self) -> Replanner:
        """The re-planner of running trials that no arrangement covers."""
        return KeepWidths()

    def join(self, instance: Instance, others: FloatArray, idle: int) -> Arrangement:
        """Arranges trials that arrive while others run (:func:`fluid.planners.shares.arrival_widths`).

        Args:
            instance: the new trials, and all devices of the job.
            others: heights of the trials that run or wait, seconds.
            idle: number of idle devices.
        """
        widths = arrival_widths(instance, others, idle)
        order = start_order(widths, instance.late_heights, instance.priority)
        return Arrangement(widths, order, self.replanner(), replan_at_start=False, name=self.name)

    def join_alike(self, kinds: Instance, counts: IntArray, idle: int) -> FloatArray | None:
        """The widths that :meth:`join` gives trials of which many are alike, where alike ones get equal widths.

        Args:
            kinds: the new trials, one of each kind, and all devices of the job.
            counts: (kinds,) trials of each kind.
            idle: number of idle devices.

        Returns:
            (kinds,) widths; ``None`` to be asked :meth:`join`, trial by trial.
        """
        return None

    def plan(self, group: TrialGroup, cluster: Cluster, profile: Profile | None = None) -> Plan:
        """Plans a group's active trials on an idle cluster.

        Args:
            group: at least one active trial.
            cluster: the devices.
            profile: measured overheads and paces; ``None`` for ideal trials of 1 s per iteration.

        Raises:
            InvalidFieldError: the group is empty, or a trial fits on no device.
        """
        instance = Instance.from_group(group, cluster, profile, c=self.c, d=self.d)
        return Plan(self.name, instance, self._arrange(instance))

    def _arrange(self, instance: Instance) -> Arrangement:
        """Arranges trials of which some may have a fixed width: those come first, as they are hardest to place."""
        constraints = instance.constraints
        if constraints is None:
            return self.arrange(instance)
        widths = np.array([float((asked and asked.width) or 0) for asked in constraints])
        fixed, free = np.flatnonzero(widths), np.flatnonzero(widths == 0)
        order = fixed[start_order(widths[fixed], instance.heights[fixed], instance.priority[fixed])]
        if not len(free):
            return Arrangement(widths, order, self.replanner(), replan_at_start=False, name=self.name)
        rest = self.arrange(instance.take(free.tolist(), [instance.trial_ids[row] for row in free.tolist()]))
        widths[free] = rest.widths
        return replace(rest, widths=widths, order=np.concatenate([order, free[rest.order]]))


class Plan:
    """A planner's answer for one instance. Predictions are computed on first use.

    Example:
        >>> from fluid import Cluster, StaticFluid, Trial, TrialGroup
        >>> group = TrialGroup([Trial(print, budget=budget, trial_id=name) for name, budget in zip("abc", (8, 1, 1))])
        >>> plan = StaticFluid(c=2, d=4).plan(group, Cluster.of(2))
        >>> plan.widths
        {'a': 1.0, 'b': 0.5, 'c': 0.5}
        >>> plan.placements["b"].device_ids, plan.queue
        ((1,), [])
        >>> plan.makespan, round(plan.lower_bound, 3)
        (8.0, 4.333)

    Attributes:
        planner: name of the planner.
        instance: what was planned.
        arrangement: widths, order and re-planner, by row.
    """

    def __init__(self, planner: str, instance: Instance, arrangement: Arrangement) -> None:
        self.planner = planner
        self.instance = instance
        self.arrangement = arrangement

    @cached_property
    def _started(self) -> Rollout:
        return start(self.instance, self.arrangement)

    @property
    def widths(self) -> dict[str, float]:
        """Width of each trial by its id: a share of one device, or a number of devices."""
        return {trial_id: self._started.width(row) for row, trial_id in enumerate(self.instance.trial_ids)}

    @property
    def placements(self) -> dict[str, Placement]:
        """Devices of each trial that starts at once, by its id; the others wait in :attr:`queue`."""
        return {
            self.instance.trial_ids[row]: Placement(self._started.width(row), devices)
            for row, devices in self._started.occupancy.held.items()
        }

    @property
    def queue(self) -> list[str]:
        """Ids of the trials that wait for a device, in starting order."""
        held = self._started.occupancy.held
        return [self.instance.trial_ids[row] for row in self.arrangement.order.tolist() if row not in held]

    @cached_property
    def schedule(self) -> Rollout:
        """The predicted run, with its segments."""
        return roll_out(self.instance, self.arrangement, record=True)

    @property
    def makespan(self) -> float:
        """Predicted seconds from the first start to the last finish."""
        return self.schedule.now

    @cached_property
    def lower_bound(self) -> float:
        """mLB, seconds: no schedule of the instance is shorter (docs/theory.md, section 5)."""
        return malleable_lower_bound(self.instance)
