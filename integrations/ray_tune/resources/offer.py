"""What a session offers for Tune's resource requests: devices, the nodes of Ray's cluster, the user's thread count."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray

from fluid.backends.hosts.folders import HERE
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.integrations.ray_tune.lane.elastic_lane_trial import runs_elastic
from fluid.integrations.ray_tune.private_api import (
    Trial,
    cluster_may_grow,
    environment_of_job,
    labels_of,
    requested_for_sweep,
    threads_are_of_ray,
)
from fluid.integrations.ray_tune.resources.requests import (
    CPU,
    DEFAULT,
    PRECISION,
    Offer,
    OfferedNode,
    TrialNeeds,
    has_room,
    needs_of,
    omp_threads,
    refusal,
    stays_with_ray,
    trials_at_once,
    with_labels,
)
from fluid.integrations.ray_tune.virtual_time import is_rehearsed
from fluid.resources import available_cores


class ResourceRequests:
    """Answers the requests of one sweep's trials.

    Args:
        executor: runs the trials.
    """

    def __init__(self, executor: FluidExecutor) -> None:
        self._executor = executor
        self._offer: Offer | None = None
        self._is_rehearsed = is_rehearsed(executor)
        #: Whether trainables request resources themselves, by name.
        self._requesting: dict[str, bool] = {}

    def needs(self, trial: Trial, *, is_elastic: bool) -> TrialNeeds:
        """Returns what a trial is given for its request.

        Args:
            trial: Tune's.
            is_elastic: whether it can span several lanes.

        Raises:
            InvalidFieldError: the request is invalid, or asks for more than there is.
        """
        request = trial.placement_group_factory
        wanted = with_labels(request.required_resources, labels_of(request))
        if self._offer is not None:
            try:
                return needs_of(wanted, self._offer, is_elastic=is_elastic)
            except InvalidFieldError:
                pass  # Devices or nodes may have come since.
        self._offer = offer_of(self._executor)
        return needs_of(wanted, self._offer, is_elastic=is_elastic)

    def has_room(self, trial: Trial, others: Iterable[Trial]) -> bool:
        """Whether the user's requests leave room for a trial beside others, as Ray would count them."""
        if not self.limits(trial):
            return True
        beside = [other.placement_group_factory.required_resources for other in others if self.limits(other)]
        request = trial.placement_group_factory.required_resources
        if self._offer is not None and has_room(request, beside, [node.counted for node in self._offer.nodes]):
            return True
        self._offer = offer_of(self._executor)  # Nodes may have come since.
        return has_room(request, beside, [node.counted for node in self._offer.nodes])

    def limits(self, trial: Trial) -> bool:
        """Whether the user requested the resources of a trial, so that they limit how many run at once.

        Tune's own default, of one CPU, does not; nor does anything in a rehearsal, whose machines are not Ray's.
        """
        if self._is_rehearsed:
            return False
        if requested_for_sweep(trial) or trial.placement_group_factory.required_resources != DEFAULT:
            return True
        name = trial.trainable_name
        if name not in self._requesting:  # To look takes Tune a millisecond.
            self._requesting[name] = bool(trial.get_trainable_cls().default_resource_request(trial.config))
        return self._requesting[name]

    def trials_at_once(self, trial: Trial) -> int:
        """Returns how many trials with the same request the session's devices can run at a time."""
        devices = self._executor.max_devices
        if stays_with_ray(trial.placement_group_factory):
            return devices
        return trials_at_once(self.needs(trial, is_elastic=runs_elastic(trial.get_trainable_cls())), devices)


def offer_of(executor: FluidExecutor) -> Offer:
    """Returns what an executor's session offers now; Ray is connected."""
    devices = tuple(executor.devices)
    hosts = {device.host for device in devices}
    nodes = [node for node in _nodes() if not hosts or node.host in hosts]
    return Offer(
        devices=devices,
        nodes=tuple(nodes),
        # As with Ray, the variable of ``ray.init(runtime_env=...)`` comes before that of the driver.
        omp_threads=omp_threads(environment_of_job(), {} if threads_are_of_ray() else os.environ),
        may_grow=executor.max_devices > len(devices),
    )


def require_in_cluster(request: Any) -> None:
    """Checks that Ray's cluster can give all bundles of a request at a time, as Ray would wait for them for ever.

    Raises:
        InvalidFieldError: it never can, and nothing says that it may grow.
    """
    if cluster_may_grow():
        return
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, wanted in request.required_resources.items():
        there = sum(node.get(name, 0.0) for node in nodes)
        if wanted > there + PRECISION:
            reason = (
                f"its {len(request.bundles)} bundles need {wanted:g} {name} in all, and Ray's cluster has {there:g}"
            )
            raise refusal(request.required_resources, reason)
    for bundle in request.bundles:
        if not any(all(node.get(name, 0.0) + PRECISION >= bundle[name] for name in bundle) for node in nodes):
            raise refusal(request.required_resources, f"no node of Ray's cluster has all of its bundle {bundle}")


def _nodes() -> list[OfferedNode]:
    """The nodes of Ray's cluster that are up. The driver's machine has all its cores, whatever Ray was told."""
    up = [node for node in ray.nodes() if node["Alive"]]
    driver = ray.get_runtime_context().get_node_id()
    here = {node["NodeManagerAddress"] for node in up if node["NodeID"] == driver}
    nodes = []
    for node in up:
        resources = with_labels(node["Resources"], node.get("Labels") or {})
        is_here = (
            node["NodeManagerAddress"] in here
        )  # By address, as Fluid's devices: a machine may have several nodes.
        if is_here:
            resources[CPU] = max(resources.get(CPU, 0.0), len(available_cores()))
        host = HERE if is_here else node["NodeManagerAddress"]
        nodes.append(OfferedNode(host, resources, counted=node["Resources"]))
    return nodes
