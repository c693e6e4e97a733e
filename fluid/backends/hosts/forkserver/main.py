"""The fork server: processes that have loaded what trials import, and fork a lane at each request.

Run by :mod:`fluid.backends.hosts.forkserver.host_end` with its state, as JSON, as its argument. The first process, the
base, has loaded what every lane needs, and nothing of trials. Whatever else lanes are to have from the start is loaded
by an
heir: a process forked from the newest server, which takes its place once that went well. So lanes that are started
meanwhile wait only where the host wants them to, and a module that spoils a process for forks (it starts a thread,
or uses CUDA) spoils an heir that has forked no lane: it ends, and another one does without that module. A server that
has an heir ends with its last lane; the base stays, and adopts its heirs' heirs.

A server is the parent of its lanes, so it knows how they end and when they are stopped, and it adopts the processes
they leave behind, which it kills. The base is below a guardian (:mod:`fluid.backends.hosts.forkserver.guardian`), which
ends all when the host dies. The server of ``multiprocessing.forkserver`` cannot do this: it loads modules only before
it starts, does not say how its children end, and does not follow its host.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import select
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from msgspec import convert

import fluid.shared_data.loading  # noqa: F401  # For trials: to load it takes as long as to map what it has shared.
from fluid._clock import MonotonicClock
from fluid.backends.hosts import memory as host_memory
from fluid.backends.hosts.forkserver.guardian import (
    NO_DESCRIPTORS,
    ForkServerState,
    LaneKiller,
    fork_below_guardian,
    kill_with_group,
)
from fluid.backends.hosts.forkserver.modules import join_memory, load_module
from fluid.lane.news import note_modules_before_fork
from fluid.lane.output import DUMP_SIGNAL, lane_output, lane_stacks
from fluid.lane.protocol import LaneOptions
from fluid.lane.serve import run_as_process
from fluid.processes.children import (
    adopt_orphans,
    children,
    describe_exit,
    die_with_parent,
    is_stopped,
    kill,
    kill_children,
    process_name,
    set_process_name,
    signal_parents_death,
)
from fluid.processes.frames import FramedConnection
from fluid.processes.signals import leave_to_driver, restore_in_forks
from fluid.wire import decoder, encode

#: Seconds that a lane may be stopped (SIGSTOP) before it is killed. If the look at it comes so many seconds late, this
#: process was stopped, too, and it has as long again.
_STOPPED_S = 5.0
_LATE_S = 1.0
#: Seconds that processes left behind by a lane have to end by themselves.
_ORPHAN_GRACE_S = 0.5
#: Sent by the kernel when the guardian dies; no module that is loaded is likely to use it.
_GUARDIAN_DIED = signal.SIGRTMAX
_LARGEST_REQUEST = 1 << 20
_decode = decoder(Any)
#: Lanes after which a server makes forks cheaper, which takes it as long as that has taken with PyTorch.
_FORKS_BEFORE_JOINING = 32
#: Name of the processes that fork lanes.
_NAME = "fluid-forks"


class ForkServer:
    """A server's main loop, :meth:`run`, and its :meth:`end`.

    Args:
        state: what the base was told.
        control: descriptor of its socket to the host.
        base: the server that this one is an heir of, by whatever number of steps; ``None`` for the base itself.
    """

    def __init__(self, state: ForkServerState, control: int, base: ForkServer | None = None) -> None:
        self._state = state
        self._pid = os.getpid()
        self._is_base = base is None
        self._clock = MonotonicClock()
        self._control = socket.socket(fileno=control)
        self._control.setblocking(True)
        self._asked = select.poll()
        self._asked.register(self._control, select.POLLIN)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._wake_reader, self._wake_writer = os.pipe()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        # Lanes hold it too, so that no other session clears the folder while one of them is still ending.
        self._memory_lock: int = self._enter_memory() if base is None else base._memory_lock
        #: Lane by process.
        self._lanes: dict[int, int] = {}
        #: The process that was forked last to take this one's place, if it is there; whether it has.
        self._heir = 0
        self._is_retired = False
        #: How many lanes it has forked, and what makes the next ones cheaper, bit by bit.
        self._forked = 0
        self._joining = join_memory()
        #: When to kill processes that lanes have left behind.
        self._orphans_at: float | None = None
        #: When to kill lanes that are stopped; and those that were killed for it.
        self._stopped: dict[int, float] = {}
        self._killed: set[int] = set()
        self._killer = LaneKiller()

    def run(self, modules: Sequence[str] = (), *, late: bool = False) -> NoReturn:
        """Loads modules, and serves.

        Args:
            modules: what an heir loads before it takes a server's place.
            late: whether no import statement names these modules: one that cannot be loaded may leave nothing behind.
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)  # It only has to wake the loop.
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        adopt_orphans()
        if self._is_base:
            signal.signal(_GUARDIAN_DIED, lambda *_: self.end())
            set_process_name(_NAME)
            if not signal_parents_death(self._state.guardian, _GUARDIAN_DIED):
                self.end()
        self._tell("started", self._pid)
        self._load(modules, late)
        self._tell("ready")
        while True:
            self._serve()
            self._reap()
            self._end_stopped()
            if self._is_retired and not self._lanes and self._orphans_at is None:
                os._exit(0)
            if self._forked >= _FORKS_BEFORE_JOINING and not self._is_retired and not self._asked.poll(0):
                self._join_memory()
            for key, _ in self._selector.select(self._until_next_look()):
                if key.fileobj is not self._control:
                    with suppress(BlockingIOError):
                        os.read(self._wake_reader, 4096)

    # -- requests --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serves all requests that have arrived."""
        while self._asked.poll(0):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST_REQUEST, 1)
            except ConnectionResetError:
                data = b""  # The host died before it had read everything.
            if not data:
                self.end()
            name, argument = _decode(data)
            if name == "fork":
                self._fork(convert(argument, LaneOptions), descriptors)
            elif name == "heir" and descriptors:  # Else the host sees that the connection has ended.
                modules, late = argument
                self._fork_heir(modules, late, descriptors[0])
            elif name == "disown" and self._heir:
                kill([self._heir])
            elif name == "retire":
                self._is_retired = True
            elif name == "kill":
                killed, control = argument
                for process in self._processes_of(killed):
                    self._killer.kill(process, control)
            elif name == "dump":
                for process in self._processes_of(argument):
                    with suppress(OSError):
                        os.kill(process, DUMP_SIGNAL)

    def _processes_of(self, lane_id: int) -> list[int]:
        return [process for process, lane in self._lanes.items() if lane == lane_id]

    def _tell(self, *report: Any) -> None:
        try:
            self._control.send(encode(report))
        except OSError:
            self.end()

    # -- heirs -----------------------------------------------------------------------------------------------

    def _fork_heir(self, modules: Sequence[str], late: bool, control: int) -> None:
        """Forks a process that loads modules and then takes the place of this one."""
        try:
            process = os.fork()
        except OSError as error:
            traceback.print_exception(error)
            os.close(control)  # The host sees that.
            return
        if process:
            os.close(control)
            self._heir = process
            return
        try:
            signal.set_wakeup_fd(-1)
            self._close()
            ForkServer(self._state, control, self).run(modules, late=late)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)

    def _load(self, modules: Sequence[str], late: bool) -> None:
        for name in modules:
            if name in sys.modules:
                continue
            self._tell("loading", name)
            seconds, error, spoilt = load_module(name, self._clock, whole=late)
            if spoilt:
                self._tell("spoilt", f"it {spoilt}")
                kill_children()
                os._exit(0)
            self._tell("loaded", name, seconds, error)
        note_modules_before_fork()
        # Keeps the collector of each lane from writing to, and so copying, every page it shares with the others.
        gc.freeze()

    # -- lanes -----------------------------------------------------------------------------------------------

    def _fork(self, options: LaneOptions, descriptors: Sequence[int]) -> None:
        if not descriptors:
            self._tell("exited", options.lane_id, f"could not be forked: {NO_DESCRIPTORS}")
            return
        (connection,) = descriptors
        try:
            process = os.fork()
        except OSError as error:
            os.close(connection)
            self._tell("exited", options.lane_id, f"could not be forked: {error}")
            return
        if process == 0:
            try:
                self._be_lane(options, connection)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(1)
        os.close(connection)
        self._forked += 1
        self._lanes[process] = options.lane_id
        with suppress(OSError):  # The child does the same; one of the two comes first.
            os.setpgid(process, process)

    def _be_lane(self, options: LaneOptions, connection: int) -> NoReturn:
        # A group of its own, so that what the lane starts can be killed with it, and no Ctrl-C reaches it.
        with suppress(OSError):
            os.setpgid(0, 0)
        die_with_parent(self._pid)
        set_process_name("fluid-program" if options.program else f"fluid-lane-{options.lane_id}")
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, _GUARDIAN_DIED):
            signal.signal(number, signal.SIG_DFL)
        restore_in_forks()
        # A process that a trial leaves behind must not seem to use the session's folder.
        os.register_at_fork(after_in_child=self._leave_memory)
        self._close()
        for descriptor, path in enumerate(lane_output(options.run_folder, options.lane_id), start=1):
            file = os.open(path, _APPEND, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        if options.program:
            module, _, function = options.program.partition(":")
            getattr(importlib.import_module(module), function)(socket.socket(fileno=connection))
            os._exit(0)
        run_as_process(FramedConnection(connection), options)

    def _close(self) -> None:
        """Closes, in a process that was forked, what is this process's own."""
        self._selector.close()
        self._control.close()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.close(descriptor)

    def _reap(self) -> None:
        """Reports every lane that has ended to the host, and reaps it."""
        while (found := self._next_dead()) is not None:
            if found in self._lanes:
                # Until it is reaped, no other process or group gets its number.
                with suppress(OSError):
                    os.killpg(found, signal.SIGTERM)
                self._orphans_at = self._clock.now() + _ORPHAN_GRACE_S
            _, status = os.waitpid(found, 0)
            lane_id = self._lanes.pop(found, None)
            self._killer.reaped(found)
            self._stopped.pop(found, None)
            was_stopped = found in self._killed
            self._killed.discard(found)
            how = describe_exit(os.waitstatus_to_exitcode(status))
            if lane_id is not None:
                self._delete_empty(lane_id)
                reason = f"was stopped (SIGSTOP) for {_STOPPED_S:.0f} s" if was_stopped else how
                self._tell("exited", lane_id, reason, was_stopped)
            else:
                self._heir = 0 if found == self._heir else self._heir
                self._orphans_at = self._clock.now() + _ORPHAN_GRACE_S  # What the lanes of a server leave comes here.
        if self._orphans_at is not None and self._clock.now() >= self._orphans_at:
            orphans = [process for process in children() if process not in self._lanes and not _is_server(process)]
            kill(orphans)
            # Those may have children of their own, which come here when they die.
            self._orphans_at = self._clock.now() + _ORPHAN_GRACE_S if orphans else None

    def _delete_empty(self, lane_id: int) -> None:
        """Deletes the files of a lane that has ended and nothing was written to."""
        folder = self._state.run_folder
        for path in (*lane_output(folder, lane_id), lane_stacks(folder, lane_id)):
            with suppress(OSError):
                if os.stat(path).st_size == 0:
                    os.unlink(path)

    def _next_dead(self) -> int | None:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        return None if found is None else found.si_pid

    def _end_stopped(self) -> None:
        """Kills lanes that were stopped and not continued in time."""
        while (changed := _next_stop()) is not None:
            process, has_stopped = changed
            if not has_stopped:
                self._stopped.pop(process, None)
            elif process in self._lanes:
                self._stopped.setdefault(process, self._clock.now() + _STOPPED_S)
        now = self._clock.now()
        for process, at in list(self._stopped.items()):
            if now > at + _LATE_S:
                self._stopped[process] = now + _STOPPED_S
            elif now >= at:
                del self._stopped[process]
                if is_stopped(process):
                    self._killed.add(process)
                    kill_with_group(process)

    def _join_memory(self) -> None:
        """Makes forks cheaper while there is nothing else to do, up to the next request."""
        while not self._asked.poll(0) and next(self._joining, self) is None:
            pass

    def _until_next_look(self) -> float | None:
        times = [*self._stopped.values(), *([] if self._orphans_at is None else [self._orphans_at])]
        return max(0.0, min(times) - self._clock.now()) if times else None

    # -- the end ---------------------------------------------------------------------------------------------

    def _enter_memory(self) -> int:
        state = self._state
        if not state.memory_folder:
            return -1
        try:
            return host_memory.enter(state.memory_folder, state.run_folder, state.mark, temporary=state.temporary)
        except OSError:
            return -1

    def _leave_memory(self) -> None:
        if self._memory_lock >= 0:
            with suppress(OSError):  # A trial may have closed it.
                os.close(self._memory_lock)

    def end(self) -> NoReturn:
        """Kills everything below this process, and ends: the guardian or the host has died, or both."""
        if os.getpid() != self._pid:
            os._exit(1)  # A signal in a forked process that is not a lane yet.
        for process in self._lanes:
            with suppress(OSError):
                os.killpg(process, signal.SIGKILL)
        kill_children([*self._lanes, *filter(None, [self._heir])])
        state, lock = self._state, self._memory_lock
        if self._is_base and lock >= 0 and state.is_session_over() and host_memory.is_last(lock):
            host_memory.settle(state.memory_folder, lock)
        os._exit(0)


def _next_stop() -> tuple[int, bool] | None:
    """Returns the next child that was stopped or continued since it was last asked, and whether it was stopped."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    except ChildProcessError:
        return None
    return None if found is None else (found.si_pid, found.si_code == os.CLD_STOPPED)


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def _is_server(process: int) -> bool:
    """Whether a child is a server: an heir, or one that came here as the server before it has ended."""
    return process_name(process) == _NAME


def main() -> NoReturn:
    """Runs the server."""
    state = ForkServerState.from_json(sys.argv[1])
    sys.argv[:] = [""]
    # What is written here must not be in a buffer that each lane would write again.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    leave_to_driver()
    if not state.guardian:
        fork_below_guardian(state)
    server = ForkServer(state, state.control)
    try:
        server.run()
    except BaseException:
        traceback.print_exc()
        server.end()


if __name__ == "__main__":
    main()
