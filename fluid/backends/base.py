"""The interface of a backend, which carries out and reports but never decides, and of what starts its processes."""

# A method that does nothing is one that a backend may leave out.
# ruff: noqa: B027

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from fluid._clock import MonotonicClock
from fluid.engine.commands import CheckpointValue, Command
from fluid.engine.events import Event
from fluid.errors import InvalidFieldError, parse_duration, require_integer
from fluid.keeping import WorstKept
from fluid.lane.protocol import CheckpointReport, LaneLogged
from fluid.packing import DEFAULT_GPU_WAY
from fluid.resources import Device
from fluid.trainables.payload import TrialPayload
from fluid.waiting.clock_hold import NO_HOLD, ClockHold
from fluid.wire import Frame


class GpuSharing(NamedTuple):
    """How lanes share a GPU.

    Attributes:
        way: the name of :data:`fluid.packing.MPS` (at the same time) or :data:`fluid.packing.TIMESLICE` (in turns).
        why: why it is not MPS, though that was asked for; empty otherwise.
    """

    way: str
    why: str = ""


class HostRoom(NamedTuple):
    """What the lanes of a machine find there; ``None`` for what is not limited or not known.

    Attributes:
        descriptors: that a process may have open.
        tasks: processes and threads that the control group allows.
        memory_left: bytes that processes may still take.
        lane_bytes: bytes that a lane takes for itself.
        lane_tasks: tasks of a lane.
        lanes: that there are.
    """

    descriptors: int | None = None
    tasks: int | None = None
    memory_left: float | None = None
    lane_bytes: float | None = None
    lane_tasks: float | None = None
    lanes: int = 0


class ScalingLimits(NamedTuple):
    """How far a session may scale the number of its devices by itself.

    Attributes:
        autoscale: most devices that it may hold; ``None``: it never asks for any.
        idle_timeout_s: seconds after which an idle device that was taken later is given back; ``None``: it never is.
        provision_s: seconds from asking for a device until it comes, as far as is known beforehand.
    """

    autoscale: int | None = None
    idle_timeout_s: float | None = None
    provision_s: float = 0.0

    @property
    def is_off(self) -> bool:
        """Whether the session neither asks for devices nor gives any back, unless a deadline sizes it."""
        return self.autoscale is None and self.idle_timeout_s is None

    @classmethod
    def of(cls, autoscale: int | None, idle_timeout_s: float | str | None, provision_s: float = 0.0) -> ScalingLimits:
        """Returns these limits.

        Raises:
            InvalidFieldError: one of them is none.
        """
        if autoscale is not None:
            require_integer("autoscale", autoscale, at_least=1)
        if idle_timeout_s is not None:
            idle_timeout_s = parse_duration("idle_timeout_s", idle_timeout_s, zero=True)
        return cls(autoscale, idle_timeout_s, provision_s)


class LaneText(Frame, frozen=True):
    """What a lane has written to its own standard output or error since it was last read.

    Attributes:
        lane_id: the lane.
        is_error: whether it is standard error.
        data: the bytes; a line may continue in the next ones. :mod:`fluid.lane.output` explains the marks in them.
        skipped: bytes before them that were left out, because more is written than can be shown.
        has_more: whether the lane had written more by then.
        host: name of the lane's machine; ``"localhost"`` for the driver's.
    """

    lane_id: int
    is_error: bool
    data: bytes
    skipped: int = 0
    has_more: bool = False
    host: str = "localhost"


_CLOCK = MonotonicClock()


