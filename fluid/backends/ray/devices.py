"""Devices of a Ray cluster: their reservation in placement groups, and what becomes of them as nodes come and go.

The set that is asked for at the start is one group. A group can neither grow nor release a bundle, so every device that
is taken later is a group of its own, which can be given back alone. Where a deadline sizes the session, all are. The
first set can be given back as a whole.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fluid._imports import try_import
from fluid._logs import logger_of
from fluid.backends.ray import api as connection
from fluid.backends.ray.api import draining_nodes
from fluid.backends.ray.nodes import (
    DeviceCounts,
    DeviceSlot,
    NewNodes,
    Node,
    NodeChanges,
    free,
    free_by_node,
    is_placed,
    list_nodes,
    places,
    release,
    reserve,
    unreachable,
    wait_for_free,
)
from fluid.backends.ray.other_jobs import DEFAULT_TIMEOUT_S, choose_devices, not_given, warn_of_fewer
from fluid.errors import InvalidFieldError, require_integer
from fluid.resources import Cluster, Device, DeviceKind

with try_import("Ray", extra="ray"):
    import ray


# -- pending -------------------------------------------------------------------------------------
#
# Devices that are asked for while a session runs: pending placement groups of one device each.
#
# A pending group is also what makes Ray's autoscaler start a node.


class PendingDevices:
    """Groups of one device each, until the device can be used. Its methods call Ray, and wait for no device.

    Args:
        kind: of the devices.
        most: most devices that the session may hold; ``None`` for no limit.
    """

    def __init__(self, kind: DeviceKind, most: int | None = None) -> None:
        self._kind: DeviceKind = kind
        self._most = most
        #: Those that the scaling policy has asked for, and those for what was seen to be free on new nodes.
        self._asked: list[Any] = []
        self._offered: list[Any] = []
        #: Those that Ray has placed, while a task looks at the GPU.
        self._placed: list[DeviceSlot] = []

    def ask(self, total: int, held: int) -> None:
        """Asks for the devices that the scaling policy misses, and withdraws those that it does not miss any more.

        Args:
            total: devices to hold in all.
            held: those that have joined.
        """
        waiting = _unplaced(self._asked)
        coming = len(self._placed) + len(self._offered) + len(self._asked) - len(waiting)
        self._resize(self._asked, waiting, max(0, total - held - coming))

    def offer(self, count: int, held: int) -> None:
        """Asks for devices that are free on new nodes, less those that the scaling policy asks for.

        Args:
            count: how many are free there.
            held: devices that have joined.
        """
        waiting = _unplaced(self._offered)
        count -= len(self._asked)
        if self._most is not None:
            coming = len(self._placed) + len(self._asked) + len(self._offered) - len(waiting)
            count = min(count, self._most - held - coming)
        self._resize(self._offered, waiting, max(0, count))

    def count_on(self, node: str) -> int:
        """Returns how many devices Ray has placed on a node that cannot be used yet."""
        return sum(slot.node == node for slot in self._placed)

    def take(self, nodes: Mapping[str, Node]) -> list[DeviceSlot]:
        """Returns the devices that can be used by now, which are the caller's from now on; each has index 0.

        Args:
            nodes: all nodes, by id.
        """
        for groups in (self._asked, self._offered):
            for group in [group for group in groups if is_placed(group)]:
                groups.remove(group)
                slot = DeviceSlot(Device(0, kind=self._kind), group, 0, True, places(group)[0])
                self._placed.append(slot)
                slot.begin_look()
        usable = []
        for slot in list(self._placed):
            node = nodes.get(slot.node)
            if (node is not None and not node.alive) or not slot.node:  # It went before it was used.
                self._placed.remove(slot)
                release(slot.group)
            elif node is not None and slot.end_look(0.0):
                self._placed.remove(slot)
                usable.append(slot)
        return usable

    def close(self) -> None:
        """Withdraws all, and gives back what Ray has placed."""
        for group in (*self._asked, *self._offered, *(slot.group for slot in self._placed)):
            release(group)

    def _resize(self, groups: list[Any], waiting: list[Any], count: int) -> None:
        """Makes it ``count`` groups that wait; those that Ray has just placed are kept."""
        for group in waiting[count:]:
            groups.remove(group)
            release(group)
        groups += [reserve([Device(0, kind=self._kind)]) for _ in range(count - len(waiting))]


def _unplaced(groups: list[Any]) -> list[Any]:
    """The groups that Ray has not placed."""
    return [group for group in groups if not is_placed(group)]


# -- devices -------------------------------------------------------------------------------------


_log = logger_of(__name__)
#: Seconds left to a node that drains without a deadline.
NO_DEADLINE_S = 86_400.0
#: Seconds for Ray to take the devices back, and to end.
CLOSE_S = 10.0


class RayDevices:
    """Devices of a Ray cluster, reserved until :meth:`close`.

    Joins the cluster that this process is connected to, or that ``RAY_ADDRESS`` names. Without either it starts Ray
    on this machine and ends that again.

    The properties and look-ups never call Ray. What calls Ray says so; it may hang for a minute where Ray's control
    store (GCS) is gone, so none of it belongs in the thread of the session.

    Args:
        devices: see :class:`fluid.backends.ray.backend.RayBackend`.
        timeout: seconds to wait for devices that other jobs use; ``None`` as for the backend.
        most: most devices to hold if the session scales, so that nodes may still come; ``None`` if it does not.
        alone: whether each device is a group of its own from the start, so that all can be given back.

    Attributes:
        node: id of the driver's node.
        ip: its address.

    Raises:
        InvalidFieldError: the cluster cannot give as many.
        FluidError: Ray cannot be reached.
    """

    def __init__(
        self, devices: int | Iterable[Device] | None, timeout: float | None, most: int | None, alone: bool
    ) -> None:
        if isinstance(devices, int):
            require_integer("devices", devices, at_least=1)
        elif devices is not None:
            devices = list(Cluster.of(devices).devices)
        count = devices if isinstance(devices, int) else len(devices or ())
        if most is not None and count > most:
            raise InvalidFieldError("autoscale", most, f"is less than the {count} devices to begin with")
        self._timeout = timeout
        self._patience = DEFAULT_TIMEOUT_S if timeout is None else timeout
        self._most = most
        #: Held by what calls Ray.
        self._lock = threading.Lock()
        #: Replaced as a whole when a device comes or goes, as other threads may iterate over it.
        self._slots: dict[int, DeviceSlot] = {}
        self._counted: DeviceCounts | None = None
        self._groups: list[Any] = []
        self._nodes: dict[str, Node] = {}
        self._kind: DeviceKind = "cpu"
        self._pending = PendingDevices(self._kind, most)
        #: The index of the next device; none is given twice.
        self._next = 0
        self._takes_new = devices is None
        self._closed = False
        connection.connect(count)
        try:
            self.node = str(ray.get_runtime_context().get_node_id())
            self._nodes = list_nodes()
            self.ip = self._nodes[self.node].ip
            self._new_nodes = NewNodes(self._nodes)
            while not self._begin(devices, alone):
                pass  # Other jobs were faster.
        except BaseException:
            self.close()
            raise

    # -- look-ups ------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[Device]:
        """The devices, in order of their index."""
        return [slot.device for _, slot in sorted(self._slots.items())]

    @property
    def hosts(self) -> set[str]:
        """Names of the machines that hold them."""
        return set(self._counts.on_machine)

    @property
    def _counts(self) -> DeviceCounts:
        # Made anew only if devices have come, gone or moved: it is asked for at every turn of the driver.
        if self._counted is None or self._counted.slots is not self._slots:
            self._counted = DeviceCounts.of(self._slots)
        return self._counted

    def __contains__(self, index: object) -> bool:
        return index in self._slots

    def __getitem__(self, index: int) -> Device:
        return self._slots[index].device

    def node_of(self, index: int) -> str:
        """Returns the id of the node that holds a device."""
        return self._slots[index].node

    def bundle_of(self, index: int) -> tuple[Any, int]:
        """Returns the placement group that holds a device, and its bundle there."""
        return self._slots[index].group, self._slots[index].bundle

    def node_at(self, node: str) -> Node:
        """Returns a node, given its id, also one that is gone."""
        return self._nodes[node]

    def gpu_token(self, index: int) -> str | None:
        """Returns the UUID of a GPU, as its node's NVML names it; ``None`` for a CPU, or without NVML."""
        gpu = self._slots[index].gpu
        return None if gpu is None else gpu.token

    def visible_for(self, index: int) -> str | None:
        """Returns what ``CUDA_VISIBLE_DEVICES`` is to be for a device.

        It is not left to Ray: old releases give all that share a GPU, of whatever bundle, the node's first.

        Returns:
            The value; empty to hide every GPU, ``None`` to leave it.
        """
        slot = self._slots[index]
        return "" if slot.device.kind == "cpu" else slot.visible

    def threads_for(self, index: int) -> int:
        """Returns how many threads a lane of a device should use, where ``OMP_NUM_THREADS`` does not say."""
        mine = self._slots[index]
        if mine.device.kind == "cpu":
            return 1
        node = self._nodes[mine.node]  # All its GPUs count, however many are the session's: that number changes.
        return max(1, node.count("cpu") // max(1, node.count("gpu")))

    def is_lost(self, index: int) -> bool:
        """Whether a device's node is gone."""
        return self._slots[index].lost

    def is_gone(self, host: str) -> bool:
        """Whether a machine is gone, or all its devices are lost, and with them what it kept in memory."""
        here = [slot for slot in self._slots.values() if slot.device.host == host]
        nodes = [node for node in self._nodes.values() if node.ip == host]
        return all(slot.lost for slot in here) if here else bool(nodes) and not any(node.alive for node in nodes)

    def can_give_back(self, index: int) -> bool:
        """Whether a device was taken alone, after the start, so that it can be given back alone."""
        return index in self._slots and self._slots[index].alone

    # -- more and fewer devices, by calls to Ray -----------------------------------------------------------

    def discover(self) -> list[Device]:
        """Reserves the devices of the same kind that are free by now, by calls to Ray; waits a little for them.

        Returns:
            The devices that have joined, often none.
        """
        found = []
        for _ in range(free(self._kind)):
            with suppress(InvalidFieldError):  # Another job was faster.
                found += self._take([Device(0, kind=self._kind)], alone=True, is_new=True)
        return found

    def ask(self, total: int) -> None:
        """Asks Ray for devices, and waits for none: each joins when Ray gives it, see :meth:`check`.

        This is also what makes Ray's autoscaler start nodes.

        Args:
            total: devices to hold in all; lost ones count, as Ray tries to replace them. What was asked for before and
                is not among them is withdrawn.
        """
        with self._lock:
            if not self._closed:
                self._pending.ask(total, len(self._slots))

    def give_back(self, index: int) -> None:
        """Gives Ray a device back, by a call to Ray, once all of its group are given back. Its lanes must have ended.

        Raises:
            InvalidFieldError: there is no such device.
        """
        with self._lock:
            slot = self._slots.get(index)
            if slot is None:
                raise InvalidFieldError("index", index, "Ray has not given it")
            self._slots = {number: other for number, other in self._slots.items() if number != index}
            # It is not to be taken again at once.
            self._new_nodes.forget(slot.node)
            if all(other.group is not slot.group for other in self._slots.values()):
                self._groups.remove(slot.group)
                release(slot.group)

    # -- nodes that come and go ----------------------------------------------------------------------------

    def check(self, *, probe: bool = False) -> NodeChanges:
        """Checks the nodes, by calls to Ray, and takes the devices of new nodes if all devices were asked for.

        Args:
            probe: whether to ask the nodes, too: Ray takes up to half a minute to notice that one is gone.
        """
        lost: list[int] = []
        back: list[Device] = []
        joined: list[Device] = []
        draining: list[tuple[int, float]] = []
        with self._lock:
            if self._closed:
                return NodeChanges()
            try:
                nodes = list_nodes()
                self._nodes = {**self._nodes, **nodes}
                self._check_slots(nodes, lost, back, probe=probe)
                drains = draining_nodes()
                draining = self._drains_to_tell(drains, {device.index for device in back})
                joined = self._take_placed(nodes)
                self._request_new(nodes, drains)
            except Exception as error:  # Ray itself is gone; its lanes will end, and tell.
                _log.debug("the nodes of the Ray cluster cannot be listed: %s", error)
        return NodeChanges(lost, back, joined, draining)

    def _check_slots(self, nodes: Mapping[str, Node], lost: list[int], back: list[Device], *, probe: bool) -> None:
        alive = {name for name, node in nodes.items() if node.alive}
        moved = [(slot, self._moved(slot, alive)) for slot in self._slots.values() if slot.lost]
        asked = {slot.node for slot in self._slots.values()} if probe else set()
        # A node that replaces another is asked, too: Ray may not have noticed yet that it is gone.
        asked |= {node for _, node in moved if node is not None}
        alive -= unreachable(nodes[node] for node in asked & alive)
        for index, slot in self._slots.items():
            if not slot.lost and slot.node not in alive:
                slot.lost = True
                lost.append(index)
        for slot, node in moved:
            if node in alive and self._has_moved(slot, nodes[node]):
                back.append(slot.device)

    def _moved(self, slot: DeviceSlot, alive: set[str]) -> str | None:
        """The live node that a lost device is on by now, if any."""
        node = places(slot.group).get(slot.bundle, "")
        return node if node in alive else None

    def _has_moved(self, slot: DeviceSlot, node: Node) -> bool:
        """Whether a lost device can be used again; updates where it is."""
        if node.node_id != slot.node:
            slot.node, slot.drain_told = node.node_id, False
            slot.visible = slot.gpu = None
            slot.begin_look()
        if not slot.end_look(0.0):
            return False
        slot.settle(node, self.ip)
        slot.lost = False
        self._slots = dict(self._slots)
        return True

    def _request_new(self, nodes: Mapping[str, Node], drains: Container[str]) -> None:
        """Asks for the devices that are free on nodes which have joined since the session began."""
        new = self._new_nodes.look(nodes, drains) if self._takes_new else ()
        there = free_by_node(self._kind) if new else None
        unreserved = 0
        for node in new:
            held = sum(slot.node == node.node_id for slot in self._slots.values())
            most = node.count(self._kind) - held - self._pending.count_on(node.node_id)
            unreserved += most if there is None else min(most, there.get(node.node_id, 0))
        # Ray places the bundles first that were on nodes which are gone.
        lost = sum(slot.lost for slot in self._slots.values())
        self._pending.offer(max(0, unreserved - lost), len(self._slots))

    def _take_placed(self, nodes: Mapping[str, Node]) -> list[Device]:
        """Takes over the devices that Ray has given since."""
        came = self._pending.take(nodes)
        for slot in came:
            slot.device = replace(slot.device, index=self._next)
            self._next += 1
            slot.settle(nodes[slot.node], self.ip)
            self._groups.append(slot.group)
        self._slots = {**self._slots, **{slot.device.index: slot for slot in came}}
        return [slot.device for slot in came]

    def _drains_to_tell(self, drains: Mapping[str, float | None], back: set[int]) -> list[tuple[int, float]]:
        told = []
        for index, slot in self._slots.items():
            if slot.node in drains and not (slot.lost or slot.drain_told or index in back):
                left = drains[slot.node]
                told.append((index, NO_DEADLINE_S if left is None else left))
                slot.drain_told = True
        return told

    # -- the end -------------------------------------------------------------------------------------------

    def close(self, within: float = CLOSE_S) -> None:
        """Gives the devices back, and ends Ray if this session started it.

        Args:
            within: seconds to wait for that. Without its control store (GCS) Ray answers no call, for a minute.
        """
        closing = threading.Thread(target=self._close, name="fluid-ray-close", daemon=True)
        closing.start()
        closing.join(within)
        if closing.is_alive():
            _log.warning("Ray does not answer; its devices are free once it has ended")

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if ray.is_initialized():
            with suppress(Exception):  # Ray may be gone, and the devices with it.
                self._give_all_back()
        connection.disconnect()

    def _give_all_back(self) -> None:
        due = free(self._kind) + sum(slot.device.kind == self._kind and not slot.lost for slot in self._slots.values())
        self._pending.close()
        for group in self._groups:
            release(group)
        if not connection.is_ours():  # The next job is to find them free.
            wait_for_free(self._kind, due)

    # -- choosing and taking -------------------------------------------------------------------------------

    def _begin(self, devices: int | Sequence[Device] | None, alone: bool) -> bool:
        """Takes the devices to begin with; returns whether it has some. Without, it is to be called again."""
        chosen = choose_devices(devices, self._most, self._timeout)
        self._kind = chosen[0].kind
        self._pending = PendingDevices(self._kind, self._most)
        self._next = 1 + max(device.index for device in chosen)
        try:
            for together in [[device] for device in chosen] if alone else [chosen]:
                self._take(together, alone=alone)
        except InvalidFieldError:
            if devices is not None:
                raise
        if devices is None and self._slots:
            warn_of_fewer(self._kind, len(self._slots))
        return bool(self._slots)

    def _take(self, devices: list[Device], *, alone: bool, is_new: bool = False) -> list[Device]:
        """Reserves devices in one group, and looks up where they are.

        Args:
            devices: in the order of the bundles.
            alone, is_new: whether it is one device, and whether that was not asked for at the start; it gets an index.

        Raises:
            InvalidFieldError: other jobs do not give them back in time.
        """
        group = reserve(devices)
        if not group.wait(self._patience):
            release(group)
            raise not_given(devices, self._patience)
        nodes, where = list_nodes(), places(group)
        slots = [DeviceSlot(device, group, bundle, alone, where[bundle]) for bundle, device in enumerate(devices)]
        for slot in slots:
            slot.begin_look()
        for slot in slots:
            slot.await_look()
            slot.settle(nodes[slot.node], self.ip)
        with self._lock:
            self._groups.append(group)
            self._nodes = {**self._nodes, **nodes}
            if is_new:
                slots[0].device = replace(slots[0].device, index=self._next)
                self._next += 1
            self._slots = {**self._slots, **{slot.device.index: slot for slot in slots}}
        return [slot.device for slot in slots]


# -- leaving -------------------------------------------------------------------------------------
#
# Devices that go back to Ray once their lanes have ended, and hosts that end with the last device of their node.


class LeavingDevices:
    """Keeps track of which lanes may still run on which devices. Its methods do not wait.

    Args:
        devices: the session's.
        request: makes a call to Ray in the thread for such calls.
        end_host: ends the host of a node on which no device is left.
    """

    def __init__(
        self, devices: RayDevices, request: Callable[[Callable[[], None]], None], end_host: Callable[[str], None]
    ) -> None:
        self._devices = devices
        self._request = request
        self._end_host = end_host
        #: Devices of every lane that may still run.
        self._devices_of: dict[int, tuple[int, ...]] = {}
        #: Devices whose lanes are to end first, and those that Ray was or is given back.
        self._waiting: set[int] = set()
        self._gone: set[int] = set()

    def __contains__(self, device_id: int) -> bool:
        """Whether a device goes back, or has gone."""
        return device_id in self._waiting or device_id in self._gone

    def started(self, lane_id: int, device_ids: tuple[int, ...]) -> None:
        """Takes note of a lane."""
        self._devices_of[lane_id] = device_ids

    def ended(self, lane_id: int) -> None:
        """Gives its devices back that are to go if that was the last lane there."""
        for device_id in self._devices_of.pop(lane_id, ()):
            if device_id in self._waiting:
                self._give_back_if_empty(device_id)

    def give_back(self, device_id: int) -> None:
        """Gives a device back once its lanes have ended."""
        if device_id not in self:
            self._waiting.add(device_id)
            self._give_back_if_empty(device_id)

    def _give_back_if_empty(self, device_id: int) -> None:
        if any(device_id in devices for devices in self._devices_of.values()):
            return
        node = self._devices.node_of(device_id)
        self._waiting.remove(device_id)
        self._gone.add(device_id)
        here = {device.index for device in self._devices.devices if self._devices.node_of(device.index) == node}
        if here <= self._gone:
            # Ray's autoscaler would not end a node on which an actor runs.
            self._end_host(node)
        self._request(functools.partial(self._devices.give_back, device_id))
