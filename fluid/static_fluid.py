"""StaticFluid, the paper's planner on arrival of a TrialGroup (Algorithm 3.1; docs/theory.md, section 3)."""

from __future__ import annotations

from fluid.planners.arrangement import Arrangement, KeepWidths, start_order
from fluid.planners.instance import Instance
from fluid.planners.planner import Planner
from fluid.planners.shares import static_widths


class StaticFluid(Planner):
    """Water-filling by runtime: long trials get several devices, short ones share one.

    Example:
        >>> from fluid import Cluster, StaticFluid, Trial, TrialGroup
        >>> trials = [Trial(print, budget=budget, trial_id=name) for name, budget in zip("abcd", (30, 10, 4, 4))]
        >>> plan = StaticFluid(c=2, d=4).plan(TrialGroup(trials), Cluster.of(4))
        >>> plan.widths
        {'a': 2.0, 'b': 0.5, 'c': 0.5, 'd': 0.5}
        >>> plan.makespan
        15.0
    """

    name = "static"

    def arrange(self, instance: Instance) -> Arrangement:
        """Plans the instance; trials keep their widths to the end."""
        model = instance.model
        widths = static_widths(instance.heights, model.c, model.d, instance.n)
        order = start_order(widths, instance.heights, instance.priority)
        return Arrangement(widths, order, KeepWidths(), replan_at_start=False, name=self.name)
