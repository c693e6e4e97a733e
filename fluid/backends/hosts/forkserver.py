"""The host's end of the fork server and of its guardian.

See :mod:`fluid.backends.hosts.forkserver_main` and :mod:`fluid.backends.hosts.guardian`.
"""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import fluid._version
from fluid._logs import logger_of
from fluid.backends.hosts.forkserver_state import NO_DESCRIPTORS, PROGRAM, STATE_VARIABLE, ForkServerState
from fluid.backends.hosts.guardian import END, exit_code
from fluid.backends.hosts.lane_killing import MpsControl
from fluid.errors import FluidError
from fluid.lane.messages import LaneOptions
from fluid.processes.children import describe_exit, is_stopped
from fluid.processes.session_mark import SESSION_VARIABLE, kill_marked
from fluid.processes.signals import blocked_for_driver

_log = logger_of(__name__)

#: One thread each, so that there are no threads that a fork would lose. A lane sets its own numbers.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    # Makes torch.cuda.is_available() ask NVML, not CUDA, which must not be initialised before a fork.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_LARGEST_ANSWER = 1 << 20
#: Seconds the guardian has to kill everything below it, before it is killed itself.
_END_S = 5.0


class Exited(NamedTuple):
    """A lane has ended, or could not be forked; ``reason`` is to be read after "lane 3".

    Attributes:
        blameless: whether something outside it has ended it.
    """

    lane_id: int
    reason: str
    blameless: bool = False


