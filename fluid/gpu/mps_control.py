"""The client of an NVIDIA MPS control daemon: runs ``nvidia-cuda-mps-control`` with a command on its stdin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from fluid.errors import FluidError, InvalidFieldError, require_number

PROGRAM = "nvidia-cuda-mps-control"
#: Where drivers put it in containers, often without a mention in PATH.
FOLDERS = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/local/bin", "/opt/nvidia/bin", "/run/nvidia/driver/usr/bin")
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
PERCENTAGE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
#: The states of a server, and what the words for them begin with. A server in FAULT accepts no new client until all of
#: its clients have left.
STATES = {"FAULT": "FAULT", "ACTIVE": "ACTIVE", "INITIALIZING": "INITIALI"}
#: File in its log folder for the daemon's output.
OUTPUT_LOG = "output.log"
_MIB = 1 << 20
#: The program reports a refused command in its output, and still exits with status 0.
_REFUSAL = re.compile(r"invalid|unknown|unrecogni[sz]ed|unsupported|not supported|usage|error|fail", re.IGNORECASE)
_LONGEST_ANSWER = 300
#: What a log line begins with.
_LOG_PREFIX = re.compile(r"\[[^\]]*\]")
#: A number that is no part of a name, a UUID or a fraction.
_NUMBER = re.compile(r"(?<![\w.-])\d+(?![\w-]|\.\d)")
#: Before the name of a state they deny it.
_DENIALS = ("NO", "NOT", "NON", "WITHOUT")


class MpsError(FluidError):
    """NVIDIA MPS cannot be used, or does not answer; the message has the reason."""


class MpsTimeoutError(MpsError):
    """NVIDIA MPS has not answered or started in time, as on a machine that is busy; it may do so the next time."""


def find_program() -> str | None:
    """Returns the path of the control program: in ``PATH``, beside ``nvidia-smi`` or in one of :data:`FOLDERS`."""
    smi = shutil.which("nvidia-smi")
    beside = [] if smi is None else [os.path.dirname(smi), os.path.dirname(os.path.realpath(smi))]
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join((*beside, *FOLDERS)))


def search_paths(program: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which the control program finds the server's program and the driver's libraries.

    Args:
        program: path of the control program.
        environment: to which these variables are added.
    """
    folder = os.path.dirname(os.path.abspath(program))
    if folder in environment.get("PATH", os.defpath).split(os.pathsep):
        return {}
    found = {"PATH": _with_first(folder, environment.get("PATH", os.defpath))}
    libraries = os.path.join(os.path.dirname(folder), "lib64")
    has_driver = os.path.exists(os.path.join(libraries, "libcuda.so.1"))
    # With a C library the folder belongs to another system: with it the programs of this one would not run.
    if has_driver and not os.path.exists(os.path.join(libraries, "libc.so.6")):
        found["LD_LIBRARY_PATH"] = _with_first(libraries, environment.get("LD_LIBRARY_PATH", ""))
    return found


def percentage_text(percentage: float) -> str:
    """Formats an active-thread percentage for MPS.

    Raises:
        InvalidFieldError: it is not in (0, 100].
    """
    value = require_number("active_thread_percentage", percentage, at_least=0.0)
    if not 0.0 < value <= 100.0:
        raise InvalidFieldError("active_thread_percentage", percentage, "must be in (0, 100]")
    return f"{value:.10g}"


def memory_text(memory_bytes: float) -> str:
    """Formats an amount of memory for MPS: whole MiB, rounded down, at least one.

    Raises:
        InvalidFieldError: it is below 1 MiB.
    """
    return f"{int(require_number('memory_limit_bytes', memory_bytes, at_least=_MIB)) // _MIB}M"


def is_refusal(answer: str) -> bool:
    """Whether the words of an answer say that the daemon does not support, or has refused, a command."""
    return _REFUSAL.search(answer) is not None


def read_state(answer: str) -> str:
    """Returns the state of a server in an answer, in whatever words around it: one of :data:`STATES`, or empty.

    Example:
        >>> read_state("Status: Active"), read_state("MPS_SERVER_FAULT"), read_state("?")
        ('ACTIVE', 'FAULT', '')
    """
    words = re.findall("[A-Z]+", _LOG_PREFIX.sub("", answer).upper())
    said = [word for before, word in zip(["", *words], words, strict=False) if before not in _DENIALS]
    return next((state for state, stem in STATES.items() if any(word.startswith(stem) for word in said)), "")


