"""Nodes of a Ray cluster: which are alive, which are new, which drain, and what is free on them."""

from __future__ import annotations

import base64
import getpass
import json
import os
import pickle
import re
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fluid._clock import MonotonicClock
from fluid._imports import try_import
from fluid._logs import logger_of
from fluid.backends.hosts.folders import HERE
from fluid.backends.hosts.sockets import is_reachable
from fluid.backends.ray.api import free_resources
from fluid.backends.ray.remote import call
from fluid.errors import InvalidFieldError
from fluid.gpu.assigned import CUDA_S, find_assigned
from fluid.gpu.nvml import Gpu
from fluid.resources import Device

with try_import("Ray", extra="ray"):
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


#: Seconds for a node to answer before it is taken for dead.
_ANSWER_S = 1.0
#: Nodes that are asked at the same time.
_MOST_ASKED = 32
#: Seconds after a node has joined in which its devices are taken: Ray lists them some time after it.
_NEW_S = 30.0
#: Seconds for Ray to notice that devices which were given back are free.
_NOTICE_S = 3.0
_LOOK_AGAIN_S = 0.05
#: Resources of every node; others that are not custom ones: of accelerators, addresses and placement groups.
_OWN_RESOURCES = ("CPU", "GPU", "memory", "object_store_memory")
_ACCELERATOR_TYPE = "accelerator_type:"
_ACCELERATOR_LABEL = "ray.io/accelerator-type"
_OF_RAY = re.compile(rf"^(?:node:|{_ACCELERATOR_TYPE})|_group_(?:\d+_)?[0-9a-f]{{16,}}$")
_NODE_ID_LABEL = "ray.io/node-id"
#: Ray adds and subtracts shares of a device.
_ROUNDING = 1e-6


class Node(NamedTuple):
    """A node, as Ray lists it.

    Attributes:
        node_id: Ray's id of it, hexadecimal.
        ip: address of its machine; nodes of one machine share it.
        port: where its node manager (raylet) answers.
        alive: whether it is alive; Ray takes up to half a minute to notice that a node is gone.
        resources: what it has for Ray, also what is reserved.
        labels: its labels.
    """

    node_id: str
    ip: str
    port: int
    alive: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str] = {}

    @property
    def model(self) -> str | None:
        """The accelerator type that Ray knows, as a resource or as a label; ``None`` if it knows none."""
        prefix = _ACCELERATOR_TYPE
        found = [name.removeprefix(prefix) for name in sorted(self.resources) if name.startswith(prefix)]
        return next(iter(found), self.labels.get(_ACCELERATOR_LABEL) or None)

    @property
    def tags(self) -> tuple[str, ...]:
        """Names of its custom resources, and its labels as ``name=value``."""
        custom = [name for name in self.resources if name not in _OWN_RESOURCES and not _OF_RAY.search(name)]
        labels = [f"{name}={value}" for name, value in self.labels.items() if name != _NODE_ID_LABEL]
        return tuple(sorted(custom + labels))

    @property
    def object_store_bytes(self) -> float:
        """Most bytes that Ray's object store may take of its machine's shared memory."""
        return float(self.resources.get("object_store_memory", 0.0))

    def count(self, kind: str) -> int:
        """Returns how many whole devices of a kind it has."""
        return int(self.resources.get(kind.upper(), 0))


class NodeChanges(NamedTuple):
    """What has changed since the last check.

    Attributes:
        lost: indices of devices whose node is gone.
        back: lost devices that can be used again: Ray has replaced their node.
        joined: devices that Ray has given since: on nodes that are new, or that were asked for.
        draining: index of each device whose node drains, told once, and in how many seconds the node goes.
    """

    lost: Sequence[int] = ()
    back: Sequence[Device] = ()
    joined: Sequence[Device] = ()
    draining: Sequence[tuple[int, float]] = ()

    @classmethod
    def merged(cls, changes: Iterable[NodeChanges]) -> NodeChanges:
        """Returns several checks' changes as one's."""
        return cls(*([one for part in parts for one in part] for parts in zip(cls(), *changes, strict=True)))


class NewNodes:
    """Nodes that have joined since the session began; each counts as new for a while, see :data:`_NEW_S`.

    Args:
        known: ids of the nodes that were there.
    """

    def __init__(self, known: Iterable[str]) -> None:
        self._known = set(known)
        self._clock = MonotonicClock()
        self._until: dict[str, float] = {}

    def look(self, nodes: Mapping[str, Node], drains: Container[str]) -> list[Node]:
        """Returns the new nodes that are alive and do not drain.

        Args:
            nodes: all nodes, by id.
            drains: ids of those that drain.
        """
        now = self._clock.now()
        self._until |= dict.fromkeys(nodes.keys() - self._known, now + _NEW_S)
        self._known |= nodes.keys()
        self._until = {name: until for name, until in self._until.items() if until > now}
        return [nodes[name] for name in self._until if name in nodes and nodes[name].alive and name not in drains]

    def forget(self, node: str) -> None:
        """Makes a node, given by its id, count as new no longer."""
        self._until.pop(node, None)


