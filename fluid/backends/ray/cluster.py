"""Devices of a Ray cluster: the connection, their reservation in placement groups, and which nodes are alive."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fluid._clock import MonotonicClock
from fluid._imports import try_import
from fluid.backends.hosts.folders import HERE
from fluid.backends.hosts.listener import is_reachable
from fluid.backends.ray.remote import call
from fluid.errors import FluidError, InvalidFieldError, require_integer
from fluid.gpu.nvml import find_gpus
from fluid.resources import Cluster, Device

with try_import("Ray", extra="ray") as ray_imports:
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_log = logging.getLogger(__name__)
#: Share of its device's bundle that a lane takes: Fluid, not Ray, decides how many share a device.
_LANE_SHARE = 0.001
#: Share of the resource that stands for a machine; it only says where.
PIN_SHARE = 0.001
#: Seconds for a node to answer before it is taken for dead.
_ANSWER_S = 1.0
#: Seconds for a process to start and report its GPU.
_LOOK_S = 60.0
#: Seconds for Ray to notice that devices which were given back are free.
_NOTICE_S = 3.0
_LOOK_AGAIN_S = 0.05

#: Seconds for Ray to take the devices back, and to end.
_CLOSE_S = 10.0

_connection = threading.Lock()
#: Backends that use the connection, and the job of the connection if one of them made it.
_users = 0
_our_job: str | None = None


@dataclass(slots=True)
class _DeviceSlot:
    """Where a device is: a bundle of a placement group, on a node.

    Attributes:
        visible: what Ray sets ``CUDA_VISIBLE_DEVICES`` to for that GPU; ``None`` if that is not known.
    """

    device: Device
    group: Any
    bundle: int
    node: str
    visible: str | None = None
    lost: bool = False


class RayDevices:
    """Devices of a Ray cluster, reserved until :meth:`close`.

    Joins the cluster that this process is connected to, or that ``RAY_ADDRESS`` names. Without either it starts Ray
    on this machine and ends that again.

    Args:
        devices: see :class:`fluid.backends.ray.backend.RayBackend`.
        timeout: seconds to wait for devices that other jobs use.

    Raises:
        InvalidFieldError: the cluster cannot give as many.
        FluidError: Ray cannot be reached.
    """

    def __init__(self, devices: int | Iterable[Device] | None, timeout: float) -> None:
        ray_imports.check()
        if isinstance(devices, int):
            require_integer("devices", devices, at_least=1)
        elif devices is not None:
            devices = list(Cluster.of(devices).devices)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._slots: dict[int, _DeviceSlot] = {}
        self._groups: list[Any] = []
        self._closed = False
        _connect(devices if isinstance(devices, int) else len(devices or ()))
        try:
            self.node = str(ray.get_runtime_context().get_node_id())
            self.ip = str(self._nodes()[self.node]["NodeManagerAddress"])
            self._take(self._choose(devices))
        except BaseException:
            self.close()
            raise

    # -- devices -------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[Device]:
        """The devices, in order of their index."""
        return [slot.device for _, slot in sorted(self._slots.items())]

    @property
    def hosts(self) -> set[str]:
        """Names of the machines that hold them."""
        return {slot.device.host for slot in self._slots.values()}

    @property
    def spread(self) -> bool:
        """Whether they are on other nodes than the driver's, which can go while it goes on."""
        return any(slot.node != self.node for slot in self._slots.values())

    def __contains__(self, index: object) -> bool:
        return index in self._slots

    def __getitem__(self, index: int) -> Device:
        return self._slots[index].device

    def place_of(self, index: int) -> str:
        """Names what a lane is bound to: lanes in one place are as good as each other."""
        slot = self._slots[index]
        return f"gpu {index}" if slot.device.kind == "gpu" else slot.node

    def visible_for(self, index: int) -> str | None:
        """What ``CUDA_VISIBLE_DEVICES`` is to be for a device; empty to hide every GPU, ``None`` to leave it.

        It is not left to Ray: releases of old give all that share a GPU, of whatever bundle, the node's first.
        """
        slot = self._slots[index]
        return slot.visible if slot.device.kind == "gpu" else ""

    def threads_for(self, index: int) -> int:
        """How many threads a lane of a device should use."""
        mine = self._slots[index]
        if mine.device.kind == "cpu":
            return 1
        cores = self._nodes().get(mine.node, {}).get("Resources", {}).get("CPU", 1)
        return max(1, int(cores) // sum(slot.node == mine.node for slot in self._slots.values()))

    def options_for(self, index: int) -> dict[str, Any]:
        """The options of an actor or task on a device.

        Raises:
            FluidError: the device is gone.
        """
        slot = self._slots[index]
        if slot.lost:
            raise FluidError(f"its node {slot.device.host} is gone")
        strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
        share = {"num_gpus": _LANE_SHARE, "num_cpus": 0} if slot.device.kind == "gpu" else {"num_cpus": _LANE_SHARE}
        return {**share, "scheduling_strategy": strategy}

    def discover(self) -> list[Device]:
        """Reserves the devices of the same kind that are free by now; waits a little for them.

        Returns:
            The devices that have joined, often none.
        """
        kind = self.devices[0].kind
        free = self._free(kind)
        first = max(self._slots) + 1
        known = set(self._slots)
        for index in range(first, first + free):
            with suppress(InvalidFieldError):  # Another job was faster.
                self._take([Device(index, kind=kind)])
        return [device for device in self.devices if device.index not in known]

    # -- nodes that come and go ----------------------------------------------------------------------------

    def check(self, *, probe: bool = False) -> tuple[list[int], list[Device]]:
        """Checks which nodes are alive.

        Args:
            knock: whether to ask them, too: Ray takes up to half a minute to notice that one is gone.

        Returns:
            Devices that were lost, and devices that can be used again: Ray replaces a node that is gone by another
            one, if it has one.
        """
        lost: list[int] = []
        back: list[Device] = []
        with self._lock:
            try:
                nodes = self._nodes()
                awake: dict[str, bool] = {}
                for index, slot in self._slots.items():
                    if slot.lost:
                        if self._moved(slot, nodes):
                            back.append(slot.device)
                    elif not _is_alive(nodes.get(slot.node), awake if probe else None):
                        slot.lost = True
                        lost.append(index)
            except Exception as error:  # Ray itself is gone; its lanes will end, and tell.
                _log.debug("the nodes of the Ray cluster cannot be listed: %s", error)
        return lost, back

    def is_gone(self, host: str) -> bool:
        """Whether all devices of a machine are lost, and with them what it kept in memory."""
        here = [slot for slot in self._slots.values() if slot.device.host == host]
        return bool(here) and all(slot.lost for slot in here)

    def close(self) -> None:
        """Gives the devices back, and ends Ray if this session started it; at most ten seconds.

        Without its control store (GCS) Ray answers no call, for a minute.
        """
        closing = threading.Thread(target=self._close, name="fluid-ray-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            _log.warning("Ray does not answer; its devices are free once it has ended")

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if ray.is_initialized():
            with suppress(Exception):  # Ray may be gone, and the devices with it.
                self._give_back()
        _disconnect()

    def _give_back(self) -> None:
        kind = self.devices[0].kind if self._slots else "cpu"
        due = self._free(kind) + sum(slot.device.kind == kind and not slot.lost for slot in self._slots.values())
        for group in self._groups:
            remove_placement_group(group)
        # The next job is to find them free: Ray takes a moment to notice.
        clock = MonotonicClock()
        until = clock.now() + _NOTICE_S
        while _our_job is None and self._free(kind) < due and clock.now() < until:
            threading.Event().wait(_LOOK_AGAIN_S)

    # -- choosing and taking -------------------------------------------------------------------------------

    def _choose(self, devices: int | Sequence[Device] | None) -> list[Device]:
        if isinstance(devices, Sequence):
            return list(devices)
        kind = "gpu" if _total("gpu") else "cpu"
        if devices is not None:
            return _alike(devices, kind)
        clock = MonotonicClock()
        until = clock.now() + _NOTICE_S
        while not (free := self._free(kind)):
            if clock.now() > until:
                raise InvalidFieldError("devices", devices, _what_there_is(kind, 0))
            threading.Event().wait(_LOOK_AGAIN_S)
        return _alike(free, kind)

    def _take(self, devices: list[Device]) -> None:
        """Reserves devices, and looks up where they are.

        Raises:
            InvalidFieldError: there are not as many, or other jobs do not give them back in time.
        """
        for kind in ("gpu", "cpu"):
            asked = sum(device.kind == kind for device in devices)
            if asked and asked + sum(slot.device.kind == kind for slot in self._slots.values()) > _total(kind):
                raise InvalidFieldError("devices", asked, _what_there_is(kind, self._free(kind)))
        group = placement_group([_bundle(device) for device in devices], strategy="PACK")
        self._groups.append(group)
        if not group.wait(self._timeout):
            self._groups.remove(group)
            remove_placement_group(group)
            kinds = sorted({device.kind for device in devices})
            what = "; ".join(_what_there_is(kind, self._free(kind)) for kind in kinds)
            raise InvalidFieldError("devices", len(devices), f"{what}; waited {self._timeout:g} s")
        nodes = self._nodes()
        where = _bundles(group)
        slots = [_DeviceSlot(device, group, bundle, where[bundle]) for bundle, device in enumerate(devices)]
        looks = {bundle: _look(slot) for bundle, slot in enumerate(slots) if slot.device.kind == "gpu"}
        for bundle, slot in enumerate(slots):
            self._complete(slot, nodes[slot.node], looks.get(bundle))
        # A new dictionary, as another thread may be iterating over the old one.
        self._slots = {**self._slots, **{slot.device.index: slot for slot in slots}}

    def _complete(self, slot: _DeviceSlot, node: dict[str, Any], look: Any) -> None:
        """Fills in the host, memory and visible name of a device."""
        memory = slot.device.memory_bytes
        if look is not None:
            try:
                slot.visible, seen = ray.get(look, timeout=_LOOK_S)
                memory = seen if memory is None else memory
            except Exception as error:
                _log.warning("GPU %d cannot be looked at: %s", slot.device.index, error)
        address = str(node["NodeManagerAddress"])
        # By address: nodes of one machine share its memory and its disk.
        slot.device = replace(slot.device, host=HERE if address == self.ip else address, memory_bytes=memory)

    def _moved(self, slot: _DeviceSlot, nodes: dict[str, Any]) -> bool:
        """Whether a lost device can be used again; updates where it is."""
        node = _bundles(slot.group).get(slot.bundle, "")
        if not _is_alive(nodes.get(node), {}):
            return False
        elsewhere = node != slot.node
        slot.node = node
        self._complete(slot, nodes[node], _look(slot) if elsewhere and slot.device.kind == "gpu" else None)
        slot.lost = False
        return True

    def _nodes(self) -> dict[str, Any]:
        return {str(node["NodeID"]): node for node in ray.nodes()}

    def _free(self, kind: str) -> int:
        """How many whole devices of a kind are not reserved."""
        name = kind.upper()
        try:
            from ray._private.state import available_resources_per_node
        except ImportError:
            return int(ray.available_resources().get(name, 0))
        # A node's leftovers are of no use to the others.
        return sum(int(free.get(name, 0) + 1e-6) for free in available_resources_per_node().values())


def _alike(count: int, kind: str) -> list[Device]:
    return list(Cluster.of(count, kind="gpu" if kind == "gpu" else "cpu").devices)


def _bundle(device: Device) -> dict[str, float]:
    # No CPU beside a GPU: clusters that keep other work off their GPU nodes say that these have none.
    bundle = {device.kind.upper(): 1.0}
    if device.host != HERE:
        bundle[f"node:{device.host}"] = PIN_SHARE
    return bundle


def _bundles(group: Any) -> dict[int, str]:
    """Which node each bundle of a group is on."""
    return {int(bundle): str(node) for bundle, node in placement_group_table(group)["bundles_to_node_id"].items()}


def _total(kind: str) -> int:
    return int(ray.cluster_resources().get(kind.upper(), 0))


def _what_there_is(kind: str, free: int) -> str:
    return f"the Ray cluster has {_total(kind)} {kind.upper()}s, {free} of them free"


def _is_alive(node: dict[str, Any] | None, awake: dict[str, bool] | None) -> bool:
    """Whether a node is alive: as Ray says, and, given ``awake``, as it says itself; answers are kept there."""
    if node is None or not node["Alive"]:
        return False
    if awake is None:
        return True
    if node["NodeID"] not in awake:
        awake[node["NodeID"]] = is_reachable((node["NodeManagerAddress"], node["NodeManagerPort"]), _ANSWER_S)
    return awake[node["NodeID"]]


def _look(slot: _DeviceSlot) -> Any:
    """Starts a process that reports which GPU Ray gives it, all of it, and how much memory that has."""
    strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=slot.bundle)
    return call(_see_gpu, num_gpus=1, scheduling_strategy=strategy)


def _see_gpu() -> tuple[str | None, float | None]:
    gpus = find_gpus()
    return os.environ.get("CUDA_VISIBLE_DEVICES"), gpus[0].memory_bytes if gpus else None


def _connect(cpus: int) -> None:
    global _users, _our_job
    with _connection:
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
                    ray.init(address=address, **options)
                except (ConnectionError, OSError, RuntimeError) as error:
                    raise FluidError(f"Ray at {address!r} cannot be reached: {error}") from error
            _our_job = str(ray.get_runtime_context().get_job_id())
        _users += 1


def _disconnect() -> None:
    global _users, _our_job
    with _connection:
        _users -= 1
        if _users == 0 and _our_job is not None:
            # The user may have started another one since.
            if ray.is_initialized() and str(ray.get_runtime_context().get_job_id()) == _our_job:
                ray.shutdown()
            _our_job = None