class Backend(ABC):
    """Carries the engine's commands out, and reports what happens as events.

    The contract: one thread calls it, except for methods that say otherwise. :meth:`execute` never waits for a lane;
    :meth:`poll` waits. The events that a command's class names (:mod:`fluid.engine.commands`) answer it. Times of
    events never go back. No method is called after :meth:`close`. ``docs/extending.md`` has a small backend.

    A class of one's own has to have five methods: :meth:`devices`, :meth:`execute`, :meth:`poll`, :meth:`wake` and
    :meth:`close`. All others are what a backend may be able to do; as they are here, it cannot.

    Attributes:
        lane_policy: which trial a lane runs next if several have iterations left there (:mod:`fluid.lane.policy`);
            ``None`` where that is not known, or the session says so.
        scaling_limits: how far the session may scale; ``None`` if devices neither come nor go by its wish.
        can_lend: whether all devices can be given back, to a cluster whose other users can take them then.
        forwards_output: whether lanes are processes whose output :meth:`read_output` returns.
        is_virtual: whether its clock is virtual: see :class:`VirtualBackend`.
        replays: whether trials are replayed: no code of theirs runs.
        hold: who holds its clock, which then stands still; a real one never does.

    Example:
        >>> from fluid import Device
        >>> from fluid.backends.base import Backend
        >>> from fluid.backends.simulated import SimulatedBackend, Truth
        >>> from fluid.engine.commands import StartLane, StartTrial
        >>> backend: Backend = SimulatedBackend(lambda trial_id, config: Truth(seconds=2.0), [Device(0)])
        >>> backend.execute([StartLane(lane_id=0, device_id=0)])
        >>> backend.poll(timeout=1.0)
        [LaneReady(at=0.0, lane_id=0, own_bytes=0.0)]
        >>> backend.execute([StartTrial("a", lane_ids=(0,), iterations=1)])
        >>> [type(event).__name__ for event in (*backend.poll(), *backend.poll())]
        ['TrialStarted', 'IterationDone']
        >>> backend.close()
    """

    lane_policy: str | None = None
    scaling_limits: ScalingLimits | None = None
    can_lend = False
    forwards_output = False
    is_virtual = False
    replays = False
    hold: ClockHold = NO_HOLD

    # -- what each one does ----------------------------------------------------------------------------------

    @abstractmethod
    def devices(self) -> list[Device]:
        """Returns the devices, in order of their index."""

    @abstractmethod
    def execute(self, commands: Sequence[Command]) -> None:
        """Carries commands out, per lane in the order given. Never waits for a lane.

        Raises:
            FluidError: this backend cannot carry out one of the commands; then it has carried out none.
        """

    @abstractmethod
    def poll(self, timeout: float | None = None) -> list[Event]:
        """Waits for an event, for :meth:`wake`, or for ``timeout`` seconds; ``None`` sets no limit.

        Returns:
            The events since the last call, in order of time; often empty.
        """

    @abstractmethod
    def wake(self) -> None:
        """Makes :meth:`poll`, the one in progress or else the next, return; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Ends every lane; no process is left when it returns. Closing twice is harmless."""

    def now(self) -> float:
        """Returns the time, seconds, on the clock of the events: the machine's monotonic one."""
        return _CLOCK.now()

    def register(self, trial_id: str, payload: TrialPayload) -> None:
        """Takes what a trial is, before a command names the trial."""

    def forget(self, trial_id: str) -> None:
        """Drops a trial that no command will name again, and deletes its checkpoints."""

    def end(self) -> list[Event]:
        """Ends every lane, and waits a while for those that run an iteration; only :meth:`close` is called after it.

        Returns:
            The events since the last :meth:`poll`, in order of time: iterations that were finished count.
        """
        return []

    # -- devices ---------------------------------------------------------------------------------------------

    @property
    def sharing(self) -> GpuSharing:
        """How lanes that are started now share a GPU; without MPS they always do so in turns."""
        return GpuSharing(DEFAULT_GPU_WAY)

    def add_devices(self, devices: Iterable[Device]) -> None:
        """Adds devices, before a command names them.

        Raises:
            InvalidFieldError: the backend does not have such a device.
        """
        raise InvalidFieldError("devices", list(devices), f"{type(self).__name__} has those only that it began with")

    def ask(self, devices: int) -> None:
        """Asks, without waiting, for the devices missing to so many in all, in place of what was asked for before.

        A ``DeviceAdded`` reports each that comes. If so many are held, what was asked for is withdrawn.
        """

    def can_give_back(self, device_id: int) -> bool:
        """Whether a device can be given back alone."""
        return False

    def give_back(self, device_id: int) -> None:
        """Gives back, without waiting, a device that can be given back alone, once its lanes have ended.

        No command will name it before it is added again.
        """

    # -- processes of lanes ----------------------------------------------------------------------------------

    def lane_room(self) -> HostRoom | None:
        """Returns what lanes find on the driver's machine, if all run there, and what they take of it."""
        return None

    def preload(self, modules: Sequence[str]) -> None:
        """Loads modules before the next lane is forked; those that cannot be loaded are left out. From any thread."""

    def loading(self) -> str:
        """The module that is imported now and that lanes wait for; empty if there is none. From any thread."""
        return ""

    def start_program(self, program: str) -> socket.socket | None:
        """Forks a process that is no lane; it ends with the backend at the latest. From any thread.

        Args:
            program: ``module:function``, called with the process's end of a connection. The module is loaded ahead.

        Returns:
            The caller's end of the connection; ``None`` if no lane is forked on the driver's machine.

        Raises:
            FluidError, OSError: it cannot be started.
        """
        return None

    def forward_output(self) -> None:
        """Makes lanes that are started from now on forward what their trials print."""

    def read_output(self) -> list[LaneText]:
        """Returns what was printed since the last call, without waiting; for one thread; after ``close`` the rest."""
        return []

    def hear_records(self, take: Callable[[LaneLogged], None]) -> None:
        """Has a function called with lanes' log records as they come, by the thread that polls; it must not wait."""

    # -- checkpoints that outlive the run --------------------------------------------------------------------

    def set_bar(self, group: str, bar: WorstKept | None, room: int | None) -> None:
        """Tells lanes what is worth keeping (:class:`fluid.keeping.KeepRule`); one that does not know it keeps more.

        Args:
            group: the group whose trials are compared.
            bar: the value that an iteration must beat; ``None`` if any will do.
            room: bytes that are left of the quota; ``None`` if there is no quota.
        """

    def discard_kept(self, host: str, path: str, *, demote: bool) -> None:
        """Removes a checkpoint from those that outlive the run, on another machine.

        Args:
            host: the machine's name.
            path: the checkpoint.
            demote: whether the trial may still be restored from it.
        """

    def fetch_kept(self, host: str, path: str, target: str) -> None:
        """Copies a checkpoint from another machine; waits for that. From any thread.

        Args:
            host: the machine's name.
            path: the checkpoint there.
            target: its folder here, which appears as a whole.

        Raises:
            OSError: it cannot be fetched.
        """
        raise FileNotFoundError(f"{path} is on {host}")

    # -- trials that are replayed ----------------------------------------------------------------------------

    @property
    def facts(self) -> Mapping[str, Any]:
        """What ``session.json`` says of the backend."""
        return {}

    def require_replayable(self, trainable: Any) -> None:
        """Refuses a trainable whose trials cannot be replayed, where trials are; from any thread.

        Raises:
            InvalidFieldError: it is one.
        """

    @property
    def pays_to_pack(self) -> bool:
        """Whether two trials on one device may end sooner than one after the other: real ones are measured."""
        return True


