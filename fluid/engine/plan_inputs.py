"""Plan inputs: trials and devices as planners see them, by the present estimates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fluid.devices.models import at_speeds
from fluid.devices.occupancy import Occupancy
from fluid.engine import tuning
from fluid.engine.estimates import Estimates
from fluid.engine.records import TrialRecord
from fluid.planners.instance import Instance
from fluid.resources import Cluster


class PlanInputs:
    """Makes the instances that planners are given.

    Args:
        occupancy: the devices.
        estimates: what trials need, and how fast they are.
    """

    def __init__(self, occupancy: Occupancy, estimates: Estimates) -> None:
        self._occupancy = occupancy
        self._estimates = estimates
        self._cluster: Cluster | None = None

    def forget_devices(self) -> None:
        """Has to be called when devices came or went."""
        self._cluster = None

    def open_cluster(self) -> Cluster:
        """All devices that trials are placed on."""
        if self._cluster is None:
            self._cluster = Cluster(tuple(self._occupancy.open_devices), self._occupancy.memory.watermark)
        return self._cluster

    def instance(self, trials: Sequence[TrialRecord], cluster: Cluster) -> tuple[Instance, list[float]]:
        """The planner's input, and the seconds of work left of each trial."""
        estimates = self._estimates
        of_keys = [estimates.of_key(trial) for trial in trials]
        heights, needs = [estimates.height(trial) for trial in trials], [estimates.need(trial) for trial in trials]
        instance = Instance.build(
            [max(height, tuning.LEAST_HEIGHT_S) for height in heights],
            cluster,
            alpha=[estimate.alpha for estimate in of_keys],
            beta=[estimate.beta for estimate in of_keys],
            c=[estimates.packing(trial) for trial in trials],
            d=[estimates.widest(trial) for trial in trials],
            fused=[estimate.fused for estimate in of_keys],
            epsilon=estimates.epsilon,
            threshold=-math.inf,  # c comes from measurements; alpha must not lower it a second time
            trial_ids=[trial.trial_id for trial in trials],
            priority=[trial.spec.priority for trial in trials],
            sigma=[estimates.sigma(trial) for trial in trials],
            needs=[need if need is None or need.peak_bytes <= cluster.rooms[-1] else None for need in needs],
        )
        return instance, heights

    def at_measured_speeds(
        self, instance: Instance, trials: Sequence[TrialRecord], heights: Sequence[float]
    ) -> Instance:
        """The instance on devices of the speeds that were measured for its trials (:func:`speeds_of_all`).

        Args:
            instance: on devices as they are described.
            trials: its trials.
            heights: seconds of work left of each.
        """
        if not self._occupancy.models.are_several:
            return instance
        work: dict[str, float] = {}
        for trial, height in zip(trials, heights, strict=True):
            key = trial.spec.profile_key
            work[key] = work.get(key, 0.0) + max(height, tuning.LEAST_HEIGHT_S)
        speeds = self._estimates.speeds_of_all(work)
        return instance if speeds is None else replace(instance, cluster=at_speeds(instance.cluster, speeds))
