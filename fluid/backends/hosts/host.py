"""A host: runs lanes on the machine of this process, each bound to its device.

It has a fork server, the folders of the session on this machine, and the MPS daemon if there is to be one. The local
backend has one host in the driver's process; the Ray backend has another one in an actor on each further node.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import current_process
from typing import NamedTuple

from fluid._clock import MonotonicClock
from fluid._private_files import make_folder, open_private
from fluid.backends.base import (
    CheckpointSource,
    DeviceBinding,
    GpuSharing,
    HostRoom,
    Keeping,
    LaneConnected,
    LaneDying,
    LaneExited,
    LaneSuperseded,
    LaneText,
    Launcher,
    LauncherReport,
)
from fluid.backends.hosts.checkpoints.keeper import CheckpointKeeper, KeeperOptions
from fluid.backends.hosts.folders import HERE, HostFolders, SessionFolders
from fluid.backends.hosts.forkserver.guardian import NO_DESCRIPTORS
from fluid.backends.hosts.forkserver.host_end import Exited, ForkServerProcess
from fluid.backends.hosts.gpu.sharing import DeviceFaults, LaneSharing
from fluid.backends.hosts.lane_limits import room_here
from fluid.backends.hosts.output import OutputTail
from fluid.backends.hosts.payloads import PayloadStore
from fluid.backends.hosts.sockets import WakeableSelector, limit_lane_buffer
from fluid.elastic.messages import LOOPBACK
from fluid.errors import FluidError
from fluid.gpu.nvml import cpu_cores
from fluid.lane.output import has_text, lane_output, lane_stacks, trial_log
from fluid.lane.policy import DEFAULT_POLICY
from fluid.lane.process.state import read_running_trial
from fluid.lane.protocol import LaneOptions
from fluid.packing import DEFAULT_GPU_WAY
from fluid.resources import available_cores

# -- numa ----------------------------------------------------------------------------------------
#
# Pins the lanes of a GPU to the CPU cores of its NUMA node, from which memory and the GPU are reached fastest.


class NumaCores:
    """The cores to which lanes are pinned. Nothing is pinned if a core would then serve no GPU, or all serve each.

    Args:
        tokens: UUIDs of the GPUs in use on this machine.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        available = set(available_cores())
        near = {token: available.intersection(cpu_cores(token)) for token in tokens}
        is_split = set().union(*near.values()) == available and any(cores != available for cores in near.values())
        self._near = near if is_split and all(near.values()) else {}

    def near(self, token: str) -> tuple[int, ...]:
        """Returns the cores of a lane's GPUs, UUIDs divided by commas; none for no pinning."""
        sets = [self._near.get(name, set()) for name in token.split(",")]
        return tuple(sorted(set().union(*sets))) if all(sets) else ()


# -- threads -------------------------------------------------------------------------------------
#
# How many CPU threads lanes use, where their trials do not say, and how OpenMP's threads wait for work.


#: Variables with which the user decides that already.
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def explicit_threads() -> int | None:
    """The number that the user has set as ``OMP_NUM_THREADS`` for the driver; ``None`` if there is none."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else None


def threads_per_gpu(gpus: int) -> int:
    """Returns how many threads each lane of a GPU has: the GPU's share of the cores.

    Args:
        gpus: those of the machine, also if a session uses fewer: a trial computes alike in both.
    """
    return max(1, len(available_cores()) // max(1, gpus))


def waiting_variables(gpus: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Returns the variables with which threads of OpenMP sleep, and do not spin, while they wait for work.

    Threads that spin take cores from other lanes of the GPU, and from the workers that load data.

    Args:
        gpus: UUIDs of the GPUs that lanes may share; nothing is changed where there are none, or if the user has
            decided how threads wait.
    """
    decided = any(name in os.environ for name in _WAITING)
    return (("OMP_WAIT_POLICY", "PASSIVE"),) if gpus and not decided else ()


# -- stack copies --------------------------------------------------------------------------------
#
# Copies the stacks that a lane has written to the log of the trial that runs there.


#: Seconds for a lane to write its stacks, between two looks at them, and without more after which they are complete.
_PATIENCE_S = 5.0
_LOOK_S = 0.05
_QUIET_S = 0.1


