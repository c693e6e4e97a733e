"""Placement groups: how Ray reserves devices, a bundle of the group for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fluid._imports import try_import
from fluid._logs import logger_of
from fluid.backends.hosts.folders import HERE
from fluid.backends.ray.claims import new_group_name
from fluid.backends.ray.nodes import Node
from fluid.backends.ray.remote import call
from fluid.gpu.assigned import CUDA_S, find_assigned
from fluid.resources import Device

with try_import("Ray", extra="ray"):
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_log = logger_of(__name__)
#: Seconds for a process of Ray's to start and look at its GPU, for which it may ask CUDA.
_LOOK_S = 60.0 + CUDA_S
#: Share of the resource that stands for a machine; it only says where.
PIN_SHARE = 0.001


class GpuView(NamedTuple):
    """What a process sees that Ray gives a GPU.

    Attributes:
        visible: what Ray calls the GPU, as in ``CUDA_VISIBLE_DEVICES``; ``None`` if it does not say.
        token: UUID of the GPU; ``None`` if neither NVML nor CUDA tells.
        memory_bytes: its memory that other processes have left; ``None`` if unknown.
        model: its model; ``None`` if unknown.
        doubt: why it may be another GPU; empty if it is certain.
    """

    visible: str | None
    token: str | None
    memory_bytes: float | None
    model: str | None = None
    doubt: str = ""


@dataclass(slots=True)
class DeviceSlot:
    """Where a device is: a bundle of a placement group, on a node.

    Attributes:
        alone: whether the group holds this device only, so that it can be given back alone.
        node: id of the node.
        view: how processes see the GPU, once one has looked.
        look: the task that looks at the GPU, until it has.
        lost: whether the device cannot be used: its node is gone, or Ray has not replaced it yet.
        drain_told: whether it was told that the node drains.
    """

    device: Device
    group: Any
    bundle: int
    alone: bool
    node: str
    view: GpuView | None = None
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
            self.view = GpuView(*ray.get(self.look, timeout=timeout))
            if self.view.doubt:
                _log.warning("node %s: %s", self.node, self.view.doubt)
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
        view, asked = self.view or GpuView(None, None, None), self.asked
        self.device = replace(
            self.device,
            # By address: nodes of one machine share its memory and its disk.
            host=HERE if node.ip == driver_ip else node.ip,
            memory_bytes=view.memory_bytes if asked.memory_bytes is None else asked.memory_bytes,
            model=asked.model or view.model or node.model,
            tags=(*node.tags, *asked.tags),
        )


class DeviceCounts(NamedTuple):
    """How many devices there are on each node and each machine.

    Attributes:
        slots: what was counted.
        on_node: by id of the node.
        on_machine: by name of the machine, which may have several nodes.
    """

    slots: Mapping[int, DeviceSlot]
    on_node: Counter[str]
    on_machine: Counter[str]

    @classmethod
    def of(cls, slots: Mapping[int, DeviceSlot]) -> DeviceCounts:
        """Counts devices."""
        on_node = Counter(slot.node for slot in slots.values())
        return cls(slots, on_node, Counter(slot.device.host for slot in slots.values()))


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


def _see_gpu() -> GpuView:
    # Not the environment's variable: Ray may have been told to leave it (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES).
    given = next(iter(ray.get_gpu_ids()), None)
    if given is None:
        return GpuView(None, None, None)
    gpu, doubt = find_assigned(str(given))
    if gpu is None:
        return GpuView(str(given), None, None)
    return GpuView(str(given), gpu.token, gpu.available_bytes, gpu.name, doubt)
