"""Every private name of Ray that the backend uses, in one place.

They were read in the sources of Ray 2.60. A release without one of them is used without what it tells: see each
function.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from fluid._clock import wall_seconds

#: Module and dotted name of each.
AVAILABLE_PER_NODE = ("ray._private.state", "available_resources_per_node")
DRAINING_NODES = ("ray._private.state", "state.get_draining_nodes")
RESOURCE_STATE = ("ray.autoscaler.v2.sdk", "get_cluster_resource_state")
GCS_CLIENT = ("ray._raylet", "GcsClient")
NAMES = (AVAILABLE_PER_NODE, DRAINING_NODES, RESOURCE_STATE, GCS_CLIENT)


def find(module: str, name: str) -> Any | None:
    """Returns a private name of Ray; ``None`` in a release that lacks it."""
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value


def free_resources() -> Mapping[str, Mapping[str, float]] | None:
    """Returns what is free on each node, by node id; ``None`` where only the sum over all nodes can be read."""
    ask = find(*AVAILABLE_PER_NODE)
    return None if ask is None else ask()


def draining_nodes() -> dict[str, float | None]:
    """Returns the nodes that drain, and in how many seconds each is to be gone; ``None`` if at no set time.

    Empty in a release that cannot tell: such nodes are noticed once they are gone.
    """
    ask = find(*DRAINING_NODES)
    if ask is None:
        return {}
    now = wall_seconds()
    # Ray gives milliseconds since 1970, or 0.
    return {node: max(0.0, deadline / 1e3 - now) if deadline else None for node, deadline in ask().items()}


def pending_requests(gcs_address: str) -> list[dict[str, float]]:
    """Returns what tasks and actors wait for, by resource; empty in a release that cannot tell."""
    ask, client = find(*RESOURCE_STATE), find(*GCS_CLIENT)
    if ask is None or client is None:
        return []
    return [dict(one.request.resources_bundle) for one in ask(client(address=gcs_address)).pending_resource_requests]
