"""Kills lanes: with SIGKILL, and clients of MPS only once their work on the GPU was ended.

The kernels of all clients of a GPU run in one context of the MPS server. A client that dies in the middle of one may
leave that undefined, so NVIDIA has ``terminate_client`` for it. The control daemon may take long to answer, so a
process of its own asks, which ends after a second at the latest.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import NamedTuple

from fluid.gpu.mps_control import PIPE_VARIABLE, Control, MpsError, search_paths
from fluid.processes.children import die_with_parent, kill, set_process_name

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
