"""The guardian: the parent of the fork server, which kills all processes below it when the server or its host dies.

It adopts orphans, so that sub-processes of trials come to it also if they lead a session of their own. It has nothing
else to do, and shares its memory with the server, of which it is the other half after a fork. Of host, server and
guardian any one may be killed, or host and server together. (On the driver's node the host is the driver.)

* The host dies: the guardian kills the server, the lanes and all below them; unless the driver lives on another node,
  which may start another host, it clears the session's folders.
* The server dies: its lanes die with it; the guardian kills what they leave, and waits for the host's word.
* The guardian dies: the server kills the lanes and all below them, and ends.

If guardian and server are killed together, the host finds their processes by the session's mark
(:mod:`fluid.processes.session_mark`); if all three are, the next session of this user on this machine does.
"""

from __future__ import annotations

import json
import os
import select
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple, NoReturn

from fluid.backends.hosts import memory as host_memory
from fluid.backends.hosts.sockets import is_reachable
from fluid.gpu.mps_control import PIPE_VARIABLE, Control, MpsError, search_paths
from fluid.lane.checkpoints.paths import open_folder
from fluid.lane.checkpoints.store import persist_checkpoints
from fluid.processes.children import adopt_orphans, die_with_parent, kill, kill_children, open_process, set_process_name

# -- forkserver state ----------------------------------------------------------------------------
#
# What a fork server is told by its host.


#: The program, whose argument the state is.
PROGRAM = "fluid.backends.hosts.forkserver.main"
#: Seconds in which a driver that is alive answers.
_DRIVER_S = 1.0
#: Why a lane cannot be started.
NO_DESCRIPTORS = "too many open files; see `ulimit -n`"


@dataclass(kw_only=True)
class ForkServerState:
    """What a fork server knows.

    Attributes:
        control: descriptor of the server's socket to its host.
        guard: descriptor of the pipe from the host to the guardian.
        host: the host's process; the driver itself, unless the driver is on another node.
        mark: the session's; see :mod:`fluid.processes.session_mark`.
        run_folder: folder of the run.
        memory_folder: folder of the checkpoints in host memory; empty if there is none.
        temporary: whether both folders are deleted after the driver's death.
        driver_address: where the driver listens, if the host is another process; ``None`` otherwise.
        guardian: the guardian's process; 0 before it was forked.
    """

    control: int
    guard: int
    host: int
    mark: str
    run_folder: str
    memory_folder: str
    temporary: bool
    driver_address: tuple[str, int] | None = None
    guardian: int = 0

    @classmethod
    def from_json(cls, text: str) -> ForkServerState:
        """Reads what :meth:`to_json` returned."""
        state = cls(**json.loads(text))
        if state.driver_address is not None:
            state.driver_address = state.driver_address[0], state.driver_address[1]
        return state

    def is_session_over(self) -> bool:
        """Whether the driver has ended too, to be asked when the host has; may wait a second for an answer."""
        return self.driver_address is None or not is_reachable(self.driver_address, _DRIVER_S)

    def to_json(self) -> str:
        """Returns the state as text."""
        return json.dumps(asdict(self))


# -- guardian ------------------------------------------------------------------------------------


#: What the host writes to end the guardian and all below it. It clears the folders itself.
END = b"end"
#: Added to the number of the signal that has killed the server, in the guardian's exit status.
_BY_SIGNAL = 128


def fork_below_guardian(state: ForkServerState) -> None:
    """Forks, and returns in the child, which is the fork server; this process becomes its guardian, and never returns.

    Args:
        state: of the server; the child's copy then has the guardian's number.
    """
    guardian = os.getpid()
    adopt_orphans()
    server = os.fork()
    if server:
        os.close(state.control)
        _Guardian(state, server).run()
    os.close(state.guard)
    os.setpgid(0, 0)  # What kills its group spares the guardian.
    state.guardian = guardian


def exit_code(status: int) -> int:
    """Returns how the server ended, negative for a signal, from the exit status of its guardian."""
    return status if status <= _BY_SIGNAL else _BY_SIGNAL - status


