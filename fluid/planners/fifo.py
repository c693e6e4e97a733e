"""First come, first served: one trial per device, in order of submission, as tuning without Fluid."""

from __future__ import annotations

import numpy as np

from fluid.planning.arrangement import Arrangement, KeepWidths
from fluid.planning.instance import Instance
from fluid.planning.planner import Planner
from fluid.planning.runtime_model import FloatArray


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
