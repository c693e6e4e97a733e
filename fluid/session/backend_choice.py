"""Makes the backend that an executor runs on, by its name."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from fluid.backends.base import Backend, OutputForwarding
from fluid.elastic.messages import DEFAULT_PROCESS_GROUP
from fluid.errors import InvalidFieldError
from fluid.lane.policy import DEFAULT_POLICY, ROUNDS
from fluid.rehearsal.backend import RehearsalBackend
from fluid.rehearsal.plan import plan_in_force
from fluid.resources import DeviceChoice


def make_backend(
    backend: str | Backend,
    devices: DeviceChoice,
    run_dir: Path,
    sharing: str,
    lane_policy: str | None,
    process_group: str | None,
    *,
    forwards: bool,
    releasable: bool = False,
) -> Backend:
    """Returns the backend to run on.

    Args:
        backend: ``"auto"``, ``"local"``, ``"ray"``, ``"simulated"``, or a backend, which is returned.
        devices: how many devices, or which; ``None`` for all.
        run_dir: folder of the session.
        sharing: how lanes share a GPU, as :class:`fluid.backends.local.LocalBackend` takes it.
        lane_policy: which trial a lane runs next; ``None`` for the default.
        process_group: how the devices of one trial communicate; ``None`` for the default.
        forwards: whether it is to forward what trials print.
        releasable: whether any device may have to be given back.

    Raises:
        InvalidFieldError: the backend does not support an argument; the error names the executor's argument.
    """
    made = _make_backend(backend, devices, run_dir, sharing, lane_policy, process_group, releasable)
    if forwards and isinstance(made, OutputForwarding):
        made.forward_output()
    return made


def _make_backend(
    backend: str | Backend,
    devices: DeviceChoice,
    run_dir: Path,
    sharing: str,
    lane_policy: str | None,
    process_group: str | None,
    releasable: bool,
) -> Backend:
    if (plan := plan_in_force()) is not None:
        virtual = devices if plan.devices is None else plan.devices
        return RehearsalBackend(virtual, source=plan.source, overheads=plan.overheads, lane_policy=lane_policy)
    if not isinstance(backend, str):
        if sharing == "mps" and backend.sharing.way != "mps":
            raise InvalidFieldError("packing", sharing, "pass it to the backend object instead: sharing='mps'")
        if lane_policy == ROUNDS:
            if getattr(backend, "lane_policy", None) not in (None, ROUNDS):
                raise InvalidFieldError("rounds", True, 'needs a backend object made with lane_policy="rounds"')
        elif lane_policy is not None:
            raise InvalidFieldError("lane_policy", lane_policy, "pass it to the backend object instead")
        return backend
    if backend == "simulated":
        if process_group is not None:
            reason = "means nothing to trials that are replayed, not run"
            raise InvalidFieldError("process_group", process_group, reason)
        return RehearsalBackend(devices, lane_policy=lane_policy)
    policy = lane_policy or DEFAULT_POLICY
    group = process_group or DEFAULT_PROCESS_GROUP
    try:
        if backend == "ray" or (backend == "auto" and _ray_is_connected()):
            from fluid.backends.ray import RayBackend

            return RayBackend(
                devices,
                run_dir=run_dir,
                sharing=sharing,
                lane_policy=policy,
                process_group=group,
                releasable=releasable,
            )
        from fluid.backends.local import LocalBackend

        return LocalBackend(devices, run_dir=run_dir, sharing=sharing, lane_policy=policy, process_group=group)
    except InvalidFieldError as error:
        if error.field == "sharing":
            raise InvalidFieldError("packing", error.value, error.reason) from error
        raise


def ray_hides_output() -> bool:
    """Whether the user has told Ray, by ``ray.init(log_to_driver=False)``, not to show what other processes print."""
    if not _ray_is_connected():
        return False
    connection = sys.modules.get("fluid.backends.ray.api")
    if connection is not None and connection.is_ours():
        return False  # Fluid has made the connection; it leaves this to no one else.
    is_driver = sys.modules["ray"]._private.worker.global_worker.mode == sys.modules["ray"].SCRIPT_MODE
    return is_driver and not any(thread.name == "ray_print_logs" for thread in threading.enumerate())


def _ray_is_connected() -> bool:
    """Whether this process is connected to Ray; Ray is not imported to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