class _Guardian:
    """The guardian's main loop.

    Args:
        state: the server's.
        server: its process.
    """

    def __init__(self, state: ForkServerState, server: int) -> None:
        self._state = state
        self._server = server
        #: How the server ended, as an exit status; 0 while it runs.
        self._status = 0
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        self._poller = select.poll()
        self._poller.register(self._reader, select.POLLIN)
        self._poller.register(state.guard, select.POLLIN)
        host = open_process(state.host)
        if host is not None:  # On an old kernel the end of the pipe has to do.
            self._poller.register(host, select.POLLIN)
        #: Held until this process ends.
        self._lock = self._run_folder = -1
        if state.memory_folder:
            with suppress(OSError):
                self._lock = host_memory.enter(
                    state.memory_folder, state.run_folder, state.mark, temporary=state.temporary
                )
                self._run_folder = open_folder(state.run_folder)

    def run(self) -> NoReturn:
        """Waits for the end of the server, and for the host's word or death."""
        set_process_name("fluid-guard")
        signal.signal(signal.SIGCHLD, lambda *_: None)  # It only has to wake the loop.
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if os.getppid() != self._state.host:
            self._end(clear=True)  # It died before it could be watched.
        self._look_for_server()  # It may have died before its end could be signalled.
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor == self._reader:
                    with suppress(BlockingIOError):
                        os.read(self._reader, 4096)
                    self._look_for_server()
                else:
                    self._end(clear=descriptor != self._state.guard or not os.read(self._state.guard, len(END)))

    def _look_for_server(self) -> None:
        """Kills what the server has left, if it has ended; the host, if it lives, will read how that was."""
        if self._server and os.waitid(os.P_PID, self._server, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._end_server()
            kill_children()

    def _end_server(self) -> None:
        server, self._server = self._server, 0
        if server:
            kill([server])
            code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
            self._status = code if code >= 0 else _BY_SIGNAL - code

    def _end(self, *, clear: bool) -> NoReturn:
        """Kills everything below this process, and ends.

        Args:
            clear: whether the host has died, so that this process clears the session's folders.
        """
        self._end_server()
        kill_children()
        state = self._state
        clear = (clear or os.getppid() != state.host) and state.is_session_over()
        # Another host of the session may use them: several nodes of a cluster may be on one machine.
        if clear and self._lock < 0:
            persist_checkpoints(state.memory_folder, state.run_folder, temporary=state.temporary)
        elif clear and host_memory.is_last(self._lock):
            host_memory.settle(state.memory_folder, self._lock, self._run_folder)
        os._exit(self._status)


# -- lane killing --------------------------------------------------------------------------------
#
# Kills lanes: with SIGKILL, and clients of MPS only once their work on the GPU was ended.
#
# The kernels of all clients of a GPU run in one context of the MPS server. A client that dies in the middle of one may
# leave that undefined, so NVIDIA has ``terminate_client`` for it. The control daemon may take long to answer, so a
# process of its own asks, which ends after a second at the latest.


#: Longest that a lane lives on until its work on the GPU was ended, seconds.
_PATIENCE_S = 1.0


class MpsControl(NamedTuple):
    """Where the control daemon of a lane is: path of the control program, and the folder of the daemon's sockets."""

    program: str
    pipe_folder: str


class LaneKiller:
    """Kills child processes of this process, which reaps them. For one thread."""

    def __init__(self) -> None:
        #: The process that each helper is to end the work of, by the helper's process id.
        self._targets: dict[int, int] = {}

    def kill(self, process: int, control: MpsControl | None = None) -> None:
        """Kills a lane that was not reaped; at a second call, and if it is no client of MPS, at once.

        Args:
            process: its process id.
            control: of the daemon whose client it is; ``None`` for none.
        """
        if control is None or process in self._targets.values():
            kill_with_group(process)
            return
        try:
            helper = os.fork()
        except OSError:
            kill_with_group(process)
            return
        if helper == 0:
            _end_work(process, control)
        self._targets[helper] = process

    def reaped(self, process: int) -> None:
        """Takes note that a child was reaped; if that was a helper, its lane is killed."""
        # Another process may get the number of a lane that has ended.
        self._targets = {helper: lane for helper, lane in self._targets.items() if lane != process}
        if process in self._targets:
            kill_with_group(self._targets.pop(process))


def kill_with_group(process: int) -> None:
    """Kills a lane that was not reaped, with what its trials started in its process group."""
    try:
        os.killpg(process, signal.SIGKILL)
    except OSError:  # It has ended, and only waits to be reaped; or its group is not made yet.
        kill([process])


def _end_work(client: int, control: MpsControl) -> None:
    """Asks a daemon to end a client's work, and ends this process, which was forked for that."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)
        die_with_parent(os.getppid())
        set_process_name("fluid-killer")
        environment = {**os.environ, **search_paths(control.program, os.environ), PIPE_VARIABLE: control.pipe_folder}
        with suppress(MpsError):
            Control(control.program, environment, _PATIENCE_S).terminate_client(client)
    finally:
        os._exit(0)
