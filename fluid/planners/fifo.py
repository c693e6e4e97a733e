"""First come, first served: one trial per device, in order of submission, as tuning without Fluid."""

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
        """Returns width 1 for all: a trial waits for an idle device."""
        return self.arrange(instance)