class VirtualBackend(Backend):
    """A backend on a virtual clock, whose devices are none of this machine.

    Its ``now`` is no time of the machine's. Its clock stands still while a thread holds it, and nothing happens until
    ``poll`` moves it (:mod:`fluid.waiting.clock_hold`).
    """

    is_virtual = True

    @abstractmethod
    def now(self) -> float:
        """Returns the virtual time, seconds."""


class LaneConnected(NamedTuple):
    """A lane that was launched has connected.

    Attributes:
        host: name of its machine; ``"localhost"`` shares the driver's clock.
    """

    lane_id: int
    socket: socket.socket
    host: str = "localhost"


class LaneDying(Frame, frozen=True):
    """A lane's process has ended; :class:`LaneExited` follows once it is known why."""

    lane_id: int


class LaneExited(Frame, frozen=True):
    """A lane has ended, or could not be launched.

    Attributes:
        reason: what happened to it, to be read after "lane 3".
        blameless: whether no trial in it is to blame.
        culprit: the trial whose code ran when it ended, if that is known.
    """

    lane_id: int
    reason: str
    blameless: bool = False
    culprit: str | None = None


class LaneSuperseded(Frame, frozen=True):
    """Lanes that are launched on the lane's host from now on have modules loaded that this one lacks."""

    lane_id: int


