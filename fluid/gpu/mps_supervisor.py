"""The driver's end of the supervisor of an MPS control daemon: see :mod:`fluid.gpu.mps_supervisor_main`."""

from __future__ import annotations

import json
import os
import select
import subprocess
import weakref
from contextlib import suppress

from fluid.processes.children import describe_exit
from fluid.processes.interpreters import start_program
from fluid.processes.signals import blocked_for_driver

_PROGRAM = "fluid.gpu.mps_supervisor_main"
#: Seconds that the supervisor has to kill the remaining processes, beyond the time that the daemon has to quit.
_SLACK_S = 5.0
_REPORT_BYTES = 1 << 16


class SupervisorProcess:
    """The driver's end of a supervisor, which starts a control daemon when this is made.

    Args:
        program: the control program.
        environment: the daemon's.
        grace: seconds that the daemon has to quit.
        output: file for the daemon's output.
        delete: folders to delete when this process has died.

    Attributes:
        pid: the control daemon's process id while it runs, else ``None``.
        exit_reason: why the daemon has ended; empty while it runs or starts.
    """

    def __init__(
        self, program: str, environment: dict[str, str], *, grace: float, output: str, delete: list[str]
    ) -> None:
        self._owner = os.getpid()
        self.pid: int | None = None
        self.exit_reason = ""
        settings = {"driver": self._owner, "program": program, "grace": grace, "output": output, "delete": delete}
        with blocked_for_driver():
            self._process = start_program(
                _PROGRAM,
                [json.dumps(settings)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # No Ctrl-C reaches it: the driver decides what that means.
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._unread = b""
        #: Runs at the end of the interpreter too, for callers that do not call end().
        self._finalizer = weakref.finalize(self, _end_process, self._process, self._owner, grace + _SLACK_S)

    @property
    def is_ours(self) -> bool:
        """Whether this process started it; a process forked from the driver has a copy of this object only."""
        return os.getpid() == self._owner

    def wait(self, timeout: float) -> str:
        """Waits for the supervisor's next report, and updates the attributes; returns :attr:`exit_reason`.

        Args:
            timeout: seconds.
        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if self.exit_reason or not poller.poll(timeout * 1000.0):
            return self.exit_reason
        data = os.read(descriptor, _REPORT_BYTES)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.pid = report.get("started")
            if "refused" in report:
                self.exit_reason = str(report["refused"])
            elif "exited" in report:
                self.exit_reason = f"the MPS control daemon {describe_exit(report['exited'])}"
        if not data:
            self.pid, self.exit_reason = None, "the supervisor of the MPS control daemon has died"
        return self.exit_reason

    def end(self) -> None:
        """Ends the daemon and the supervisor; returns when both have ended."""
        self.pid = None
        self._finalizer()


def _end_process(process: subprocess.Popen[bytes], owner: int, timeout: float) -> None:
    if os.getpid() != owner:
        process.returncode = 0  # Not a child of this process, which so must not wait for it.
        return
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()  # The supervisor ends at the end of its input.
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    finally:  # Also when interrupted.
        process.kill()  # If it still runs. The daemon is killed with it.
        process.wait()