def request_stacks(run_folder: str, lane_id: int, trial_id: str, send_signal: Callable[[], None]) -> threading.Thread:
    """Has a lane write its stacks, and copies them to a trial's log, in a thread that may wait.

    Args:
        run_folder: folder of the run.
        lane_id: the lane.
        trial_id: the trial.
        send_signal: makes the lane write, at once or soon.
    """
    written = _size(lane_stacks(run_folder, lane_id))
    send_signal()
    copying = threading.Thread(target=_copy, args=(run_folder, lane_id, trial_id, written), daemon=True)
    copying.start()
    return copying


def _copy(run_folder: str, lane_id: int, trial_id: str, start: int) -> None:
    source, target = lane_stacks(run_folder, lane_id), trial_log(run_folder, trial_id)
    clock, pause = MonotonicClock(), threading.Event()
    deadline, size, grown_at = clock.now() + _PATIENCE_S, start, clock.now()
    while clock.now() < deadline and (size == start or clock.now() < grown_at + _QUIET_S):
        pause.wait(_LOOK_S)
        if (now := _size(source)) != size:
            size, grown_at = now, clock.now()
    with suppress(OSError):  # The folder of a session that has ended may be gone.
        with open(source, "rb") as file:
            file.seek(start)
            stacks = file.read(size - start)
        make_folder(os.path.dirname(target))
        with open_private(target, "ab") as file:
            file.write(b"\nFluid: no result for long; the stacks of lane %d:\n" % lane_id + stacks)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


# -- host ----------------------------------------------------------------------------------------


#: What a module loads only once it is used, which then takes each lane a second: PyTorch's optimizers, when the first
#: one is made. Trials that are there by then load it themselves; it keeps none of them waiting.
_LATE = dict.fromkeys(("torch.optim", "fluid.fused", "fluid.elastic"), ("torch._dynamo",))
#: Seconds that a host waits, as it closes, for those who use programs that are no lanes.
_PROGRAMS_S = 5.0
#: Stands for the fork server in the selector.
_SERVER = "server"


class HostSettings(NamedTuple):
    """What a host is told once.

    Attributes:
        session: the folders that all hosts of the session have in common.
        name: the machine's; :data:`~fluid.backends.hosts.folders.HERE` for the driver's.
        preload: modules to load before the first lane is forked.
        preload_late: modules to load for later lanes.
        policy: which trial a lane runs next if several have iterations left; see :mod:`fluid.lane.policy`.
        sharing: how lanes are to share a GPU: one of :data:`fluid.packing.GPU_WAYS`, by name.
        tokens: UUIDs of the GPUs to share.
        mps_program: control program that is used without asking whether MPS can be; ``None`` for the installed one.
        driver: where the driver listens, if it is another process than the host's.
        address: at which other machines reach this one.
        key: shared by the session's processes on several machines; empty on one.
        environment: variables that the lanes get beside those of this process.
        reserved_bytes: of shared memory, which another program may take, as Ray's object store.
        checkpoint_memory_bytes: most bytes of host memory for checkpoints; ``None`` for a share of what is left.
    """

    session: SessionFolders
    name: str = HERE
    preload: tuple[str, ...] = ()
    preload_late: tuple[str, ...] = ()
    policy: str = DEFAULT_POLICY
    sharing: str = DEFAULT_GPU_WAY
    tokens: tuple[str, ...] = ()
    mps_program: str | None = None
    driver: tuple[str, int] | None = None
    address: str = LOOPBACK
    key: bytes = b""
    environment: tuple[tuple[str, str], ...] = ()
    reserved_bytes: float = 0.0
    checkpoint_memory_bytes: int | None = None


class _Launch(NamedTuple):
    """A lane that waits for what lanes depend on; ``connection`` is its end."""

    lane_id: int
    binding: DeviceBinding
    connection: socket.socket


