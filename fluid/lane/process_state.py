"""The process state of each resident: random number generators, working directory, standard output.

The residents of a lane share one process. The lane swaps this state when it switches from one to another, so that
each sees the process as its own. Modules are looked up in ``sys.modules`` and never imported: a trial has no state in
a module that it has not loaded. Not swapped are PyTorch's global flags, the environment, class attributes, and
threads that a trial left running. (The standard library's ``redirect_stdout`` replaces ``sys.stdout``, of which
logging handlers keep references; hence :class:`Output`.)
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

_SEED_BYTES = 16


def read_random_state() -> dict[str, Any]:
    """Returns the states of the global random number generators that are loaded, by module."""
    states: dict[str, Any] = {}
    if (module := sys.modules.get("random")) is not None:
        states["random"] = module.getstate()
    if (module := sys.modules.get("numpy.random")) is not None:
        states["numpy.random"] = module.get_state()
    if (torch := _torch()) is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["torch.cuda"] = torch.cuda.get_rng_state()
    return states


def write_random_state(states: dict[str, Any]) -> None:
    """Sets the generators to these states; those without one get a fresh seed.

    All lanes are forked from one process: without a fresh seed, trials would draw the same random numbers.
    """
    seed = int.from_bytes(os.urandom(_SEED_BYTES), "little")
    if (module := sys.modules.get("random")) is not None:
        if "random" in states:
            module.setstate(states["random"])
        else:
            module.seed(seed)
    if (module := sys.modules.get("numpy.random")) is not None:
        if "numpy.random" in states:
            module.set_state(states["numpy.random"])
        else:
            module.seed(seed % 2**32)
    if (torch := _torch()) is not None:
        if "torch" in states:
            torch.set_rng_state(states["torch"])
        else:
            # Not torch.manual_seed: it also looks for every kind of accelerator, which takes longer.
            torch.default_generator.manual_seed(seed % 2**63)
        if torch.cuda.is_initialized():
            if "torch.cuda" in states:
                torch.cuda.set_rng_state(states["torch.cuda"])
            else:
                torch.cuda.manual_seed(seed % 2**63)


def restore_random_state(states: dict[str, Any]) -> None:
    """Sets the generators to the states that they had in another process.

    Imports their modules if they are not loaded: the trial has drawn from them before, and may do so again.
    """
    for name in states:
        importlib.import_module(name)
    write_random_state(states)


def _torch() -> Any:
    torch = sys.modules.get("torch")
    # A trial that failed to import it leaves a partial module without a generator.
    return torch if hasattr(torch, "default_generator") else None


class ProcessState:
    """The process state of one resident.

    Attributes:
        log_path: the file that receives its output.

    Args:
        log_path: as above.
        folder: its working directory at first.
    """

    def __init__(self, log_path: str, folder: str) -> None:
        self.log_path = log_path
        self._folder = folder
        self._random: dict[str, Any] = {}

    def enter(self, output: Output) -> None:
        """Restores the state in which the resident left the process."""
        write_random_state(self._random)
        with suppress(OSError):  # The folder may have been deleted since.
            os.chdir(self._folder)
        output.switch(self.log_path)

    def leave(self) -> None:
        """Records the state in which the resident leaves the process."""
        self._random = read_random_state()
        with suppress(OSError):
            self._folder = os.getcwd()


class Output(io.TextIOBase):
    """Replaces ``sys.stdout`` and ``sys.stderr``; writes to the log of the resident whose code runs.

    One object serves for the whole life of the lane: a logging handler that a trial set up keeps a reference to it,
    and must not write to that trial's log, or to a closed file, while other trials run. The log is opened at the first
    write, so that silent trials have none, and closed at the switch, so that thousands of residents can have one.

    Args:
        fallback: receives the output while no trial runs.
    """

    def __init__(self, fallback: TextIO) -> None:
        self._fallback = fallback
        self._path: str | None = None
        self._file: TextIO | None = None

    def switch(self, path: str | None) -> None:
        """Redirects the output to ``path``; ``None`` for the fallback."""
        if path != self._path:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._path, self._file = path, None

    def write(self, text: str) -> int:
        """Writes text, buffered by line, so that the log is complete even if the trial is killed."""
        try:
            return self._target().write(text)
        except (OSError, ValueError):
            # A full disk, or a thread that prints during a switch, must not fail a trial.
            return len(text)

    def flush(self) -> None:
        """Flushes buffered text."""
        (self._fallback if self._file is None else self._file).flush()

    def fileno(self) -> int:
        """The descriptor of the lane's own output, for sub-processes."""
        return self._fallback.fileno()

    def isatty(self) -> bool:
        """False."""
        return False

    def writable(self) -> bool:
        """True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """How characters that cannot be encoded are written."""
        return "backslashreplace"

    @property
    def buffer(self) -> Any:
        """The underlying stream of bytes."""
        return self._target().buffer

    def _target(self) -> TextIO:
        if self._path is None:
            return self._fallback
        if self._file is None:
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            # What a trial prints may hold secrets of its config: the file is for its owner only.
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._file = open(file, "a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        return self._file
