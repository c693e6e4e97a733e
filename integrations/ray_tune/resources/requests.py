"""Resource requests of Ray Tune, and what they mean on Fluid.

A request names amounts: ``CPU``, ``GPU``, ``memory``, and custom resources, among them ``accelerator_type:A100`` and
``node:10.0.0.1``. Fluid gives a trial devices, which are GPUs or CPU cores, and threads (docs/ray_tune.md, Resources).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fluid.errors import InvalidFieldError
from fluid.resources import Device, MemoryNeed, Requires

CPU, GPU, MEMORY = "CPU", "GPU", "memory"
#: Ray sets it in its workers where it is not set, to the CPUs of the actor.
THREADS_VARIABLE = "OMP_NUM_THREADS"
#: Begin the names of resources that Ray itself gives to nodes.
_OF_RAY = (CPU, GPU, MEMORY, "object_store_memory", "node:")
#: What selects labels by more than one value.
_OPERATOR = re.compile(r"=(?:!|in\()")
#: What Tune requests for a trial if the user requests nothing.
DEFAULT = {CPU: 1.0}
#: Begins the names of resources that are models of GPUs.
_MODEL = "accelerator_type:"
#: Amounts are compared up to the precision of Ray's.
PRECISION = 1e-4


class TrialNeeds(NamedTuple):
    """What Fluid gives a trial for its request, as the fields of a :class:`fluid.Trial`.

    Attributes:
        devices: how many devices, or which share of one; ``None``: the engine decides.
        threads: CPU threads; ``None``: the lane's default.
        memory: memory of the device; ``None``: it is measured.
        requires: what the devices must have; ``None``: any will do.
    """

    devices: float | None = None
    threads: int | None = None
    memory: MemoryNeed | None = None
    requires: Requires | None = None


class OfferedNode(NamedTuple):
    """A node of Ray's cluster.

    Attributes:
        host: its name on Fluid's devices.
        resources: what it has in all, by name.
        counted: what Ray counts of it.
    """

    host: str
    resources: Mapping[str, float]
    counted: Mapping[str, float] = {}


class Offer(NamedTuple):
    """What a session can give to trials.

    Attributes:
        devices: those of the session.
        nodes: those of Ray's cluster on which it may run trials.
        omp_threads: threads that the user's OMP_NUM_THREADS gives each trial; ``None`` without one.
        may_grow: whether further nodes may come.
    """

    devices: tuple[Device, ...]
    nodes: tuple[OfferedNode, ...]
    omp_threads: int | None = None
    may_grow: bool = False

    @property
    def on_cpus(self) -> bool:
        """Whether all devices are CPU cores."""
        return all(device.kind == "cpu" for device in self.devices)

    def shortage(self, name: str) -> str:
        """Says that no node has enough of a resource, and what there is."""
        most = max((node.resources.get(name, 0.0) for node in self.nodes), default=0.0)
        if name == MEMORY:
            return f"no node has so much memory; one has {most / 2**30:.3g} GiB at most"
        if most or name == CPU:
            return f"no node has so much of {name}; one has {most:g} at most"
        there = {tag for device in self.devices for tag in device.tags}
        there |= {f"{_MODEL}{device.model}" for device in self.devices if device.model}
        there |= {name for node in self.nodes for name in node.resources if not name.startswith(_OF_RAY)}
        return f"no node has {name}; there is {', '.join(sorted(there)) or 'no custom resource'}"


def with_labels(resources: Mapping[str, float], labels: Mapping[str, str]) -> dict[str, float]:
    """Adds a resource, named after the label and its value, for each label of a node, or of a request for one."""
    return {**resources, **{f"{name}={value}": 1.0 for name, value in labels.items()}}


def refusal(request: Mapping[str, float], reason: str) -> InvalidFieldError:
    """Returns the error about a request that cannot be met."""
    return InvalidFieldError("resources", dict(request), reason)


def stays_with_ray(request: Any) -> bool:
    """Whether a request is for a distributed program of its own, with workers of Ray in further bundles."""
    return bool(len(request.bundles) + request.head_bundle_is_empty > 1)


def needs_of(request: Mapping[str, float], offer: Offer, *, is_elastic: bool) -> TrialNeeds:
    """Returns what a trial with this request is given.

    Args:
        request: amounts by name.
        offer: what there is.
        is_elastic: whether the trial can span several devices.

    Raises:
        InvalidFieldError: an amount is invalid, or more than there is.
    """
    if request == DEFAULT:
        return TrialNeeds(threads=offer.omp_threads)
    for name in request:
        if _OPERATOR.search(name):
            raise refusal(request, f"{name!r} is not supported: a label must have one value")
    cpus, gpus, memory = (request.get(name, 0.0) for name in (CPU, GPU, MEMORY))
    if gpus > 1.0 and not gpus.is_integer():
        raise refusal(request, "GPU must be a whole number, or a fraction of one GPU")
    devices = _devices(gpus)
    if offer.on_cpus and not gpus and (is_elastic or cpus < 1.0):  # Its CPUs are its devices.
        request = {name: amount for name, amount in request.items() if name != CPU}
        devices, cpus = _devices(math.floor(cpus) if cpus > 1.0 else cpus), 0.0
    requires = _requires(request, offer)
    lanes = max(1, math.floor(devices or 1)) if is_elastic else 1
    return TrialNeeds(
        devices=devices,
        threads=offer.omp_threads or (max(1, math.floor(cpus / lanes)) if cpus else None),
        memory=MemoryNeed(persistent_bytes=memory / lanes) if memory and offer.on_cpus else None,
        requires=requires,
    )


def has_room(
    request: Mapping[str, float], others: Sequence[Mapping[str, float]], nodes: Iterable[Mapping[str, float]]
) -> bool:
    """Whether Ray would run a trial beside others, by all that they request but GPUs, of which Fluid decides.

    Args:
        request: that of the trial; empty if the user requested nothing.
        others: those of the trials beside which it would run. Without any, it runs.
        nodes: what Ray counts of each node. What no node has is not counted.
    """
    left = [dict(node) for node in nodes]
    counted = {name for node in left for name in node} - {GPU}
    fits = True
    for wanted in [*others, request]:
        amounts = {name: amount for name, amount in wanted.items() if name in counted}
        room = (node for node in left if all(node.get(name, 0.0) + PRECISION >= amounts[name] for name in amounts))
        node = next(room, None)
        fits = node is not None
        if node is not None:
            node |= {name: node[name] - amounts[name] for name in amounts}
    return fits or not others


def omp_threads(*environments: Mapping[str, str]) -> int | None:
    """Returns the threads that OMP_NUM_THREADS gives, in the first environment that has it; ``None`` for none."""
    value = next((found for variables in environments if (found := variables.get(THREADS_VARIABLE)) is not None), "")
    outermost = value.split(",")[0].strip()  # A list gives the threads of nested parallel regions, too.
    return int(outermost) if outermost.isdecimal() and int(outermost) else None


def trials_at_once(needs: TrialNeeds, devices: int) -> int:
    """Returns how many trials with these needs so many devices can run at a time; one per device if they need none."""
    if needs.devices is None:
        return devices
    if needs.devices < 1.0:
        return devices * math.floor(1.0 / needs.devices + PRECISION)
    return max(1, devices // int(needs.devices))


def _devices(amount: float) -> float | None:
    """The devices for an amount. None at all, or one, leave it to the engine."""
    return None if amount in (0.0, 1.0) else amount


def _requires(request: Mapping[str, float], offer: Offer) -> Requires | None:
    """What the devices must have for a request.

    Raises:
        InvalidFieldError: no node has as much.
    """
    fields: dict[str, Any] = {}
    if request.get(GPU) and not all(device.kind == "gpu" for device in offer.devices):
        fields["kind"] = "gpu"
    tags: list[str] = []
    hosts = all_hosts = {device.host for device in offer.devices}
    for name, amount in request.items():
        model = name.removeprefix(_MODEL) if name.startswith(_MODEL) else None
        if name == GPU:
            continue
        if model and any(Requires(model=model).met_by(device) for device in offer.devices):
            fields["model"] = model
        elif any(name in device.tags for device in offer.devices):
            tags.append(name)
        elif having := {node.host for node in offer.nodes if node.resources.get(name, 0.0) + PRECISION >= amount}:
            hosts = hosts & having
        elif not offer.may_grow:
            raise refusal(request, offer.shortage(name))
        elif model:
            fields["model"] = model
        elif name not in (CPU, MEMORY):
            tags.append(name)
    if not hosts and all_hosts:
        raise refusal(request, "no single node has all of it")
    if hosts != all_hosts:
        fields["host"] = "|".join(sorted(hosts))
    return Requires(**fields, tags=tuple(tags)) if fields or tags else None
