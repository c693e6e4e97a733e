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

import os
import select
import signal
from contextlib import suppress
from typing import NoReturn

from fluid.backends.hosts import host_memory
from fluid.backends.hosts.forkserver_state import ForkServerState
from fluid.lane.checkpoints.paths import open_folder
from fluid.lane.checkpoints.store import persist_checkpoints
from fluid.processes.children import adopt_orphans, kill, kill_children, open_process, set_process_name

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
