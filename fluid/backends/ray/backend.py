"""The backend itself: Fluid's lanes on devices that Ray gives."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from fluid.backends.base import DeviceBinding, GpuSharing, ScalingLimits
from fluid.backends.hosts.folders import HERE, new_session
from fluid.backends.hosts.host import HostSettings, device_variables
from fluid.backends.lanes.pool import DEFAULT_GRACE_S, LaneBackend, LanePool, modules_to_load, require_lane_options
from fluid.backends.lanes.times import not_before
from fluid.backends.ray.api import gcs_address, has_runtime_env
from fluid.backends.ray.devices import RayDevices
from fluid.backends.ray.launcher import RayLauncher
from fluid.backends.ray.nodes import NodeChanges, variables_of
from fluid.elastic.messages import DEFAULT_PROCESS_GROUP
from fluid.engine.commands import Command, StartTrial
from fluid.engine.events import CheckpointPlaced, DeviceAdded, DeviceDraining, DeviceLost, Event, LaneLost, TrialSaved
from fluid.errors import FluidError, InvalidFieldError, parse_duration, require_integer
from fluid.keeping import parse_bytes
from fluid.lane.checkpoints.paths import host_of
from fluid.lane.policy import DEFAULT_POLICY
from fluid.packing import DEFAULT_GPU_WAY, gpu_way_of
from fluid.resources import Device, DeviceChoice

#: Loaded for lanes from the start, if the driver has loaded them; the rest is read from the trainables.
_LIKELY = ("numpy", "torch", "torchvision")
#: Seconds until a device comes on a new node, and on one that is there, as long as none was measured.
_NODE_S, _DEVICE_S = 120.0, 2.0


class RayBackend(LaneBackend):
    """Runs trials on the devices of a Ray cluster: its GPUs, or CPUs where it has none.

    Joins the cluster that this process is connected to, or the one that ``RAY_ADDRESS`` names, and leaves it up.
    Without either it starts Ray on this machine, and ends it with the last backend that uses it. The devices are
    reserved in placement groups; Fluid decides how many trials share one.

    Each node has one host, which forks the lanes: on the driver's node it is the driver's process, on others an actor
    that takes no device. Fluid must be installed on all nodes. Trials see the driver's modules by ``sys.path`` and, on
    its machine, its working directory; where the job has a ``runtime_env``, they get that, on every node. Machines need
    not share a file system: checkpoints are fetched from where they were written. Those of a machine that is gone are
    lost. Unlike nodes are told apart by the GPU's product name or, where that is unknown and for CPUs, by the node's
    accelerator type (``ray start --labels ray.io/accelerator-type=Xeon-8480``).

    Args:
        devices: what to reserve: all that is free, so many, or the :class:`fluid.Device` objects given, on any node
            unless their ``host`` is the address of one. Ray chooses the devices, so indices are refused. Where Ray is
            started here, more CPUs than there are cores may be asked for.
        preload: modules to load before the first lane is started; ``None`` for a guess. What trainables import
            is added when they are registered.
        run_dir: folder for the trials' output and checkpoints; kept. ``None`` for a temporary one, which is deleted at
            the end: a sweep that is to be resumed needs that of its executor here, too.
        grace: seconds a lane has to end by itself before it is killed.
        timeout: seconds to wait for devices that other jobs use; ``None``, the default: 30 for devices that were asked
            for, and no limit for the first of all that are free.
        sharing: how lanes share a GPU: see :class:`fluid.backends.local.LocalBackend`; each GPU has a daemon
            of its own.
        lane_policy: which trial a lane runs next if several have iterations left there; see
            :mod:`fluid.lane.policy`.
        process_group: what the devices of one trial communicate through: see :class:`fluid.executor.FluidExecutor`.
        autoscale: most devices that the session may hold: while trials wait, it asks Ray for further ones, for which
            Ray's autoscaler starts nodes; ``None``, the default, if it never asks.
        idle_timeout_s: seconds after which an idle device that was taken after the start is given back; ``None``, the
            default, if it is kept.
        releasable: whether the devices to begin with are reserved one by one, so that a session with a deadline can
            give them back, too; Ray may then spread them over more nodes. An executor with a deadline or a budget that
            makes the backend itself sets it.
        checkpoint_memory_bytes: most bytes of each machine's memory for checkpoints, or a text such as ``"8GB"``;
            ``None``, the default, for 0.85 of what the machine has left.

    Attributes:
        scaling_limits: the latter two.

    Raises:
        InvalidFieldError: an argument cannot be used, or the cluster cannot give as many devices.
        MissingDependencyError: Ray is not installed.
        FluidError: the cluster cannot be reached.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> from fluid.backends.ray import RayBackend
        >>> def train(config):
        ...     for step in range(100):
        ...         yield {"loss": config["lr"] / (step + 1)}
        >>> with FluidExecutor(backend=RayBackend(devices=1), verbose=0) as executor:
        ...     handle = executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 0.5}, budget=2)]))
        ...     [result.metrics["loss"] for result in handle.results()]
        [0.5, 0.25]
    """

    can_lend = True

    def __init__(
        self,
        devices: DeviceChoice = None,
        *,
        preload: Sequence[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        grace: float = DEFAULT_GRACE_S,
        timeout: float | None = None,
        sharing: str = DEFAULT_GPU_WAY,
        lane_policy: str = DEFAULT_POLICY,
        process_group: str = DEFAULT_PROCESS_GROUP,
        autoscale: int | None = None,
        idle_timeout_s: float | None = None,
        releasable: bool = False,
        checkpoint_memory_bytes: int | str | None = None,
        _mps_program: str | None = None,
    ) -> None:
        grace = require_lane_options(grace=grace, lane_policy=lane_policy, process_group=process_group)
        self.lane_policy = lane_policy
        if timeout is not None:
            timeout = parse_duration("timeout", timeout, zero=True)
        way = gpu_way_of(sharing)
        checkpoint_memory = parse_bytes("checkpoint_memory_bytes", checkpoint_memory_bytes)
        # Ray's autoscaler starts nodes in minutes; without it, there are nodes.
        self.scaling_limits = ScalingLimits.of(autoscale, idle_timeout_s, _NODE_S if autoscale else _DEVICE_S)
        self._devices = RayDevices(_require_countable(devices), timeout, autoscale, releasable)
        bindings = _RayBindings(self._devices, stand_ins=_mps_program is not None)
        try:
            settings = HostSettings(
                session=new_session(run_dir),
                preload=tuple(modules_to_load(preload, _LIKELY)),
                policy=lane_policy,
                sharing=sharing,
                mps_program=_mps_program,
                environment=(("RAY_ADDRESS", gcs_address()),),
                checkpoint_memory_bytes=checkpoint_memory,
            )
            self._launcher = RayLauncher(
                self._devices, settings, in_process=not has_runtime_env(), gpu_tokens=bindings.tokens
            )
        except BaseException:
            self._devices.close()
            raise
        try:
            for device in self._devices.devices:  # They load modules while the caller goes on.
                self._launcher.start_host(self._devices.node_of(device.index))
            if way.needs_mps:
                self._launcher.await_sharing()
        except BaseException:
            self._launcher.close()
            raise
        super().__init__(
            LanePool(self._devices.devices, self._launcher, bindings.bind, grace=grace, process_group=process_group)
        )
        self._launcher.actors.notify_of_changes(self._pool.wake)
        #: No event may be older than this: lanes may report what happened before a device was lost.
        self._floor = 0.0
        # Exit handlers run last in, first out: this one runs before that of Ray, which was imported before.
        atexit.register(self._finalizer)

    @property
    def run_folder(self) -> str:
        """Folder of the trials' output and checkpoints."""
        return self._launcher.run_folder

    @property
    def sharing(self) -> GpuSharing:
        """How lanes share a GPU."""
        return self._launcher.sharing

    def discover(self) -> list[Device]:
        """Reserves the devices that are free by now, as after a node has joined.

        Returns:
            The new devices, for :meth:`fluid.executor.FluidExecutor.add_device`.
        """
        found = self._devices.discover()
        self._pool.add_devices(found)
        return found

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Adds devices: those that :meth:`discover` has found.

        Raises:
            InvalidFieldError: a device was not reserved.
        """
        chosen = list(devices)
        for device in chosen:
            if device.index not in self._devices:
                raise InvalidFieldError("devices", device, "Ray has not reserved it; see discover()")
        super().add_devices(chosen)

    def ask(self, devices: int) -> None:
        """Asks Ray for devices, and waits for none: :meth:`poll` reports each as added when Ray gives it.

        This is also what makes Ray's autoscaler start nodes.

        Args:
            devices: how many to hold in all; 0 withdraws what Ray has not given yet.
        """
        require_integer("devices", devices, at_least=0)
        self._launcher.actors.request(functools.partial(self._devices.ask, devices))

    def can_give_back(self, device_id: int) -> bool:
        """Whether a device was taken after the start, so that it can be given back alone."""
        return self._devices.can_give_back(device_id)

    def give_back(self, device_id: int) -> None:
        """Gives Ray a device back that the engine no longer uses, once its lanes have ended.

        Ray has it when all others of its placement group are given back, too.
        """
        self._launcher.leaving.give_back(device_id)

    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out: see :meth:`fluid.backends.base.Backend.execute`."""
        super().execute([self._without_lost_checkpoint(command) for command in commands])

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Waits for something to happen: see :meth:`fluid.backends.base.Backend.poll`."""
        events = super().poll(timeout)
        if self._devices.hosts != {HERE}:
            events = [_bound_to_machine(event) for event in events]
        changes = NodeChanges.merged(self._launcher.actors.take_changes())
        back = [device for device in changes.back if device.index not in self._launcher.leaving]
        changes = changes._replace(back=back)
        if not any(changes):
            return not_before(events, self._floor)
        self._floor = now = max(self.now(), events[-1].at if events else 0.0)
        self._pool.add_devices([*changes.back, *changes.joined])
        # A lost device is reported before its lanes, so that the engine starts no other lane there.
        deaths = [event for event in events if isinstance(event, LaneLost)]
        rest = [event for event in events if not isinstance(event, LaneLost)]
        return (
            not_before(rest, now) + device_events(changes, now) + [structs.replace(event, at=now) for event in deaths]
        )

    def end(self) -> list[Event]:
        """Ends every lane: see :meth:`fluid.backends.base.Backend.end`."""
        return not_before(super().end(), self._floor)

    def close(self) -> None:
        """Ends every lane and gives the devices back. Closing twice is harmless."""
        super().close()
        atexit.unregister(self._finalizer)

    def _without_lost_checkpoint(self, command: Command) -> Command:
        """Starts a trial afresh whose checkpoint was just lost, which the engine does not know yet."""
        if isinstance(command, StartTrial) and command.checkpoint is not None:
            host = command.checkpoint.host
            if host != HERE and command.checkpoint.in_memory and self._devices.is_gone(host):
                return structs.replace(command, checkpoint=None)
        return command


def device_events(changes: NodeChanges, now: float) -> list[Event]:
    """Returns changes of nodes as events at the time ``now``, seconds."""
    added = {device.index: device for device in (*changes.back, *changes.joined)}
    return [
        *(DeviceLost(now, index) for index in changes.lost),
        *(DeviceAdded(now, device) for device in added.values()),
        *(DeviceDraining(now, index, now + left) for index, left in changes.draining if index not in changes.lost),
    ]


class _RayBindings:
    """Tells how lanes are bound to devices of a Ray cluster.

    Args:
        devices: the devices.
        stand_ins: whether CPU devices stand in for GPUs, in tests.
    """

    def __init__(self, devices: RayDevices, *, stand_ins: bool) -> None:
        self._devices = devices
        self._stand_ins = stand_ins

    def bind(self, device: Device) -> DeviceBinding:
        """Returns how a lane is bound to a device.

        Raises:
            FluidError: its node is gone, or it is a GPU, and which one is not known.
        """
        devices, index = self._devices, device.index
        if devices.is_lost(index):
            raise FluidError(f"its node {device.host} is gone")
        token, visible = self.token(index), devices.visible_for(index)
        if device.kind == "gpu" and not token and visible is None:
            raise FluidError("Ray has not said which GPU it is")
        return DeviceBinding(
            (index,),
            device.kind,
            node=devices.node_of(index),
            token=token,
            visible=visible or "",
            threads=devices.threads_for(index),
            bounded=device.memory_bytes is not None,
            variables=(*device_variables(index), *variables_of(*devices.bundle_of(index))),
        )

    def token(self, index: int) -> str:
        """The UUID of a GPU; empty for a CPU device, unless it stands in for one."""
        return self._devices.gpu_token(index) or (f"GPU-{index}" if self._stand_ins else "")

    def tokens(self, node: str) -> tuple[str, ...]:
        """The UUIDs of a node's GPUs."""
        here = [device.index for device in self._devices.devices if self._devices.node_of(device.index) == node]
        return tuple(filter(None, map(self.token, here)))


def _bound_to_machine(event: Event) -> Event:
    """Marks a checkpoint on another machine's own disk like one in its memory: both are lost with the machine."""
    if (
        not isinstance(event, (TrialSaved, CheckpointPlaced))
        or event.checkpoint.in_memory
        or host_of(event.checkpoint.path) == HERE
    ):
        return event
    return structs.replace(event, checkpoint=replace(event.checkpoint, in_memory=True))


def _require_countable(devices: DeviceChoice) -> int | list[Device] | None:
    """Refuses indices and names: Ray chooses the devices that it gives."""
    if devices is None or devices == "all":
        return None
    if isinstance(devices, int):
        return devices
    chosen = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else [devices]
    given = [device for device in chosen if isinstance(device, Device)]
    if len(given) < len(chosen):
        reason = "Ray chooses the devices that it gives: pass a number, or Device(index, kind=, host=) for each"
        raise InvalidFieldError("devices", devices, reason)
    return given
