"""What of a process's state belongs to the resident whose code runs: random numbers, working directory, output.

Residents of a lane share one process. Switching from one to another swaps this state, so that each sees the
process as if it were alone there. Modules are looked up in ``sys.modules``, not imported: in what a trial has
not loaded it has no state. Not swapped: PyTorch's global flags, the environment, class attributes, and
threads that a trial left running.
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
    """Returns the state of every global random number generator there is, by module."""
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
    """Puts generators into the state they had; those without one get a fresh seed.

    A fresh seed, because all lanes are copies of one process, and trials must not share their random numbers.
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
    """Puts generators into the state they had in another process.

    Their modules are imported if need be: a trial that draws from them for the first time later on in this
    process has done so before.
    """
    for name in states:
        importlib.import_module(name)
    write_random_state(states)


def _torch() -> Any:
    torch = sys.modules.get("torch")
    # Half-imported in a trial that failed to import it: it has no generator yet.
    return torch if hasattr(torch, "default_generator") else None


class Context:
    """The process state of one resident.

    Attributes:
        log_path: where its output goes.
    """

    def __init__(self, log_path: str, folder: str) -> None:
        self.log_path = log_path
        self._folder = folder
        self._random: dict[str, Any] = {}

    def enter(self, output: Output) -> None:
        """Makes the process look as the resident left it."""
        write_random_state(self._random)
        with suppress(OSError):  # It may have been deleted since.
            os.chdir(self._folder)
        output.switch(self.log_path)

    def leave(self) -> None:
        """Notes how the resident leaves the process."""
        self._random = read_random_state()
        with suppress(OSError):
            self._folder = os.getcwd()


class Output(io.TextIOBase):
    """Stands for ``sys.stdout`` and ``sys.stderr`` and writes to the log of the resident whose code runs.

    One object for the whole life of the lane: a logging handler that one trial set up keeps a reference, and
    must not write to that trial's log, or to a closed file, once others run. The file is opened when something
    is written, so silent trials have none, and closed at the switch, so that thousands of residents can write.

    Args:
        fallback: takes what is written while no trial runs.
    """

    def __init__(self, fallback: TextIO) -> None:
        self._fallback = fallback
        self._path: str | None = None
        self._file: TextIO | None = None

    def switch(self, path: str | None) -> None:
        """Writes to ``path`` from now on; ``None`` for the fallback."""
        if path != self._path:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._path, self._file = path, None

    def write(self, text: str) -> int:
        """Writes text, line by line: what a trial printed before it was killed is there."""
        try:
            return self._target().write(text)
        except (OSError, ValueError):
            # A full disk, or a thread that prints during a switch: no reason to fail a trial.
            return len(text)

    def flush(self) -> None:
        """Hands buffered text to the system."""
        (self._fallback if self._file is None else self._file).flush()

    def fileno(self) -> int:
        """Returns the lane's own output, which sub-processes can write to."""
        return self._fallback.fileno()

    def isatty(self) -> bool:
        """Returns False."""
        return False

    def writable(self) -> bool:
        """Returns True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8."""
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """Output never fails for want of an encoding."""
        return "backslashreplace"

    @property
    def buffer(self) -> Any:
        """The stream of bytes below."""
        return self._target().buffer

    def _target(self) -> TextIO:
        if self._path is None:
            return self._fallback
        if self._file is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._file = open(self._path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        return self._file
