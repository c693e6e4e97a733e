"""The supervisor of an MPS control daemon: a process that starts the daemon, and ends it when the driver ends or dies.

:mod:`fluid.mps` runs it with its settings, as JSON, as its argument. The daemon runs in the foreground, as a child
of this process: in the background it would leave its parent and outlive the driver. The driver cannot be the parent,
because the signal at a parent's death is bound to the thread that started the child, and a driver's threads may end at
any time. This process has one thread, and watches the driver through a pidfd.

It ends the daemon at the line ``quit`` or the end of its stdin. It writes JSON lines to stdout: ``{"started": pid}``,
``{"refused": why}`` and ``{"exited": code}``, where the code of a signal is negative.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any, NoReturn

from fluid._clock import MonotonicClock
from fluid.gpu.mps_control import is_refusal
from fluid.processes.children import adopt_orphans, die_with_parent, kill_children, open_process, set_process_name
from fluid.processes.signals import FOR_THE_DRIVER, leave_to_driver

#: Seconds beyond the daemon's time to quit before it is killed.
_QUIT_SLACK_S = 1.0


class Supervisor:
    """The supervisor's main loop.

    Args:
        settings: ``driver``, its process id; ``program``, path of the control program; ``grace``, seconds that the
            daemon has to quit; ``output``, file for its output; ``delete``, folders to delete when the driver has died.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._driver = int(settings["driver"])
        self._program = str(settings["program"])
        self._grace = float(settings["grace"])
        self._output = str(settings["output"])
        self._delete: list[str] = settings["delete"]
        self._clock = MonotonicClock()
        self._daemon: int | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.set_blocking(descriptor, False)

    def run(self) -> NoReturn:
        """Starts the daemon; ends it and this process when the driver asks for it or dies."""
        leave_to_driver()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # A handler, so that the signal wakes the loop.
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        # Servers whose daemon has died become children of this process, which can kill them.
        adopt_orphans()
        set_process_name("fluid-mps")
        self._selector.register(0, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        driver = open_process(self._driver)
        if driver is not None:  # On an old kernel the end of stdin has to do.
            self._selector.register(driver, selectors.EVENT_READ)
        if os.getppid() != self._driver:
            self.end()  # It died before it could be watched.
        self._start()
        while True:
            for key, _ in self._selector.select():
                if key.fd == self._wake_reader:
                    with suppress(BlockingIOError):
                        os.read(self._wake_reader, 4096)
                elif key.fd != 0:
                    self.end()  # The driver has died.
                elif not (line := os.read(0, 4096)) or b"quit" in line:
                    self.end()
            self._reap()

    def end(self) -> NoReturn:
        """Ends the daemon, its descendants and this process."""
        if self._daemon is not None:
            self._ask_to_quit()
        kill_children()
        # A dying driver may close the connection first; this process gets another parent later.
        if os.getppid() != self._driver:
            for folder in self._delete:
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _start(self) -> None:
        supervisor = os.getpid()

        def prepare() -> None:
            # In case this process is killed, too. SIGKILL, because the daemon may handle other signals slowly.
            die_with_parent(supervisor)
            for number in FOR_THE_DRIVER:  # Here by SIG_IGN, which survives the exec.
                signal.signal(number, signal.SIG_IGN)

        try:
            with open(self._output, "ab") as output:
                started = subprocess.Popen(
                    [self._program, "-f"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=prepare,  # Safe: there are no other threads.
                )
        except (OSError, subprocess.SubprocessError) as error:
            self._report(refused=f"{self._program} cannot be started: {error}")
            return
        self._daemon = started.pid
        started.returncode = 0  # _reap() waits for it, as for all other children.
        self._report(started=started.pid)

    def _report(self, **report: Any) -> None:
        with suppress(OSError):  # The driver is gone; the loop will notice.
            os.write(1, json.dumps(report).encode() + b"\n")

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._daemon:
                    self._daemon = None
                    kill_children()  # Servers are useless without their daemon.
                    self._report(exited=os.waitstatus_to_exitcode(status))

    def _ask_to_quit(self) -> None:
        """Makes the daemon end its servers and itself; clients that do not leave in time are disconnected."""
        seconds = max(1, round(self._grace))
        deadline = self._clock.now() + seconds + _QUIT_SLACK_S
        with suppress(OSError, subprocess.SubprocessError):  # A daemon that refuses is killed at once.
            for command in (f"quit -t {seconds}", "quit"):  # The latter for drivers that do not know the limit.
                answer = subprocess.run(
                    [self._program],
                    input=f"{command}\n",
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    timeout=seconds + _QUIT_SLACK_S,
                    check=True,
                ).stdout
                if not is_refusal(answer):
                    break
            self._await_daemon(deadline)

    def _await_daemon(self, deadline: float) -> None:
        assert self._daemon is not None
        descriptor = open_process(self._daemon)
        if descriptor is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while (left := deadline - self._clock.now()) > 0.0 and not selector.select(left):
                pass
        os.close(descriptor)


def main() -> NoReturn:
    """Runs the supervisor."""
    settings = json.loads(sys.argv[1])
    sys.stdout.flush()
    Supervisor(settings).run()


if __name__ == "__main__":
    main()
