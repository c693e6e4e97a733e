"""Nodes of a Ray cluster: which are alive, which are new, which drain, and what is free on them."""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from fluid._clock import MonotonicClock
from fluid._imports import try_import
from fluid.backends.hosts.listener import is_reachable
from fluid.backends.ray.private_api import free_resources
from fluid.errors import InvalidFieldError
from fluid.resources import Device

with try_import("Ray", extra="ray"):
    import ray

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
