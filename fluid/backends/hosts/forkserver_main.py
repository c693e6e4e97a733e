"""The fork server: a process that has loaded what trials import, and forks a lane at each request.

Run by :mod:`fluid.backends.hosts.forkserver` with its state, as JSON, in the environment. It never touches CUDA: a
process forked from one that did cannot use it. Should a module that it loads do so, or start a thread (which
the lanes would not have), then the server replaces itself, by ``exec``, with one that leaves that module out.

It is the parent of all lanes, so it knows how they end and when they are stopped, and it adopts the processes they
leave behind, which it kills. It is below a guardian (:mod:`fluid.backends.hosts.guardian`), which ends it when its
host dies. The server of ``multiprocessing.forkserver`` cannot do this: it loads modules only before it starts, does
not say how its children end, and does not follow its host.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import pickle
import select
import selectors
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from fluid._clock import MonotonicClock
from fluid.backends.hosts import host_memory
from fluid.backends.hosts.forkserver_state import NO_DESCRIPTORS, PROGRAM, STATE_VARIABLE, ForkServerState
from fluid.backends.hosts.guardian import fork_below_guardian
from fluid.backends.hosts.lane_killing import LaneKiller, kill_with_group
from fluid.lane.checkpoint_store import persist_checkpoints
from fluid.lane.messages import LaneOptions
from fluid.lane.output import lane_output
from fluid.lane.process import run_as_process
from fluid.lane.stack_dump import DUMP_SIGNAL
from fluid.processes.children import (
    adopt_orphans,
    children,
    describe_exit,
    die_with_parent,
    is_stopped,
    kill,
    kill_children,
    set_process_name,
    signal_parents_death,
)
from fluid.processes.signals import FOR_THE_DRIVER, leave_to_driver, restore_in_forks

#: Seconds that a lane may be stopped (SIGSTOP) before it is killed. If the look at it comes so many seconds late, this
#: process was stopped, too, and it has as long again.
_STOPPED_S = 5.0
_LATE_S = 1.0
#: Seconds that processes left behind by a lane have to end by themselves.
_ORPHAN_GRACE_S = 0.5
#: Sent by the kernel when the guardian dies; no module that is loaded is likely to use it.
_GUARDIAN_DIED = signal.SIGRTMAX
_LARGEST_REQUEST = 1 << 20


class ForkServer:
    """The server's main loop, :meth:`run`, and its :meth:`end`."""

    def __init__(self, state: ForkServerState) -> None:
        self._state = state
        self._pid = os.getpid()
        self._clock = MonotonicClock()
        self._control = socket.socket(fileno=state.control)
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
        self._memory_lock = self._enter_memory()
        #: When to kill processes that lanes have left behind.
        self._orphans_at: float | None = None
        #: When to kill lanes that are stopped; and those that were killed for it.
        self._stopped: dict[int, float] = {}
        self._killed: set[int] = set()
        self._killer = LaneKiller()

    def run(self) -> NoReturn:
        signal.signal(_GUARDIAN_DIED, lambda *_: self.end())  # Also while a module is loaded, which may take long.
        signal.signal(signal.SIGCHLD, lambda *_: None)  # It only has to wake the loop.
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        adopt_orphans()
        set_process_name("fluid-forks")
        if not signal_parents_death(self._state.guardian, _GUARDIAN_DIED):
            self.end()
        self._tell("started", self._pid)
        self._load(list(self._state.loaded))
        self._serve()
        while True:
            self._reap()
            self._end_stopped()
            for key, _ in self._selector.select(self._until_next_look()):
                if key.fileobj is self._control:
                    self._serve()
                else:
                    with suppress(BlockingIOError):
                        os.read(self._wake_reader, 4096)

    # -- requests --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Serves the requests; modules are loaded before lanes are forked, which would each load them again."""
        modules = self._read_requests()
        while modules:
            self._load(modules)
            modules = self._read_requests()
        self._fork_waiting()

    def _read_requests(self) -> list[str]:
        """Reads all requests that have arrived; returns the modules to load."""
        modules: list[str] = []
        while self._asked.poll(0):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST_REQUEST, 1)
            except ConnectionResetError:
                data = b""  # The host died before it had read everything.
            if not data:
                self.end()
            name, argument = pickle.loads(data)
            if name == "fork" and not descriptors:
                self._tell("exited", LaneOptions(*argument).lane_id, f"could not be forked: {NO_DESCRIPTORS}")
            elif name == "fork":
                self._state.waiting.append((pickle.dumps(argument).hex(), descriptors[0]))
            elif name == "preload":
                modules += argument
                self._state.loaded += argument
            elif name == "kill":
                self._fork_waiting()
                killed, control = argument
                for process in [process for process, lane_id in self._state.lanes.items() if lane_id == killed]:
                    self._killer.kill(process, control)
            elif name == "dump":
                for process in [process for process, lane_id in self._state.lanes.items() if lane_id == argument]:
                    with suppress(OSError):
                        os.kill(process, DUMP_SIGNAL)
        return modules

    def _tell(self, *report: Any) -> None:
        try:
            self._control.send(pickle.dumps(report))
        except OSError:
            self.end()

    def _load(self, modules: list[str]) -> None:
        for name in modules:
            if name in sys.modules or name in self._state.refused:
                continue
            threads = threading.active_count()
            error = ""
            with _without_collector():
                begun = self._clock.now()
                try:
                    importlib.import_module(name)
                except BaseException as raised:  # Also what a script without a main guard may do.
                    error = f"{type(raised).__name__}: {raised}"
                seconds = self._clock.now() - begun
            if _has_touched_cuda():
                self._start_over_without(name, "it uses CUDA when it is imported")
            if threading.active_count() > threads:
                self._start_over_without(name, "it starts a thread when it is imported")
            self._tell("preloaded", name, seconds, error)
        # Keeps the collector of each lane from writing to, and so copying, every page it shares with the others.
        gc.freeze()

    def _start_over_without(self, name: str, reason: str) -> NoReturn:
        self._state.refused[name] = reason
        self._state.loaded.remove(name)
        self._tell("preloaded", name, 0.0, f"not loaded ahead: {reason}")
        for descriptor in (self._state.control, *(connection for _, connection in self._state.waiting)):
            os.set_inheritable(descriptor, True)
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in self._state.sys_path if path)
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ[STATE_VARIABLE] = self._state.to_json()
        signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_DRIVER)  # Until the other program has its handlers.
        os.execv(sys.executable, [sys.executable, "-m", PROGRAM])

    # -- lanes -----------------------------------------------------------------------------------------------

    def _fork_waiting(self) -> None:
        while self._state.waiting:
            options, connection = self._state.waiting.pop(0)
            self._fork(LaneOptions(*pickle.loads(bytes.fromhex(options))), connection)

    def _fork(self, options: LaneOptions, connection: int) -> None:
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
        self._state.lanes[process] = options.lane_id
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
        self._selector.close()
        self._control.close()
        others = [descriptor for _, descriptor in self._state.waiting]
        for descriptor in (self._wake_reader, self._wake_writer, *others):
            os.close(descriptor)
        for descriptor, path in enumerate(lane_output(options.run_folder, options.lane_id), start=1):
            file = os.open(path, _APPEND, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        if options.program:
            module, _, function = options.program.partition(":")
            getattr(importlib.import_module(module), function)(socket.socket(fileno=connection))
            os._exit(0)
        run_as_process(Connection(connection), options)

    def _reap(self) -> None:
        """Reports every lane that has ended to the host, and reaps it."""
        while (found := self._next_dead()) is not None:
            if found in self._state.lanes:
                # Until it is reaped, no other process or group gets its number.
                with suppress(OSError):
                    os.killpg(found, signal.SIGTERM)
                self._orphans_at = self._clock.now() + _ORPHAN_GRACE_S
            _, status = os.waitpid(found, 0)
            lane_id = self._state.lanes.pop(found, None)
            self._killer.reaped(found)
            self._stopped.pop(found, None)
            was_stopped = found in self._killed
            self._killed.discard(found)
            if lane_id is not None:
                how = describe_exit(os.waitstatus_to_exitcode(status))
                reason = f"was stopped (SIGSTOP) for {_STOPPED_S:.0f} s" if was_stopped else how
                self._tell("exited", lane_id, reason, was_stopped)
        if self._orphans_at is not None and self._clock.now() >= self._orphans_at:
            orphans = [process for process in children() if process not in self._state.lanes]
            kill(orphans)
            # Those may have children of their own, which come here when they die.
            self._orphans_at = self._clock.now() + _ORPHAN_GRACE_S if orphans else None

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
            elif process in self._state.lanes:
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
        for process in self._state.lanes:
            with suppress(OSError):
                os.killpg(process, signal.SIGKILL)
        kill_children(self._state.lanes)
        state = self._state
        if self._memory_lock >= 0 and state.is_session_over() and host_memory.is_last(self._memory_lock):
            persist_checkpoints(state.memory_folder, state.run_folder, temporary=state.temporary)
        os._exit(0)


def _next_stop() -> tuple[int, bool] | None:
    """Returns the next child that was stopped or continued since it was last asked, and whether it was stopped."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    except ChildProcessError:
        return None
    return None if found is None else (found.si_pid, found.si_code == os.CLD_STOPPED)


_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@contextmanager
def _without_collector() -> Iterator[None]:
    """Switches the garbage collector off: a quarter of the time would go into looking for cycles among what stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _has_touched_cuda() -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    # The driver opens this when it is initialised by whatever library; asking NVML what there is does not.
    for descriptor in _names("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm"):
                return True
    return False


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def main() -> NoReturn:
    """Runs the server."""
    state = ForkServerState.from_json(os.environ.pop(STATE_VARIABLE))
    sys.argv[:] = [""]
    sys.path[:] = state.sys_path
    os.environ.pop("PYTHONPATH", None)
    if state.python_path is not None:
        os.environ["PYTHONPATH"] = state.python_path
    # What is written here must not be in a buffer that each lane would write again.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
    leave_to_driver()
    if not state.guardian:
        fork_below_guardian(state)
    server = ForkServer(state)
    try:
        server.run()
    except BaseException:
        traceback.print_exc()
        server.end()


if __name__ == "__main__":
    main()