#: What a launcher reports.
LauncherReport = LaneConnected | LaneDying | LaneExited | LaneSuperseded | CheckpointReport


class DeviceBinding(NamedTuple):
    """How a host binds a lane to a device, or a gang's lane to several.

    Attributes:
        device_ids: index of the device; several for the lane of a gang.
        kind: ``"gpu"`` or ``"cpu"``.
        node: the Ray node that has the device; empty for this machine.
        token: the GPU's UUID, which names it to CUDA and MPS; several have commas between; empty for a CPU device.
        visible: value of ``CUDA_VISIBLE_DEVICES``; empty hides every GPU.
        threads: threads that PyTorch and numeric libraries use in each lane.
        cores: the CPU cores that the lane is pinned to; none for no pinning.
        bounded: whether the device's memory is limited, so that it is measured on a CPU, too.
        variables: environment variables that tell code in the lane about its device, each a list as JSON.
    """

    device_ids: tuple[int, ...]
    kind: str
    node: str = ""
    token: str = ""
    visible: str = ""
    threads: int = 1
    cores: tuple[int, ...] = ()
    bounded: bool = False
    variables: tuple[tuple[str, str], ...] = ()

    @classmethod
    def joined(cls, bindings: Sequence[DeviceBinding]) -> DeviceBinding:
        """The binding of a lane to all devices of these bindings, which are of one host."""
        first = bindings[0]
        lists: dict[str, list[Any]] = {}
        for name, value in (variable for binding in bindings for variable in binding.variables):
            lists.setdefault(name, []).extend(json.loads(value))
        return first._replace(
            device_ids=tuple(device for binding in bindings for device in binding.device_ids),
            token=",".join(binding.token for binding in bindings) if first.token else "",
            visible=",".join(binding.visible for binding in bindings) if first.visible else "",
            threads=sum(binding.threads for binding in bindings),
            cores=tuple(dict.fromkeys(core for binding in bindings for core in binding.cores)),
            bounded=any(binding.bounded for binding in bindings),
            variables=tuple((name, json.dumps(values)) for name, values in lists.items()),
        )


class CheckpointSource(NamedTuple):
    """Where the checkpoints of a machine are served to lanes of other machines.

    Attributes:
        address: and port; ``None`` if there is no other machine, or the machine does not serve them.
        is_coming: whether the machine will serve them soon, as its host is being started.
    """

    address: tuple[str, int] | None = None
    is_coming: bool = False


class Keeping(Enum):
    """How far a launcher is with keeping a payload for the lanes of a host."""

    DONE = "done"
    UNDER_WAY = "under way"
    REFUSED = "refused"


class CheckpointStores(Protocol):
    """The stores of a session's hosts: each keeps the checkpoints of its lanes in host memory and on disk.

    They work whether or not a lane is there. No method waits.
    """

    def value(self, values: Mapping[str, CheckpointValue]) -> None:
        """Tells all of them, also those to come, what checkpoints of trials are worth, by trial."""
        ...

    def forget(self, trial_id: str, *, keep_newest: bool) -> None:
        """Drops what they know of a trial, and deletes its checkpoints, except those that outlive the run.

        Args:
            trial_id: the trial, of which no lane saves anything any more.
            keep_newest: whether its newest one becomes one of those.
        """
        ...

    def persist(self, host: str, trial_id: str, path: str, *, keep: bool) -> None:
        """Copies a checkpoint to disk, on its machine; always answered by a CheckpointPersisted.

        Args:
            host: name of the machine.
            trial_id: the trial.
            path: where its checkpoint was written: to host memory, or, with ``keep``, to disk; it stays there.
            keep: whether the copy is to outlive the run.
        """
        ...

    def fork(self, host: str, child: str, parent: str, path: str) -> None:
        """Makes a checkpoint of a trial the state from which another one starts; always answered by a CheckpointForked.

        Args:
            host: name of the machine.
            child: the trial that starts.
            parent: the trial that the checkpoint is of, whose own folder is copied, too.
            path: where the checkpoint was written, in this run or another one; it stays there.
        """
        ...

    def discard(self, host: str, path: str, *, demote: bool) -> None:
        """Removes a checkpoint of a machine from those that outlive the run.

        Args:
            host: name of the machine.
            path: the checkpoint.
            demote: whether its trial may still be restored from it.
        """
        ...

    def prefetch(self, host: str, trial_id: str, path: str, source: tuple[str, int] | None) -> None:
        """Has a host bring a checkpoint into its memory, if that is worth it.

        Args:
            host: name of the machine.
            trial_id: the trial.
            path: where its checkpoint was written.
            source: where the checkpoints of the machine that has it are served; ``None`` if that is the host itself.
        """
        ...


