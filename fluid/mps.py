"""NVIDIA MPS: starts and supervises a control daemon for a node's GPUs, and ends it whenever the driver ends.

With MPS the kernels of several processes run on a GPU at the same time; without it the processes time-slice. A lane
becomes a client through its environment alone (:meth:`MpsDaemon.lane_environment`); the driver is no client. The
daemon's folders are private, so it does not interfere with other daemons, and compute modes are not changed. See
``docs/devices.md``.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from fluid._clock import MonotonicClock
from fluid.errors import InvalidFieldError, parse_duration, require_number
from fluid.gpu.mps_control import (
    LOG_VARIABLE,
    MEMORY_VARIABLE,
    OUTPUT_LOG,
    PERCENTAGE_VARIABLE,
    PIPE_VARIABLE,
    PROGRAM,
    Control,
    MpsError,
    MpsTimeoutError,
    find_program,
    log_tail,
    memory_text,
    percentage_text,
    search_paths,
    stray_processes,
)
from fluid.gpu.mps_supervisor import SupervisorProcess

#: Longest path of the pipe folder, bytes: a socket's path has at most 108, and names take up to about 24.
_LONGEST_FOLDER = 80
#: Seconds between two checks of a daemon that is starting. Its end is reported at once.
_START_CHECK_S = 0.05
#: Seconds for the supervisor to tell of the daemon's end.
_END_TOLD_S = 0.5


class MpsDaemon:
    """An MPS control daemon for the GPUs of a node. The constructor starts it; close it, or use it as a context.

    The daemon ends with this process, even if this process is killed. If the daemon cannot start a server, it is ended
    at once, so that the error is raised here and not in the first trial.

    Args:
        devices: UUIDs of the GPUs.
        program: the control program; ``None`` to search for it.
        log_folder: folder for its logs, which is kept; ``None`` for a temporary one.
        start_timeout: longest that the daemon and its first server may take to start, seconds.
        answer_timeout: longest that it may take to answer a command, seconds.
        quit_timeout: seconds that its clients have to leave when it is ended; at least 1.
        is_cancelled: called while the daemon starts; once it returns True, the start fails.

    Attributes:
        devices: UUIDs of the GPUs.
        program: path of the control program.
        restarts: how often it was restarted.
        pipe_folder: the private folder of its sockets.
        log_folder: the folder of its logs.

    Raises:
        InvalidFieldError: an argument cannot be used.
        MpsTimeoutError: it has not started in time; all that was started has ended.
        MpsError: it cannot be started; the same.

    Example:
        On a machine with NVIDIA GPUs::

            with MpsDaemon([gpu.token for gpu in find_gpus()]) as daemon:
                environment = daemon.lane_environment(daemon.devices[0], active_thread_percentage=50)

        >>> MpsDaemon(["0"])
        Traceback (most recent call last):
        ...
        fluid.errors.InvalidFieldError: devices='0': must be the UUID of a whole GPU, GPU-...
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        program: str | None = None,
        log_folder: str | os.PathLike[str] | None = None,
        start_timeout: float = 30.0,
        answer_timeout: float = 5.0,
        quit_timeout: float = 5.0,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.devices = _checked(devices)
        self.program = program or find_program() or ""
        self._start_timeout = parse_duration("start_timeout", start_timeout, zero=True)
        answer = parse_duration("answer_timeout", answer_timeout, zero=True)
        self._quit_timeout = require_number("quit_timeout", quit_timeout, at_least=1.0)
        if not self.program:
            raise MpsError(f"{PROGRAM} is not installed (it is part of the NVIDIA driver)")
        self._is_cancelled = is_cancelled
        self._clock = MonotonicClock()
        self._closed = False
        self.restarts = 0
        self.pipe_folder = _make_pipe_folder()
        self._kept = None if log_folder is None else os.path.abspath(log_folder)
        self.log_folder = self._kept or os.path.join(self.pipe_folder, "log")
        self._environment = self._daemon_environment()
        self._control = Control(self.program, self._environment, answer)
        self._supervisor: SupervisorProcess | None = None
        self._servers: list[int] = []
        #: Runs at the end of the interpreter too, for callers that do not call close().
        self._finalizer = weakref.finalize(self, _delete, self.pipe_folder, os.getpid())
        self._start()

    def __enter__(self) -> MpsDaemon:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- for lanes -------------------------------------------------------------------------------------------

    def lane_environment(
        self,
        device: str,
        *,
        active_thread_percentage: float | None = None,
        memory_limit_bytes: float | None = None,
    ) -> dict[str, str]:
        """Returns the variables that make a lane a client on one GPU; to be set before the lane uses CUDA.

        They name the GPU by its UUID, because MPS renumbers the GPUs in the daemon's order: the machine's number would
        select another GPU, or none.

        Args:
            device: UUID of one of the daemon's GPUs.
            active_thread_percentage: share of the GPU's multiprocessors that it may use, in (0, 100]; ``None`` for all.
            memory_limit_bytes: most device memory that it may take, at least 1 MiB; ``None`` for no limit, as for
                Fluid's own lanes: the limit is fixed when a lane starts, before it is known which trial it runs. It
                applies to device 0, the only one that the lane sees.

        Raises:
            InvalidFieldError: an argument cannot be used.
        """
        if device not in self.devices:
            raise InvalidFieldError("device", device, f"is not one of {', '.join(self.devices)}")
        added = {
            PIPE_VARIABLE: self.pipe_folder,
            LOG_VARIABLE: self.log_folder,
            "CUDA_VISIBLE_DEVICES": device,
        }
        if active_thread_percentage is not None:
            added[PERCENTAGE_VARIABLE] = percentage_text(active_thread_percentage)
        if memory_limit_bytes is not None:
            added[MEMORY_VARIABLE] = f"0={memory_text(memory_limit_bytes)}"
        return added

    def set_default_active_thread_percentage(self, percentage: float) -> bool:
        """Sets the share of the multiprocessors, in (0, 100], for clients of servers that start from now on.

        Returns:
            Whether the NVIDIA driver supports that.

        Raises:
            InvalidFieldError: the percentage is out of range.
            MpsError: the daemon does not answer.
        """
        return self._control.command(f"set_default_active_thread_percentage {percentage_text(percentage)}")

    def set_default_memory_limit(self, device: str, limit_bytes: float) -> bool:
        """Limits each client's memory on a device, at least 1 MiB; returns whether the driver supports that."""
        if device not in self.devices:
            raise InvalidFieldError("device", device, f"is not one of {', '.join(self.devices)}")
        number = self.devices.index(device)
        return self._control.command(f"set_default_device_pinned_mem_limit {number} {memory_text(limit_bytes)}")

    # -- status ---------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The control daemon's process id; ``None`` if it does not run."""
        return None if self._supervisor is None else self._supervisor.pid

    def servers(self) -> dict[int, str]:
        """Returns the servers' states by process id; see :meth:`fluid.gpu.mps_control.Control.servers`."""
        servers = self._control.servers()
        self._servers = list(servers)
        return servers

    def clients(self) -> list[int]:
        """Returns the clients' process ids; raises :class:`MpsError` if the daemon does not answer."""
        return [client for server in self.servers() for client in self._control.clients(server)]

    def problem(self) -> str:
        """Returns the daemon's problem as a sentence, or an empty text; may take a few times ``answer_timeout``.

        Raises:
            MpsError: the daemon runs, but did not answer this time, as on an overloaded machine.
        """
        if self._closed or self._supervisor is None:
            return "the MPS daemon was closed"
        if reason := self._supervisor.wait(0.0):
            return reason
        try:
            faulty = [server for server, state in self.servers().items() if state == "FAULT"]
        except MpsError:
            # A daemon that has just died does not answer; its supervisor says how it ended, a moment later.
            if reason := self._supervisor.wait(_END_TOLD_S):
                return reason
            raise
        if faulty:
            return f"MPS server {faulty[0]} is in FAULT: a client failed, and no other can start until all have ended"
        return ""

    def restart(self) -> None:
        """Ends the daemon and starts it again with the same folders, where new lanes find it.

        To be called when :meth:`problem` reports one. All clients must have ended or be about to end: a fatal fault of
        one is a fault of all on that GPU, and remaining clients are disconnected.

        Raises:
            MpsError: it cannot be started again; it is then closed.
        """
        if self._closed:
            raise MpsError("the MPS daemon was closed")
        self._stop()
        for entry in os.scandir(self.pipe_folder):
            if entry.path != self.log_folder:
                with suppress(OSError):
                    os.unlink(entry.path)
        self.restarts += 1
        self._start()

    # -- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the daemon and its servers; returns when all have ended. May be called twice."""
        if self._closed or (self._supervisor is not None and not self._supervisor.is_ours):
            return
        self._closed = True
        try:
            self._stop()
        finally:
            self._finalizer()

    def _stop(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.end()
        # Servers are left only if the supervisor was killed.
        for pid in stray_processes(self._servers, self.pipe_folder):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._servers = []

    # -- the start -------------------------------------------------------------------------------------------

    def _daemon_environment(self) -> dict[str, str]:
        # Limits in this process's environment must not apply to all clients.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
        return {
            **inherited,
            **search_paths(self.program, inherited),
            PIPE_VARIABLE: self.pipe_folder,
            LOG_VARIABLE: self.log_folder,
            "CUDA_VISIBLE_DEVICES": ",".join(self.devices),
        }

    def _start(self) -> None:
        try:
            os.makedirs(self.log_folder, mode=0o700, exist_ok=True)
            self._supervisor = SupervisorProcess(
                self.program,
                self._environment,
                grace=self._quit_timeout,
                output=os.path.join(self.log_folder, OUTPUT_LOG),
                delete=[self.pipe_folder],
            )
            deadline = self._clock.now() + self._start_timeout
            self._wait_until(deadline, "answer", self._answers)
            # It may answer only once the server runs, which takes seconds where the GPU has to be initialised.
            self._control.query(f"start_server -uid {os.getuid()}", timeout=max(1.0, deadline - self._clock.now()))
            self._wait_until(deadline, "start a server", self._has_server)
        except MpsError as error:
            tail = log_tail(self.log_folder)
            self.close()
            # Of the same class: callers tell a start that took too long from one that was refused.
            raise type(error)(f"{error}{f'; its log ends with: {tail}' if tail else ''}") from error.__cause__
        except BaseException:
            self.close()
            raise

    def _wait_until(self, deadline: float, what: str, done: Callable[[], bool]) -> None:
        """Waits until ``done`` returns True. The daemon refuses commands before it is ready."""
        while True:
            self._check_alive()
            if self._is_cancelled():
                raise MpsError("the start of the MPS control daemon was cancelled")
            why = ""
            try:
                if done():
                    return
            except MpsError as error:
                why = f" ({error})"
            if self._clock.now() >= deadline:
                self._check_alive()
                raise MpsTimeoutError(f"the MPS control daemon did not {what} within {self._start_timeout:g} s{why}")
            assert self._supervisor is not None
            self._supervisor.wait(_START_CHECK_S)

    def _answers(self) -> bool:
        self._control.query("get_server_list")
        return True

    def _has_server(self) -> bool:
        return any(state in ("ACTIVE", "") for state in self.servers().values())

    def _check_alive(self) -> None:
        assert self._supervisor is not None
        if reason := self._supervisor.wait(0.0):
            raise MpsError(reason)


def _checked(devices: Sequence[str]) -> tuple[str, ...]:
    tokens = tuple(devices) if not isinstance(devices, str) else (devices,)
    if not tokens:
        raise InvalidFieldError("devices", devices, "must name at least one GPU")
    for token in tokens:
        if not isinstance(token, str) or not token.startswith("GPU-") or "," in token:
            raise InvalidFieldError("devices", token, "must be the UUID of a whole GPU, GPU-...")
    if len(set(tokens)) < len(tokens):
        raise InvalidFieldError("devices", tokens, "must not name a GPU twice")
    return tokens


def _make_pipe_folder() -> str:
    """Makes the private folder of the daemon's sockets, with a short path."""
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm")):
        try:
            folder = tempfile.mkdtemp(prefix="fluid-mps-", dir=base)  # With mode 0700.
        except OSError:
            continue
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
            return folder
        os.rmdir(folder)
    raise MpsError(f"the sockets of MPS need a temporary folder with a path of at most {_LONGEST_FOLDER} bytes")


def _delete(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