class ForkServerProcess:
    """The host's end of a fork server, which is started at once, and again if it dies.

    Args:
        run_folder: folder of the run; logs of the server and of the lanes go to ``logs`` there.
        memory_folder: folder of the checkpoints in host memory; empty if there is none.
        mark: the session's; see :mod:`fluid.processes.session_mark`.
        temporary: whether both folders are deleted once the driver is gone.
        preload: modules to load first.
        driver_address: where the session's driver listens, if this process is not the driver.
        environment: variables that the server and the lanes get beside those of this process.
    """

    def __init__(
        self,
        run_folder: str,
        *,
        memory_folder: str = "",
        mark: str,
        temporary: bool = False,
        preload: Sequence[str] = (),
        driver_address: tuple[str, int] | None = None,
        environment: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._environment = dict(environment)
        self._driver_address = driver_address
        self._run_folder = run_folder
        self._memory_folder = memory_folder
        self._mark = mark
        self._temporary = temporary
        self._modules: list[str] = list(dict.fromkeys(preload))
        #: register() of a trial may preload from another thread than the one that polls.
        self._lock = threading.RLock()
        self._requests: deque[tuple[bytes, socket.socket | None]] = deque()
        self._lanes: set[int] = set()
        self._ended: list[Exited] = []
        self._pid: int | None = None
        #: Processes that were stopped at the last look.
        self._stopped: set[int] = set()
        #: The guardian, and the pipe to it.
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = -1
        self._control: socket.socket | None = None
        self._closed = False
        self._log_folder = os.path.join(run_folder, "logs")
        os.makedirs(self._log_folder, mode=0o700, exist_ok=True)
        self._start()

    @property
    def pid(self) -> int | None:
        """The server's process; ``None`` while it has none, or has not told it yet."""
        with self._lock:
            self._receive()
            return self._pid

    @property
    def guardian(self) -> int | None:
        """The guardian's process; ``None`` while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def wants_to_write(self) -> bool:
        """Whether requests wait for the server to read."""
        return bool(self._requests) and self._control is not None

    def fileno(self) -> int:
        """A descriptor that is readable when lanes have ended; -1 while the server does not run."""
        return -1 if self._control is None else self._control.fileno()

    def preload(self, modules: Sequence[str]) -> None:
        """Loads modules before the next lane is forked. Those that cannot be loaded are left out."""
        with self._lock:
            new = [name for name in dict.fromkeys(modules) if name not in self._modules]
            if new:
                self._modules += new
                self._request("preload", new)

    def fork(self, options: LaneOptions, connection: socket.socket) -> None:
        """Forks a lane, which need not be there yet on return.

        Args:
            options: the lane's settings.
            connection: its end of the connection to the driver; closed here once it was handed over.

        Raises:
            FluidError: the server was closed, or cannot be started.
        """
        with self._lock:
            try:
                if self._control is None:
                    self._start()
            except BaseException as error:
                connection.close()
                if isinstance(error, OSError) and error.errno == errno.EMFILE:
                    raise FluidError(NO_DESCRIPTORS) from error
                raise
            self._lanes.add(options.lane_id)
            self._request("fork", tuple(options), connection)

    def kill(self, lane_id: int, control: MpsControl | None = None) -> None:
        """Kills a lane, if it is there.

        Args:
            lane_id: its number.
            control: of the MPS daemon that is to end the lane's work before, where its clients are to go on.
        """
        with self._lock:
            self._request("kill", (lane_id, control))

    def dump_stacks(self, lane_id: int) -> None:
        """Makes a lane write its stacks to its log, if it is there."""
        with self._lock:
            self._request("dump", lane_id)

    def look(self) -> None:
        """Continues the server and its guardian if they were stopped (SIGSTOP), at the second look; cheap."""
        with self._lock:
            stopped = {pid for pid in (self.pid, self.guardian) if pid is not None and is_stopped(pid)}
            for pid in stopped & self._stopped:
                _log.warning("the fork server of the lanes, process %d, was stopped (SIGSTOP): it is continued", pid)
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            self._stopped = stopped

    def poll(self) -> list[Exited]:
        """Returns the lanes that have ended since the last call."""
        with self._lock:
            self._flush()
            self._receive()
            ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Ends the server and every process below it; none is left when it returns."""
        with self._lock:
            self._closed = True
            guardian = self._dismiss_guardian()
            self._disconnect()
        if guardian is not None:
            self._await_end(guardian)

    def abandon(self) -> None:
        """Called in a process forked from the driver: closes the connection, and leaves the server alone."""
        self._closed = True
        self._disconnect()
        if self._process is not None:
            os.close(self._guard)
            self._process.returncode = 0  # Not its child: it must not wait for it.
            self._process = None

    def _start(self) -> None:
        if self._closed:
            raise FluidError("the fork server was closed")
        if not sys.executable:
            raise FluidError("sys.executable is empty: there is no Python to start lanes with")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                reader, self._guard = os.pipe()
                try:
                    self._process = self._execute(theirs.fileno(), reader)
                except BaseException:
                    os.close(self._guard)
                    raise
                finally:
                    os.close(reader)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._control = ours
        if self._modules:
            self._request("preload", self._modules)

    def _execute(self, control: int, guard: int) -> subprocess.Popen[bytes]:
        """Starts the program, which forks into guardian and server."""
        state = ForkServerState(
            control=control,
            guard=guard,
            host=os.getpid(),
            mark=self._mark,
            python_path=os.environ.get("PYTHONPATH"),
            sys_path=sys.path,
            run_folder=self._run_folder,
            memory_folder=self._memory_folder,
            temporary=self._temporary,
            driver_address=self._driver_address,
        )
        environment = {
            **os.environ,
            **self._environment,
            **_ENVIRONMENT,
            "PYTHONPATH": _python_path(),
            SESSION_VARIABLE: self._mark,
            STATE_VARIABLE: state.to_json(),
        }
        with (
            open(os.path.join(self._log_folder, "forkserver.log"), "ab", opener=_for_owner) as log,
            blocked_for_driver(),
        ):
            return subprocess.Popen(
                [sys.executable, "-m", PROGRAM],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[control, guard],
                start_new_session=True,  # No Ctrl-C reaches it: the driver decides what that means.
            )

    def _request(self, name: str, argument: Any, connection: socket.socket | None = None) -> None:
        if self._control is not None:
            self._requests.append((pickle.dumps((name, argument)), connection))
            self._flush()

    def _flush(self) -> None:
        while self._requests and self._control is not None:
            data, connection = self._requests[0]
            try:
                descriptors = [] if connection is None else [connection.fileno()]
                socket.send_fds(self._control, [data], descriptors)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                return  # It is gone; poll() will notice.
            self._requests.popleft()
            if connection is not None:
                connection.close()

    def _receive(self) -> None:
        """Reads what the server says."""
        while self._control is not None:
            try:
                answer = self._control.recv(_LARGEST_ANSWER)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                answer = b""
            if answer:
                self._read(pickle.loads(answer))
            else:
                self._lose_server()

    def _read(self, answer: tuple[Any, ...]) -> None:
        if answer[0] == "exited":
            self._lanes.discard(answer[1])
            self._ended.append(Exited(*answer[1:]))
        elif answer[0] == "started":
            self._pid = answer[1]
        elif answer[0] == "preloaded":
            _, name, seconds, error = answer
            if error:
                _log.info("lanes start without %s: %s", name, error)
            else:
                _log.debug("%s was loaded for all lanes in %.3f s", name, seconds)

    def _lose_server(self) -> None:
        """Reports all lanes as ended: the server has died, and they with it."""
        self._disconnect()
        reason = "lost the fork server it came from"
        guardian = self._dismiss_guardian()
        if guardian is not None:
            self._await_end(guardian)
            who = "whose guardian" if guardian.returncode < 0 else "which"
            reason += f", {who} {describe_exit(exit_code(guardian.returncode))}; see {self._log_folder}/forkserver.log"
        self._ended += [Exited(lane_id, reason) for lane_id in sorted(self._lanes)]
        self._lanes.clear()

    def _dismiss_guardian(self) -> subprocess.Popen[bytes] | None:
        """Tells the guardian to end everything below it, and returns it, if there is one."""
        guardian, self._process = self._process, None
        if guardian is not None:
            with suppress(OSError):  # It has died.
                os.write(self._guard, END)
            os.close(self._guard)
        return guardian

    def _await_end(self, guardian: subprocess.Popen[bytes]) -> None:
        """Waits for the guardian's end; kills what is left if it did not end by itself."""
        try:
            with suppress(subprocess.TimeoutExpired):
                guardian.wait(_END_S)
        finally:  # Also when interrupted.
            guardian.kill()  # If it still runs. The server and its lanes die with it.
            guardian.wait()
            if guardian.returncode < 0:
                kill_marked(self._mark)

    def _disconnect(self) -> None:
        for _, connection in self._requests:
            if connection is not None:
                connection.close()
        self._requests.clear()
        self._pid = None
        if self._control is not None:
            self._control.close()
            self._control = None


def _python_path() -> str:
    """The server's ``PYTHONPATH``, by which it finds the same Fluid."""
    root = str(Path(fluid._version.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
