"""The driver's end of the supervisor of an MPS control daemon: see :mod:`fluid.gpu.mps_supervisor_main`."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path

import fluid._version
from fluid.gpu.mps_supervisor_main import ORDERS_VARIABLE
from fluid.processes.children import describe_exit

_PROGRAM = "fluid.gpu.mps_supervisor_main"
#: Seconds the supervisor has beyond what the daemon has to quit, and to kill what is left.
_SLACK_S = 5.0
_NEWS_BYTES = 1 << 16


class SupervisorProcess:
    """The driver's end of a supervisor, which starts a control daemon when this is made.

    Args:
        program: the control program.
        environment: of the daemon.
        grace: seconds the daemon has to quit.
        output: file for what it prints.
        delete: folders that nobody needs once this process is dead.

    Attributes:
        pid: the control daemon, as long as it runs.
        gone: why there is no daemon any more; empty as long as there is one, or may be soon.
    """

    def __init__(
        self, program: str, environment: dict[str, str], *, grace: float, output: str, delete: list[str]
    ) -> None:
        self._owner = os.getpid()
        self.pid: int | None = None
        self.gone = ""
        orders = {"driver": self._owner, "program": program, "grace": grace, "output": output, "delete": delete}
        root = str(Path(fluid._version.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM],
            env={**environment, "PYTHONPATH": path, ORDERS_VARIABLE: json.dumps(orders)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # No Ctrl-C reaches it: the driver decides what that means.
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._news = b""
        #: Also at the end of the interpreter, for callers who forget.
        self._finalizer = weakref.finalize(self, _end_process, self._process, self._owner, grace + _SLACK_S)

    @property
    def is_ours(self) -> bool:
        """Whether this process started it: one forked from the driver has only a copy of this."""
        return os.getpid() == self._owner

    def wait(self, timeout: float) -> None:
        """Waits for news, and takes them in.

        Args:
            timeout: seconds.
        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if self.gone or not poller.poll(timeout * 1000.0):
            return
        data = os.read(descriptor, _NEWS_BYTES)
        *lines, self._news = (self._news + data).split(b"\n")
        for line in lines:
            news = json.loads(line)
            self.pid = news.get("started")
            if "refused" in news:
                self.gone = str(news["refused"])
            elif "exited" in news:
                self.gone = f"the MPS control daemon {describe_exit(news['exited'])}"
        if not data:
            self.pid, self.gone = None, "the process that kept the MPS control daemon has died"

    def end(self) -> None:
        """Has the daemon ended; neither it nor the supervisor is left when this returns."""
        self.pid = None
        self._finalizer()


def _end_process(process: subprocess.Popen[bytes], owner: int, timeout: float) -> None:
    if os.getpid() != owner:
        process.returncode = 0  # Not its child: it must not wait for it.
        return
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()  # The supervisor takes the end of its input for the order to end.
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    finally:  # Also when interrupted.
        process.kill()  # If it still runs. The daemon dies with it.
        process.wait()