class Launcher(ABC):
    """Starts processes that run :func:`fluid.lane.serve.serve`. No method waits, except for ``close`` and ``fetch``.

    Attributes:
        stores: those of the hosts' checkpoints.
        wants_to_write: whether to call :meth:`poll` also when :meth:`fileno` becomes writable: never.
    """

    stores: CheckpointStores
    wants_to_write = False

    @abstractmethod
    def launch(self, lane_id: int, binding: DeviceBinding) -> LaneConnected | None:
        """Starts a lane; ``None`` if it connects later, which :meth:`poll` reports.

        Raises:
            FluidError, OSError: it cannot be started.
        """

    @abstractmethod
    def kill(self, lane_id: int) -> None:
        """Kills a lane, if it is there; :meth:`poll` reports its end."""

    @abstractmethod
    def dump_stacks(self, lane_id: int, trial_id: str) -> None:
        """Has the stacks of a lane's threads written to the log of the trial that runs there, soon."""

    @abstractmethod
    def preload(self, modules: Sequence[str], *, late: bool = False) -> None:
        """Loads modules ahead, so that lanes launched later need not.

        Args:
            modules: their names.
            late: whether no lane is to wait for it.
        """

    @abstractmethod
    def keep(self, lane_id: int, name: str, data: bytes) -> Keeping:
        """Keeps a payload where every lane on a lane's host can read it; may be called again, to see how that went.

        Args:
            lane_id: a lane that is to read it.
            name: the payload's, and a file name; there is no other payload of that name.
            data: the payload.

        Returns:
            ``DONE`` if the lane can be sent :class:`fluid.lane.protocol.KeptPayload` in place of the payload;
            ``UNDER_WAY`` if not yet: :meth:`fileno` becomes readable then; ``REFUSED`` if it has to be sent whole.
        """

    @abstractmethod
    def drop(self, name: str) -> None:
        """Drops a payload on every host that keeps it, if any does."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`poll` has something to report; -1 for none. It may change."""

    @abstractmethod
    def poll(self) -> list[LauncherReport]:
        """Returns the lanes that have connected or ended, and what hosts did with checkpoints, since the last call."""

    @abstractmethod
    def checkpoints_at(self, host: str) -> CheckpointSource:
        """Returns where the checkpoints of a machine, given its name, are served to lanes of other machines."""

    def fetch(self, host: str, path: str, target: str) -> None:
        """Copies a checkpoint from another machine: see :meth:`Backend.fetch_kept`."""
        raise FileNotFoundError(f"{path} is on {host}")

    @abstractmethod
    def forward_output(self) -> None:
        """Makes lanes that are launched from now on forward what their trials print."""

    @abstractmethod
    def read_output(self) -> list[LaneText]:
        """Returns what was printed: see :meth:`Backend.read_output`."""

    @abstractmethod
    def look(self) -> None:
        """Looks for processes that were stopped (SIGSTOP); to be called every few seconds."""

    @abstractmethod
    def close(self) -> None:
        """Ends every process; none is left when it returns."""

    @abstractmethod
    def abandon(self) -> None:
        """Closes descriptors in a process forked from the driver, which does not own them."""
