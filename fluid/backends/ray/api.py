"""Every private name of Ray that the backend uses, in one place.

They were read in the sources of Ray 2.60. A release without one of them is used without what it tells: see each
function.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from fluid._clock import wall_seconds
from fluid._imports import try_import
from fluid.errors import FluidError
from fluid.processes.lasting_thread import call_in_lasting_thread

with try_import("Ray", extra="ray") as ray_imports:
    import ray


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


# -- connection ----------------------------------------------------------------------------------
#
# The driver's connection to Ray: joins a cluster, or starts Ray on this machine and ends it again.


_lock = threading.Lock()
#: Backends that use the connection, and the job of the connection if one of them made it.
_users = 0
_our_job: str | None = None


def connect(cpus: int) -> None:
    """Joins the cluster that this process is connected to, or that ``RAY_ADDRESS`` names, or starts Ray here.

    Args:
        cpus: CPUs that Ray is to have at least where it is started here.

    Raises:
        MissingDependencyError: Ray is not installed.
        FluidError: Ray cannot be reached.
    """
    global _users, _our_job
    ray_imports.check()
    with _lock:
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS") or "local"
            if address.startswith("ray://"):
                raise FluidError(f"RAY_ADDRESS={address!r}: lanes cannot connect to a Ray Client; run on a node of it")
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if address == "local":
                options |= {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Of what will change in Ray, which is none of the user's concern.
                try:
                    call_in_lasting_thread(lambda: ray.init(address=address, **options))
                except (ConnectionError, OSError, RuntimeError) as error:
                    raise FluidError(f"Ray at {address!r} cannot be reached: {error}{_token_hint()}") from error
            _our_job = str(ray.get_runtime_context().get_job_id())
        _users += 1


def is_ours() -> bool:
    """Whether a backend of this process made the connection, and ends it with the last backend that uses it."""
    return _our_job is not None


def gcs_address() -> str:
    """Returns the address at which further processes, such as trials, join the cluster."""
    return str(ray.get_runtime_context().gcs_address)


def has_runtime_env() -> bool:
    """Whether Ray gives the processes of this job another environment than the driver has (``runtime_env``)."""
    return bool(ray.get_runtime_context().runtime_env)


def disconnect() -> None:
    """Ends one backend's use of the connection, and with the last one Ray, if a backend started it."""
    global _users, _our_job
    with _lock:
        _users -= 1
        if _users == 0 and _our_job is not None:
            # The user may have started another one since.
            if ray.is_initialized() and str(ray.get_runtime_context().get_job_id()) == _our_job:
                ray.shutdown()
            _our_job = None


def _token_hint() -> str:
    """What to try where Ray has made a token for this user: without it a cluster that asks for it does not answer."""
    has_token = os.path.exists(os.path.expanduser("~/.ray/auth_token"))
    if not has_token or os.environ.get("RAY_AUTH_MODE"):
        return ""
    return "; if the cluster was started with token authentication, set RAY_AUTH_MODE=token"
