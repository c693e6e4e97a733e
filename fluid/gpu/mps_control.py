"""Talking to an NVIDIA MPS control daemon: ``nvidia-cuda-mps-control`` with a command on its stdin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from fluid.errors import FluidError, InvalidFieldError, require_number

PROGRAM = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
PERCENTAGE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
#: What the states of a server are called. A server in FAULT takes no new client until all it has are gone.
STATES = ("INITIALIZING", "ACTIVE", "FAULT")
#: What the daemon prints goes to this file of its log folder.
OUTPUT_LOG = "output.log"
_MIB = 1 << 20
#: The tool refuses a command in words, and ends with status 0.
_REFUSAL = re.compile(r"invalid|unknown|unrecogni[sz]ed|unsupported|not supported|usage|error|fail", re.IGNORECASE)
_LONGEST_ANSWER = 300


class MpsError(FluidError):
    """NVIDIA MPS cannot be used, or does not answer; the message says why."""


def find_program() -> str | None:
    """Returns the path of the control program; ``None`` if it is not installed."""
    return shutil.which(PROGRAM)


def percentage_text(percentage: float) -> str:
    """Returns an active-thread percentage as MPS wants it.

    Raises:
        InvalidFieldError: it is not in (0, 100].
    """
    value = require_number("active_thread_percentage", percentage, at_least=0.0)
    if not 0.0 < value <= 100.0:
        raise InvalidFieldError("active_thread_percentage", percentage, "must be in (0, 100]")
    return f"{value:.10g}"


def memory_text(memory_bytes: float) -> str:
    """Returns an amount of memory as MPS wants it: whole MiB, rounded down, at least one.

    Raises:
        InvalidFieldError: it is below 1 MiB.
    """
    return f"{int(require_number('memory_limit_bytes', memory_bytes, at_least=_MIB)) // _MIB}M"


class Control:
    """The front end of one control daemon.

    Args:
        program: path of ``nvidia-cuda-mps-control``.
        environment: of the daemon; it names the daemon's pipe folder.
        timeout: seconds the daemon has to answer.
    """

    def __init__(self, program: str, environment: Mapping[str, str], timeout: float) -> None:
        self._program = program
        self._environment = dict(environment)
        self._timeout = timeout

    def ask(self, command: str, timeout: float | None = None) -> str:
        """Gives a command; returns what the daemon answers.

        Raises:
            MpsError: it does not answer in time, or there is no daemon.
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
            raise MpsError(f"the MPS control daemon did not answer {command!r} within {limit:g} s") from None
        except OSError as error:
            raise MpsError(f"{self._program} cannot be run: {error}") from error
        answer = done.stdout.strip()
        if done.returncode != 0:
            said = answer[-_LONGEST_ANSWER:] or f"status {done.returncode}"
            raise MpsError(f"the MPS control daemon did not take {command!r}: {said}")
        return answer

    def order(self, command: str) -> bool:
        """Gives a command that only has an effect; returns whether it was taken. Older drivers know fewer.

        Raises:
            MpsError: as for :meth:`ask`.
        """
        return _REFUSAL.search(self.ask(command)) is None

    def servers(self) -> dict[int, str]:
        """Returns the servers by process, and their state: one of :data:`STATES`, or empty if it is not told.

        Raises:
            MpsError: as for :meth:`ask`.
        """
        return {server: self._state(server) for server in _numbers(self.ask("get_server_list"))}

    def clients(self, server: int) -> list[int]:
        """Returns the processes that are clients of a server.

        Raises:
            MpsError: as for :meth:`ask`.
        """
        return _numbers(self.ask(f"get_client_list {server}"))

    def _state(self, server: int) -> str:
        words = self.ask(f"get_server_status {server}").upper().split()
        return next((state for state in STATES if state in words), "")


def stray_processes(pids: list[int], pipe_folder: str) -> list[int]:
    """Returns those of these processes that still run and have this pipe folder in their environment.

    The folder is private to one daemon, so none of them is somebody else's that was given an old number.
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
    """Returns the last lines of a daemon's logs, for people; empty if there are none."""
    texts = []
    for name in ("control.log", "server.log", OUTPUT_LOG):
        try:
            with open(os.path.join(log_folder, name), encoding="utf-8", errors="replace") as file:
                texts += [line.rstrip() for line in file.readlines()[-lines:] if line.strip()]
        except OSError:
            continue
    return "\n".join(dict.fromkeys(texts))


def _numbers(answer: str) -> list[int]:
    return [int(word) for word in answer.split() if word.isdecimal()]
