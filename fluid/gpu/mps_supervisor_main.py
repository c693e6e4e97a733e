"""The supervisor of an MPS control daemon: a process that starts it, and ends it with the driver, whatever happens.

Run by :mod:`fluid.mps` with its orders, as JSON, in the environment. The daemon runs in the foreground, as a child of
this process. In the background it would leave its parent and outlive everybody; and a signal at the parent's death
is bound to the one thread that started it, which in a driver may end at any time. This process has one thread, and
watches the driver through a descriptor of the driver's process, which nothing can hold open.

It reads lines from stdin: ``quit``, or the end, says that the daemon is to be ended. It writes JSON lines to stdout:
``{"started": pid}``, ``{"refused": why}`` and ``{"exited": code}``, negative for a signal.
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
from fluid.processes.children import adopt_orphans, die_with_parent, kill_children, open_process, set_process_name

#: Holds the orders; not an argument, which would clutter every list of processes.
ORDERS_VARIABLE = "FLUID_MPS_KEEPER"
#: Seconds beyond what the daemon was given to quit, before it is killed.
_QUIT_SLACK_S = 1.0


class Supervisor:
    """The supervisor's main loop.

    Args:
        orders: ``driver``, its process; ``program``, path of the control program; ``grace``, seconds the daemon has
            to quit; ``output``, file for what it prints; ``delete``, folders that nobody needs once the driver is dead.
    """

    def __init__(self, orders: dict[str, Any]) -> None:
        self._driver = int(orders["driver"])
        self._program = str(orders["program"])
        self._grace = float(orders["grace"])
        self._output = str(orders["output"])
        self._delete: list[str] = orders["delete"]
        self._clock = MonotonicClock()
        self._daemon: int | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.set_blocking(descriptor, False)

    def run(self) -> NoReturn:
        """Starts the daemon, and ends when the driver says so or is gone."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self.end())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # It only has to wake the loop.
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        # Servers whose daemon has died come here, and can be killed.
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
        """Ends the daemon and every process below it, and this one."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._daemon is not None:
            self._ask_to_quit()
        kill_children()
        # Of a driver that dies the connection may end first, and only then does this process get another parent.
        if os.getppid() != self._driver:
            for folder in self._delete:
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _start(self) -> None:
        supervisor = os.getpid()

        def prepare() -> None:
            # Should even this process be killed. The daemon might take its time over anything milder.
            die_with_parent(supervisor)

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
            self._tell(refused=f"{self._program} cannot be started: {error}")
            return
        self._daemon = started.pid
        started.returncode = 0  # It is waited for below, with everybody else who comes here.
        self._tell(started=started.pid)

    def _tell(self, **news: Any) -> None:
        with suppress(OSError):  # Of a driver that is gone the loop hears soon.
            os.write(1, json.dumps(news).encode() + b"\n")

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._daemon:
                    self._daemon = None
                    kill_children()  # Its servers are of no use without it.
                    self._tell(exited=os.waitstatus_to_exitcode(status))

    def _ask_to_quit(self) -> None:
        """Has the daemon end its servers and itself; clients that do not leave are cut off."""
        seconds = max(1, round(self._grace))
        deadline = self._clock.now() + seconds + _QUIT_SLACK_S
        with suppress(OSError, subprocess.SubprocessError):  # One that does not take it needs no more time.
            subprocess.run(
                [self._program],
                input=f"quit -t {seconds}\n".encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds + _QUIT_SLACK_S,
                check=True,
            )
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
    orders = json.loads(os.environ.pop(ORDERS_VARIABLE))
    sys.stdout.flush()
    Supervisor(orders).run()


if __name__ == "__main__":
    main()