class Host(Launcher):
    """Runs lanes on this machine.

    Args:
        settings: what it is told once.

    Attributes:
        folders: of the session on this machine.
        payloads: that it keeps for its lanes.
        stores: the only one, of the checkpoints on this machine.

    Raises:
        InvalidFieldError: MPS was asked for and cannot be had.
    """

    def __init__(self, settings: HostSettings) -> None:
        self._settings = settings
        self.folders = HostFolders(settings.session, settings.name)
        self.payloads = PayloadStore(self.folders)
        self._selector = WakeableSelector()
        self._clock = MonotonicClock()
        #: UUIDs of the GPUs, divided by commas, of each lane that runs.
        self._running: dict[int, str] = {}
        #: Numbers of processes that are no lanes: below 0.
        self._programs = itertools.count(-1, -1)
        #: The callers' ends of the connections to them.
        self._program_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._waiting: list[_Launch] = []
        self._numa = NumaCores(settings.tokens)
        self._reports: list[LaneDying | LaneExited | LaneSuperseded] = []
        try:
            self._server = ForkServerProcess(
                self.folders.run_folder,
                memory_folder=self.folders.memory_folder,
                mark=settings.session.mark(settings.name),
                temporary=self.folders.temporary,
                preload=settings.preload,
                driver_address=settings.driver,
                environment=(*waiting_variables(settings.tokens), *settings.environment),
            )
        except BaseException:
            self.folders.leave(clear=True)
            self._selector.close()
            raise
        try:
            # While the fork server loads its modules.
            self._sharing = LaneSharing(
                settings.sharing, settings.tokens, self._selector.wake, program=settings.mps_program
            )
        except BaseException:
            self._server.close()
            self.folders.leave(clear=True)
            self._selector.close()
            raise
        self._server.preload([*settings.preload_late, *_loaded_late_by(settings.preload)], late=True)
        self._faults = DeviceFaults()
        self._faults.add(self._sharing.watchdogs)
        self._selector.watch(_SERVER, self._server)
        kept = self.folders.memory_folder, self.folders.run_folder, settings.checkpoint_memory_bytes
        keeper = KeeperOptions(settings.name, *kept, settings.reserved_bytes, settings.key)
        self.stores: CheckpointKeeper = CheckpointKeeper(keeper, self._selector.wake)
        #: Of lanes whose output is forwarded; ``None`` if it is not.
        self._output: OutputTail | None = None

    @property
    def sharing(self) -> GpuSharing:
        """How lanes that are started now share a GPU."""
        return self._sharing.sharing

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`poll` has something to do."""
        return self._selector.fileno()

    def add_gpus(self, tokens: Iterable[str]) -> None:
        """Takes further GPUs, by their UUIDs: they get MPS daemons as those of the settings did, in the background.

        Raises:
            InvalidFieldError: MPS was asked for and cannot be used there.
        """
        self._faults.add(self._sharing.add(tokens))

    def launch(
        self, lane_id: int, binding: DeviceBinding, connection: socket.socket | None = None
    ) -> LaneConnected | None:
        """Forks a lane, once the MPS daemon of its GPU has started, if it is to have one.

        Args:
            lane_id: its number.
            binding: to its device.
            connection: the lane's end of a connection to the driver, which is then the host's to close. If there is
                none, the driver is this process, which gets its end at once, before the lane runs.

        Raises:
            FluidError: it cannot be started.
        """
        if not os.path.isdir(os.path.join(self.folders.run_folder, "logs")):
            if connection is not None:
                connection.close()
            raise FluidError(f"the run folder {self.folders.run_folder} is gone: it was deleted while the session ran")
        try:
            self.add_gpus(filter(None, binding.token.split(",")))  # One that has joined the session later.
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        connected = None
        if connection is None:
            try:
                ours, connection = socket.socketpair()
            except OSError as error:
                raise FluidError(NO_DESCRIPTORS) if error.errno == errno.EMFILE else error from error
            limit_lane_buffer(connection)
            connected = LaneConnected(lane_id, ours, self._settings.name)
        launch = _Launch(lane_id, binding, connection)
        if not self._faults.may_launch(binding.token):
            self._waiting.append(launch)
            return connected
        try:
            self._fork(launch)
        except BaseException:
            if connected is not None:
                connected.socket.close()
            raise
        return connected

    def start_program(self, program: str) -> socket.socket:
        """Forks a process that is no lane; returns the caller's end of the connection to it. From any thread."""
        ours, theirs = socket.socketpair()
        try:
            self._server.preload([program.partition(":")[0]])
            number = next(self._programs)
            self._server.fork(LaneOptions(number, run_folder=self.folders.run_folder, program=program), theirs)
        except BaseException:
            ours.close()
            raise
        self._program_ends.add(ours)
        self._selector.wake()
        return ours

    def kill(self, lane_id: int) -> None:
        """Kills a lane, if it is there; :meth:`poll` reports its end."""
        for launch in [launch for launch in self._waiting if launch.lane_id == lane_id]:
            self._waiting.remove(launch)
            launch.connection.close()
            self._report(LaneExited(lane_id, "was killed before it was started"))
        self._server.kill(lane_id, self._sharing.control(self._running.get(lane_id, "")))
        self._selector.wake()  # It may have waited for modules.

    def dump_stacks(self, lane_id: int, trial_id: str) -> None:
        """Has a lane's stacks written to the log of the trial that runs there, soon."""
        request_stacks(self.folders.run_folder, lane_id, trial_id, lambda: self._server.dump_stacks(lane_id))

    def preload(self, modules: Sequence[str], *, late: bool = False) -> None:
        """Loads what trials are going to import: see :meth:`fluid.backends.base.Launcher.preload`; from any thread."""
        self._server.preload(modules, late=late)
        self._server.preload(_loaded_late_by(modules), late=True)
        self._selector.wake()

    def loading(self) -> str:
        """The module that is imported now and that lanes wait for; empty if there is none; from any thread."""
        return self._server.loading()

    def keep(self, lane_id: int, name: str, data: bytes) -> Keeping:
        """Keeps a payload for the lanes: see :meth:`fluid.backends.base.Launcher.keep`. Never under way here."""
        is_kept = name in self.payloads or self.payloads.write(name, data, size=len(data))
        return Keeping.DONE if is_kept else Keeping.REFUSED

    def drop(self, name: str) -> None:
        """Drops a payload, if it is kept."""
        self.payloads.drop(name)

    def poll(self) -> list[LauncherReport]:
        """Returns the lanes that have ended, and what was done with checkpoints, since the last call."""
        self._selector.wait(0.0)  # Empties the pipe.
        for exited in self._server.poll():
            self._note_end(exited)
        self._reports += [LaneSuperseded(lane_id) for lane_id in self._server.take_superseded()]
        self._handle_device_fault()
        reports, self._reports = self._reports, []
        return [*reports, *self.stores.poll()]

    def checkpoints_at(self, host: str) -> CheckpointSource:
        """Nowhere, as the driver's machine is the only one where a host is the launcher."""
        return CheckpointSource()

    def forward_output(self) -> None:
        """Makes lanes that are launched from now on forward what their trials print."""
        self._output = self._output or OutputTail(self.folders.run_folder)

    def lane_room(self) -> HostRoom:
        """Returns what lanes find on this machine, and what those that there are take of it."""
        return room_here(self._server.lane_processes())

    def read_output(self) -> list[LaneText]:
        """Returns what was printed: see :class:`fluid.backends.base.Launcher`; bounded, and from any thread."""
        return [] if self._output is None else self._output.read()

    def look(self) -> None:
        """Continues the fork server if it was stopped; it looks at the lanes itself."""
        self._server.look()

    def close(self, *, clear: bool = True) -> None:
        """Ends the server, every lane and the MPS daemon; no process is left when it returns.

        Args:
            clear: whether the session is over, so that its folders are cleared.
        """
        for launch in self._waiting:
            launch.connection.close()
        self._waiting.clear()
        self._await_programs()
        try:
            self._server.close()
        finally:
            if self._output is not None:
                self._output.close()
            try:
                self._sharing.close()
            finally:
                self.stores.close()
                self.payloads.close()
                # On the driver's machine the driver clears them, after all hosts there.
                self.folders.leave(clear=clear and (self._settings.driver is None or self._settings.name != HERE))
                self._selector.close()

    def _await_programs(self) -> None:
        """Waits a while for those who use programs: they hear that the session ends, and write what is left."""
        until, pause = self._clock.now() + _PROGRAMS_S, threading.Event()
        while any(ours.fileno() >= 0 for ours in tuple(self._program_ends)) and self._clock.now() < until:
            pause.wait(0.01)

    def abandon(self) -> None:
        """Called in a process forked from the driver: closes descriptors that are the driver's."""
        self._server.abandon()
        self.payloads.abandon()
        self.stores.abandon()
        self.folders.leave(clear=False)
        self._selector.close()

    def _fork(self, launch: _Launch) -> None:
        lane_id, binding, connection = launch
        options = LaneOptions(
            lane_id,
            kind=binding.kind,
            visible=binding.token or binding.visible,
            threads=binding.threads,
            cores=binding.cores or self._numa.near(binding.token),
            address=self._settings.address,
            run_folder=self.folders.run_folder,
            memory_folder=self.folders.memory_folder,
            note=self.folders.note(lane_id),
            policy=self._settings.policy,
            payload_folders=self.payloads.folders,
            environment=self._sharing.lane_environment(binding.token),
            variables=binding.variables,
            bounded=binding.bounded,
            session_key=self._settings.key,
            session_folder=self._settings.session.run_folder,
            echo=self._output is not None,
            launched_at=self._clock.now(),
            reserved_bytes=self._settings.reserved_bytes,
            authkey=bytes(current_process().authkey),
        )
        if self._output is not None:
            self._output.follow(lane_id)
        self._running[lane_id] = binding.token
        try:
            self._server.fork(options, connection)
        except BaseException:
            del self._running[lane_id]
            raise
        self.stores.note_lanes(len(self._running))

    def _note_end(self, exited: Exited) -> None:
        lane_id, reason, blameless = exited
        if self._output is not None:
            self._output.lane_ended(lane_id)
        token = self._running.pop(lane_id, None)
        self.stores.note_lanes(len(self._running), lost=lane_id)
        if token is None:
            return  # Its end was reported before.
        note = self.folders.note(lane_id)
        culprit = read_running_trial(note)
        with suppress(OSError):
            os.unlink(note)
        death = LaneExited(lane_id, reason + self._hint(lane_id), blameless, culprit)
        self._report(LaneDying(lane_id) if self._faults.keeps_back(death, token) else death)

    def _handle_device_fault(self) -> None:
        """Ends the lanes of a GPU where what they depend on has failed, and launches those that waited for it."""
        failed, deaths = self._faults.look(self._running)
        for lane_id, problem in sorted(failed.items()):
            self._server.kill(lane_id)
            del self._running[lane_id]
            self._report(LaneExited(lane_id, problem, blameless=True))
        self._reports += deaths
        waiting, self._waiting = self._waiting, []
        for launch in waiting:
            if not self._faults.may_launch(launch.binding.token):
                self._waiting.append(launch)
                continue
            try:
                self._fork(launch)
            except (FluidError, OSError) as error:
                self._report(LaneExited(launch.lane_id, f"could not be started: {error}"))

    def _report(self, report: LaneDying | LaneExited) -> None:
        self._reports.append(report)
        self._selector.wake()

    def _hint(self, lane_id: int) -> str:
        """Names the log that the lane wrote before it died, if it wrote anything; rather that of its errors."""
        if self._settings.session.temporary:
            return ""
        written = filter(has_text, reversed(lane_output(self.folders.run_folder, lane_id)))
        return "".join(f"; see {path}" for path in itertools.islice(written, 1))


def _loaded_late_by(modules: Sequence[str]) -> list[str]:
    """What these modules load only once they are used."""
    return [
        ahead for name in modules for user, late in _LATE.items() if f"{name}.".startswith(f"{user}.") for ahead in late
    ]


# -- device variables ----------------------------------------------------------------------------
#
# Environment variables that tell code in a lane about its device.


def device_variables(index: int) -> tuple[tuple[str, str], ...]:
    """Returns the variable that has the indices of a lane's devices, given that of one: ``FLUID_DEVICES="[0]"``."""
    return (("FLUID_DEVICES", json.dumps([index])),)