def list_nodes() -> dict[str, Node]:
    """Returns the nodes by id, also those that are gone."""
    return {
        entry["NodeID"]: Node(
            str(entry["NodeID"]),
            str(entry["NodeManagerAddress"]),
            int(entry["NodeManagerPort"]),
            bool(entry["Alive"]),
            entry.get("Resources", {}),
            entry.get("Labels", {}),
        )
        for entry in ray.nodes()
    }


def unreachable(nodes: Iterable[Node]) -> set[str]:
    """Asks nodes whether they are there, all at once; returns the ids of those that do not answer within a second."""
    asked = list(nodes)
    if not asked:
        return set()
    with ThreadPoolExecutor(min(_MOST_ASKED, len(asked)), "fluid-ray-probe") as threads:
        answers = threads.map(lambda node: is_reachable((node.ip, node.port), _ANSWER_S), asked)
        return {node.node_id for node, answer in zip(asked, answers, strict=True) if not answer}


def total(kind: str) -> int:
    """Returns how many devices of a kind the cluster has."""
    return int(ray.cluster_resources().get(kind.upper(), 0))


def require_total(devices: Sequence[Device]) -> None:
    """Refuses devices that the cluster does not have, by a call to Ray.

    Raises:
        InvalidFieldError: it has fewer of a kind.
    """
    for kind in ("gpu", "cpu"):
        asked = sum(device.kind == kind for device in devices)
        if asked and asked > total(kind):
            raise InvalidFieldError("devices", asked, describe(kind, free(kind)))


def free(kind: str) -> int:
    """Returns how many whole devices of a kind are not reserved."""
    by_node = free_by_node(kind)
    return int(ray.available_resources().get(kind.upper(), 0)) if by_node is None else sum(by_node.values())


def wait_for_free(kind: str, count: int) -> int:
    """Waits until so many devices are free, as Ray takes a moment to notice what was given back; returns how many are.

    It waits at most :data:`_NOTICE_S` seconds.
    """
    clock = MonotonicClock()
    until = clock.now() + _NOTICE_S
    while (there := free(kind)) < count and clock.now() < until:
        threading.Event().wait(_LOOK_AGAIN_S)
    return there


def free_by_node(kind: str) -> Mapping[str, int] | None:
    """Returns how many whole devices of a kind are not reserved, by node id; ``None`` where Ray cannot tell."""
    resources = free_resources()
    if resources is None:
        return None
    # A node's leftovers are of no use to the others.
    return {node: int(there.get(kind.upper(), 0) + _ROUNDING) for node, there in resources.items()}


def describe(kind: str, free: int) -> str:
    """Says how many devices of a kind there are, and how many of them are free."""
    return f"the Ray cluster has {total(kind)} {kind.upper()}s, {free} of them free"


# -- placement -----------------------------------------------------------------------------------
#
# Placement groups: how Ray reserves devices, a bundle of the group for each.


_log = logger_of(__name__)
#: Seconds for a process of Ray's to start and look at its GPU, for which it may ask CUDA.
_LOOK_S = 60.0 + CUDA_S
#: Share of the resource that stands for a machine; it only says where.
PIN_SHARE = 0.001