def read_pids(answer: str) -> list[int]:
    """Returns the process ids in an answer: all of a single line, else the first number of each line.

    Example:
        >>> read_pids("12 34"), read_pids(chr(10).join(["PID  DEVICE", "56   0", "78   0"]))
        ([12, 34], [56, 78])
    """
    lines = [_NUMBER.findall(_LOG_PREFIX.sub("", line)) for line in answer.splitlines()]
    found = lines[0] if len(lines) == 1 else [numbers[0] for numbers in lines if numbers]
    return [int(number) for number in found if int(number) > 0]


class Control:
    """The client of one control daemon.

    Args:
        program: path of ``nvidia-cuda-mps-control``.
        environment: the daemon's, which names its pipe folder.
        timeout: longest that the daemon may take to answer, seconds.
    """

    def __init__(self, program: str, environment: Mapping[str, str], timeout: float) -> None:
        self._program = program
        self._environment = dict(environment)
        self._timeout = timeout

    def query(self, command: str, timeout: float | None = None) -> str:
        """Sends a command; returns the daemon's answer.

        Raises:
            MpsTimeoutError: it does not answer in time.
            MpsError: it refuses the command, or there is no daemon.
        """
        limit = self._timeout if timeout is None else timeout
        try:
            done = subprocess.run(
                [self._program],
                input=f"{command}\n",
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MpsTimeoutError(f"the MPS control daemon did not answer {command!r} within {limit:g} s") from None
        except OSError as error:
            raise MpsError(f"{self._program} cannot be run: {error}") from error
        answer = done.stdout.strip()
        if done.returncode != 0:
            said = answer[-_LONGEST_ANSWER:] or f"status {done.returncode}"
            raise MpsError(f"the MPS control daemon refused {command!r}: {said}")
        return answer

    def command(self, command: str) -> bool:
        """Sends a command that has no answer; returns whether it was accepted. Older drivers support fewer.

        Raises:
            MpsError: as for :meth:`query`.
        """
        return not is_refusal(self.query(command))

    def terminate_client(self, client: int) -> None:
        """Ends the work of a client on its GPUs. Its process goes on, with errors, and can be killed without harm.

        Args:
            client: its process id.

        Raises:
            MpsError: as for :meth:`query`.
        """
        for server in read_pids(self.query("get_server_list")):
            self.command(f"terminate_client {server} {client}")

    def servers(self) -> dict[int, str]:
        """Returns the state of each server by its process id: one of :data:`STATES`, or empty if unknown.

        Raises:
            MpsError: as for :meth:`query`.
        """
        return {server: self._state(server) for server in read_pids(self.query("get_server_list"))}

    def clients(self, server: int) -> list[int]:
        """Returns the process ids of a server's clients.

        Raises:
            MpsError: as for :meth:`query`.
        """
        return read_pids(self.query(f"get_client_list {server}"))

    def _state(self, server: int) -> str:
        return read_state(self.query(f"get_server_status {server}"))


def stray_processes(pids: list[int], pipe_folder: str) -> list[int]:
    """Returns those of these processes that still run and have this pipe folder in their environment.

    The folder is private to one daemon, so a process that has reused an old id is not among them.
    """
    wanted = f"{PIPE_VARIABLE}={pipe_folder}".encode()
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(pid)
        except OSError:
            continue
    return found


def log_tail(log_folder: str, lines: int = 6) -> str:
    """Returns the last lines of a daemon's logs; empty if there are none."""
    texts = []
    for name in ("control.log", "server.log", OUTPUT_LOG):
        try:
            with open(os.path.join(log_folder, name), encoding="utf-8", errors="replace") as file:
                texts += [line.rstrip() for line in file.readlines()[-lines:] if line.strip()]
        except OSError:
            continue
    return "\n".join(dict.fromkeys(texts))


def _with_first(folder: str, folders: str) -> str:
    return os.pathsep.join(filter(None, (folder, folders)))
