"""NVIDIA MPS: starts a control daemon of Fluid's own for a node's GPUs, watches it, and ends it on every way out.

With MPS the kernels of several processes run on a GPU side by side; without, the GPU gives each a slice of time in
turn. A lane becomes a client by its environment alone (:meth:`MpsDaemon.lane_environment`); the driver stays out of
it. The daemon's folders are private, so it never meets one that somebody else started, and compute modes are left as
they are. See ``docs/gpu_sharing.md``.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from fluid._clock import MonotonicClock
from fluid.errors import InvalidFieldError, require_number
from fluid.gpu.mps_control import (
    LOG_VARIABLE,
    MEMORY_VARIABLE,
    OUTPUT_LOG,
    PERCENTAGE_VARIABLE,
    PIPE_VARIABLE,
    PROGRAM,
    Control,
    MpsError,
    find_program,
    log_tail,
    memory_text,
    percentage_text,
    stray_processes,
)
from fluid.gpu.mps_supervisor import SupervisorProcess
from fluid.gpu.mps_support import why_not_here
from fluid.gpu.nvml import GpuState, describe_gpus

_log = logging.getLogger(__name__)

#: Sockets in the pipe folder must fit into 108 bytes; their names take up to about 24.
_LONGEST_FOLDER = 80
#: Seconds between two looks whether a daemon that starts is there. Should it end, that is heard at once.
_START_CHECK_S = 0.05


class MpsDaemon:
    """One MPS control daemon, for all GPUs of a node. Started when it is made; close it, or use it as a context.

    Ends with this process, also if that is killed. A daemon that cannot start a server is ended again, so that what
    is wrong shows here and not in the first trial.

    Args:
        devices: UUIDs of the GPUs.
        program: the control program; ``None`` to look for it.
        log_folder: folder for its logs, kept; ``None`` for a temporary one.
        start_timeout: seconds the daemon and its first server have to start.
        answer_timeout: seconds it has to answer a command.
        quit_timeout: seconds its clients have to leave when it is ended; at least 1.

    Raises:
        InvalidFieldError: an argument cannot be used.
        MpsError: it cannot be started; nothing of it is left.
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
    ) -> None:
        self.devices = _checked(devices)
        self._program = program or find_program() or ""
        self._start_timeout = require_number("start_timeout", start_timeout, at_least=0.0)
        answer = require_number("answer_timeout", answer_timeout, at_least=0.0)
        self._quit_timeout = require_number("quit_timeout", quit_timeout, at_least=1.0)
        if not self._program:
            raise MpsError(f"{PROGRAM} is not installed (it is part of the NVIDIA driver)")
        self._clock = MonotonicClock()
        self._closed = False
        #: Times it was started again.
        self.restarts = 0
        self.pipe_folder = _make_pipe_folder()
        self._kept = None if log_folder is None else os.path.abspath(log_folder)
        self.log_folder = self._kept or os.path.join(self.pipe_folder, "log")
        self._environment = self._daemon_environment()
        self._control = Control(self._program, self._environment, answer)
        self._supervisor: SupervisorProcess | None = None
        self._servers: list[int] = []
        #: Also at the end of the interpreter, for callers who forget.
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
        """Returns what to add to a lane's environment, before it uses CUDA, to make it a client on one GPU.

        The GPU is named by its UUID. Numbers would count the daemon's GPUs in the daemon's order, as MPS renumbers
        them, and a lane that names its GPU by a number of the machine would get another one or none.

        Args:
            device: UUID of one of the daemon's GPUs.
            active_thread_percentage: most of the GPU's multiprocessors it may use, in (0, 100]; ``None`` for all.
            memory_limit_bytes: most device memory it may take, at least 1 MiB; ``None`` for no limit. Its own device
                is the only one that it sees, and so has the number 0.

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
        """Sets what clients of servers that start from now on may use of the multiprocessors, in (0, 100].

        Returns:
            Whether the driver can do that.

        Raises:
            InvalidFieldError: the percentage is not one.
            MpsError: the daemon does not answer.
        """
        return self._control.order(f"set_default_active_thread_percentage {percentage_text(percentage)}")

    def set_default_memory_limit(self, device: str, limit_bytes: float) -> bool:
        """Sets how much memory each client may take on a device, at least 1 MiB; see above for the rest."""
        if device not in self.devices:
            raise InvalidFieldError("device", device, f"is not one of {', '.join(self.devices)}")
        number = self.devices.index(device)
        return self._control.order(f"set_default_device_pinned_mem_limit {number} {memory_text(limit_bytes)}")

    # -- how it is -------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The control daemon's process; ``None`` if it does not run."""
        return None if self._supervisor is None else self._supervisor.pid

    def servers(self) -> dict[int, str]:
        """Returns the servers by process, and their state; see :meth:`fluid.gpu.mps_control.Control.servers`."""
        servers = self._control.servers()
        self._servers = list(servers)
        return servers

    def clients(self) -> list[int]:
        """Returns the processes that are clients; raises :class:`MpsError` if the daemon does not answer."""
        return [client for server in self.servers() for client in self._control.clients(server)]

    def problem(self) -> str:
        """Returns what is wrong with it, as a sentence; empty if all is well. Takes up to a few answers' time."""
        if self._closed:
            return "the MPS daemon was closed"
        try:
            self._check_alive()
            faulty = [server for server, state in self.servers().items() if state == "FAULT"]
        except MpsError as error:
            return str(error)
        if faulty:
            return f"MPS server {faulty[0]} is in FAULT: a client failed, and no other can start until all have ended"
        return ""

    def restart(self) -> None:
        """Ends the daemon and starts it again, with the same folders: lanes started from now on find it.

        What to do when :meth:`problem` says that there is one. All clients must have ended before, or be about to:
        a fatal fault of one is a fault of all on that GPU, and those that are left are cut off.

        Raises:
            MpsError: it cannot be started again; it is closed then.
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
        """Ends the daemon and its servers; none is left when it returns. Closing twice is harmless."""
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
        # Only if the supervisor was killed is any of them left.
        for pid in stray_processes(self._servers, self.pipe_folder):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._servers = []

    # -- the start -------------------------------------------------------------------------------------------

    def _daemon_environment(self) -> dict[str, str]:
        # Limits that are set for this process are not meant for all clients.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
        return {
            **inherited,
            PIPE_VARIABLE: self.pipe_folder,
            LOG_VARIABLE: self.log_folder,
            "CUDA_VISIBLE_DEVICES": ",".join(self.devices),
        }

    def _start(self) -> None:
        try:
            os.makedirs(self.log_folder, mode=0o700, exist_ok=True)
            self._supervisor = SupervisorProcess(
                self._program,
                self._environment,
                grace=self._quit_timeout,
                output=os.path.join(self.log_folder, OUTPUT_LOG),
                delete=[self.pipe_folder],
            )
            deadline = self._clock.now() + self._start_timeout
            self._until(deadline, "answer", self._answers)
            self._control.ask(f"start_server -uid {os.getuid()}")
            self._until(deadline, "start a server", self._has_server)
        except MpsError as error:
            tail = log_tail(self.log_folder)
            self.close()
            raise MpsError(f"{error}{f'; its log ends with: {tail}' if tail else ''}") from error.__cause__
        except BaseException:
            self.close()
            raise

    def _until(self, deadline: float, what: str, done: Callable[[], bool]) -> None:
        """Waits until the daemon has done something. Refusals until then say only that it is not ready."""
        while True:
            self._check_alive()
            why = ""
            try:
                if done():
                    return
            except MpsError as error:
                why = f" ({error})"
            if self._clock.now() >= deadline:
                self._check_alive()
                raise MpsError(f"the MPS control daemon did not {what} within {self._start_timeout:g} s{why}")
            assert self._supervisor is not None
            self._supervisor.wait(_START_CHECK_S)

    def _answers(self) -> bool:
        self._control.ask("get_server_list")
        return True

    def _has_server(self) -> bool:
        return any(state in ("ACTIVE", "") for state in self.servers().values())

    def _check_alive(self) -> None:
        assert self._supervisor is not None
        self._supervisor.wait(0.0)
        if self._supervisor.gone:
            raise MpsError(self._supervisor.gone)


def start_or_explain(gpus: Sequence[GpuState] | None = None, **options: object) -> tuple[MpsDaemon | None, str]:
    """Starts MPS where it can be used; elsewhere says why trials share GPUs by time slices.

    Args:
        gpus: what trials are to share; ``None`` for all GPUs that this process may use.
        options: as for :class:`MpsDaemon`.

    Returns:
        The daemon and an empty text, or ``None`` and a sentence, which is also logged as a warning.
    """
    daemon, reason = start_or_why_not(describe_gpus() if gpus is None else gpus, **options)
    if daemon is not None:
        return daemon, ""
    text = f"trials share GPUs by time slices, without MPS: {reason}"
    _log.warning(text)
    return None, text


def start_or_why_not(gpus: Sequence[GpuState], **options: object) -> tuple[MpsDaemon | None, str]:
    """As :func:`start_or_explain`, but the reason is half a sentence, and nothing is logged."""
    reason = why_not_here(gpus)
    if not reason:
        try:
            return MpsDaemon([gpu.token for gpu in gpus], **options), ""  # type: ignore[arg-type]
        except MpsError as error:
            reason = str(error)
    return None, reason


def _checked(devices: Sequence[str]) -> tuple[str, ...]:
    tokens = tuple(devices) if not isinstance(devices, str) else (devices,)
    if not tokens:
        raise InvalidFieldError("devices", devices, "MPS needs at least one GPU")
    for token in tokens:
        if not isinstance(token, str) or not token.startswith("GPU-") or "," in token:
            raise InvalidFieldError("devices", token, "must be the UUID of a whole GPU, GPU-...")
    if len(set(tokens)) < len(tokens):
        raise InvalidFieldError("devices", tokens, "names a GPU twice")
    return tokens


def _make_pipe_folder() -> str:
    """Makes the private folder of the daemon's sockets; its path must be short."""
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/dev/shm")):
        try:
            folder = tempfile.mkdtemp(prefix="fluid-mps-", dir=base)  # Nobody else may enter it.
        except OSError:
            continue
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER:
            return folder
        os.rmdir(folder)
    raise MpsError(f"there is no folder for the sockets of MPS with a path of at most {_LONGEST_FOLDER} bytes")


def _delete(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