@dataclass(slots=True)
class DeviceSlot:
    """Where a device is: a bundle of a placement group, on a node.

    Attributes:
        alone: whether the group holds this device only, so that it can be given back alone.
        node: id of the node.
        visible: what Ray calls the GPU, as in ``CUDA_VISIBLE_DEVICES``, once a process has looked; ``None`` if Ray does
            not say.
        gpu: the GPU, as that process has seen it; ``None`` if neither NVML nor CUDA tells.
        look: the task that looks at the GPU, until it has.
        lost: whether the device cannot be used: its node is gone, or Ray has not replaced it yet.
        drain_told: whether it was told that the node drains.
    """

    device: Device
    group: Any
    bundle: int
    alone: bool
    node: str
    visible: str | None = None
    gpu: Gpu | None = None
    look: Any = None
    lost: bool = False
    drain_told: bool = False
    #: The device as it was asked for, whatever node it is on.
    asked: Device = field(init=False)

    def __post_init__(self) -> None:
        self.asked = self.device

    @property
    def strategy(self) -> Any:
        """Where Ray is to start what runs on the device."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)

    def begin_look(self) -> None:
        """Starts a task that looks at the GPU; does nothing for a CPU."""
        if self.device.kind == "gpu":
            # The whole GPU: Ray tells the tasks that share one the same number.
            self.look = call(_see_gpu, num_gpus=1, scheduling_strategy=self.strategy)

    def end_look(self, timeout: float) -> bool:
        """Takes over what the task has seen; returns whether it has ended.

        Args:
            timeout: seconds to wait for it.
        """
        if self.look is None:
            return True
        ready, _ = ray.wait([self.look], timeout=timeout, fetch_local=False)
        if not ready:
            return False
        try:
            self.visible, self.gpu, doubt = ray.get(self.look, timeout=timeout)
            if doubt:
                _log.warning("node %s: %s", self.node, doubt)
        except Exception as error:
            _log.warning("a GPU of node %s cannot be looked at: %s", self.node, error)
        self.look = None
        return True

    def await_look(self) -> None:
        """Waits until the task has seen the GPU, and says so if that takes too long: then no lane can use it."""
        if not self.end_look(_LOOK_S):
            _log.warning("a GPU of node %s was not looked at within %g s, and cannot be used", self.node, _LOOK_S)

    def settle(self, node: Node, driver_ip: str) -> None:
        """Names the device's machine and fills in its memory, model and tags, once its node is known.

        What the user gave holds. The rest is this node's: it may replace one of another model.
        """
        gpu, asked = self.gpu, self.asked
        self.device = replace(
            self.device,
            # By address: nodes of one machine share its memory and its disk.
            host=HERE if node.ip == driver_ip else node.ip,
            memory_bytes=asked.memory_bytes if asked.memory_bytes is not None or gpu is None else gpu.available_bytes,
            model=asked.model or (gpu and gpu.name) or node.model,
            tags=(*node.tags, *asked.tags),
        )


class DeviceCounts(NamedTuple):
    """How many devices there are on each machine.

    Attributes:
        slots: what was counted.
        on_machine: by name of the machine, which may have several nodes.
    """

    slots: Mapping[int, DeviceSlot]
    on_machine: Counter[str]

    @classmethod
    def of(cls, slots: Mapping[int, DeviceSlot]) -> DeviceCounts:
        """Counts devices."""
        return cls(slots, Counter(slot.device.host for slot in slots.values()))


def reserve(devices: Sequence[Device]) -> Any:
    """Asks Ray for a placement group of these devices, on as few nodes as possible, and does not wait for it.

    Its name tells the drivers of other sessions who holds the devices.
    """
    return placement_group([_bundle(device) for device in devices], strategy="PACK", name=new_group_name())


def release(group: Any) -> None:
    """Gives a placement group back, or withdraws it."""
    remove_placement_group(group)


def places(group: Any) -> dict[int, str]:
    """Returns the node of each bundle that Ray has placed, by id; ``""`` for the others."""
    return {int(bundle): str(node or "") for bundle, node in placement_group_table(group)["bundles_to_node_id"].items()}


def is_placed(group: Any) -> bool:
    """Whether Ray has given all that a placement group asks for."""
    return bool(placement_group_table(group)["state"] == "CREATED")


def _bundle(device: Device) -> dict[str, float]:
    # No CPU beside a GPU: clusters that keep other work off their GPU nodes say that these have none.
    bundle = {device.kind.upper(): 1.0}
    if device.host != HERE:
        bundle[f"node:{device.host}"] = PIN_SHARE
    return bundle


def _see_gpu() -> tuple[str | None, Gpu | None, str]:
    """What Ray calls the GPU that it gives this process, the GPU, and why it may be another one."""
    # Not the environment's variable: Ray may have been told to leave it (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES).
    given = next(iter(ray.get_gpu_ids()), None)
    if given is None:
        return None, None, ""
    return (str(given), *find_assigned(str(given)))


# -- bundles -------------------------------------------------------------------------------------
#
# Tells the code of a lane which bundles of placement groups its devices are, so that it can start Ray actors there.


#: Environment variable of a lane.
VARIABLE = "FLUID_RAY_BUNDLES"


class Bundle(NamedTuple):
    """One device: a bundle of a placement group.

    Attributes:
        group: the pickled placement group.
        number: the bundle's in it.
    """

    group: bytes
    number: int


def variables_of(group: Any, number: int) -> tuple[tuple[str, str], ...]:
    """Returns the environment variable that tells a lane the bundle of its device: a list, as JSON."""
    return ((VARIABLE, json.dumps([[base64.b64encode(pickle.dumps(PlacementGroup(group.id))).decode(), number]])),)


def bundles_of_lane() -> tuple[Bundle, ...]:
    """Returns the bundles of this lane's devices; none where Fluid does not have them from Ray."""
    told = json.loads(os.environ.get(VARIABLE, "[]"))
    return tuple(Bundle(base64.b64decode(group), number) for group, number in told)


def new_group_name() -> str:
    """Returns a name for a placement group of this process; no two are the same."""
    user = "unknown"
    with suppress(Exception):  # A container's user may have no name.
        user = getpass.getuser()
    return f"fluid/{user}/{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(8)}"
