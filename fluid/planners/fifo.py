"""First come, first served: one trial on one device, in order of submission. What tuning does without Fluid."""

from __future__ import annotations

import numpy as np

from fluid.planning.arrangement import Arrangement, KeepWidths
from fluid.planning.instance import Instance
from fluid.planning.planner import Planner
from fluid.planning.runtime_model import FloatArray


class Fifo(Planner):
    """Every trial gets width 1 and keeps it; the order is that of submission."""

    name = "fifo"

    def arrange(self, instance: Instance) -> Arrangement:
        """Returns width 1 for all, in the order given."""
        k = len(instance)
        return Arrangement(np.ones(k), np.arange(k), KeepWidths(), replan_at_start=False, name=self.name)

    def join(self, instance: Instance, others: FloatArray, idle: int) -> Arrangement:
        """Returns the same: a trial waits for a device of its own."""
        return self.arrange(instance)
