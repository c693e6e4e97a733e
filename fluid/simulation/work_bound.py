"""How fast the work of a scenario could be done at best."""

from __future__ import annotations

from collections.abc import Iterable

from fluid.planners.bounds import malleable_lower_bound
from fluid.planners.instance import Instance
from fluid.resources import Cluster
from fluid.simulation.scenario import Scenario


def work_bound(scenario: Scenario, cluster: Cluster, seconds: Iterable[float]) -> float:
    """Returns a time, in seconds, that no schedule of independent trials beats.

    Args:
        scenario: the overheads and limits, and the rates of fused trials.
        cluster: the devices.
        seconds: of each trial, alone on a device of speed 1; those of 0 do not count.
    """
    heights = [height for height in seconds if height > 0.0]
    if not heights:
        return 0.0
    alpha, beta, d = scenario.alpha, scenario.beta, scenario.d
    instance = Instance.build(heights, cluster, alpha=alpha, beta=beta, c=scenario.c, d=d)
    if scenario.fused is None:
        return malleable_lower_bound(instance)
    rates = [scenario.fused] * len(heights)
    packs = Instance.build(heights, cluster, alpha=alpha, beta=beta, c=scenario.max_fused, d=d, fused=rates)
    return min(malleable_lower_bound(instance), malleable_lower_bound(packs))
